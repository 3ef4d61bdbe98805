"""States of Hugging Face accelerate in a store. Skipped where accelerate is not installed."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from support_python import ckptdelta, environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]
if ckptdelta is not None and torch is not None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from ckptdelta.accelerate import load_state, save_state


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs"


class Training:
    """A model with dropout and batch norm, AdamW, a scheduler, shuffled batches and a registered object."""

    def __init__(self, seed=1, seedable=True, width=32, objects=1, stateful=False):
        set_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=seedable, use_stateful_dataloader=stateful))
        model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.counters = [Counter() for _ in range(objects)]
        self.accelerator.register_for_checkpointing(*self.counters)

    def batches(self, loader):
        losses, self.seen = [], []
        for batch in loader:
            self.seen.append(batch)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(batch) - batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            self.counters[0].count += 1
        return losses

    def epochs(self, count):
        return [loss for _ in range(count) for loss in self.batches(self.loader)]

    def state(self):
        return {"model": self.accelerator.unwrap_model(self.model).state_dict(), "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(), "count": self.counters[0].count}


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def assert_same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}.{i}")
    else:
        assert a == b, where


@pytest.mark.parametrize("seedable", [True, False])
def test_a_resumed_training_ends_as_one_that_was_not_interrupted(path, seedable):
    whole = Training(seedable=seedable)
    losses = whole.epochs(4)
    first = Training(seedable=seedable)
    assert first.epochs(1) == losses[:4]
    for step in (1, 2):
        saved = save_state(first.accelerator, path, run="gpt", step=step)
        assert (saved.run, saved.step, saved.kind) == ("gpt", step, "base" if step == 1 else "delta")
        if step == 1:
            assert first.epochs(1) == losses[4:8]
    resumed = Training(seed=9, seedable=seedable)
    resumed.epochs(1)  # what it had is overwritten
    assert load_state(resumed.accelerator, path).step == 2
    assert resumed.accelerator.step == first.accelerator.step
    assert resumed.epochs(2) == losses[8:]
    assert_same(resumed.state(), whole.state())
    again = Training(seed=3, seedable=seedable)
    assert str(load_state(again.accelerator, path, run="gpt", step=1)) == "gpt@1"
    assert again.epochs(3) == losses[4:]


def test_a_resume_within_an_epoch_is_that_of_accelerate(path, tmp_path):
    """The rest of the epoch has the batches that were not seen, and the losses of a resume from accelerate's own folder."""
    first = Training()
    first.epochs(1)
    order = []
    for i, batch in enumerate(first.loader):
        order.append(batch)
        if i < 2:
            first.batches([batch])
        if i == 1:
            save_state(first.accelerator, path, run="gpt", step=6)
            first.accelerator.save_state(tmp_path / "folder")
    ends = []
    for own in (False, True):
        resumed = Training(seed=1 if own else 4)
        if own:  # accelerate leaves the seed and the epoch of the sampler to the caller
            resumed.accelerator.load_state(tmp_path / "folder")
            resumed.loader.set_epoch(1)
        else:
            load_state(resumed.accelerator, path)
            assert resumed.loader.iteration == 1
        rest = resumed.accelerator.skip_first_batches(resumed.loader, 2)
        ends.append((resumed.batches(rest), resumed.state()))
        assert_same(resumed.seen, order[2:])
    assert len(ends[0][0]) == 2
    assert_same(list(ends[0]), list(ends[1]))


def test_what_is_stored(path):
    training = Training()
    training.epochs(1)
    with ckptdelta.open(path) as store:
        save_state(training.accelerator, store, run="gpt", step=1, metric=("loss", 0.5))
        training.epochs(1)
        saved = save_state(training.accelerator, store, run="gpt", step=2)
        assert saved.kind == "delta" and saved.parent == store.find(run="gpt", step=1).id and store.verify()
        assert store.find(run="gpt", step=1).metric == 0.5
        roles = {tensor.name: tensor.role for tensor in store.tensors(run="gpt", step=2)}
        parameters = {f"model.{name}" for name, _ in training.model.named_parameters()}
        assert {name for name, role in roles.items() if role == "weight"} == parameters
        assert {name for name, role in roles.items() if role == "exp_avg_sq"} == {f"optimizer.state.{name}.exp_avg_sq" for name in parameters}
        assert roles["model.1.running_mean"] == "other"
        state = store.state_dict(run="gpt", step=2)
        assert_same(state["model"], dict(training.model.state_dict()))
        assert state["custom"] == {"count": 8} and state["accelerate"]["processes"] == 1
        lossy = save_state(training.accelerator, store, run="lossy", step=1, fidelity="near")
        assert lossy.fidelity == "near"
        assert {t.name for t in store.tensors(run="lossy") if t.rel_l2 > 0} <= {name for name, role in roles.items() if role != "other"}


