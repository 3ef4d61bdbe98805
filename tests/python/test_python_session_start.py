"""How a session begins: in a new run, in one that is finished, in one that it does not know, and under a mistyped name."""

import os
import re
import signal
from pathlib import Path

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch
from support_training import Training, no_room

pytestmark = [needs_package, needs_torch]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def train(store, until, run="gpt", **options):
    """The loop of the documentation. Returns what the last save() returned."""
    training = Training(1)
    with ckptdelta.Session(store, run, **training.parts(), every=10, **options) as session:
        for _ in range(session.restore() + 1, until + 1):
            training.step()
            session.step()
        return session.save()


def test_a_finished_job_that_is_started_again_saves_nothing(store):
    assert train(store, 25) is True
    before = [c.id for c in store.checkpoints()]
    assert train(store, 25) is False
    assert [c.id for c in store.checkpoints()] == before and [c.step for c in store.checkpoints("gpt")] == [10, 20, 25]
    assert train(store, 27) is True
    assert store.find(run="gpt").step == 27


@pytest.mark.parametrize("run, elsewhere, warns", [("gpt", False, False), ("gpt~2", False, False), ("gtp", False, True), ("gtp", True, False), ("gpt", True, True)])
def test_a_run_that_ckptdelta_run_does_not_watch(store, monkeypatch, caplog, tmp_path, run, elsewhere, warns):
    monkeypatch.setenv("CKPTDELTA_STORE", str(tmp_path / "other" if elsewhere else store.path))
    monkeypatch.setenv("CKPTDELTA_RUN", "gpt")
    with caplog.at_level("WARNING", "ckptdelta"):
        assert train(store, 10, run) is False
    assert any("was started for the run gpt" in r.getMessage() for r in caplog.records) == warns


def test_a_restored_step_is_saved_already_also_if_it_is_not_the_newest(store):
    train(store, 25)
    training = Training(1)
    with ckptdelta.Session(store, "gpt", **training.parts(), every=10) as session:
        assert session.restore(20) == 20 and session.save() is False
        training.step(), session.step()
        assert session.save() is True
    assert [str(c) for c in store.checkpoints()] == ["gpt@10", "gpt@20", "gpt@25", "gpt~2@21"]


def test_a_training_that_starts_over_fails_at_its_first_step(store):
    train(store, 25)
    training = Training(2)
    with ckptdelta.Session(store, "gpt", **training.parts(), every=1000) as session:
        training.step()
        for _ in range(2):
            with pytest.raises(ckptdelta.ExistsError, match=r"up to step 25, and this session did not resume from them: call session\.restore\(\)"):
                session.step()
        assert session.at == 0
        assert session.step(26) is False, "a trainer may have loaded the state itself"
    with ckptdelta.Session(store, "gpt", **training.parts(), every=1000, on_duplicate="branch") as session:
        session.step()
        assert session.save() is True
    assert store.find(run="gpt~2").step == 1


def test_a_mistyped_run_is_told(store, caplog):
    def told():
        return [r.getMessage().partition(": ")[2] for r in caplog.records if r.levelname == "WARNING"]

    assert train(store, 3) is True
    assert not told(), "the store has no other run"
    for name in ("a", "b", "c", "d", "e"):
        store.save({"x": torch.ones(2)}, run=name, step=1)
    assert train(store, 1, run="gtp") is True
    assert told() == ["run 'gtp' is new; the store has: gpt, a, b, c, d and 1 more"]
    caplog.clear()
    train(store, 2, run="gtp")
    assert not told(), "it is not new any more"


def test_a_preempted_training_loses_no_step(store):
    training, told = Training(1), []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    try:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=10) as session:
            for step in range(session.restore() + 1, 26):
                training.step()
                if step == 7:
                    os.kill(os.getpid(), signal.SIGTERM)
                session.step()
                if told:
                    break
            session.save()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert store.find(run="gpt").step == 7


def test_errors_advise_what_python_has(store):
    with ckptdelta.open(store.path, readonly=True) as readonly:
        with pytest.raises(ckptdelta.ReadOnlyError, match="open it without readonly=True"):
            readonly.save({"x": torch.ones(2)}, run="a", step=1)
    first, second = Training(1), Training(2)
    with (ckptdelta.Session(store, "a", **first.parts(), every=1) as one, ckptdelta.Session(store, "a", **second.parts(), every=1) as other):
        first.step(), one.step(), one.wait()
        second.step(), other.step(2)
        with pytest.raises(ckptdelta.ExistsError, match='another launch saves to run.*or pass on_duplicate="branch"'):
            other.wait()


