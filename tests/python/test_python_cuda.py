"""Tensors on a GPU. Skipped where torch finds none; test_python_device.py emulates one."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in each run

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GPU = torch is not None and torch.cuda.is_available()
pytestmark = [needs_package, needs_torch]
if not os.environ.get("CKD_REQUIRE_GPU"):  # scripts/device-checks.sh: no GPU is a failure
    pytestmark.append(pytest.mark.skipif(not HAS_GPU, reason="torch finds no GPU here"))

GPU = "cuda"
LONG = 400_000_000  # cycles, about a fifth of a second
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128] if torch else []


@pytest.fixture(autouse=True)
def backend():
    from ckptdelta import _device

    if "emulated" in os.environ.get("CKD_CUDA", ""):
        pytest.skip("this process has the emulated device: run this file in a process of its own")
    assert _device.device_of(torch.zeros(1, device=GPU)) is not None, "the package was built without CUDA, or its backend was refused"


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


@pytest.fixture
def no_copies(monkeypatch):
    def refuse(tensor, *args, **kwargs):
        raise AssertionError(f"a tensor of {tuple(tensor.shape)} goes through host memory")

    monkeypatch.setattr(torch.Tensor, "cpu", refuse)


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).to("cpu")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def noise(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(*shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def on_gpu(value, offset=0):
    """A contiguous copy, so many elements behind the beginning of an allocation."""
    size = value.element_size()
    memory = torch.empty((value.numel() + offset) * size, dtype=torch.uint8, device=GPU)
    return memory[offset * size:].view(value.dtype).view(value.shape).copy_(value)


# --------------------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_saves_and_loads_in_place(store, no_copies, dtype, offset):
    value = noise(dtype, 500, 700)
    there = on_gpu(value, offset)
    store.save({"w": there}, run="a", step=1)
    assert same(store.state_dict(run="a")["w"], value)
    other = on_gpu(torch.zeros(500, 700).to(dtype), offset)
    store.load({"w": other}, run="a")
    assert same(other, value)


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[3:9], lambda t: t[:0], lambda t: t[5, 7],
                                  lambda t: t.expand(3, *t.shape)], ids=["transposed", "strided", "rows", "empty", "number", "expanded"])
def test_views(store, view):
    whole = noise(torch.float32, 400, 300)
    store.save({"w": view(whole.to(GPU))}, run="a", step=1)
    assert same(store.state_dict(run="a")["w"], view(whole))
    other, expected = torch.zeros(400, 300, device=GPU), torch.zeros(400, 300)
    if view(other).numel() <= other.numel():
        store.load({"w": view(other)}, run="a")
        view(expected).copy_(view(whole))
        assert same(other, expected)


def test_lazy_conjugates(store, no_copies):
    value = noise(torch.complex64, 300, 300)
    there = value.to(GPU)
    store.save({"a": there.conj(), "b": there.conj().imag}, run="a", step=1)
    found = store.state_dict(run="a")
    assert same(found["a"], value.conj()) and same(found["b"], -value.imag)
    other = torch.zeros_like(there)
    store.load({"a": other.conj()}, run="a")
    assert same(other, value)


@pytest.mark.parametrize("side", [False, True])
def test_saves_and_loads_come_in_the_order_of_the_stream(store, no_copies, side):
    weight = torch.zeros(3000, 1000, device=GPU)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        weight.fill_(2)
        store.save({"w": weight, "t": weight.t()}, run="a", step=1)
        weight.fill_(5)
        torch.cuda._sleep(LONG)
        weight.fill_(7)
        store.load({"w": weight}, run="a")
        weight.mul_(2)
        stream.synchronize()
    found = store.state_dict(run="a")
    assert bool((found["w"] == 2).all()) and bool((found["t"] == 2).all()) and bool((weight == 4).all())


@pytest.mark.parametrize("fidelity", ["exact", "near", "coarse"])
def test_what_is_stored_does_not_depend_on_the_place(store, no_copies, fidelity):
    value = {name: noise(torch.float32, 700, 900, seed=seed) for seed, name in enumerate(["w", "exp_avg.w", "exp_avg_sq.w"])}
    value["exp_avg_sq.w"].square_()
    for step in (1, 2, 3):
        store.save(value, run="host", step=step, fidelity=fidelity)
        store.save({name: one.to(GPU) for name, one in value.items()}, run="gpu", step=step, fidelity=fidelity)
        found = [store.state_dict(run=run, step=step) for run in ("host", "gpu")]
        assert all(same(found[0][name], found[1][name]) for name in value), step
        assert fidelity != "exact" or all(same(found[1][name], value[name]) for name in value)
        for one in value.values():
            one.mul_(1 + 1e-3 * step)


def test_a_temporary_copy_is_not_overwritten_while_it_is_read(store):
    """The caching allocator gives its memory to whoever comes next."""
    for step in range(20):
        whole = torch.full((1500, 1000), float(step), device=GPU)
        store.save({"w": whole.t()}, run="a", step=step)
        torch.full((1000, 1500), -1.0, device=GPU)
    assert all(bool((store.state_dict(run="a", step=step)["w"] == step).all()) for step in range(20))


def test_a_copy_that_does_not_fit_goes_through_the_host(store):
    value = noise(torch.float32, 4000, 4000)
    there = value.to(GPU).t()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (20 << 20)) / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            there.contiguous()
        store.save({"w": there}, run="a", step=1)
        there.zero_()
        store.load({"w": there}, run="a")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same(there, value.t()) and same(store.state_dict(run="a")["w"], value.t())


class Foreign:
    """An array of another library, as it shows itself to DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None):
        assert stream == 1
        return self.tensor.__dlpack__(stream=stream)


