"""Checkpoints of PyTorch Lightning in a store. Skipped where Lightning is not installed."""

import argparse
import datetime
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import warnings

import pytest

from support_python import ckptdelta, environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]
if ckptdelta is not None and torch is not None:
    warnings.filterwarnings("ignore")
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.utilities.parsing import AttributeDict
    from ckptdelta.lightning import CheckpointIO, RandomStates, load_checkpoint, load_from_checkpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self, width=16, options=None):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3),
                                           torch.nn.Linear(width, 16))
            self.losses = []

        def training_step(self, batch, _):
            loss = (self.net(batch) - batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            self.log("val", (self.net(batch) - batch).square().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    class Worse(Module):
        """The name of its metric has a slash, and its value grows with each epoch."""

        def validation_step(self, batch, _):
            self.log("val/loss", 0.3 + self.current_epoch)


class Stopped(Exception):
    """An interruption of training."""


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs"


def samples():
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(5))


def trainer_of(plugin, *callbacks, epochs=2, **options):
    plugins = [plugin] if plugin is not None else None
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)  # else Lightning adds one that writes to the working folder
    return pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), plugins=plugins, logger=False, accelerator="cpu", enable_progress_bar=False,
                      enable_model_summary=False, enable_checkpointing=saves, **options)


def fit(plugin, *callbacks, ckpt_path=None, seed=1, module=None, **options):
    """Trains with shuffled batches of 8, four an epoch."""
    torch.manual_seed(seed)
    module = module or Module()
    trainer = trainer_of(plugin, *callbacks, **options)
    shuffle = next((c.generators["shuffle"] for c in callbacks if isinstance(c, RandomStates)), torch.Generator().manual_seed(7))
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True, generator=shuffle)
    trainer.fit(module, loader, torch.utils.data.DataLoader(samples(), batch_size=16), ckpt_path=ckpt_path)
    return module, trainer


def names_in(folder):
    return sorted(p.name for p in folder.iterdir())


def steps(path, run="lightning"):
    with ckptdelta.open(path, readonly=True) as store:
        return [checkpoint.step for checkpoint in store.checkpoints(run)]


def assert_same(a, b, where=""):
    assert type(a) is type(b), f"{where}: {type(a)} {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
        assert a.requires_grad == b.requires_grad, where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}.{i}")
    elif hasattr(a, "dtype") and hasattr(a, "tobytes"):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), where
    else:
        assert a == b, where


def dumped(trainer):
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


# ---------------------------------------------------------------------------------------------------------------- resume


