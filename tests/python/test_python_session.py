"""Background saves beside training. Those of torch are skipped where it is not installed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from support_python import ckptdelta, environment, needs_package, needs_torch, torch
from support_training import Training, no_room, saved_states

pytestmark = [needs_package, needs_torch]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


@pytest.mark.parametrize("every", [1, 3])
def test_the_losses_after_a_restore_are_those_of_an_uninterrupted_run(store, every):
    whole = Training(1)
    expected = [whole.step() for _ in range(12)]
    first = Training(1)
    with ckptdelta.Session(store, "gpt", **first.parts(), every=every) as session:
        assert session.restore() == 0
        losses = []
        for step in range(1, 8):
            losses.append(first.step())
            assert session.step() == (step % every == 0)
    assert losses == expected[:7]
    other = Training(2)
    with ckptdelta.Session(store, "gpt", **other.parts(), every=every) as session:
        at = session.restore()
        assert at == 7 // every * every == session.at
        for step in range(at + 1, 13):
            assert other.step() == expected[step - 1]
            session.step()
        session.save()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.state_dict().values(), other.model.state_dict().values()))
    assert store.find(run="gpt").step == 12 and store.verify()
    methods = {t.method for t in store.tensors(run="gpt", step=9)}
    assert ("step" in methods) == (every == 1)


def test_the_fence_keeps_the_next_step_out_of_a_save(store):
    training = Training(1, width=20000)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        states = saved_states(store, session, training, 4)
    for step, state in states.items():
        stored = store.state_dict(run="a", step=step, only="model")["model"]
        assert all(torch.equal(stored[k], state[k]) for k in state), step


def test_a_save_is_committed_when_the_hook_of_the_optimizer_has_fenced_it(store):
    """Until then parameters may still be read, so that without the hook nothing would be committed here."""
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        training.step()
        session.step()
        time.sleep(0.2)
        assert session.last is None
        training.optimizer.step()
        deadline = time.monotonic() + 30
        while session.last is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.last is not None and session.last.step == 1


def test_what_is_no_parameter_may_change_as_soon_as_step_returns(store):
    training = Training(1)
    average = {"weights": [p.detach().clone() for p in training.model.parameters()]}

    def change():
        for tensor in [*average["weights"], *training.model.buffers()]:
            tensor.add_(1)

    with ckptdelta.Session(store, "a", **training.parts(), more={"average": average}, every=1) as session:
        states = saved_states(store, session, training, 3, change)
    for step, state in states.items():
        stored = store.state_dict(run="a", step=step)
        assert all(torch.equal(stored["model"][k], state[k]) for k in state), step


TRAINER = """
import sys, torch, ckptdelta
sys.path.insert(0, {tests!r})
from support_training import Training
training = Training(1)
with ckptdelta.open({path!r}) as store, ckptdelta.Session(store, "gpt", **training.parts(), every=5, max_lag={lag}) as session:
    at = session.restore()
    print("from", at, flush=True)
    while True:
        training.step()
        session.step()
        print(session.at, flush=True)
