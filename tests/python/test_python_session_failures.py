"""What may go wrong beside a session: failures, forks, damage, odd states. Skipped where torch is not installed."""

import collections
import gc
import io
import os
import random
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch
from support_training import Training, no_room

pytestmark = [needs_package, needs_torch]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_registration_that_fails_midway_is_made_anew(store, monkeypatch, error):
    from ckptdelta import _registered
    training, add, calls = Training(1), _registered.Registered._add, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise error("midway")
        add(*arguments)

    monkeypatch.setattr(_registered.Registered, "_add", failing)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        training.step()
        with pytest.raises(error):
            session.step()
        assert session.save() is True
        training.step(), session.step()
    assert [c.step for c in store.checkpoints("a")] == [1, 2]


def test_a_store_that_cannot_be_opened_again_is_tried_again(store, monkeypatch):
    training, more, normal = Training(1), {}, ckptdelta.Session._open
    with ckptdelta.Session(store, "a", **training.parts(), more={"more": more}, every=1) as session:
        training.step(), session.step()
        more["new"] = torch.ones(2)

        def failing(self):
            monkeypatch.setattr(ckptdelta.Session, "_open", normal)
            raise ckptdelta.BusyError("the store is locked")

        monkeypatch.setattr(ckptdelta.Session, "_open", failing)
        with pytest.raises(ckptdelta.BusyError):
            training.step(), session.step()
        session.wait(), session.fence()
        assert session.save() is True
    assert [c.step for c in store.checkpoints("a")] == [1, 2]


def test_a_save_that_could_not_begin_is_not_taken_for_one(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1, snapshot_bytes=1) as session:
        training.step()
        for call in (session.step, session.save, session.save):
            with pytest.raises(ckptdelta.InvalidError, match="snapshot_bytes allows 1"):
                call()
    assert not store.checkpoints()


def test_a_step_whose_save_failed_in_the_background_can_be_saved_again(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        with no_room(store):
            training.step(), session.step()
            with pytest.raises(ckptdelta.Error, match="step 1 failed"):
                session.wait()
        assert session.save() is True
        session.wait()
        assert session.save() is False and session.last.step == 1


def test_a_failed_restore_leaves_the_session_where_it_was(store):
    first = Training(1)
    with ckptdelta.Session(store, "a", **first.parts(), every=5) as session:
        for _ in range(5):
            first.step(), session.step()
    other = Training(1, width=32)
    with ckptdelta.Session(store, "a", **other.parts(), every=1) as session:
        with pytest.raises(ckptdelta.MismatchError):
            session.restore()
        assert session.at == 0
        other.step()
        with pytest.raises(ckptdelta.ExistsError, match="did not resume"):
            session.step()
        other.step(), session.step(6)
    assert store.find(run="a", step=6).resumed_from == ""


def test_a_branch_goes_on_as_one_when_its_first_save_failed(store):
    training, more = Training(1), {"log": {}}
    with ckptdelta.Session(store, "a", **training.parts(), more=more, every=1) as session:
        for _ in range(3):
            training.step(), session.step()
        session.wait()
        session.restore(2)
        with no_room(store):
            training.step(), session.step()
            with pytest.raises(ckptdelta.Error, match="step 3 failed"):
                session.wait()
        more["log"]["new"] = torch.ones(3)  # the library's session is opened again
        assert session.last.step == 3 and session.save() is True, "that was step 3 of before the restore"
    assert [str(c) for c in store.checkpoints()] == ["a@1", "a@2", "a@3", "a~2@3"]
    assert store.find(run="a~2").parent == store.find(run="a", step=2).id == store.find(run="a~2").resumed_from


def damage_newest(store, how):
    """Removes the newest chunk file, or changes a bit in the middle of it or of the newest manifest."""
    folder = "m" if how == "manifest" else "c"
    newest = max((Path(store.path) / "data" / folder).iterdir(), key=lambda p: p.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    newest.unlink()
    if how != "missing":
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "manifest", "values"])
def test_a_damaged_checkpoint_is_no_new_run(tmp_path, how):
    training = Training(1)
    with ckptdelta.open(tmp_path / "store") as store:
        with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
            for _ in range(2):
                training.step(), session.step(), session.wait()
        kept = store.state_dict(run="a", step=1)["model"]
        damage_newest(store, how)
    with ckptdelta.open(tmp_path / "store") as store:
        with ckptdelta.Session(store, "a", **Training(2).parts(), every=1) as session, pytest.raises(ckptdelta.Error):
            session.restore()
        with ckptdelta.Session(store, "a", **training.parts(), every=1, restore_older=True) as session:
            assert session.restore() == 1 == session.at
            assert all(torch.equal(v, kept[k]) for k, v in training.model.state_dict().items())


