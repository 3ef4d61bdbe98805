"""Suspect checkpoints through Python: a module whose weights become NaN."""

import numpy
import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def parts(seed=1):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    model.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(store, until, *, seed=1, poison=None, restore=None):
    """The loop of the documentation. Returns the restored step, and the model."""
    model, optimizer = parts(seed)
    with ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, every=1) as session:
        restored = session.restore() if restore is None else session.restore(restore)
        for step in range(restored + 1, until + 1):
            factor = float("nan") if poison is not None and step >= poison else 1
            optimizer.zero_grad()
            (model(torch.ones(2, 16)).square().sum() * factor).backward()
            optimizer.step()
            session.step()
            session.wait()
        return restored, model


def marks(store, run):
    return [(c.step, c.suspect) for c in store.checkpoints(run)]


def test_a_module_that_becomes_nan(store, caplog):
    train(store, 5, poison=4)
    assert "gpt@4: " in caplog.text and "marked suspect" in caplog.text
    assert marks(store, "gpt") == [(1, False), (2, False), (3, False), (4, True), (5, True)]
    assert store.find(run="gpt").step == 5
    caplog.clear()
    assert torch.isfinite(store.state_dict(run="gpt")["model"]["0.weight"]).all()
    assert "gpt@5 is suspect and passed over: gpt@3 is used instead" in caplog.text
    assert torch.isnan(store.state_dict(run="gpt", step=5)["model"]["0.weight"]).all()
    caplog.clear()
    with ckptdelta.open(store.path) as again:  # a session does not repeat what its store has said
        restored, model = train(again, 5, seed=2)
    assert restored == 3 and "gpt@5 is suspect and passed over: gpt@3 is used instead" in caplog.text
    assert torch.isfinite(model[0].weight).all() and marks(store, "gpt~2") == [(4, False), (5, False)]
    assert train(store, 5)[0] == 5


def test_exports_and_accelerate_pass_it_over(store, tmp_path):
    train(store, 3, poison=3)
    assert store.export_checkpoint(tmp_path / "newest.pt", run="gpt").step == 2
    assert store.export_checkpoint(tmp_path / "third.pt", run="gpt", step=3).step == 3
    assert torch.isfinite(torch.load(tmp_path / "newest.pt")["model"]["0.weight"]).all()
    accelerate = pytest.importorskip("accelerate", reason="accelerate cannot be imported here")
    from ckptdelta.accelerate import load_state, save_state
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())
    for step in (1, 2):
        save_state(accelerator, store, run="bert", step=step)
        model[0].weight.data.fill_(float("nan"))
    assert marks(store, "bert") == [(1, False), (2, True)]
    assert load_state(accelerator, store, run="bert").step == 1 and torch.isfinite(model[0].weight).all()
    assert load_state(accelerator, store, run="bert", step=2).step == 2


def test_a_damaged_manifest_between(tmp_path, caplog):
    """It may be that of a later healthy checkpoint."""
    with ckptdelta.open(tmp_path / "store") as store:
        train(store, 3, poison=3)
    manifest = tmp_path / "store/data/m/gpt.2.0"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    (tmp_path / "store/catalog.db").unlink()
    with ckptdelta.open(tmp_path / "store") as store:
        with pytest.raises(ckptdelta.CorruptError, match="gpt@2 is newer than gpt@1 and cannot be read"):
            train(store, 3)
        model, optimizer = parts()
        with ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, every=1, restore_older=True) as session:
            assert session.restore() == 1 and "gpt@2 is newer than gpt@1" in caplog.text


def test_a_step_is_restored_all_the_same(store):
    train(store, 3, poison=3)
    restored, model = train(store, 3, restore=3)
    assert restored == 3 and torch.isnan(model[0].weight).all()


def test_only_suspect_ones(store):
    """They are no new run: a training that starts over would save to one that exists."""
    store.save({"w": numpy.ones(64, "f4"), "exp_avg.w": numpy.full(64, numpy.nan, "f4")}, run="gpt", step=7)
    assert store.find(run="gpt").suspect
    with pytest.raises(ckptdelta.StateError, match="name its step, 7"):
        store.state_dict(run="gpt")
    assert store.state_dict(run="gpt", step=7)["w"].sum() == 64
    model, optimizer = parts()
    with ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, every=1) as session, pytest.raises(ckptdelta.StateError):
        session.restore()