"""


@pytest.mark.parametrize("lag, bound", [(0, 5), (None, 10)])
def test_a_kill_loses_at_most_what_is_promised(tmp_path, lag, bound):
    path, chance = str(tmp_path / "store"), random.Random(lag)
    last = 0
    for _ in range(4):
        code = TRAINER.format(tests=os.path.dirname(__file__), path=path, lag=lag)
        support = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support")
        process = subprocess.Popen([sys.executable, "-c", code], env=environment(PYTHONPATH=environment()["PYTHONPATH"] + os.pathsep + support),
                                   stdout=subprocess.PIPE, text=True)
        start = int(process.stdout.readline().split()[1])
        assert last - start <= bound, "what was lost"
        last = start
        for _ in range(chance.randint(1, 40)):
            last = int(process.stdout.readline())
        time.sleep(chance.random() / 50)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait()
        seen = [int(line) for line in rest[:-1] if line]
        last = max([last, *seen])
    with ckptdelta.open(path) as store:
        assert last - store.find(run="gpt").step <= bound and store.verify()


def test_a_failed_save_comes_out_at_the_next_step_and_training_goes_on(store):
    training = Training(1)
    with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        with no_room(store):
            training.step()
            session.step(2)
            training.step()
            with pytest.raises(ckptdelta.Error, match="step 2 failed"):
                session.wait()
        session.step(4)
        session.wait()
        assert session.last.step == 4


def test_a_failure_comes_out_at_a_step_that_saves_nothing(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=2) as session:
        with no_room(store):
            training.step(), session.step(2), training.step()
            deadline = time.monotonic() + 30
            while session._poll().under_way and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(ckptdelta.Error, match="step 2 failed"):
                session.step()
            assert session.at == 3 and session.step(5) is False
            with pytest.raises(ckptdelta.Error, match="step 6 failed"):
                session.step(), session.close()
        session.close()
    assert not store.checkpoints()


def test_a_failure_comes_out_at_the_exit(store, caplog):
    training = Training(1)
    session = ckptdelta.Session(store, "gpt", **training.parts(), every=1)
    with pytest.raises(ckptdelta.Error, match="step 1 failed"), no_room(store), session:
        training.step()
        session.step()
    session = ckptdelta.Session(store, "gpt", **training.parts(), every=1)
    with pytest.raises(ZeroDivisionError), no_room(store), session:
        training.step()
        session.step()
        1 / 0
    assert any("step 1 failed" in r.getMessage() for r in caplog.records)


def test_states_that_change_their_shape_or_place_are_saved_all_the_same(store):
    training, more = Training(1), {"log": {"text": ""}}
    with ckptdelta.Session(store, "a", **training.parts(), more=more, every=1) as session:
        for step in range(1, 5):
            training.step()
            if step == 2:
                more["log"]["text"] = "x" * 100000
                training.optimizer.load_state_dict(training.optimizer.state_dict())
            if step == 3:
                more["log"]["new"] = torch.ones(5)
            session.step()
    assert [c.step for c in store.checkpoints("a")] == [1, 2, 3, 4]
    found = store.state_dict(run="a", step=4)
    assert len(found["log"]["text"]) == 100000 and found["log"]["new"].sum() == 5
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], training.optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_restore_of_an_older_step_goes_on_in_a_branch(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), every=1) as session:
        for _ in range(3):
            training.step(), session.step()
        session.wait()
        assert session.restore(1) == 1
        training.step(), session.step()
    assert [str(c) for c in store.checkpoints()] == ["a@1", "a@2", "a@3", "a~2@2"]
    with ckptdelta.Session(store, "a", **Training(2).parts(), every=1) as session:
        assert session.restore() == 2


def test_arguments_that_make_no_sense_are_refused(store, tmp_path):
    training = Training(1)
    for arguments in ({"every": 0}, {"every": 2.5}, {"every": "3"}, {"max_lag": True}, {"snapshot_bytes": -1}, {"overhead": float("nan")}, {"overhead": -1.0}, {"max_lag": -1}, {"loader": [1, 2]}, {"more": {"rng": 1}}, {"fidelity": "good"}):
        with pytest.raises(ckptdelta.InvalidError):
            ckptdelta.Session(store, "a", **{**training.parts(), **arguments})
    with ckptdelta.open(store.path, readonly=True) as reader, pytest.raises(ckptdelta.ReadOnlyError):
        ckptdelta.Session(reader, "a", **training.parts())
    session = ckptdelta.Session(store, "a", **training.parts(), every=1)
    session.step(5)
    with pytest.raises(ckptdelta.InvalidError, match="not after step 5"):
        session.step(5)
    session.close(), session.close()
    with pytest.raises(ckptdelta.StateError, match="closed"):
        session.step()
    with pytest.raises(ckptdelta.NotFoundError):
        ckptdelta.Session(store, "none", **training.parts()).restore(7)


def test_without_an_interval_the_cost_of_saves_decides(store):
    training = Training(1)
    with ckptdelta.Session(store, "a", **training.parts(), overhead=0.5) as session:
        deadline = time.monotonic() + 60
        while len(store.checkpoints("a")) < 3 and time.monotonic() < deadline:
            training.step()
            session.step()
        at = session.at
        session.save()
    assert len(store.checkpoints("a")) >= 3 and store.find(run="a").step == at, "the last step can be saved after it was reported"


def test_an_interval_earns_what_a_save_has_cost():
    from ckptdelta._interval import Costs, Interval
    interval = Interval(None, None, 0.1)
    assert [interval.due(step, Costs(0, 0, 0, 0, 0, 0)) for step in range(1, 6)] == [False] * 4 + [True]
    interval.begun(Costs(0, 0, 0, 0, 0, 0), 0.25)
    assert not interval.due(6, Costs(100.0, 0.75, 0, 1.0, 1, 0)), "how long a step takes is not known"
    assert not interval.due(6, Costs(100.0, 0.75, 0.1, 1.0, 0, 1)), "a save is under way"
    assert not interval.due(6, Costs(9.0, 0.75, 0.1, 1.0, 1, 0)) and interval.due(6, Costs(10.5, 0.75, 0.1, 1.0, 1, 0))
    assert not interval.due(6, Costs(10.5, 0.75, 0.1, 9.0, 1, 0)), "the last save took nearly as long"
    assert Interval(None, None, None).overhead == 0.035 and Interval(3, None, None).overhead is None
    assert Interval(None, 0.0, None).due(1, Costs(0, 0, 0, 0, 0, 0)) and not Interval(None, 100.0, None).due(1, Costs(0, 0, 0, 0, 0, 0))