def test_of_two_failures_the_first_is_logged(store, caplog):
    from ckptdelta._native import lib
    with ckptdelta.Session(store, "a", **Training(1).parts(), every=1) as session:
        for phase in (97, 98):
            session._check_status(lambda err, phase=phase: lib.ckd_session_wait(session._owner.session, phase, err))
        with pytest.raises(ckptdelta.InvalidError, match="98"):
            session.wait()
    assert any("97" in r.getMessage() for r in caplog.records)


def test_a_session_that_nobody_closes_is_closed_before_its_memory_goes(store):
    def train():
        training = Training(1, width=20000)
        session = ckptdelta.Session(store, "a", **training.parts(), every=1)
        session.loop = session  # collected as garbage, as its optimizer's hook makes it anyway
        training.step(), session.step()
        return {k: v.clone() for k, v in training.model.state_dict().items()}, weakref.ref(session)

    gc.disable()
    try:
        weights, session = train()
    finally:
        gc.enable()
    gc.collect()
    assert session() is None
    stored = store.state_dict(run="a", step=1)["model"]
    assert all(torch.equal(stored[k], v) for k, v in weights.items())


def test_calls_leave_nothing_to_the_garbage_collector(store):
    """Trainers switch it off."""
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=2) as session:
        training.step(), session.step()
        gc.collect()
        gc.disable(), gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for step in range(1, 5):
                training.step(), session.step()
                store.save(training.parts(), run="b", step=step, progress=lambda *_: None)
                store.state_dict(run="b"), store.verify(), store.tensors(run="b")
                with pytest.raises(ckptdelta.NotFoundError):
                    store.find(run="c")
            gc.collect()
            left = [thing for thing in gc.garbage if type(thing).__module__.partition(".")[0] in ("ckptdelta", "_cffi_backend")]
        finally:
            gc.set_debug(0), gc.enable(), gc.garbage.clear()
        session.wait()
    assert left == []


