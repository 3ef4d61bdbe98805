"""Deletions and policies of the Python package."""

import numpy as np
import pytest

from support_python import ckptdelta, needs_package

pytestmark = needs_package
RNG = np.random.default_rng(5)


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as store:
        yield store


def fill(store, steps, run="gpt", metric=None):
    for step in steps:
        store.save({"w": np.full(3000, step, dtype="f4")}, run=run, step=step, metric=(metric[0], metric[1][step]) if metric else None)


def steps(store, run="gpt"):
    return [checkpoint.step for checkpoint in store.checkpoints(run)]


def value(store, step, run="gpt"):
    return store.state_dict(run=run, step=step)["w"][0]


def test_a_deleted_checkpoint_comes_back(store):
    fill(store, (1, 2, 3))
    gone, = store.delete(run="gpt", step=2)
    assert str(gone) == "gpt@2" and steps(store) == [1, 3] and value(store, 3) == 3
    with pytest.raises(ckptdelta.NotFoundError):
        store.state_dict(run="gpt", step=2)
    back, = store.undelete(run="gpt", step=2)
    assert back.id == gone.id and steps(store) == [1, 2, 3] and value(store, 2) == 2


def test_several_go_together_or_none(store):
    fill(store, (1, 2, 3, 4))
    with pytest.raises(ckptdelta.NotFoundError, match="9"):
        store.delete(run="gpt", step=[1, 9])
    assert steps(store) == [1, 2, 3, 4]
    assert [c.step for c in store.delete(run="gpt", step=(s for s in (1, 2, 2)))] == [1, 2] and steps(store) == [3, 4]
    with pytest.raises(ckptdelta.NotFoundError, match="gpt@3"):
        store.undelete(run="gpt", step=[1, 3])
    assert steps(store) == [3, 4]
    store.undelete(run="gpt", step=[1, 2])
    assert store.verify() and [value(store, s) for s in steps(store)] == [1, 2, 3, 4]


def test_without_a_time_to_undo_it_is_gone(store):
    fill(store, (1,), run="old")
    fill(store, (1, 2))
    before = sum(c.stored_bytes for c in store.checkpoints())
    store.delete(run="old", step=1, undo_s=0)
    with pytest.raises(ckptdelta.NotFoundError, match="old@1"):
        store.undelete(run="old", step=1)
    assert store.runs() == ["gpt"] and sum(c.stored_bytes for c in store.checkpoints()) < before


def test_files_that_cannot_go_yet_do_not_undo_a_deletion(store, monkeypatch, caplog):
    def busy(*_):
        raise ckptdelta.BusyError("somebody loads")

    fill(store, (1, 2, 3, 4))
    monkeypatch.setattr(ckptdelta.Store, "_collect", staticmethod(busy))
    assert len(store.delete(run="gpt", step=1, undo_s=0)) == 1
    assert len(store.prune(ckptdelta.Policy(keep_last=2, undo_s=0)).deleted) == 1
    assert steps(store) == [3, 4] and caplog.text.count("still take space") == 2


def test_collect_frees_only_what_is_over(store):
    fill(store, (1, 2, 3))
    store.delete(run="gpt", step=1)
    assert store.collect() == 0
    assert store.undelete(run="gpt", step=1)


def test_prune_keeps_what_a_rule_keeps(store):
    fill(store, range(1, 9), metric=("loss", {s: abs(s - 3) for s in range(1, 9)}))
    policy = ckptdelta.Policy(keep_every=5, keep_best=1)
    plan = store.prune(policy, run="gpt", dry_run=True)
    assert [c.step for c in plan.kept] == [3, 5, 7, 8] and [c.step for c in plan.deleted] == [1, 2, 4, 6]
    assert steps(store) == list(range(1, 9))
    assert store.prune(policy, run="gpt") == plan
    assert steps(store) == [3, 5, 7, 8] and [value(store, s) for s in steps(store)] == [3, 5, 7, 8] and store.verify()
    highest = store.prune(ckptdelta.Policy(keep_best=1, highest_is_best=True), dry_run=True)
    assert [c.step for c in highest.kept] == [7, 8]
    store.undelete(run="gpt", step=[1, 2])


def test_prune_treats_each_run_by_itself(store):
    fill(store, (1, 2, 3, 4))
    fill(store, (1, 2, 3), run="b")
    store.prune(ckptdelta.Policy(keep_last=2), run="b")
    assert (steps(store), steps(store, "b")) == ([1, 2, 3, 4], [2, 3])
    store.prune(ckptdelta.Policy(keep_last=3))
    assert (steps(store), steps(store, "b")) == ([2, 3, 4], [2, 3])


@pytest.mark.parametrize("policy, says", [
    ({}, "keep"), ({"keep_last": -1}, "keep_last"), ({"keep_last": 2.5}, "keep_last"), ({"keep_last": 2**32}, "keep_last"),
    ({"keep_new_s": float("nan")}, "keep_new_s"), ({"keep_last": 3, "undo_s": -1}, "undo_s"), ({"keep_last": True}, "keep_last"),
    ({"keep_last": 3, "compact_share": 100}, "compact_share|compaction|percent"),
], ids=str)
def test_a_policy_that_makes_no_sense_is_an_error(store, policy, says):
    fill(store, (1, 2, 3, 4))
    with pytest.raises(ckptdelta.InvalidError, match=says):
        store.prune(ckptdelta.Policy(**policy), run="gpt")
    with pytest.raises(ckptdelta.InvalidError):
        store.set_policy(ckptdelta.Policy(**policy), run="gpt")
    assert steps(store) == [1, 2, 3, 4] and store.policy("gpt") is None


def test_a_stored_policy_works_at_each_save(store, caplog):
    policy = ckptdelta.Policy(keep_last=3, keep_daily=0, automatic=1, undo_s=0)
    store.set_policy(policy, run="gpt")
    assert store.policy("gpt") == policy and store.policy("other") is None
    fill(store, range(1, 8))
    fill(store, range(1, 8), run="other")
    assert steps(store) == [5, 6, 7] and steps(store, "other") == list(range(1, 8))
    assert not caplog.records  # it does what it was told to, so nothing is a warning
    store.set_policy(None, run="gpt")
    assert store.policy("gpt") is None
    fill(store, (8, 9))
    assert steps(store) == [5, 6, 7, 8, 9]
    with pytest.raises(ckptdelta.NotFoundError):
        store.set_policy(None, run="gpt")


def test_a_policy_for_all_runs(store):
    policy = ckptdelta.Policy(keep_last=4, keep_new_s=1.5, compact_share=None, highest_is_best=True)
    store.set_policy(policy)
    assert store.policy() == store.policy("any") == ckptdelta.Policy(keep_last=4, keep_new_s=2, compact_share=None, highest_is_best=True)


def test_a_store_for_reading_deletes_nothing(store):
    fill(store, (1, 2, 3))
    with ckptdelta.open(store.path, readonly=True) as reading:
        for call in (lambda: reading.delete(run="gpt", step=1), lambda: reading.prune(ckptdelta.Policy(keep_last=1)),
                     lambda: reading.set_policy(ckptdelta.Policy(keep_last=1))):
            with pytest.raises(ckptdelta.ReadOnlyError):
                call()
    assert steps(store) == [1, 2, 3]
