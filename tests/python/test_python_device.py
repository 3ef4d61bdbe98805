"""Tensors on a GPU: the library reads and writes their memory itself. The device is emulated (support_device.py)."""

import logging
import types

import pytest

from support_device import PATH, device  # noqa: F401 (device is a fixture)
from support_python import ckptdelta, needs_package, needs_torch, torch
from support_training import Training

pytestmark = [needs_package, needs_torch]

if torch and ckptdelta:
    from ckptdelta import _device, _session, _torch

    DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
              torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]
else:
    DTYPES = []


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def bits(tensor):
    """For comparisons of tensors with NaNs, too."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def noise(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(*shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_saves_and_loads_in_place(store, device, dtype, offset):
    value = noise(dtype, 300, 70)
    there = device.put(value, offset)
    before = device.copied_to_host
    store.save({"w": there}, run="a", step=1)
    assert device.copied_to_host > before and device.used
    assert same(store.state_dict(run="a")["w"], value)
    other = device.put(torch.zeros_like(value), offset)
    version = other._version
    store.load({"w": other}, run="a")
    device.settle()
    assert same(other, value) and other._version > version


def test_what_is_stored_does_not_depend_on_the_place(store, device):
    """Deltas included: the second step of each run is one on the first."""
    for fidelity in ("exact", "near", "coarse"):
        for place in ("host", "device"):
            training = Training(1)
            for step in (1, 2, 3):
                training.step()
                state = {"model": training.model, "optimizer": training.optimizer}
                if place == "device":
                    device.move(training.model, training.optimizer)
                store.save(state, run=f"{fidelity}-{place}", step=step, fidelity=fidelity)
        for step in (1, 2, 3):
            found = [store.state_dict(run=f"{fidelity}-{place}", step=step) for place in ("host", "device")]
            assert all(same(a, b) for a, b in zip(found[0]["model"].values(), found[1]["model"].values())), (fidelity, step)
            moments = [[v for slots in f["optimizer"]["state"].values() for v in slots.values()] for f in found]
            assert len(moments[0]) == 18 and all(same(a, b) for a, b in zip(*moments)), (fidelity, step)
    assert device.used


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[3:9], lambda t: t[:0], lambda t: t[5, 7]],
                         ids=["transposed", "strided", "rows", "empty", "number"])
def test_views(store, device, view):
    whole = noise(torch.float32, 40, 30)
    there = device.put(whole)
    store.save({"w": view(there)}, run="a", step=1)
    assert same(store.state_dict(run="a")["w"], view(whole))
    other = device.put(torch.zeros(40, 30))
    store.load({"w": view(other)}, run="a")
    device.settle()
    expected = torch.zeros(40, 30)
    view(expected).copy_(view(whole))
    assert same(other, expected)


def test_lazy_conjugates(store, device):
    value = noise(torch.complex64, 30, 30)
    there = device.put(value)
    store.save({"a": there.conj(), "b": there.conj().imag}, run="a", step=1)
    found = store.state_dict(run="a")
    assert same(found["a"], value.conj().resolve_conj()) and same(found["b"], -value.imag)
    other = device.put(torch.zeros_like(value))
    store.load({"a": other.conj()}, run="a")
    assert same(other, value)


def test_tensors_that_share_memory_are_stored_once(store, device):
    there = device.put(noise(torch.float32, 100))
    store.save({"a": there, "b": there, "c": there[:50]}, run="a", step=1)
    assert [t.name for t in store.tensors(run="a")] == ["a", "c"]


def test_callers_that_ask_for_host_memory_get_it(device):
    there = device.put(noise(torch.float32, 10))
    assert _torch.LIBRARY.source(there, host=True).device is None and _torch.LIBRARY.target(there, "", host=True).device is None
    assert _torch.LIBRARY.source(there, host=False).device == (0, 0) == _torch.LIBRARY.target(there, "", host=False).device


class Foreign:
    """An array of another library, as it shows itself to DLPack."""

    def __init__(self, tensor, kind=2, number=0):
        self.tensor, self.where, self.streams = tensor, (kind, number), []

    def __dlpack_device__(self):
        return self.where

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__()


def test_arrays_of_other_libraries(store, device):
    value = noise(torch.float32, 300, 70)
    array = Foreign(device.put(value))
    store.save({"w": array, "host": Foreign(value, 1)}, run="a", step=1)
    assert set(array.streams) == {1}, "the legacy default stream"
    found = store.state_dict(run="a", tensors="torch")
    assert same(found["w"], value) and same(found["host"], value)
    with pytest.raises(ckptdelta.InvalidError, match="not contiguous"):
        store.save({"w": Foreign(device.put(value).t())}, run="a", step=2)
    with pytest.raises(ckptdelta.InvalidError, match="DLPack device 2"):
        store.save({"w": Foreign(device.put(value), number=5)}, run="a", step=2)
    with ckptdelta.Session(store, "b", more={"w": array}, every=1) as session, pytest.raises(ckptdelta.InvalidError, match="Store.save"):
        session.step()


def test_a_failure_of_the_device_is_an_error_and_the_store_stays(store, device):
    there = device.put(noise(torch.float32, 300, 300))
    store.save({"w": there}, run="a", step=1)
    device.fail_after(2)
    with pytest.raises(ckptdelta.DeviceError, match="told to fail"):
        store.save({"w": there}, run="a", step=2)
    store.save({"w": there}, run="a", step=3)
    assert [c.step for c in store.checkpoints("a")] == [1, 3] and store.verify()


# ------------------------------------------------------------------------------------------------------------ sessions


def on_device(device, seed=1, width=300):
    """A training whose parameters, buffers and moments are on the device. torch waits where a stream would."""
    training = Training(seed, width)
    training.step()
    device.move(training.model, training.optimizer)
    return training


def train(device, session, training, steps):
    """Returns the state at each step. The next step of the optimizer begins as soon as session.step() has returned."""
    states = {}
    hook = training.optimizer.register_step_pre_hook(lambda *_: device.settle())  # after the session's
    for _ in range(steps):
        training.step()
        session.step()
        states[session.at] = taken(training)
        device.settle()  # buffers change in the next forward pass
    hook.remove()
    return states


def taken(training):
    moments = [v.clone() for slots in training.optimizer.state.values() for v in slots.values()]
    return [*(v.clone() for v in training.model.state_dict().values()), *moments]


def stored(store, step, run="a"):
    state = store.state_dict(run=run, step=step)
    return [*state["model"].values(), *(v for slots in state["optimizer"]["state"].values() for v in slots.values())]


@pytest.mark.parametrize("room", [None, 0, 300_000, 1 << 30])
def test_a_session_saves_what_was_there_at_its_step(store, device, room):
    training = on_device(device)
    with ckptdelta.Session(store, "a", **training.parts(), every=1, device_bytes=room) as session:
        states = train(device, session, training, 4)
        held = session._poll().device_bytes
    state_bytes = sum(t.numel() * t.element_size() for t in states[1])
    assert (held == 0) == (room is None) and (room or held) >= held and (room not in (0, 1 << 30) or held >= state_bytes - 100)
    for step, state in states.items():
        found = stored(store, step)
        assert len(found) == len(state) and all(map(same, found, state)), step
    assert store.verify()


class Wide(torch.nn.Module if torch else object):
    """No small tensors: kernels copy these, which the emulation runs at once, with all that is before them."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(device.put(noise(torch.float32, 200, 200)))
        self.register_buffer("mean", device.put(noise(torch.float32, 200, 200, seed=1)))


