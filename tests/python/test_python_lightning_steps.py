"""Predicted optimizer steps in checkpoints of PyTorch Lightning. Skipped where Lightning is not installed."""

import logging
import warnings

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]
if ckptdelta is not None and torch is not None:
    warnings.filterwarnings("ignore")
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.optim.optimizer import _global_optimizer_post_hooks as global_hooks
    from ckptdelta.lightning import CheckpointIO, load_checkpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        """The scheduler changes the learning rate after each step, before the checkpoint is saved."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))

        def training_step(self, batch, _=0):
            return (self.net(batch) - batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}}


BATCHES = 8


def batches():
    return torch.randn(BATCHES * 8, 64, generator=torch.Generator().manual_seed(5))


def fit(plugin, folder, every):
    module = Module()
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = pl.Trainer(max_epochs=1, callbacks=[saves], plugins=[plugin], logger=False, accelerator="cpu", enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=8))
    return module


def by_session(path):
    """The same training, saved by a Session."""
    module = Module()
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    with ckptdelta.open(path) as store, ckptdelta.Session(store, "gpt", model=module, optimizer=optimizer, scheduler=scheduler, every=1, rng=False) as session:
        for batch in batches().split(8):
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
            scheduler.step()
            session.step()
    return module


def sizes(path, run):
    """Stored and raw bytes of the tensors of each step, and how weights are coded."""
    with ckptdelta.open(path, readonly=True) as store:
        found = {c.step: store.tensors(run=run, step=c.step) for c in store.checkpoints(run)}
        assert store.verify()
    return ({step: sum(t.stored_bytes for t in tensors if t.role != "other") for step, tensors in found.items()},
            {step: {t.method for t in tensors if t.role == "weight" and len(t.shape) == 2} for step, tensors in found.items()})


@pytest.mark.parametrize("background", [False, True])
def test_saves_one_step_apart_are_as_small_as_those_of_a_session(tmp_path, background):
    others = set(global_hooks)  # of tests before this one
    plugin = CheckpointIO(tmp_path / "lightning", background=background)
    module = fit(plugin, tmp_path / "marks", every=1)
    other = by_session(tmp_path / "session")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))
    (stored, methods), (expected, same) = sizes(tmp_path / "lightning", "lightning"), sizes(tmp_path / "session", "gpt")
    assert list(stored) == list(expected) == list(range(1, BATCHES + 1))
    assert methods == same and sum(found == {"step"} for found in methods.values()) >= BATCHES / 2
    assert all(abs(stored[step] - expected[step]) < 0.02 * expected[step] for step in stored), (stored, expected)
    last = load_checkpoint(tmp_path / f"marks/step={BATCHES}.ckpt")
    assert all(torch.equal(last["state_dict"][name], value) for name, value in module.state_dict().items())
    assert set(global_hooks) <= others, "nothing is followed when training has ended"


def test_saves_two_steps_apart_are_not_predicted(tmp_path):
    fit(CheckpointIO(tmp_path / "lightning"), tmp_path / "marks", every=2)
    _, methods = sizes(tmp_path / "lightning", "lightning")
    assert list(methods) == [2, 4, 6, 8] and all("step" not in found for found in methods.values())


def test_a_plugin_that_is_dropped_follows_nothing(tmp_path):
    others = set(global_hooks)  # of tests before this one
    module = Module()
    optimizer = module.configure_optimizers()["optimizer"]
    module.training_step(batches()[:8]).backward()
    optimizer.step()
    plugin = CheckpointIO(tmp_path / "lightning")
    plugin.save_checkpoint({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}, tmp_path / "a.ckpt")
    assert len(set(global_hooks) - others) == 1
    plugin._close()
    plugin.save_checkpoint({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 2}, tmp_path / "b.ckpt")
    assert len(set(global_hooks) - others) == 1
    del plugin
    assert set(global_hooks) <= others