def test_every_phrase_that_is_replaced_is_the_librarys():
    """And no message that reaches Python has another name of C. Those left out are of functions that this package does not call."""
    engine = Path(__file__).parents[2] / "engine"
    if not engine.is_dir():
        pytest.skip("the library's source is not here")
    phrases = [of_c for of_c, _ in ckptdelta._call._PHRASES]
    left_out = ("ckd_id_new", "ckd_save_seal", "ckd_wait", "every_steps or ckd_session_save", "CKD_ISAL", "dry_run is for ckd_store_delete")
    found = []
    for path in engine.rglob("*.c"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for group in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', code):
            message = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', group))
            if " " in message and re.search(r"\bckd_|\bCKD_", message):
                found.append(message)
    assert all(any(phrase in message for message in found) for phrase in phrases)
    told = [ckptdelta._call.in_python(message) for message in found if not any(name in message for name in left_out)]
    assert told and not [message for message in told if re.search(r"\bckd_|\bCKD_", message)]


# ------------------------------------------------------------------------------------------- a parent in another run


@pytest.mark.parametrize("fidelity", ["exact", "near"])
def test_the_first_save_of_a_new_run_is_a_delta_on_the_parent(store, fidelity):
    train(store, 20, fidelity=fidelity)
    base = store.find(run="gpt", step=20)
    training = Training(1)
    store.load(training.parts(), run="gpt")
    with ckptdelta.Session(store, "tuned", **training.parts(), every=1, fidelity=fidelity, parent=base) as session:
        assert session.restore() == 0
        for step in range(1, 4):
            training.step(), session.step()
            session._end()  # as for a registration that does not fit any more
    first, second, third = store.checkpoints("tuned")
    assert (first.kind, first.parent, first.resumed_from) == ("delta", base.id, base.id)
    assert (second.parent, third.parent, second.resumed_from) == (first.id, second.id, "")
    assert [c.lossy_resumes for c in (first, third)] == [int(fidelity == "near")] * 2
    again = Training(2)
    with ckptdelta.Session(store, "tuned", **again.parts(), every=1, fidelity=fidelity, parent=("gpt", 20)) as session:
        assert session.restore() == 3, "what the run has goes before the parent"
        again.step(), session.step()
    assert store.find(run="tuned").parent == third.id and store.verify()
    store.delete(run="gpt", step=[10, 20], undo_s=0)
    with ckptdelta.Session(store, "tuned", **again.parts(), every=1, fidelity=fidelity, parent=base) as session:
        assert session.restore() == 4, "the parent is not needed any more"


def test_a_parent_stays_one_until_a_save_is_durable(store):
    train(store, 10)
    training = Training(1)
    with ckptdelta.Session(store, "tuned", **training.parts(), every=1, parent=("gpt", 10)) as session:
        with no_room(store):
            training.step(), session.step()
            with pytest.raises(ckptdelta.Error, match="step 1 failed"):
                session.wait()
        assert session.save() is True
    assert store.find(run="tuned").parent == store.find(run="gpt").id


def test_a_parent_that_is_not_there_is_told_at_once(store):
    train(store, 10)
    for parent in (("gpt", 11), ("gtp", 10)):
        with pytest.raises(ckptdelta.NotFoundError):
            ckptdelta.Session(store, "tuned", **Training(1).parts(), every=1, parent=parent)
    assert "tuned" not in store.runs()


def test_a_notice_of_the_store_is_logged_once(store, caplog):
    """The session opens the store a second time, and finds the same."""
    train(store, 20)
    path = Path(store.path)
    store.close()
    manifest, = (path / "data/m").glob("gpt.10.*")
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.unlink()
    manifest.write_bytes(data)
    (path / "catalog.db").unlink()
    caplog.set_level("WARNING", "ckptdelta")
    with ckptdelta.open(path) as again, ckptdelta.Session(again, "gpt", **Training(1).parts(), every=10) as session:
        assert session.restore() == 20
    assert sum(f"manifest {manifest.name} is not used" in r.getMessage() for r in caplog.records) == 1