def test_parameters_wait_only_at_the_fence(store, device):
    """Copies of buffers precede whatever the stream does when step() has returned; those of parameters need not have begun."""
    model = Wide(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones(200, 200)
    with ckptdelta.Session(store, "a", model=model, optimizer=optimizer, every=1, rng=False) as session:
        expected = {}
        for step in range(1, 4):
            session.step()
            expected[step] = model.weight.detach().clone(), model.mean.clone()
            before = device.copied_to_host
            device.settle()
            assert device.copied_to_host - before == 160_000, "the buffer"
            model.mean.add_(1)
            hook = optimizer.register_step_pre_hook(lambda *_: device.settle())  # after the session's
            optimizer.step()
            assert device.copied_to_host - before == 320_000, "the parameter, too"
            hook.remove()
    for step, state in expected.items():
        found = store.state_dict(run="a", step=step)["model"]
        assert same(found["weight"], state[0]) and same(found["mean"], state[1])


def test_a_restore_continues_with_the_same_losses(store, device):
    whole = on_device(device)
    expected = [whole.step() for _ in range(8)]
    first = on_device(device)
    with ckptdelta.Session(store, "a", **first.parts(), every=1) as session:
        for step in range(4):
            device.settle()
            assert first.step() == expected[step]
            session.step()
    assert {t.method for t in store.tensors(run="a", step=4)} >= {"step"}
    other = on_device(device, seed=2)
    other.optimizer.register_step_pre_hook(lambda *_: device.settle())
    with ckptdelta.Session(store, "a", **other.parts(), every=1) as session:
        other.optimizer.register_step_pre_hook(lambda *_: device.settle())
        assert session.restore() == 4
        device.settle()
        places = [v.data_ptr() for slots in other.optimizer.state.values() for v in slots.values() if v.dim()]
        for step in range(4, 8):
            device.settle()
            assert other.step() == expected[step]
            session.step()
        assert places == [v.data_ptr() for slots in other.optimizer.state.values() for v in slots.values() if v.dim()]
    assert all(map(same, taken(whole), taken(other)))


@pytest.mark.parametrize("fidelity", ["near", "coarse"])
def test_lossy_sessions_store_what_they_store_of_host_memory(store, device, fidelity):
    for run in ("host", "device"):
        training = on_device(device)
        if run == "host":
            training = Training(1, 300)
            training.step()
        with ckptdelta.Session(store, run, **training.parts(), every=1, fidelity=fidelity, device_bytes=0, device_reference_bytes=1 << 20) as session:
            train(device, session, training, 3)
    for step in (1, 2, 3):
        assert all(map(same, stored(store, step, "host"), stored(store, step, "device"))), step


def test_a_device_without_room_copies_to_the_host(store, device, caplog):
    training = on_device(device)
    device.limit(1 << 16)
    with ckptdelta.Session(store, "a", **training.parts(), every=1, device_bytes=0) as session:
        states = train(device, session, training, 2)
        assert session._poll().device_bytes == 0
    assert any("it goes to host memory" in record.getMessage() for record in caplog.records)
    assert all(map(same, stored(store, 2), states[2]))


def test_another_stream_is_registered_and_waits(store, device, monkeypatch):
    training, waits = on_device(device), []
    monkeypatch.setattr(_session, "wait_for", waits.append)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        states = train(device, session, training, 2)
        registered = session._registered
        device.stream = 64
        states |= train(device, session, training, 1)
        assert session._registered is not registered and not session._moves
        device.settle()
        training.optimizer.step()
        session.fence()
    assert set(waits) == {(0, 0), (0, 64)} and waits[-1] == (0, 64)
    for step, state in states.items():
        assert all(map(same, stored(store, step), state)), step


@pytest.mark.parametrize("fidelity", ["exact", "near"])
def test_weights_that_are_rounded_masters_cost_nothing_wherever_they_are(tmp_path, device, fidelity):
    """The optimizer updates the masters, which therefore have a fence. The weights have none, and are copied first."""
    stored = []
    for there in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 512, bias=False)
        masters = {"weight": torch.nn.Parameter(model.weight.detach().clone())}
        model.bfloat16()
        if there:
            device.move(model)
            masters["weight"].data = device.put(masters["weight"].data)
        optimizer = torch.optim.SGD(masters.values(), lr=0.1)
        with ckptdelta.open(tmp_path / str(there)) as store:
            with ckptdelta.Session(store, "a", model=model, optimizer=optimizer, more={"optim": {"fp32": masters}}, every=1, rng=False,
                                   fidelity=fidelity) as session:
                for _ in range(3):
                    device.settle()
                    masters["weight"].grad = torch.randn(512, 512)
                    optimizer.step()
                    device.settle()
                    with torch.no_grad():
                        model.weight.copy_(masters["weight"])
                    session.step()
                    session.wait()
                assert bool(session._registered.devices) == there
            stored.append([c.stored_bytes for c in store.checkpoints("a")])
    host, device_bytes = stored
    assert all(0.99 < b / a < 1.01 for a, b in zip(host, device_bytes)), stored