class StopAfter:
    """Ends training as a crash would, after an epoch."""

    def __new__(cls, epoch):
        class Callback(pl.Callback):
            def on_train_epoch_end(self, trainer, module):
                if trainer.current_epoch == epoch:
                    raise Stopped

        return Callback()


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(path, tmp_path):
    """Dropout, a scheduler, batch norm, shuffled batches: losses and weights are the same, bit for bit."""
    def random_states(seed):
        return RandomStates(shuffle=torch.Generator().manual_seed(seed))

    whole, trainer = fit(None, random_states(7), epochs=4)
    each = {"dirpath": tmp_path / "marks", "save_top_k": -1, "every_n_epochs": 1, "save_last": True}
    with pytest.raises(Stopped):
        fit(CheckpointIO(path), ModelCheckpoint(**each), StopAfter(2), random_states(7), epochs=4)
    assert names_in(tmp_path / "marks") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    for ckpt_path in ("last", str(tmp_path / "marks" / "epoch=0-step=4.ckpt"), "lightning@8"):
        done = 4 if "epoch=0" in ckpt_path else 8
        torch.rand(9)
        resumed, again = fit(CheckpointIO(path), ModelCheckpoint(**{**each, "save_top_k": 0, "save_last": False}), random_states(99),
                             seed=3, epochs=4, ckpt_path=ckpt_path)
        assert resumed.losses == whole.losses[done:], ckpt_path
        assert_same(dict(resumed.state_dict()), dict(whole.state_dict()))
        assert_same(again.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
        assert_same(again.lr_scheduler_configs[0].scheduler.state_dict(), trainer.lr_scheduler_configs[0].scheduler.state_dict())


def test_without_the_random_states_the_losses_differ(path, tmp_path):
    """So the test above compares what could differ."""
    whole, _ = fit(None, epochs=3)
    fit(CheckpointIO(path), ModelCheckpoint(tmp_path / "marks", save_last=True), epochs=2)
    resumed, _ = fit(CheckpointIO(path), ModelCheckpoint(tmp_path / "marks", save_last=True), ckpt_path="last", seed=3, epochs=3)
    assert resumed.losses != whole.losses[8:] and len(resumed.losses) == 4


def test_a_resume_within_an_epoch_is_that_of_a_file(path, tmp_path):
    ends = []
    for plugin, folder in ((CheckpointIO(path), "marks"), (None, "files")):
        saves = ModelCheckpoint(tmp_path / folder, every_n_train_steps=3, save_top_k=-1)
        fit(plugin, saves)
        module, _ = fit(plugin, ModelCheckpoint(tmp_path / f"{folder}-2", save_top_k=0), ckpt_path=tmp_path / folder / "epoch=0-step=3.ckpt", seed=2)
        ends.append((module.losses, {key: value.clone() for key, value in module.state_dict().items()}))
    assert_same(ends[0], ends[1])
    assert names_in(tmp_path / "marks") == names_in(tmp_path / "files")


def test_a_file_of_lightning_continues_in_the_store(path, tmp_path):
    fit(None, ModelCheckpoint(tmp_path / "files", save_last=True))
    plugin = CheckpointIO(path)
    module, _ = fit(plugin, ModelCheckpoint(tmp_path / "marks", save_last=True), epochs=3, ckpt_path=tmp_path / "files" / "last.ckpt")
    assert len(module.losses) == 4 and steps(path) == [12]
    plugin.remove_checkpoint(tmp_path / "files" / "last.ckpt")
    assert "last.ckpt" not in names_in(tmp_path / "files")


# ---------------------------------------------------------------------------------------------------------- ModelCheckpoint


def test_checkpoints_are_deltas_and_are_stored_once(path, tmp_path):
    fit(CheckpointIO(path), ModelCheckpoint(tmp_path / "marks", save_top_k=-1, every_n_train_steps=2, save_last=True))
    assert len(names_in(tmp_path / "marks")) == 5
    with ckptdelta.open(path) as store:
        assert store.runs() == ["lightning"] and store.verify()
        found = store.checkpoints()
        assert [(c.step, c.kind) for c in found] == [(2, "base"), (4, "delta"), (6, "delta"), (8, "delta")]
        assert [c.parent for c in found] == ["", *(c.id for c in found[:-1])]
        roles = {tensor.name: tensor.role for tensor in store.tensors(run="lightning", step=8)}
        parameters = {f"state_dict.{name}" for name, _ in Module().named_parameters()}
        assert {name for name, role in roles.items() if role == "weight"} == parameters
        for slot in ("exp_avg", "exp_avg_sq"):
            assert {name for name, role in roles.items() if role == slot} == {f"optimizer_states.0.state.{name}.{slot}" for name in parameters}


def test_last_and_another_path_of_a_step_come_back_each_as_it_was(path, tmp_path):
    saved = {}

    class Watched(CheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            saved[str(path)] = pickle.loads(pickle.dumps(checkpoint))
            super().save_checkpoint(checkpoint, path, storage_options)

    several = [ModelCheckpoint(tmp_path / "a", save_last=True), ModelCheckpoint(tmp_path / "b", monitor="val", save_top_k=-1, every_n_train_steps=2),
               ModelCheckpoint(tmp_path / "c", monitor="val", filename="{epoch}-{val:.3f}")]
    fit(Watched(path), *several, epochs=2, val_check_interval=1)
    there = [p for folder in "abc" for p in (tmp_path / folder).iterdir()]
    assert len(there) > 4
    with ckptdelta.open(path) as store:
        assert store.runs() == ["lightning"]
    plugin = CheckpointIO(path)
    for mark in there:
        assert_same(plugin.load_checkpoint(mark), saved[str(mark)], mark.name)


def test_top_k_deletes_and_best_is_the_best(path, tmp_path):
    best = ModelCheckpoint(tmp_path / "marks", monitor="val", save_top_k=2, save_last=True, filename="{step}")
    plugin = CheckpointIO(path)
    module, trainer = fit(plugin, best, epochs=5)
    kept = {int(pathlib.Path(p).stem.split("=")[1]) for p in best.best_k_models}
    last = plugin.load_checkpoint(best.last_model_path)["global_step"]
    assert len(kept) == 2 and set(steps(path)) == kept | {last}
    with ckptdelta.open(path) as store:
        metrics = {c.step: (c.metric_name, c.metric) for c in store.checkpoints() if c.step in kept}
    assert metrics == {int(pathlib.Path(p).stem.split("=")[1]): ("val", score.item()) for p, score in best.best_k_models.items()}
    scores = [r["val"] for r in trainer.validate(module, torch.utils.data.DataLoader(samples(), batch_size=16), ckpt_path="best", verbose=False)]
    assert scores == [pytest.approx(best.best_model_score.item())]


def test_markers_in_subfolders_count(path, tmp_path):
    def saves():
        return ModelCheckpoint(tmp_path / "marks", filename="{epoch}-{val/loss:.2f}", monitor="val/loss", save_top_k=1, save_last=True)

    fit(CheckpointIO(path), saves(), epochs=1, module=Worse())
    best, = (tmp_path / "marks").rglob("*loss*.ckpt")
    assert best.parent != tmp_path / "marks"
    fit(CheckpointIO(path), saves(), epochs=2, module=Worse(), ckpt_path=tmp_path / "marks/last.ckpt")
    assert steps(path) == [4, 8] and load_checkpoint(best)["global_step"] == 4


def test_the_working_folder_does_not_matter(path, tmp_path, monkeypatch):
    plugin = CheckpointIO(path)
    _, trainer = fit(plugin, epochs=1)
    monkeypatch.chdir(tmp_path)
    trainer.save_checkpoint("a.ckpt")
    trainer.save_checkpoint("marks/b.ckpt")
    monkeypatch.chdir(tmp_path / "marks")
    plugin.remove_checkpoint("b.ckpt")
    assert steps(path) == [4] and load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 4
    # A file of a writer that was killed stands for nothing, and does not keep others.
    (tmp_path / ".a.ckpt.new-1").write_text("ckptdelta marker 1\nhalf")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert steps(path) == []


def test_a_link_that_is_replaced_leaves_its_target(path, tmp_path):
    plugin = CheckpointIO(path)
    _, trainer = fit(plugin, epochs=1)
    elsewhere = tmp_path / "elsewhere/a.ckpt"
    trainer.save_checkpoint(elsewhere)
    other = CheckpointIO(path)
    (tmp_path / "link.ckpt").symlink_to(elsewhere)
    fit(other, epochs=2, module=trainer.lightning_module)[1].save_checkpoint(tmp_path / "link.ckpt")
    assert load_checkpoint(elsewhere)["global_step"] == 4


def test_versions_of_a_name_links_and_exceptions(path, tmp_path):
    marks = tmp_path / "marks"
    plugin = CheckpointIO(path)
    fit(plugin, ModelCheckpoint(marks, filename="same"), epochs=1)
    fit(plugin, ModelCheckpoint(marks, filename="same", save_last="link"))
    assert names_in(marks) == ["last.ckpt", "same-v1.ckpt", "same.ckpt"] and (marks / "last.ckpt").is_symlink()
    assert [plugin.load_checkpoint(marks / name)["global_step"] for name in ("same.ckpt", "same-v1.ckpt", "last.ckpt")] == [4, 8, 8]
    plugin.remove_checkpoint(marks / "last.ckpt")
    assert steps(path) == [4, 8] and names_in(marks) == ["same-v1.ckpt", "same.ckpt"]
    with pytest.raises(Stopped):
        fit(plugin, ModelCheckpoint(tmp_path / "failed", save_on_exception=True, every_n_epochs=100), StopAfter(0))
    assert load_checkpoint(tmp_path / "failed" / "epoch=0-step=4.ckpt")["global_step"] == 4


def test_a_checkpoint_goes_with_its_last_marker(path, tmp_path):
    plugin = CheckpointIO(path, undo_s=3600)
    _, trainer = fit(plugin, epochs=1)
    for name in ("a.ckpt", "b.ckpt", "folder/c.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    assert steps(path) == [4]
    for name in ("b.ckpt", "a.ckpt", "a.ckpt"):
        plugin.remove_checkpoint(tmp_path / name)
        assert steps(path) == [4]
    fit(plugin, epochs=2, module=trainer.lightning_module)[1].save_checkpoint(tmp_path / "folder" / "c.ckpt")
    with ckptdelta.open(path) as store:
        assert [str(c) for c in store.checkpoints()] == ["lightning@8"] and store.verify()
        store.undelete(run="lightning", step=4)
        assert store.state_dict(run="lightning", step=4)["global_step"] == 4


def test_the_last_one_that_is_not_suspect_stays(path, tmp_path):
    plugin = CheckpointIO(path)
    for step, value in ((1, 1), (2, 2), (3, float("nan")), (4, float("nan"))):
        state = {"optimizer_states": [], "state_dict": {"w": torch.full((100,), float(value))}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / "last.ckpt")
    assert steps(path) == [2, 4]
    plugin.load_checkpoint("lightning@2")
    plugin.save_checkpoint({**state, "state_dict": {"w": torch.ones(100)}, "global_step": 5}, tmp_path / "last.ckpt")
    assert ckptdelta.open(path).find(run="lightning~2").step == 5


def test_deleted_checkpoints_free_their_space(path, tmp_path):
    """At once, or when the time to restore them is over."""
    state = {"optimizer_states": [], "state_dict": {"w": torch.randn(1000)}}

    def size():
        return sum(p.stat().st_size for p in (path / "data").rglob("*") if p.is_file())

    def save(plugin, step):
        state["state_dict"]["w"] = torch.randn(1000)
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / "last.ckpt")
        return size()

    at_once = CheckpointIO(path)
    one = save(at_once, 1)
    for step in (2, 3):
        assert save(at_once, step) == pytest.approx(one, rel=0.1)
    later = CheckpointIO(path, undo_s=3600)
    assert [round(save(later, step) / one) for step in (11, 12, 13)] == [2, 3, 4]
    later.undo_s = 1
    before = save(later, 14)
    time.sleep(1.3)
    assert save(later, 15) < before + one / 2  # 13 is gone
    assert steps(path, "lightning~2") == [15]


def test_pinned_checkpoints_stay(path, tmp_path):
    plugin = CheckpointIO(path)
    fit(plugin, epochs=1)[1].save_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    subprocess.run([sys.executable, "-m", "ckptdelta", "pin", str(path), "lightning@4"], env=environment(), check=True, stdout=subprocess.DEVNULL)
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert steps(path) == [4] and not (tmp_path / "a.ckpt").exists()


# -------------------------------------------------------------------------------------------------------------------- runs


def test_trainings_get_runs_of_their_own(path, tmp_path, caplog):
    for _ in range(2):
        fit(CheckpointIO(path), ModelCheckpoint(tmp_path / "marks", save_top_k=-1))
    assert steps(path) == [4, 8] and steps(path, "lightning~2") == [4, 8]
    assert "it is saved as lightning~2" in caplog.text
    plugin = CheckpointIO(tmp_path / "sweep")
    for _ in range(2):
        fit(plugin, ModelCheckpoint(tmp_path / "sweep-marks", save_top_k=-1))
    assert steps(tmp_path / "sweep") == steps(tmp_path / "sweep", "lightning~2") == [4, 8]
    fit(CheckpointIO(path, "mine"), ModelCheckpoint(tmp_path / "mine", save_top_k=-1), ckpt_path="lightning@8", epochs=3)
    with ckptdelta.open(path) as store:
        (mine,) = store.checkpoints("mine")
        assert (mine.step, mine.kind, mine.parent) == (12, "delta", store.find(run="lightning", step=8).id)
        assert mine.resumed_from == mine.parent
    for source, run, expected in (("lightning@8", "lightning", [4, 8, 12]), ("lightning@4", "lightning~3", [8, 12])):
        fit(CheckpointIO(path), ModelCheckpoint(tmp_path / run, save_top_k=-1), ckpt_path=source, epochs=3)
        assert steps(path, run) == expected


def test_other_checkpoints_of_the_same_step(path, tmp_path):
    """Weights alone have a run of their own, and so have other weights at the same step."""
    plugin = CheckpointIO(path)
    both = [ModelCheckpoint(tmp_path / "full", save_top_k=-1, every_n_train_steps=4),
            ModelCheckpoint(tmp_path / "weights", save_top_k=-1, save_weights_only=True)]
    module, trainer = fit(plugin, *both)
    assert steps(path) == steps(path, "lightning-weights") == [4, 8]
    with torch.no_grad():
        module.net[0].weight.add_(1)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert steps(path, "lightning-2") == [8]
    assert torch.equal(plugin.load_checkpoint(tmp_path / "other.ckpt")["state_dict"]["net.0.weight"], module.net[0].weight)
    before = plugin.load_checkpoint(tmp_path / "full" / "epoch=1-step=8.ckpt")["state_dict"]["net.0.weight"]
    assert torch.equal(before + 1, module.net[0].weight)
    weights = plugin.load_checkpoint(tmp_path / "weights" / "epoch=1-step=8.ckpt")
    assert "optimizer_states" not in weights and torch.equal(weights["state_dict"]["net.0.weight"], before)
    with ckptdelta.open(path) as store:
        full, alone = store.find(run="lightning", step=4), store.find(run="lightning-weights", step=4)
        assert alone.parent == full.id and alone.stored_bytes < full.stored_bytes / 3


def test_optimizers_that_know_names(path, tmp_path):
    """Such as those that were made from named_parameters(), in another order than the model's."""
    class Named(Module):
        def configure_optimizers(self):
            backward = list(self.named_parameters())[::-1]
            return torch.optim.AdamW([{"params": backward[:2]}, {"params": backward[2:], "lr": 1e-3}])

    _, trainer = fit(CheckpointIO(path), epochs=1, module=Named())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with ckptdelta.open(path) as store:
        moments = {tensor.name for tensor in store.tensors() if tensor.role == "exp_avg"}
    assert moments == {f"optimizer_states.0.state.state_dict.{name}.exp_avg" for name, _ in Module().named_parameters()}
    assert_same(load_checkpoint(tmp_path / "a.ckpt")["optimizer_states"], dumped(trainer)["optimizer_states"])


def test_a_renamed_run_is_found(path, tmp_path):
    fit(CheckpointIO(path), epochs=1)[1].save_checkpoint(tmp_path / "a.ckpt")
    subprocess.run([sys.executable, "-m", "ckptdelta", "rename", str(path), "lightning", "gpt"], env=environment(), check=True,
                   stdout=subprocess.DEVNULL)
    assert load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 4


# ------------------------------------------------------------------------------------------------------------------ values


def test_everything_comes_back_as_it_was(path, tmp_path):
    options = {"namespace": argparse.Namespace(depth=2, inner=argparse.Namespace(names=["a"])),
               "attributes": AttributeDict(a=1, b=AttributeDict(c=2)),
               "path": pathlib.Path("x/y"), "pure": pathlib.PurePosixPath("z"), "time": datetime.timedelta(days=1, microseconds=3),
               "parameter": torch.nn.Parameter(torch.ones(3)), "deque": [(argparse.Namespace(),), {1: pathlib.Path("k")}], "score": torch.tensor(2.5),
               "dtype": torch.bfloat16, "none": None}
    plugin = CheckpointIO(path)
    _, trainer = fit(plugin, epochs=1, module=Module(options=options))
    wanted = dumped(trainer)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert_same(found, wanted)
    assert type(found["hyper_parameters"]["options"]["attributes"].b) is AttributeDict
    assert found["state_dict"]._metadata["net.1"] == {"version": 2}
    assert found["pytorch-lightning_version"] == pl.__version__ and "loops" in found
    with ckptdelta.open(path) as store:
        assert store.state_dict()["hyper_parameters"]["options"]["namespace"]["depth"] == 2
    module = load_from_checkpoint(Module, tmp_path / "a.ckpt")
    assert module.hparams.options["namespace"].inner.names == ["a"]
    assert_same(dict(module.state_dict()), dict(trainer.lightning_module.state_dict()))
    assert load_from_checkpoint(Module, tmp_path / "a.ckpt", width=16, strict=False).hparams.width == 16


class Opaque:
    """Something that only pickle restores."""

    def __eq__(self, other):
        return type(other) is Opaque


def test_pickle_only_if_asked(path, tmp_path):
    module = Module(options=[Opaque()])
    _, trainer = fit(CheckpointIO(path), epochs=1, module=module)
    with pytest.raises(ckptdelta.InvalidError, match="Opaque.*save_hyperparameters.*pickle=True") as found:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert found.value.path == "hyper_parameters.options.0" and not path.exists() and not (tmp_path / "a.ckpt").exists()
    trusting = CheckpointIO(path, pickle=True)
    trusting.save_checkpoint(dumped(trainer), tmp_path / "a.ckpt")
    assert trusting.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["options"] == [Opaque()]
    for plugin, options in ((CheckpointIO(path), {}), (trusting, {"weights_only": True})):
        with pytest.raises(ckptdelta.UnsupportedError, match="hyper_parameters.options.0.*pickle=True"):
            plugin.load_checkpoint(tmp_path / "a.ckpt", **options)


@pytest.mark.parametrize("checkpoint, message", [
    ({"ckptdelta": 1}, "a name that CheckpointIO needs"), ([1], "is a dict"), ({"x": torch.nn.Linear(2, 2) if torch else 0}, "only pickle")])
def test_states_that_cannot_be_stored(path, tmp_path, checkpoint, message):
    with pytest.raises(ckptdelta.InvalidError, match=message):
        CheckpointIO(path).save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_map_location(path, tmp_path):
    plugin = CheckpointIO(path)
    plugin.save_checkpoint({"a": torch.ones(2), "b": [torch.zeros(1)], "global_step": 1, "optimizer_states": []}, tmp_path / "a.ckpt")
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}):
        found = plugin.load_checkpoint(tmp_path / "a.ckpt", map_location=location)
        assert found["a"].is_meta and found["b"][0].is_meta
    asked = []
    found = plugin.load_checkpoint(tmp_path / "a.ckpt", map_location=lambda storage, place: asked.append(place) or storage)
    assert torch.equal(found["a"], torch.ones(2)) and asked == ["cpu", "cpu"]


