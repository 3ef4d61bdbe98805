"""A folder that follows the newest weights of a run, and sparse changes. Skipped where torch is not installed."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import support_safetensors as st
from support_interrupts import interrupted
from support_python import ckptdelta, environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]


def model_at(step):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    with torch.no_grad():
        model[0].weight[1, 2] = step
        model[1].running_mean[3] = step
    return model


def save(store, step, run="rl", **more):
    model = model_at(step)
    store.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters()), **more}, run=run, step=step)


def read(folder):
    return {name: value for name, (dtype, shape, value) in st.read(folder / "model.safetensors")[0].items()}


def expected(step):
    return {name: value.numpy().tobytes() for name, value in model_at(step).state_dict().items()}


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as opened:
        yield opened


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_steps(store, tmp_path):
    save(store, 1)
    with ckptdelta.Follow(store.path, tmp_path / "model", member="model") as follow:
        assert follow.applied is None
        assert follow.wait(0)
        version = follow.apply()
        assert (version.run, version.step, version.applied, version.files, str(version)) == ("rl", 1, True, 1, "rl@1")
        assert version.id == store.find(run="rl").id and version.created_ns == store.find(run="rl").created_ns
        assert read(tmp_path / "model") == expected(1)  # buffers included, by the model's own names
        assert not follow.wait(0.05)
        assert not follow.apply().applied
        save(store, 2)
        seen = []
        assert follow.wait(30)
        assert follow.apply(lambda done, total: seen.append((done, total))).step == 2
        assert seen and seen[-1][0] == seen[-1][1] == follow.applied.bytes
        assert read(tmp_path / "model") == expected(2)
    with pytest.raises(ckptdelta.StateError):
        follow.apply()
    with pytest.raises(ckptdelta.StateError):
        follow.wait(0)
    follow.close()


def test_from_pretrained_reads_the_folder(store, tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers cannot be imported here")
    from support_transformers import llama
    model = llama()
    store.save({"model": model, "step": 1}, run="rl", step=1)
    with ckptdelta.Follow(store.path, tmp_path / "served", member="model", max_shard_size=20000) as follow:
        version = follow.apply()
    assert version.files > 2 and (tmp_path / "served" / "model.safetensors.index.json").exists()
    model.config.save_pretrained(tmp_path / "served")
    served, told = type(model).from_pretrained(tmp_path / "served", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), served.state_dict().values(), strict=True))


def test_weights_by_the_names_of_the_store(store, tmp_path):
    save(store, 1)
    with ckptdelta.Follow(store.path, tmp_path / "model", exclude="*.bias") as follow:
        follow.apply()
    assert set(read(tmp_path / "model")) == {"model.0.weight", "model.1.weight"}
    with ckptdelta.Follow(store.path, tmp_path / "model", only=["*.running_*"]) as follow:
        follow.apply()
    assert set(read(tmp_path / "model")) == {"model.1.running_mean", "model.1.running_var"}
    with ckptdelta.Follow(store.path, tmp_path / "model", member="net") as follow:
        with pytest.raises(ckptdelta.MismatchError, match="no name begins with 'net.'"):
            follow.apply()


def test_iteration_from_before_the_store_exists_until_stop(tmp_path):
    versions, ended = [], threading.Event()
    follow = ckptdelta.Follow(tmp_path / "store", tmp_path / "model", run="rl", member="model", poll=0.02)

    def serve():
        for version in follow:
            versions.append((version.step, read(tmp_path / "model")))
        ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ckptdelta.NotFoundError):
        follow.apply()
    with ckptdelta.open(tmp_path / "store") as store:
        for step in 1, 2, 3:
            save(store, step)
            wait_until(lambda step=step: versions and versions[-1][0] == step)
    assert versions == [(step, expected(step)) for step in (1, 2, 3)]
    follow.stop()
    thread.join(30)
    assert ended.is_set() and not follow.wait()
    follow.close()


def test_a_store_that_is_replaced_is_opened_again(tmp_path):
    with ckptdelta.open(tmp_path / "store") as store:
        save(store, 7)
    with ckptdelta.Follow(tmp_path / "store", tmp_path / "model", member="model", poll=0.02) as follow:
        assert follow.apply().step == 7
        os.rename(tmp_path / "store", tmp_path / "old")
        with ckptdelta.open(tmp_path / "store") as store:
            save(store, 3)
        assert follow.wait(30)
        assert follow.apply().step == 3
    assert read(tmp_path / "model") == expected(3)


def test_suspect_checkpoints_are_passed_over(store, tmp_path):
    save(store, 1)
    save(store, 2)
    broken = model_at(3)
    with torch.no_grad():
        broken[0].weight[:] = float("nan")
    store.save({"model": broken, "optimizer": torch.optim.AdamW(broken.parameters())}, run="rl", step=3)
    with ckptdelta.Follow(store.path, tmp_path / "model", member="model") as follow:
        assert follow.apply().step == 2
    assert read(tmp_path / "model") == expected(2)


def test_refusals(store, tmp_path):
    save(store, 1)
    into = tmp_path / "model"
    with pytest.raises(ckptdelta.NotFoundError, match="does not exist"):
        ckptdelta.Follow(store.path, tmp_path / "none" / "model")
    with pytest.raises(ckptdelta.InvalidError):
        ckptdelta.Follow(store.path, into, run="rl", tag="best")
    with pytest.raises(ckptdelta.InvalidError):
        ckptdelta.Follow(store.path, into, poll=0)
    with pytest.raises(ckptdelta.InvalidError, match="no name"):
        ckptdelta.Follow(store.path, into, member="")
    with ckptdelta.Follow(store.path, into) as follow:
        with pytest.raises(ckptdelta.BusyError):
            ckptdelta.Follow(store.path, into)
        with pytest.raises(ValueError):
            follow.apply(lambda done, total: (_ for _ in ()).throw(ValueError("mine")))
        with pytest.raises(ckptdelta.CancelledError):
            follow.apply(lambda done, total: False)
        assert follow.applied is None and follow.apply().applied
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"theirs")
    with pytest.raises(ckptdelta.ExistsError):
        ckptdelta.Follow(store.path, tmp_path / "theirs")
    with ckptdelta.Follow(store.path, tmp_path / "theirs", overwrite=True) as follow:
        assert follow.apply().applied
    save(store, 1, run="other")
    with ckptdelta.Follow(store.path, tmp_path / "two") as follow, pytest.raises(ckptdelta.InvalidError):
        follow.apply()


def test_an_interrupt_ends_a_wait(store, tmp_path):
    save(store, 1)
    code = ("import sys, ckptdelta\nwith ckptdelta.Follow(sys.argv[1], sys.argv[2], poll=60) as follow:\n"
            "    for version in follow:\n        print(version, flush=True)\n")
    process = subprocess.Popen([sys.executable, "-c", code, store.path, tmp_path / "model"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout.readline() == "rl@1\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "") and "KeyboardInterrupt" in err


def test_an_interrupt_at_any_place_leaves_the_follower_usable(store, tmp_path):
    save(store, 1)
    with ckptdelta.Follow(store.path, tmp_path / "model", member="model") as follow:
        follow.apply()
        for place in interrupted(lambda: (follow.applied, follow.wait(0))):
            assert not is_held(follow._turns._lock), place
            assert follow.applied.step == 1, place
        assert place > 10


def is_held(lock):
    """By another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False) and (lock.release() or True)))
    thread.start(), thread.join()
    return not found[0]