def test_what_a_graph_may_replay_has_no_fence(store, device):
    training = on_device(device)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        train(device, session, training, 1)
        assert session._registered.has_fenced and session._copying
        for group in training.optimizer.param_groups:
            group["capturable"] = True
        session._reported += 1
        session.save()
        assert not session._registered.has_fenced and not session._copying
        assert session._poll().under_way or session._saved()[0] == 2


def test_a_failure_while_saving_reaches_the_trainer_and_the_next_save_succeeds(store, device):
    training = on_device(device)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        train(device, session, training, 1)
        session.fence()
        session.wait()
        training.step()
        device.fail_after(3)
        session._reported += 1
        with pytest.raises(ckptdelta.DeviceError, match="told to fail"):
            session.step()
            session.fence()
            session.wait()
        states = train(device, session, training, 1)
    at = max(states)
    assert all(map(same, stored(store, at), states[at]))


def test_two_sessions_share_a_device(store, device):
    trainings = [on_device(device, seed) for seed in (1, 2)]
    sessions = [ckptdelta.Session(store, run, **t.parts(), every=1, rng=False, device_bytes=0) for run, t in zip("ab", trainings)]
    for _ in range(3):
        states = [train(device, s, t, 1) for s, t in zip(sessions, trainings)]
    for session in sessions:
        session.close()
    for run, state in zip("ab", states):
        assert all(map(same, stored(store, 3, run), state[3]))