def test_arrays_of_other_libraries_come_in_the_order_of_their_stream(store):
    there, side = torch.zeros(2000, 1000, device=GPU), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        there.fill_(3)
        store.save({"w": Foreign(there)}, run="a", step=1)
        there.fill_(4)
    assert bool((store.state_dict(run="a", tensors="torch")["w"] == 3).all())


# ------------------------------------------------------------------------------------------------------------- sessions


class Training:
    """Dropout, running statistics, a scheduler; the generator of the GPU has a part in the loss."""

    def __init__(self, seed=1, width=1024, **options):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 8)).to(GPU)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler")}

    def step(self):
        loss = self.model(torch.randn(64, 256, device=GPU)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def taken(self):
        """The state as it is, in the order of the stream."""
        moments = [v.clone() for slots in self.optimizer.state.values() for v in slots.values()]
        return [*(v.clone() for v in self.model.state_dict().values()), *moments]


def stored(store, step, run="a"):
    state = store.state_dict(run=run, step=step)
    return [*state["model"].values(), *(v for slots in state["optimizer"]["state"].values() for v in slots.values())]


OPTIMIZERS = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}, "capturable": {"capturable": True}}


@pytest.mark.parametrize("room", [None, 0, 1 << 20, 1 << 33])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_session_saves_what_was_there_at_its_step(store, kind, room):
    """Training goes on at once, with many kernels queued before each save."""
    training, states = Training(width=4096, **OPTIMIZERS[kind]), {}
    with ckptdelta.Session(store, "a", **training.parts(), every=1, device_bytes=room) as session:
        for step in range(1, 6):
            training.step()
            torch.cuda._sleep(LONG // 10)
            states[step] = training.taken()
            session.step()
        held = session._poll().device_bytes
    assert (held == 0) == (room is None)
    for step, state in states.items():
        found = stored(store, step)
        assert len(found) == len(state) and all(map(same, found, state)), step
    assert store.verify()


def test_step_does_not_wait_for_the_gpu(store):
    training = Training(width=4096)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        for _ in range(3):  # the first ones allocate
            training.step()
            training.taken()
            session.step()
            session.fence()
            session.wait()
        training.step()
        torch.cuda._sleep(10 * LONG)
        behind = torch.cuda.Event()
        behind.record()
        expected = training.taken()
        session.step()
        assert not behind.query()
        training.step()
        assert not behind.query(), "the hook of the optimizer waits for nothing, either"
    assert all(map(same, stored(store, 4), expected))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_restore_continues_bit_for_bit(store, kind, every):
    whole = Training(**OPTIMIZERS[kind])
    expected = [whole.step().item() for _ in range(8)]
    first = Training(**OPTIMIZERS[kind])
    with ckptdelta.Session(store, "a", **first.parts(), every=every) as session:
        for step in range(4):
            assert first.step().item() == expected[step]
            session.step()
    assert ("step" in {t.method for t in store.tensors(run="a", step=4)}) == (every == 1)
    for fresh in (True, False):
        other = Training(2, **OPTIMIZERS[kind])
        if not fresh:
            other.step()
        with ckptdelta.Session(store, "a", **other.parts(), every=100) as session:
            assert session.restore() == 4
            assert [other.step().item() for _ in range(4)] == expected[4:]
        assert all(map(same, other.taken(), whole.taken()))


def test_moments_are_loaded_to_where_their_parameters_are(store, monkeypatch):
    training = Training()
    training.step()
    store.save({"model": training.model, "optimizer": training.optimizer}, run="a", step=1)
    other = Training(2)
    moved, to = [], torch.Tensor.to

    def watched(tensor, *args, **kwargs):
        found = to(tensor, *args, **kwargs)
        moved.extend([tensor] if found.device != tensor.device and tensor.dim() else [])
        return found

    monkeypatch.setattr(torch.Tensor, "to", watched)
    store.load({"model": other.model, "optimizer": other.optimizer}, run="a")
    monkeypatch.undo()
    assert not moved and all(map(same, other.taken(), training.taken()))


@pytest.mark.parametrize("fidelity", ["near", "coarse"])
@pytest.mark.parametrize("room", [None, 0])
def test_lossy_sessions(store, fidelity, room):
    training = Training()
    with ckptdelta.Session(store, "a", **training.parts(), every=1, fidelity=fidelity, device_bytes=room, device_reference_bytes=1 << 30) as session:
        for _ in range(4):
            training.step()
            session.step()
        session.fence()
        session.wait()
        assert (session._poll().device_reference_bytes > 0) == (room == 0)
        state = training.taken()
    found = stored(store, 4)
    assert all(torch.allclose(a.float(), b.to("cpu").float(), rtol=0.3, atol=0.05) for a, b in zip(found, state))
    assert not all(map(same, found, state)) and store.verify()
    other = Training(2)
    with ckptdelta.Session(store, "a", **other.parts(), every=100) as session:
        assert session.restore() == 4
    assert all(map(same, other.taken(), found))


def test_a_gpu_without_room_copies_to_the_host(store, caplog):
    training = Training(width=16384)  # 50 MB for the weights and their moments
    training.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = 40 << 20
    hog = torch.empty(max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device=GPU)
    try:
        with ckptdelta.Session(store, "a", **training.parts(), every=1, device_bytes=0) as session:
            session.step()
            assert session._poll().device_bytes == 0
    finally:
        del hog
    assert any("it goes to host memory" in record.getMessage() for record in caplog.records)
    assert all(map(same, stored(store, 1), training.taken()))


def test_memory_of_the_gpu_is_given_back(store):
    training = Training(width=16384)
    training.step()
    torch.cuda.synchronize()
    for run in "ab":  # the first one also loads kernels
        before = torch.cuda.mem_get_info()[0]
        with ckptdelta.Session(store, run, **training.parts(), every=1, device_bytes=0) as session:
            session.step()
            assert session._poll().device_bytes > 48 << 20
    assert before - torch.cuda.mem_get_info()[0] < 16 << 20


def test_two_sessions(store):
    trainings = [Training(1), Training(2)]
    sessions = [ckptdelta.Session(store, run, **t.parts(), every=1, device_bytes=0) for run, t in zip("ab", trainings)]
    for _ in range(3):
        for training in trainings:
            training.step()
        states = [t.taken() for t in trainings]
        for session in sessions:
            session.step()
    for session in sessions:
        session.close()
    assert all(map(same, stored(store, 3, "a"), states[0])) and all(map(same, stored(store, 3, "b"), states[1]))


def test_a_training_on_another_stream_from_step_to_step(store):
    """The session saves on one stream. The optimizer writes on another one."""
    training, side, states = Training(width=16384), torch.cuda.Stream(), {}
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        for step in range(1, 7):
            here, there = (torch.cuda.default_stream(), side) if step % 2 else (side, torch.cuda.default_stream())
            there.wait_stream(here)
            with torch.cuda.stream(there):
                training.step()
                states[step] = training.taken()
                torch.cuda._sleep(LONG // 20)
                session.step()
        torch.cuda.synchronize()
    for step, state in states.items():
        assert all(map(same, stored(store, step), state)), step


def test_mixed_precision(store):
    def made(seed):
        training = Training(seed)
        training.scaler = torch.amp.GradScaler(GPU, init_scale=256.0, growth_interval=2)
        return training

    def step(training):
        with torch.autocast(GPU, torch.float16):
            loss = training.model(torch.randn(64, 256, device=GPU)).square().mean()
        training.optimizer.zero_grad()
        training.scaler.scale(loss).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        return loss.item()

    whole, first, other = made(1), made(1), made(2)
    torch.manual_seed(3)
    expected = [step(whole) for _ in range(8)]
    torch.manual_seed(3)
    with ckptdelta.Session(store, "a", **first.parts(), scaler=first.scaler, every=4) as session:
        for at in range(4):
            assert step(first) == expected[at]
            session.step()
    with ckptdelta.Session(store, "a", **other.parts(), scaler=other.scaler, every=100) as session:
        assert session.restore() == 4 and other.scaler.get_scale() == 1024.0
        assert [step(other) for _ in range(4)] == expected[4:]


def test_masters_of_bf16_weights(store):
    model = torch.nn.Linear(2000, 500, device=GPU, dtype=torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    states = {}
    with ckptdelta.Session(store, "a", model=model, optimizer=optimizer, more={"masters": masters}, every=1, device_bytes=0) as session:
        for at in range(1, 5):
            model(torch.randn(64, 2000, device=GPU, dtype=torch.bfloat16)).float().square().mean().backward()
            for parameter, master in zip(model.parameters(), masters):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters):
                    parameter.copy_(master)
            session.step()
            states[at] = [v.clone() for v in (*model.state_dict().values(), *masters)]
    for at, state in states.items():
        found = store.state_dict(run="a", step=at)
        assert all(map(same, [*found["model"].values(), *found["masters"]], state)), at


# ------------------------------------------------------------------------------------------------- distributed tensors


@pytest.fixture
def world():
    """A group of one rank."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=torch.device(GPU, 0))
    yield torch.distributed.device_mesh.init_device_mesh(GPU, (1,))
    torch.distributed.destroy_process_group()


def test_fsdp2(store, world):
    from torch.distributed.fsdp import fully_shard

    def made(seed):
        training = Training(seed)
        fully_shard(training.model[0], mesh=world)
        fully_shard(training.model, mesh=world)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, fused=True)
        training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
        return training

    whole, first = made(1), made(1)
    torch.manual_seed(3)
    expected = [whole.step().item() for _ in range(6)]
    torch.manual_seed(3)
    with ckptdelta.Session(store, "a", **first.parts(), every=1) as session:
        for at in range(3):
            assert first.step().item() == expected[at]
            session.step()
    other = made(2)
    with ckptdelta.Session(store, "a", **other.parts(), every=100) as session:
        assert session.restore() == 3
        assert [other.step().item() for _ in range(3)] == expected[3:]


def test_dtensors(store, world, no_copies):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    value = noise(torch.float32, 300, 500)
    for number, placement in enumerate((Shard(0), Replicate())):
        store.save({"w": distribute_tensor(value.to(GPU), world, [placement])}, run="a", step=number)
        assert same(store.state_dict(run="a", step=number)["w"], value)
        other = distribute_tensor(torch.zeros(300, 500, device=GPU), world, [placement])
        store.load({"w": other}, run="a", step=number)
        assert same(other.to_local(), value)