def test_lossy_checkpoints(path, tmp_path):
    plugin = CheckpointIO(path, fidelity="near")
    saves = ModelCheckpoint(tmp_path / "marks", save_top_k=-1, save_last=True)
    module, trainer = fit(plugin, saves)
    with ckptdelta.open(path) as store:
        assert [(str(c), c.fidelity) for c in store.checkpoints()] == [("lightning@4", "near"), ("lightning@8", "near")]
        exact = {t.name for t in store.tensors(run="lightning", step=8) if t.rel_l2 == 0}
        assert {f"state_dict.{name}" for name, _ in module.named_buffers()} <= exact
        assert "state_dict.net.0.weight" not in exact
    fit(plugin, saves, ckpt_path="last", epochs=3)
    with ckptdelta.open(path) as store:
        assert store.find().step == 12 and store.find().lossy_resumes == 1


# ----------------------------------------------------------------------------------------------------- errors and damage


def test_missing_and_damaged_checkpoints(path, tmp_path):
    plugin = CheckpointIO(path)
    _, trainer = fit(plugin, epochs=1)
    mark = tmp_path / "a.ckpt"
    trainer.save_checkpoint(mark)
    plugin.teardown()
    with pytest.raises(ckptdelta.NotFoundError, match="none.ckpt: there is no such checkpoint"):
        fit(plugin, ckpt_path=tmp_path / "none.ckpt")
    with pytest.raises(ckptdelta.NotFoundError, match="99"):
        fit(plugin, ckpt_path="lightning@99")
    with pytest.raises(ckptdelta.NotFoundError, match="its marker names the store .*runs"):
        fit(CheckpointIO(tmp_path / "elsewhere"), ckpt_path=mark)
    assert not (tmp_path / "elsewhere").exists()
    ckptdelta.open(tmp_path / "elsewhere").close()
    with pytest.raises(ckptdelta.NotFoundError, match="lightning@4 .*not in the store .*elsewhere; the marker names another store: .*runs"):
        fit(CheckpointIO(tmp_path / "elsewhere"), ckpt_path=mark)
    text = mark.read_text()
    mark.write_text(text[:text.index("changes")])
    with pytest.raises(ckptdelta.CorruptError, match="damaged marker.*RUN@STEP"):
        plugin.load_checkpoint(mark)
    trainer.save_checkpoint(mark)  # a damaged marker does not stop a save
    assert plugin.load_checkpoint(mark)["global_step"] == 4
    plugin.teardown()
    for file in (path / "data").rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            for i in range(len(data) // 4, len(data), 97):
                data[i] ^= 255
            file.write_bytes(data)
    with pytest.raises(ckptdelta.CorruptError):
        fit(plugin, ckpt_path=mark)


def test_wrong_arguments(path, tmp_path):
    with pytest.raises(ckptdelta.InvalidError, match="fidelity"):
        CheckpointIO(path, fidelity="fine")
    plugin = CheckpointIO(path)
    with pytest.raises(ckptdelta.UnsupportedError, match="local file system"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(ckptdelta.InvalidError, match="is a folder"):
        plugin.save_checkpoint({}, tmp_path)
    with pytest.raises(ckptdelta.InvalidError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(ckptdelta.InvalidError, match="no store"):
        load_checkpoint("gpt@3")
    assert not path.exists()


def test_a_failed_save_leaves_the_marker_before(path, tmp_path, monkeypatch):
    plugin = CheckpointIO(path)
    state = {"global_step": 1, "optimizer_states": [], "state_dict": {"w": torch.ones(4)}}
    plugin.save_checkpoint(state, tmp_path / "last.ckpt")
    plugin.progress = lambda done, total: False
    with pytest.raises(ckptdelta.CancelledError):
        plugin.save_checkpoint({**state, "global_step": 2, "state_dict": {"w": torch.zeros(4)}}, tmp_path / "last.ckpt")
    plugin.progress = None
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1 and names_in(tmp_path) == ["last.ckpt", "runs"]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plugin.save_checkpoint({**state, "global_step": 3}, tmp_path / "last.ckpt")
    assert names_in(tmp_path) == ["last.ckpt", "runs"]


def test_a_deleted_parent_does_no_harm(path, tmp_path):
    plugin = CheckpointIO(path)
    state = {"global_step": 1, "optimizer_states": [], "state_dict": {"w": torch.ones(4)}}
    for step in (1, 2):
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert steps(path) == []
    plugin.save_checkpoint({**state, "global_step": 3}, tmp_path / "a.ckpt")
    assert steps(path) == [3] and plugin.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 3


# ------------------------------------------------------------------------------------------- background, processes, packages


def waiting(plugin):
    """Holds the plugin's thread until the result is set."""
    gate = threading.Event()
    plugin._do(gate.wait)
    return gate


def test_saves_in_the_background(path, tmp_path):
    """What is saved is what was there at the call, whatever training does meanwhile."""
    plugin = CheckpointIO(path, background=True)
    gate = waiting(plugin)
    weight, progress = torch.ones(100, 100), {"n": 1}
    for step in (1, 2):
        weight.fill_(step)
        progress["n"] = step
        state = {"global_step": step, "optimizer_states": [], "state_dict": {"w": weight}, "progress": progress}
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
    weight.fill_(9)
    progress["n"] = 9
    plugin.remove_checkpoint(tmp_path / "1.ckpt")
    assert not path.exists()
    with pytest.raises(ckptdelta.StateError, match="background"):
        pickle.dumps(plugin)
    gate.set()
    plugin.teardown()
    assert steps(path) == [2] and not (tmp_path / "1.ckpt").exists()
    found = plugin.load_checkpoint(tmp_path / "2.ckpt")
    assert torch.equal(found["state_dict"]["w"], torch.full((100, 100), 2.0)) and found["progress"] == {"n": 2}


def test_errors_in_the_background_are_told(path, tmp_path):
    path.write_text("no store")
    plugin = CheckpointIO(path, background=True)
    state = {"global_step": 1, "optimizer_states": [], "state_dict": {"w": torch.ones(4)}}
    plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    for future in plugin._pending:
        future.exception()
    with pytest.raises(ckptdelta.Error, match="runs"):
        plugin.save_checkpoint(state, tmp_path / "b.ckpt")
    with pytest.raises(ckptdelta.Error, match="runs"):
        plugin.teardown()
    plugin.teardown()
    path.unlink()
    with pytest.raises(ckptdelta.InvalidError):  # the save itself fails, not the one after it
        plugin.save_checkpoint({"x": object()}, tmp_path / "b.ckpt")
    plugin.save_checkpoint(state, tmp_path / "b.ckpt")
    plugin.teardown()
    assert steps(path) == [1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_training_with_background_saves(path, tmp_path, wrapped):
    plain, _ = fit(None, epochs=3)
    plugin = AsyncCheckpointIO(CheckpointIO(path)) if wrapped else CheckpointIO(path, background=True)
    module, _ = fit(plugin, ModelCheckpoint(tmp_path / "marks", save_top_k=-1, every_n_train_steps=2, save_last=True), epochs=3)
    assert module.losses == plain.losses and steps(path) == [2, 4, 6, 8, 10, 12]
    assert_same(dict(load_checkpoint(tmp_path / "marks" / "last.ckpt")["state_dict"]), {k: v for k, v in module.state_dict().items()})


def test_a_plugin_in_a_forked_process(path, tmp_path):
    plugin = CheckpointIO(path)
    state = {"global_step": 1, "optimizer_states": [], "state_dict": {"w": torch.ones(4)}}
    plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    child = os.fork()
    if child == 0:
        try:
            plugin.save_checkpoint({**state, "global_step": 2}, tmp_path / "b.ckpt")
            os._exit(0 if plugin.load_checkpoint(tmp_path / "b.ckpt")["global_step"] == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert steps(path) == [1, 2]
    copy = pickle.loads(pickle.dumps(plugin))
    copy.save_checkpoint({**state, "global_step": 3}, tmp_path / "c.ckpt")
    assert steps(path) == [1, 2] and steps(path, "lightning~2") == [3]  # the child's step 2 is no step of this lineage


def test_states_between_processes(path, tmp_path):
    """Lightning's launcher of spawned processes sends the weights back through the plugin, as a dict of tensors alone."""
    weights = {"w": torch.ones(4)}
    here = CheckpointIO(path)
    there = pickle.loads(pickle.dumps(here))
    for i in range(2):
        there.save_checkpoint(weights, tmp_path / f"{i}.ckpt")
        assert_same(here.load_checkpoint(tmp_path / f"{i}.ckpt"), weights)
    assert steps(path, "lightning-weights") == [1, 2]
    for i in range(2):
        here.remove_checkpoint(tmp_path / f"{i}.ckpt")
    assert steps(path, "lightning-weights") == []


SCRIPT = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
from ckptdelta.lightning import CheckpointIO, RandomStates

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(16, 16))

    def training_step(self, batch, _):
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def train(store, epochs, ckpt_path=None):
    torch.manual_seed(1)
    saves = pl.callbacks.ModelCheckpoint(store + "-marks", save_last=True)
    trainer = pl.Trainer(max_epochs=epochs, logger=False, accelerator="cpu", devices=2, strategy="ddp", plugins=[CheckpointIO(store)],
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[saves, RandomStates()])
    torch.manual_seed(trainer.global_rank)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 16, generator=torch.Generator().manual_seed(3)), batch_size=8), ckpt_path=ckpt_path)

train("whole", 2)
train("resumed", 1)
train("resumed", 2, "last")
print("done")
"""


def test_ranks_and_the_other_package(tmp_path):
    """Two processes, of which the first saves. The Trainer is that of pytorch_lightning."""
    pytest.importorskip("pytorch_lightning")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], text=True, timeout=300, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr[-2000:]
    ends = []
    for name in ("whole", "resumed"):
        with ckptdelta.open(tmp_path / name) as store:
            assert [(str(c), c.kind) for c in store.checkpoints()] == [("lightning@4", "delta")] and store.verify()
            ends.append(store.state_dict())
    for key in ("state_dict", "optimizer_states"):
        assert_same(ends[0][key], ends[1][key])
    states = ends[1]["callbacks"]["RandomStates"]["ranks"]
    assert len(states) == 2 and not torch.equal(states[0]["all"]["torch"], states[1]["all"]["torch"])


def test_a_trainer_of_the_other_package_in_one_process(path):
    other = pytest.importorskip("pytorch_lightning")
    plugin = CheckpointIO(path)
    assert isinstance(plugin, other.plugins.io.CheckpointIO) and isinstance(plugin, pl.plugins.io.CheckpointIO)
    assert other.Trainer(plugins=[plugin], logger=False, accelerator="cpu").strategy.checkpoint_io is plugin


def test_the_failure_of_the_last_save_in_the_background_is_logged(tmp_path, caplog):
    plugin = CheckpointIO(tmp_path / "store", run="r", background=True)
    (tmp_path / "folder").write_text("a file, where the marker's folder would be")
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(3)}, "global_step": 1}, tmp_path / "folder/a.ckpt")
    plugin._thread.shutdown()  # as the exit of the process does
    assert "a save in the background failed" in caplog.text