def test_several_models_and_objects(path):
    def several(scale):
        accelerator = accelerate.Accelerator(cpu=True)
        models = [torch.nn.Linear(4, 4) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        for model, optimizer in zip(prepared[:2], prepared[2:]):
            (model(torch.full((2, 4), scale))).sum().backward()
            optimizer.step()
        return accelerator, prepared

    accelerator, prepared = several(1.0)
    save_state(accelerator, path, run="a", step=1)
    other, mine = several(3.0)
    load_state(other, path)
    for one, two in zip(prepared, mine):
        assert_same(dict(two.state_dict()), dict(one.state_dict()))
    with ckptdelta.open(path) as store:
        assert {"model_1.weight", "optimizer_1.state.model_1.weight.exp_avg"} <= {t.name for t in store.tensors()}


def test_stateful_loaders(path, tmp_path):
    """They give the same batches; as they draw a random number more after a load, the losses are those of accelerate's own resume."""
    pytest.importorskip("torchdata.stateful_dataloader")
    first = Training(stateful=True)
    first.epochs(1)
    save_state(first.accelerator, path, run="gpt", step=1)
    first.accelerator.save_state(tmp_path / "folder")
    first.epochs(1)
    resumed, other = Training(seed=5, stateful=True), Training(stateful=True)
    load_state(resumed.accelerator, path)
    other.accelerator.load_state(tmp_path / "folder")
    other.loader.set_epoch(1)
    after = torch.get_rng_state()
    losses = resumed.epochs(1)
    torch.set_rng_state(after)
    assert other.epochs(1) == losses
    assert_same(resumed.seen, first.seen)


def test_scalers(path):
    def with_scaler(scale):
        training = Training()
        training.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        training.accelerator.scaler.scale(torch.ones(1))
        return training.accelerator

    save_state(with_scaler(64.0), path, run="a", step=1)
    other = with_scaler(2.0)
    load_state(other, path)
    assert other.scaler.get_scale() == 64.0
    with pytest.raises(ckptdelta.MismatchError, match="1 of scaler, not 0"):
        load_state(Training().accelerator, path)


def test_errors(path, tmp_path):
    training = Training()
    training.epochs(1)
    with pytest.raises(ckptdelta.NotFoundError):
        load_state(training.accelerator, path)
    save_state(training.accelerator, path, run="gpt", step=1)
    before = training.state()["model"]["0.weight"].clone()
    with pytest.raises(ckptdelta.ExistsError):
        save_state(training.accelerator, path, run="gpt", step=1)
    with pytest.raises(ckptdelta.NotFoundError, match="99"):
        load_state(training.accelerator, path, step=99)
    with pytest.raises(ckptdelta.MismatchError, match="1 of custom, not 2"):
        load_state(Training(objects=2).accelerator, path)
    wide = Training(width=33)
    with pytest.raises(ckptdelta.MismatchError, match="model.0.weight"):
        load_state(wide.accelerator, path)
    assert wide.counters[0].count == 0 and wide.loader.iteration == 0
    with ckptdelta.open(path) as store:
        store.save({"w": torch.ones(2)}, run="other", step=1)
        with pytest.raises(ckptdelta.MismatchError, match="not saved by ckptdelta.accelerate"):
            load_state(training.accelerator, store, run="other")
    training.counters[0].count = object()
    with pytest.raises(ckptdelta.InvalidError, match="custom.count"):
        save_state(training.accelerator, path, run="gpt", step=2)
    with ckptdelta.open(path) as store:
        assert [str(c) for c in store.checkpoints()] == ["gpt@1", "other@1"]
    assert torch.equal(training.state()["model"]["0.weight"], before)
    for file in (path / "data").rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            for i in range(len(data) // 4, len(data), 97):
                data[i] ^= 255
            file.write_bytes(data)
    with pytest.raises(ckptdelta.CorruptError):
        load_state(Training().accelerator, path, run="gpt")


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_what_is_spread_over_processes_is_refused(path, kind):
    class Spread:
        distributed_type = accelerate.DistributedType[kind]

    for call in (lambda: save_state(Spread(), path, run="a", step=1), lambda: load_state(Spread(), path)):
        with pytest.raises(ckptdelta.UnsupportedError, match=f"{kind}.*ckptdelta.dcp"):
            call()
    assert not path.exists()


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import ckptdelta
from test_python_accelerate import Training, assert_same
from ckptdelta.accelerate import load_state, save_state
import accelerate

whole = Training()
rank, processes = whole.accelerator.process_index, whole.accelerator.num_processes
assert processes == 2
torch.manual_seed(rank + 10)
losses = whole.epochs(2)
first = Training()
torch.manual_seed(rank + 10)
assert first.epochs(1) == losses[:2]
for path in ("runs", "runs"):
    try:
        done = save_state(first.accelerator, path, run="gpt", step=1)
        assert str(done) == "gpt@1"
    except ckptdelta.ExistsError:
        assert rank == 0
    except ckptdelta.StateError as error:
        assert rank == 1 and "the first process failed" in str(error) and isinstance(error.__cause__, ckptdelta.ExistsError)
resumed = Training(seed=8)
assert load_state(resumed.accelerator, "runs").step == 1
assert resumed.epochs(1) == losses[2:], (rank, losses)
assert_same(resumed.state(), whole.state())
with ckptdelta.open("runs", readonly=True) as store:
    states = store.state_dict(only="rng")["rng"]
    assert list(states) == ["0", "1"] and not torch.equal(states["0"]["torch"], states["1"]["torch"])
    assert "model.0.weight" in {t.name for t in store.tensors()}
print("done", rank, flush=True)
"""


def test_two_processes(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch was built without gloo")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    env = environment(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1")
    env["PYTHONPATH"] += f":{here.parent / 'support'}"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(here)], text=True,
                          timeout=300, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0 and "done 0" in done.stdout and "done 1" in done.stdout, done.stderr[-3000:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = Training()
        load_state(alone.accelerator, tmp_path / "runs")  # one process loads what two have saved
    with ckptdelta.open(tmp_path / "runs") as store:
        assert_same(dict(alone.model.state_dict()), store.state_dict()["model"])