@pytest.mark.skipif(torch is not None and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
                    reason="this torch was built without gloo")
def test_ranks_with_a_device_each(tmp_path):
    import support_ranked

    support_ranked.launch("emulated", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [(c.step, c.world) for c in store.checkpoints("gpt")] == [(1, 2), (2, 2), (3, 2)]


# ------------------------------------------------------------------------------------------ which devices can be used


class Tensor:
    """As much of a tensor as the question needs."""

    def __init__(self, index=0, size=4, kind="cuda"):
        self.device = types.SimpleNamespace(type=kind, index=index)
        self._size = size

    def numel(self):
        return self._size


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    _device.is_usable.cache_clear()
    yield
    _device.is_usable.cache_clear()


def test_the_device_and_its_current_stream(stream):
    assert _device.device_of(Tensor()) == (0, 7)
    assert _device.device_of(Tensor(size=0)) is None and _device.device_of(Tensor(kind="cpu")) is None and _device.device_of(Tensor(kind="xpu")) is None
    native = _device.Device(3, 7).native()
    assert native.device == 3 and int(_device.ffi.cast("uintptr_t", native.stream)) == 7


def test_a_device_that_the_backend_refuses_is_told_once(stream, caplog):
    caplog.set_level(logging.DEBUG, "ckptdelta")
    assert [_device.device_of(Tensor(9)) for _ in range(3)] == [None] * 3
    told = [r for r in caplog.records if "device 9 go through host memory" in r.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.WARNING and "no device 9" in told[0].getMessage()


def test_a_package_without_cuda_says_so_only_to_those_who_debug(stream, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "ckptdelta")
    monkeypatch.delenv("CKD_CUDA")
    monkeypatch.setattr(_device, "_BACKEND", "no_such_file.so")
    assert _device.device_of(Tensor(9)) is None
    assert [r.levelno for r in caplog.records if "built without CUDA" in r.getMessage()] == [logging.DEBUG]


def test_rocm_goes_through_host_memory(stream, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert _device.device_of(Tensor()) is None