def in_child(function):
    """Whether it returned true in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_cannot_use_a_session(store):
    training = Training(1)
    session = ckptdelta.Session(store, "a", **training.parts(), every=1)
    training.step(), session.step()

    def refused():
        for call in (session.step, session.save, session.restore, session.wait, lambda: session.last):
            with pytest.raises(ckptdelta.StateError, match="forked child"):
                call()
        session.fence(), session.close()  # an optimizer or a context of the child's does no harm
        return True

    assert in_child(refused)
    training.step(), session.step(), session.close()
    assert [c.step for c in store.checkpoints("a")] == [1, 2] and store.verify()


class Wrapper(torch.optim.Optimizer if torch else object):
    """As in accelerate: it inherits the methods of hooks, and its step() calls none of them."""

    def __init__(self, optimizer):
        self.inner, self._optimizer_step_pre_hooks = optimizer, {}

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1)


@pytest.mark.parametrize("both", [False, True])
def test_an_optimizer_that_calls_no_hooks_is_not_waited_for(store, both):
    """Its parameters are copied when step() returns, also if another optimizer of the state, which has hooks, writes to them."""
    training = Training(1, width=20000)
    inner, training.scheduler = training.optimizer, None
    training.optimizer = Wrapper(inner)
    optimizer = {"a": inner, "b": training.optimizer} if both else training.optimizer
    with ckptdelta.Session(store, "a", model=training.model, optimizer=optimizer, every=1) as session:
        states = {}
        for _ in range(3):
            session.step()
            states[session.at] = {k: v.clone() for k, v in training.model.state_dict().items()}
            assert session._registered.has_fenced is False
            training.optimizer.step()
    for step, state in states.items():
        stored = store.state_dict(run="a", step=step, only="model")["model"]
        assert all(torch.equal(stored[k], state[k]) for k in state), step


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_what_a_forward_pass_writes_to_is_copied_when_step_returns(store, kind):
    model = getattr(torch.nn, kind)(20000, 16, max_norm=1.0)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(19999, 0, -1).unsqueeze(0)
    with ckptdelta.Session(store, "a", model=model, optimizer=optimizer, every=1) as session:
        states = {}
        for _ in range(2):
            torch.nn.init.normal_(model.weight)
            session.step()
            states[session.at] = model.weight.detach().clone()
            assert session._registered.has_fenced is False
            model(rows)
            assert not torch.equal(states[session.at], model.weight)
            optimizer.step()
    for step, weight in states.items():
        assert torch.equal(store.state_dict(run="a", step=step, only="model")["model"]["weight"], weight), step


def write(tensor, value):
    with torch.no_grad():
        tensor.fill_(value)


def test_a_write_before_the_copy_is_complete_fails_the_save(store, caplog):
    """One that torch counts. From then on the tensor is copied when step() returns."""
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptdelta.Session(store, "a", model=model, optimizer=optimizer, every=1) as session:
        for step in range(1, 5):
            optimizer.step()
            write(model.weight, step)
            session.step()
            write(model.weight, -step)  # as an evaluation with averaged weights does
            if step == 1:
                with pytest.raises(ckptdelta.StateError, match=r"step 1 is given up: .* session.fence"):
                    session.wait()
                assert "model.weight was written to before the copy was complete" in caplog.text
    assert [c.step for c in store.checkpoints()] == [2, 3, 4]
    for step in (2, 3, 4):
        assert store.state_dict(run="a", step=step)["model"]["weight"].unique().tolist() == [step]


def test_writes_after_a_fence_and_those_of_the_optimizer_are_no_others(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        for _ in range(4):
            training.step(), session.step()
            session.fence()
            write(next(training.model.parameters()), 0.5)
        assert session._writes.names == set()
        session.step()
        write(next(training.model.parameters()), 1.0)
        with pytest.raises(ckptdelta.StateError, match="step 5 is given up"):
            session.wait()
        assert session.save() is True
    assert [c.step for c in store.checkpoints()] == [1, 2, 3, 4, 5]


def containers(full):
    """Members of a state, and a view of each that the training keeps."""
    inner = {"epoch": 3} if full else {"epoch": 0}
    more = {"replay": collections.deque([1, 2, 3] if full else [], maxlen=5), "seen": {1, 2} if full else set(),
            "raw": bytearray(b"abc" if full else b""), "file": io.BytesIO(b"file" if full else b""), "both": ([inner], 7), "log": [inner, "x"],
            "ordered": collections.OrderedDict(b=1, a=2) if full else {}, "count": collections.Counter("aab" if full else "")}
    return more, inner


def test_containers_are_restored_where_the_training_has_them(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), more=containers(True)[0], every=1) as session:
        session.step()
    (more, inner), (full, _) = containers(False), containers(True)
    with ckptdelta.Session(store, "a", **training.parts(), more=dict(more), every=1) as session:
        assert session.restore() == 1
        assert more["file"].getvalue() == full.pop("file").getvalue() and {**more, "file": None} == {**full, "file": None}
        assert inner == {"epoch": 3} and more["log"][0] is inner and more["replay"].maxlen == 5
        more["replay"].append(9), more["seen"].add(9), more["raw"].extend(b"d"), inner.update(epoch=4)
        session.step()
    found = store.state_dict(run="a", step=2)
    assert (list(found["replay"]), found["seen"], found["raw"]) == ([1, 2, 3, 9], {1, 2, 9}, bytearray(b"abcd"))
    assert found["both"][0] == [{"epoch": 4}] == found["log"][:1]


def test_a_container_of_another_kind_cannot_be_restored(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), more={"replay": [1, 2]}, every=1) as session:
        session.step()
    replay = collections.deque([5])
    with ckptdelta.Session(store, "a", **training.parts(), more={"replay": replay}, every=1) as session:
        with pytest.raises(ckptdelta.MismatchError, match="the checkpoint has a list here, not a deque"):
            session.restore()
    assert list(replay) == [5]


def test_a_dict_with_tensors_gets_the_keys_that_it_does_not_have(store):
    training = Training(1)
    average = {"decay": torch.tensor(0.9), "weights": {"a": torch.ones(3)}, "n": 5}
    with ckptdelta.Session(store, "a", **training.parts(), more={"average": average, "gone": {"x": torch.ones(1)}}, every=1) as session:
        session.step()
    fresh = {"decay": torch.tensor(0.1)}
    with ckptdelta.Session(store, "a", **training.parts(), more={"average": fresh}, every=1) as session:
        assert session.restore() == 1 and fresh.keys() == average.keys() and fresh["n"] == 5
        assert fresh["decay"] == average["decay"] and torch.equal(fresh["weights"]["a"], torch.ones(3))
        fresh["weights"]["a"].add_(1)
        session.step()
    found = store.state_dict(run="a", step=2)
    assert torch.equal(found["average"]["weights"]["a"], torch.full((3,), 2.0)) and "gone" not in found


def test_what_moves_at_each_step_is_read_from_a_buffer(store, monkeypatch):
    training = Training(1)
    opened, normal = [], ckptdelta.Session._open
    monkeypatch.setattr(ckptdelta.Session, "_open", lambda self: (opened.append(1), normal(self)))
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        kept = []
        for _ in range(8):
            training.step()
            kept.append(training.model[1].running_mean)  # so that the allocator cannot give the same place again
            training.model[1].running_mean = kept[-1] + 1
            session.step()
    assert len(opened) == 3
    for step in (1, 5, 7):  # these values are in `kept`, one step of training later
        stored = store.state_dict(run="a", step=step)["model"]["1.running_mean"]
        assert stored.shape == kept[step].shape and not torch.equal(stored, kept[step - 1])
    assert torch.equal(store.state_dict(run="a", step=8)["model"]["1.running_mean"], training.model[1].running_mean)


def test_costs_of_sessions_that_were_closed_count(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), overhead=0.5) as session:
        deadline = time.monotonic() + 60
        while not session._costs().saved and time.monotonic() < deadline:
            training.step(), session.step()
        before = session._costs()
        session._end()
        after = session._costs()
        assert before.trained > 0 and after.trained >= before.trained and after.lost >= before.lost and after.saved >= before.saved > 0


def test_a_trainer_may_count_from_0_and_a_step_goes_once(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=2) as session:
        assert session.at == 0 and session.last is None
        assert session.step(0) is True and session.save() is False
        for step in (0, -1, 1 << 63, "2", True):
            with pytest.raises(ckptdelta.InvalidError):
                session.step(step)
        assert session.step() is False and session.save() is True and session.save() is False
        assert session.step(7) is False and session.at == 7
    assert [c.step for c in store.checkpoints("a")] == [0, 1]
    with ckptdelta.Session(store, "b", **training.parts(), every=100) as session:
        assert session.save() is True
    assert store.find(run="b").step == 0


def test_plain_values_are_restored_in_the_dicts_and_lists_of_the_trainer(store):
    training = Training(1)
    progress, log, average = {"epoch": 1, "best": {"loss": 0.5}}, ["begun"], {"weights": torch.ones(2), "settings": {"decay": 0.9}}
    best, settings = progress["best"], average["settings"]
    with ckptdelta.Session(store, "a", **training.parts(), more={"progress": progress, "log": log, "average": average}, every=1) as session:
        training.step(), session.step(), session.wait()
        progress["epoch"], best["loss"], progress["more"], settings["decay"] = 2, 0.25, 1, 0.5
        log.append("ended")
        assert session.restore() == 1
        assert progress == {"epoch": 1, "best": {"loss": 0.5}} and progress["best"] is best and log == ["begun"]
        assert average["settings"] is settings and settings == {"decay": 0.9}
        progress["epoch"], best["loss"] = 7, 0.125
        training.step(), session.step()
    assert store.state_dict(run="a", step=2)["progress"] == {"epoch": 7, "best": {"loss": 0.125}}


def test_a_metric_needs_a_name(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        with pytest.raises(ckptdelta.InvalidError, match="metric"):
            session.step(metric=1.0)
        assert session.at == 0
    with ckptdelta.Session(store, "b", **training.parts(), every=1, metric="loss") as session:
        session.step(metric=0.25)
    assert (store.find(run="b").metric_name, store.find(run="b").metric) == ("loss", 0.25)


@pytest.mark.parametrize("value, why", [
    (lambda: torch.empty(3, device="meta"), "meta device"), (lambda: torch.eye(3).to_sparse(), "to_dense"), (lambda: print, "x.y"),
    (lambda: torch.nn.UninitializedParameter(), "run the module once")])
def test_what_cannot_be_stored_is_named_and_can_be_taken_out(store, value, why):
    training, more = Training(1), {"x": {"y": value()}}
    with ckptdelta.Session(store, "a", **training.parts(), more=more, every=1) as session:
        training.step()
        with pytest.raises(ckptdelta.InvalidError, match=why) as caught:
            session.step()
        assert caught.value.path == "x.y" and session.at == 1
        more["x"]["y"] = torch.arange(12.0).reshape(3, 4).t()  # not contiguous
        assert session.save() is True
    assert torch.equal(store.state_dict(run="a")["x"]["y"], torch.arange(12.0).reshape(3, 4).t())


def test_members_that_contain_themselves_are_refused(store):
    training, x = Training(1), []
    x += [x, x]
    with ckptdelta.Session(store, "a", **training.parts(), more={"x": x}, every=1) as session:
        with pytest.raises(ckptdelta.InvalidError, match="contains itself"):
            session.step()


def test_generators_go_on_after_a_restore_whatever_the_default_device(store):
    training = Training(1)

    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist(), torch.randn(3).tolist()]

    draw()
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        training.step(), session.step(), session.wait()
        expected = draw()
        torch.set_default_device("meta")
        try:
            assert session.restore() == 1
        finally:
            torch.set_default_device(None)
        assert draw() == expected


def test_nothing_is_pickled(store, monkeypatch):
    import pickle

    def forbidden(*_, **__):
        raise AssertionError("pickle")

    for module, name in ((pickle, "dump"), (pickle, "dumps"), (pickle, "load"), (pickle, "loads"), (pickle, "Pickler"),
                         (pickle, "Unpickler"), (torch, "save"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        training.step(), session.step(), session.wait()
        assert session.restore() == 1


def test_a_session_may_outlive_its_store_and_is_closed_once(tmp_path):
    training = Training(1)
    with ckptdelta.open(tmp_path / "store") as store:
        session = ckptdelta.Session(store, "a", **training.parts(), every=1)
        training.step(), session.step()
    training.step(), session.step()
    with session:
        session.save()
    for call in (session.step, session.save, session.wait, session.restore):
        with pytest.raises(ckptdelta.StateError, match="closed"):
            call()
    session.fence(), session.close()
    assert session.last.step == 2 and session.at == 2
    training.step()  # without a hook
    assert not training.optimizer._optimizer_step_pre_hooks and not training.optimizer._optimizer_step_post_hooks


def test_parts_of_deepspeed_are_refused(store):
    """ZeRO 1 to 3 by its optimizer, and ZeRO 3 by parameters that are spread over the ranks, as long as they are."""
    zero = type("ZeROOptimizer", (torch.optim.SGD,), {"__module__": "deepspeed.runtime.base_optimizer"})
    model = torch.nn.Linear(2, 3)
    optimizer = type("BF16_Optimizer", (zero,), {"__module__": "deepspeed.runtime.bf16_optimizer"})(model.parameters(), lr=0.1)
    for call in (store.save, store.load):
        with pytest.raises(ckptdelta.InvalidError, match=r"o is a BF16_Optimizer of DeepSpeed.*engine\.save_checkpoint"):
            call({"o": optimizer}, run="a", **({"step": 1} if call == store.save else {}))
        store.save({"o": torch.optim.SGD(model.parameters(), lr=0.1), "m": model}, run="a", step=2) if call == store.save else None
    with pytest.raises(ckptdelta.InvalidError, match="without a shape yet"):
        store.save({"m": torch.nn.LazyLinear(3)}, run="a", step=3)
    model.weight.ds_numel = model.weight.numel()
    store.save({"m": model}, run="a", step=3)
    model.weight.ds_numel += 1
    for state in ({"m": model}, {"o": torch.optim.SGD(model.parameters(), lr=0.1)}):
        with pytest.raises(ckptdelta.InvalidError, match="ZeRO 3 of DeepSpeed"):
            store.save(state, run="a", step=4)