def test_a_call_that_would_wait_for_itself_is_refused(store, tmp_path):
    """From a callback, a signal handler, and a child that is forked while another thread waits."""
    save(store, 1)
    with ckptdelta.Follow(store.path, tmp_path / "model", member="model") as follow:
        with pytest.raises(ckptdelta.StateError, match="only stop"):
            follow.apply(lambda *_: follow.applied)
        follow.apply()
        before = signal.signal(signal.SIGALRM, lambda *_: follow.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with contextlib.suppress(ckptdelta.StateError):  # of close(), if the handler runs in Python's part of wait()
                assert follow.wait(20) is False
            assert follow._stopped.is_set()
        finally:
            signal.signal(signal.SIGALRM, before)
    with ckptdelta.Follow(store.path, tmp_path / "model", member="model") as follow:
        waiting = threading.Thread(target=follow.wait, daemon=True)
        waiting.start()
        wait_until(lambda: is_held(follow._turns._lock))
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends it if it hangs
            try:
                follow.apply()
            except ckptdelta.StateError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        follow.stop()
        waiting.join()


def test_changes_make_one_checkpoint_of_the_other(store):
    torch.manual_seed(2)
    before = torch.randn(700, 500).bfloat16()
    after = before.clone()
    for i, j in (0, 0), (3, 499), (350, 7), (699, 499):
        after[i, j] = -before[i, j]
    store.save({"w": before, "same": before.clone()}, run="rl", step=1)
    store.save({"w": after, "same": before.clone()}, run="rl", step=2)
    positions, values = store.changes("w", before=("rl", 1), after=store.find(run="rl", step=2))
    assert positions.dtype == torch.int64 and positions.tolist() == [0, 3 * 500 + 499, 350 * 500 + 7, 700 * 500 - 1]
    assert values.dtype == torch.bfloat16
    mine = before.clone()
    mine.view(-1)[positions] = values
    assert torch.equal(mine, after)
    back, old = store.changes("w", before=("rl", 2), after=("rl", 1))
    assert torch.equal(back, positions) and torch.equal(old, before.view(-1)[positions])
    assert store.changes("same", before=("rl", 1), after=("rl", 2))[0].numel() == 0
    half = store.changes("w", before=("rl", 1), after=("rl", 2), box=(slice(350, None), slice(0, 250)))
    assert half[0].tolist() == [350 * 500 + 7]


def test_changes_that_cannot_be(store):
    store.save({"w": torch.zeros(4, 4), "v": torch.zeros(4)}, run="rl", step=1)
    store.save({"w": torch.zeros(4, 5), "v": torch.ones(4)}, run="rl", step=2)
    pair = {"before": ("rl", 1), "after": ("rl", 2)}
    positions, values = store.changes("v", **pair, tensors="numpy")
    assert positions.tolist() == [0, 1, 2, 3] and values.tolist() == [1, 1, 1, 1]
    assert (type(positions).__module__, str(positions.dtype), str(values.dtype)) == ("numpy", "int64", "float32")
    with pytest.raises(ckptdelta.MismatchError):
        store.changes("w", **pair)
    with pytest.raises(ckptdelta.NotFoundError, match="no tensor 'u'"):
        store.changes("u", **pair)
    with pytest.raises(ckptdelta.NotFoundError):
        store.changes("v", before=("rl", 1), after=("rl", 3))
    with pytest.raises(ckptdelta.InvalidError, match="a slice for each"):
        store.changes("v", **pair, box=(slice(None), slice(None)))
    with pytest.raises(ckptdelta.InvalidError):
        store.changes("v", **pair, tensors="jax")
