"""The store from Python: arrays, loads in place and in part, errors, threads, forks and interrupts."""

import collections
import copy
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import support_safetensors as st
from support_cli import run
from support_interrupts import interrupted
from support_python import ckptdelta, environment, needs_package

pytestmark = needs_package
RNG = np.random.default_rng(1)


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def bits(array):
    return array.tobytes()


ARRAYS = {
    **{name: RNG.integers(0, 256, 64, np.uint8).view(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16")},
    "bool": RNG.integers(0, 2, (3, 5)).astype(bool), "big-endian": np.arange(12, dtype=">f4").reshape(3, 4),
    "date": np.array(["2024-01-01", "NaT"], "M8[D]"), "scalar": np.array(2.5), "empty": np.zeros((0, 3), "f4"),
    "transposed": RNG.standard_normal((5, 7)).T, "strided": RNG.standard_normal(20)[::-3], "expanded": np.broadcast_to(np.float32(3), (4, 4)),
    "complex, strided": (RNG.standard_normal((4, 6)) + 1j)[:, ::2], "read-only": np.frombuffer(b"abcdefgh", "u2"),
}


def test_arrays_of_every_kind_come_back_bit_for_bit(store):
    store.save(ARRAYS, run="a", step=1)
    found = store.state_dict()
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (array.dtype, array.shape, bits(array)), name
    assert store.verify()


def test_arrays_are_loaded_in_place(store):
    store.save(ARRAYS, run="a", step=1)
    targets = {name: np.zeros_like(array, subok=False) for name, array in ARRAYS.items()}
    targets["strided"] = np.zeros((7, 2))[:, 0]
    targets["transposed"] = np.zeros((5, 7)).T
    before = dict(targets)
    assert store.load(targets).step == 1
    for name, array in ARRAYS.items():
        assert targets[name] is before[name] and bits(targets[name]) == bits(array), name


def test_a_contiguous_array_is_saved_and_loaded_without_a_copy(store):
    array = RNG.standard_normal((64, 64)).astype(np.float32)
    from ckptdelta import _numpy
    seen = []
    keep = _numpy._memory
    try:
        _numpy._memory = lambda a, writable: seen.append(a.__array_interface__["data"][0]) or keep(a, writable=writable)
        store.save({"w": array}, run="a", step=1)
        store.load({"w": array})
    finally:
        _numpy._memory = keep
    assert seen == [array.__array_interface__["data"][0]] * 2


def test_plain_values_are_replaced_in_place(store):
    store.save({"w": np.ones(3), "epoch": 3, "log": [1, 2], "deep": {"w": np.ones(2), "name": "x"}, "pair": (np.ones(1), 5)}, run="a", step=1)
    inner = {"w": np.zeros(2), "name": None}
    state = {"epoch": 0, "log": [], "deep": inner, "pair": (np.zeros(1), 0), "w": np.zeros(3)}
    pair = state["pair"][0]
    store.load(state)
    assert state["epoch"] == 3 and state["log"] == [1, 2] and state["deep"] is inner and inner["name"] == "x" and inner["w"].sum() == 2
    assert state["pair"][0] is pair and pair[0] == 1 and state["pair"][1] == 5


class Counter:
    """Any object with a state."""

    def __init__(self, n):
        self.n, self.w = n, np.full(4, n, np.float32)

    def state_dict(self):
        return {"n": self.n, "w": self.w}

    def load_state_dict(self, state):
        self.n, self.w = state["n"], state["w"]


def test_objects_with_a_state_are_saved_and_loaded_as_such(store):
    store.save([Counter(3), {"c": Counter(4)}], run="a", step=1)
    target = [Counter(0), {"c": Counter(0)}]
    store.load(target)
    assert (target[0].n, target[1]["c"].n, target[1]["c"].w[0]) == (3, 4, 4)
    assert store.state_dict(only="1")[0]["n"] == 3, "a list is taken whole"


def test_the_same_memory_is_stored_once_and_comes_back_as_one(store):
    w = RNG.standard_normal((8, 8))
    info = store.save({"a": w, "b": w, "view": w[:], "part": w[:4]}, run="a", step=1)
    assert info.tensors == 2
    found = store.state_dict()
    assert found["a"] is found["b"] is found["view"] and found["part"] is not found["a"]
    one, other = np.zeros((8, 8)), np.zeros((8, 8))
    store.load({"a": one, "b": other})
    assert bits(one) == bits(other) == bits(w)


def test_memory_that_is_one_in_the_target_but_not_in_the_checkpoint(store):
    store.save({"a": np.ones(4), "b": np.full(4, 2.0)}, run="a", step=1)
    one = np.zeros(4)
    store.load({"a": one, "b": one})
    assert (one == 2).all(), "the last one counts, as if they were loaded one after the other"


def test_keys_with_dots_get_names_of_their_own(store):
    state = {"a": {"b": np.ones(1)}, "a.b": np.zeros(1), "c": {1: np.full(1, 5), "1": np.full(1, 6)}}
    store.save(state, run="a", step=1)
    assert sorted(t.name for t in store.tensors()) == ["a.b", "a.b~2", "c.1", "c.1~2"]
    found = store.state_dict()
    assert found["a"]["b"][0] == 1 and found["a.b"][0] == 0 and found["c"][1][0] == 5 and found["c"]["1"][0] == 6


@pytest.mark.parametrize("key", ["x" * 1024, "a\0b", "\ud800"], ids=["long", "NUL", "half a pair"])
def test_a_key_that_can_be_no_name_is_an_error(store, key):
    with pytest.raises(ckptdelta.InvalidError, match="cannot be a tensor's name"):
        store.save({key: np.ones(2)}, run="a", step=1)


def test_a_state_may_be_a_single_array(store):
    store.save(np.arange(5.0), run="a", step=1)
    into = np.zeros(5)
    store.load(into)
    assert (into == store.state_dict()).all() and into[4] == 4


def test_parts_are_loaded_by_path(store):
    state = {"model": {"l.0.w": np.ones(2), "l.1.w": np.ones(3), "l.10.w": np.ones(4)}, "epoch": 3, "modelling": np.ones(1)}
    store.save(state, run="a", step=1)
    assert store.state_dict(only="model").keys() == {"model"}
    assert store.state_dict(only="model.l.1")["model"].keys() == {"l.1.w"}
    assert store.state_dict(only=["epoch", "model.l.0"]).keys() == {"model", "epoch"}
    with pytest.raises(ckptdelta.NotFoundError, match="nothing below 'modell'"):
        store.state_dict(only="modell")


def test_differences_are_named_before_anything_is_written(store):
    store.save({"a": np.ones(3), "b": np.ones(3, "f4"), "c": 5, "d": np.ones((2, 2)), "l": [np.ones(1)]}, run="a", step=1)
    fine = np.zeros(3)
    with pytest.raises(ckptdelta.MismatchError) as caught:
        store.load({"a": fine, "b": np.zeros(3, "f8"), "c": np.zeros(1), "d": np.zeros(4), "e": np.zeros(1), "l": [np.zeros(1)] * 2})
    for text in ("b: the checkpoint has float32 [3], not float64 [3]", "c: ", "d: the checkpoint has float64 [2, 2]", "e: the checkpoint does not have it", "l: "):
        assert text in str(caught.value)
    assert caught.value.path == "b" and (fine == 0).all()
    assert str(caught.value).startswith("a@1 does not fit: ") and "e: the checkpoint does not have it (it has: a, b, c, d, l)" in str(caught.value)
    left = np.full(1, 7.0)
    store.load({"a": fine, "e": left}, strict=False)
    assert (fine == 1).all() and left[0] == 7
    with pytest.raises(ckptdelta.InvalidError, match="read-only"):
        store.load({"a": np.broadcast_to(np.zeros(1), (3,))})
    with pytest.raises(ckptdelta.InvalidError, match="nothing can be loaded into a int"):
        store.load(5)


def test_what_is_missing_is_told_with_what_there_is(store):
    store.save({"model": {"layers": np.ones(3)}, "optimizer": np.ones(1), "scheduler": 1, "rng": 2, "x": 3, "y": 4}, run="small", step=20)
    for wrong, said in (
            ({"net": np.zeros(3)}, "net: the checkpoint does not have it (it has: model, optimizer, scheduler, rng, x and 1 more)"),
            ({"modle": 1, "opt": 1}, "modle: the checkpoint does not have it (it has: model, optimizer, scheduler, rng, x and 1 more); did you mean model?; "
                                     "opt: the checkpoint does not have it; did you mean optimizer?"),
            ({"model": {"layer": np.zeros(3)}}, "model.layer: the checkpoint does not have it (it has: layers); did you mean layers?")):
        with pytest.raises(ckptdelta.MismatchError) as caught:
            store.load(wrong)
        assert str(caught.value) == f"small@20 does not fit: {said}"


def test_complex_and_real_numbers_are_told_apart(store):
    store.save({"z": np.ones(3, "c8"), "pairs": np.ones((3, 2), "f4")}, run="a", step=1)
    with pytest.raises(ckptdelta.MismatchError, match="complex64"):
        store.load({"z": np.zeros((3, 2), "f4")})
    with pytest.raises(ckptdelta.MismatchError, match="complex64"):
        store.load({"pairs": np.zeros(3, "c8")})


# ------------------------------------------------------------------------------------------------ the command's stores


def test_what_python_saves_the_command_reads(store, tmp_path):
    w = RNG.standard_normal((16, 16)).astype(np.float32)
    store.save({"model": {"w": w}, "step": 5}, run="a", step=1)
    run("load", store.path, "a@1", "--out", tmp_path / "out.safetensors")
    tensors, _ = st.read(tmp_path / "out.safetensors")
    assert list(tensors) == ["model.w"] and tensors["model.w"][2] == bits(w)
    run("verify", store.path)


def test_what_the_command_saves_python_reads(store, tmp_path):
    w, b = RNG.standard_normal((4, 4)).astype(np.float32), np.arange(3, dtype=np.int64)
    run("save", store.path, "a@1", st.write(tmp_path / "in.safetensors", {"layers.0.w": w, "layers.0.b": b, "other": b}))
    found = store.state_dict(tensors="numpy")
    assert list(found) == ["layers.0.w", "layers.0.b", "other"] and bits(found["layers.0.w"]) == bits(w)
    state = {"layers": {"0": {"w": np.zeros((4, 4), "f4")}}, "other": np.zeros(3, "i8")}
    store.load(state)
    assert bits(state["layers"]["0"]["w"]) == bits(w) and state["other"][2] == 2
    assert store.state_dict(only="layers.0").keys() == {"layers.0.w", "layers.0.b"}


def test_python_m_ckptdelta_is_the_command(store):
    done = subprocess.run([sys.executable, "-m", "ckptdelta", "list", store.path, "--json"], env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    assert '"checkpoints"' in done.stdout


# ---------------------------------------------------------------------------------------------------------- the store


def test_checkpoints_are_listed_with_all_that_is_known(store):
    w = RNG.standard_normal(1000)
    saved = store.save({"w": w}, run="a", step=1, metric=("val_loss", 2.5))
    store.save({"w": w + 1e-6}, run="a", step=2)
    store.save({"w": w + 2e-6}, run="b", step=7, parent=saved, resumed_from=("a", 1))
    assert store.runs() == ["a", "b"] and [str(c) for c in store.list()] == ["a@1", "a@2", "b@7"]
    first, second, third = store.checkpoints()
    assert (first.kind, first.metric_name, first.metric, second.metric) == ("base", "val_loss", 2.5, None)
    assert second.kind == "delta" and second.parent == first.id and third.parent == third.resumed_from == first.id
    assert store.find(run="a").step == 2 and store.find(run="a", step=1) == first
    assert abs(first.created.timestamp() - time.time()) < 3600
    with pytest.raises(ckptdelta.InvalidError, match="a, b"):
        store.find()
    info, = store.tensors(run="a", step=1)
    assert (info.name, info.role, info.dtype, info.shape, info.raw_bytes) == ("w", "weight", "float64", (1000,), 8000)


def test_duplicates_follow_the_option(store):
    state = {"w": np.arange(100.0)}
    first = store.save(state, run="a", step=1)
    assert store.save(state, run="a", step=1, on_duplicate="same").id == first.id
    with pytest.raises(ckptdelta.ExistsError):
        store.save(state, run="a", step=1)
    assert store.save(state, run="a", step=1, on_duplicate="branch").run == "a~2"


@pytest.mark.parametrize("options, says", [
    ({"run": ".bad"}, "run"), ({"run": "a\0"}, "NUL"), ({"run": 5}, "string"), ({"step": -1}, "step"), ({"step": 2**64 - 1}, "step"),
    ({"step": 1.5}, "step"), ({"fidelity": "fine"}, "exact, near, coarse"), ({"role_fidelity": {"weights": "near"}}, "a role"),
    ({"on_duplicate": "no"}, "on_duplicate"), ({"codec": "xz"}, "codec"), ({"level": 99}, "level"), ({"effort": "much"}, "effort"),
    ({"staging_bytes": -1}, "staging_bytes"),
], ids=str)
def test_options_that_make_no_sense_are_errors(store, options, says):
    with pytest.raises(ckptdelta.InvalidError, match=says):
        store.save({"w": np.ones(3)}, **{"run": "a", "step": 1, **options})
    assert store.checkpoints() == []


def test_errors_have_the_fields_of_the_library(tmp_path):
    with pytest.raises(ckptdelta.NotFoundError) as caught:
        ckptdelta.open(tmp_path / "none", create=False)
    assert isinstance(caught.value, LookupError) and caught.value.status == "NOT_FOUND" and str(tmp_path / "none") in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ckptdelta.Error):
        ckptdelta.open(tmp_path / "file")
    with ckptdelta.open(tmp_path / "store") as store:
        store.save({"w": np.random.default_rng(0).standard_normal(5000)}, run="a", step=1)
        chunk, = (tmp_path / "store/data/c").iterdir()
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        os.chmod(chunk, 0o644)
        chunk.write_bytes(data)
        with pytest.raises(ckptdelta.CorruptError) as caught:
            store.state_dict()
        assert caught.value.tensor == "w" and caught.value.file.endswith(chunk.name) and caught.value.offset
        found = store.verify()
        assert not found and found.damage[0].tensor == "w" and found.damage[0].checkpoints == ("a@1",)
    with ckptdelta.open(tmp_path / "store", readonly=True) as store, pytest.raises(ckptdelta.ReadOnlyError):
        store.save({"w": np.ones(1)}, run="a", step=2)


def test_verify_takes_one_run_or_step_or_a_sample(store):
    for step in (1, 2):
        store.save({"w": RNG.standard_normal(1000)}, run="a", step=step)
    store.save({"w": RNG.standard_normal(1000)}, run="b", step=1)
    assert store.verify().checkpoints == 3 and store.verify(run="a").checkpoints == 2 and store.verify(run="a", step=2).checkpoints == 1
    assert store.verify(quick=True) and store.verify(sample=0.5)
    with pytest.raises(ckptdelta.InvalidError, match="run"):
        store.verify(step=1)
    with pytest.raises(ckptdelta.NotFoundError):
        store.verify(run="none")


def test_a_closed_store_says_so(tmp_path):
    store = ckptdelta.open(tmp_path / "store")
    store.close()
    store.close()
    assert "closed" in repr(store)
    for call in (store.checkpoints, store.state_dict, store.verify, lambda: store.save({}, run="a", step=1)):
        with pytest.raises(ckptdelta.StateError, match="closed"):
            call()


def test_a_copy_of_a_store_is_opened_again(store):
    store.save({"w": np.ones(3)}, run="a", step=1)
    for other in (pickle.loads(pickle.dumps(store)), copy.copy(store)):
        with other:
            assert other.runs() == ["a"]
    assert store.runs() == ["a"]


def test_notices_go_to_the_log(store, caplog):
    store.save({"w": np.ones(3)}, run="a", step=1)
    store.close()
    with open(os.path.join(store.path, "catalog.db"), "r+b") as catalog:
        catalog.write(bytes(4096))
    with caplog.at_level(logging.INFO, "ckptdelta"), ckptdelta.open(store.path) as again:
        assert again.runs() == ["a"]
        again.save({"w": np.ones(3)}, run="a", step=2)
    assert any(r.levelno == logging.WARNING and "catalog" in r.getMessage() for r in caplog.records)
    assert any("saved a@2" in r.getMessage() for r in caplog.records)


# ------------------------------------------------------------------------------------------- progress and interrupts

LARGE = {f"w{i}": RNG.standard_normal((512, 600)) for i in range(4)}


def leftovers(store):
    """Files of saves that did not end."""
    return [f for folder in ("c", "i", "m") for f in os.listdir(os.path.join(store.path, "data", folder))]


def test_progress_is_reported_and_may_cancel(store):
    seen = []
    store.save(LARGE, run="a", step=1, progress=lambda done, total: seen.append((done, total)))
    total = sum(w.nbytes for w in LARGE.values())
    assert len(seen) > 2 and seen[-1] == (total, total) and seen == sorted(seen)
    files = leftovers(store)
    with pytest.raises(ckptdelta.CancelledError):
        store.save(LARGE, run="a", step=2, progress=lambda done, total: done < total // 2)
    assert leftovers(store) == files and [c.step for c in store.list()] == [1]
    assert store.verify(progress=lambda done, total: None)
    with pytest.raises(ckptdelta.CancelledError):
        store.verify(progress=lambda done, total: False)
    seen.clear()
    store.load({name: np.zeros_like(w) for name, w in LARGE.items()}, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(total, total)]
    with pytest.raises(ckptdelta.CancelledError):
        store.state_dict(progress=lambda done, total: False)


def test_an_exception_of_a_callback_comes_back_and_nothing_is_saved(store):
    def fail(done, total):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        store.save(LARGE, run="a", step=1, progress=fail)
    assert leftovers(store) == []
    store.save(LARGE, run="a", step=1)
    with pytest.raises(ckptdelta.StateError, match="a callback called the store"):
        store.save(LARGE, run="a", step=2, progress=lambda done, total: store.checkpoints())


def test_an_interrupt_ends_a_save_and_leaves_nothing(store):
    with pytest.raises(KeyboardInterrupt):
        store.save(LARGE, run="a", step=1, progress=lambda done, total: os.kill(os.getpid(), signal.SIGINT))
    assert leftovers(store) == [] and store.checkpoints() == []
    store.save(LARGE, run="a", step=1)
    assert store.verify()


def test_interrupts_at_any_moment_lose_no_commit(store):
    """A timer interrupts saves wherever they are. Each one is committed and whole, or leaves nothing."""
    state = {"w": RNG.standard_normal((64, 600))}
    done = interrupted = 0

    def handler(number, frame):
        raise KeyboardInterrupt

    keep = signal.signal(signal.SIGALRM, handler)
    try:
        for step in range(1, 41):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0004 * step)
                store.save(state, run="a", step=step)
                signal.setitimer(signal.ITIMER_REAL, 0)
                done += 1
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, keep)
    gc.collect()
    assert interrupted > 0
    committed = store.checkpoints()
    assert done <= len(committed) <= done + interrupted and store.verify()
    for checkpoint in committed:
        assert bits(store.state_dict(run="a", step=checkpoint.step)["w"]) == bits(state["w"])
    assert not os.listdir(os.path.join(store.path, "data/i")), "no save is under way"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt where memory is freed
def test_an_interrupt_at_any_place_leaves_the_store_usable(store):
    """For this thread, and for another one, which would wait for ever if the lock were still held."""
    store.save({"w": np.ones(3)}, run="a", step=1)
    for place in interrupted(lambda: store.state_dict(run="a")):
        other = threading.Thread(target=store.find, daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive(), place
        assert store.find().step == 1, place
    assert place > 100


# ------------------------------------------------------------------------------------------------- threads and forks


def test_threads_share_a_store(store, tmp_path):
    failures = []

    def work(number):
        try:
            with ckptdelta.open(store.path) as own:
                for step in range(4):
                    state = {"w": np.full(1000, number * 100 + step, np.float32), "n": number}
                    (own if step % 2 else store).save(state, run=f"r{number}", step=step)
                    found = store.state_dict(run=f"r{number}", step=step)
                    assert bits(found["w"]) == bits(state["w"]) and found["n"] == number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(store.list()) == 16 and store.verify()


def test_the_interpreter_is_free_while_the_library_works(tmp_path):
    """Another thread goes on during a save: it counts while the first one is inside the call."""
    counted, saving = [0], threading.Event()

    def count():
        while not saving.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    with ckptdelta.open(tmp_path / "store", threads=1) as store:
        thread.start()
        before = counted[0]
        store.save(LARGE, run="a", step=1)
        after = counted[0]
        saving.set()
        thread.join()
    assert after > before + 100


def test_a_forked_child_must_open_the_store_again(store):
    store.save({"w": np.ones(3)}, run="a", step=1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (store.checkpoints, store.runs):
                try:
                    call()
                except ckptdelta.StateError as error:
                    status = 0 if "after a fork" in str(error) else 2
            store.close()
            with ckptdelta.open(store.path) as own:
                own.save({"w": np.ones(4)}, run="child", step=1)
        except BaseException:
            status = 3
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.runs() == ["a", "child"]


def test_a_fork_during_a_save_does_not_touch_it(store):
    """The child drops everything that it has of the save; the parent goes on and commits."""
    def fork(done, total):
        child = os.fork()
        if child == 0:
            os._exit(drop())
        assert os.waitpid(child, 0)[1] == 0

    def drop():
        found = [o for o in gc.get_objects() if type(o).__name__ == "Store"]
        found[0].close()
        for frame in sys._current_frames().values():
            while frame is not None:
                owner = frame.f_locals.get("owner")
                if owner is not None:
                    from ckptdelta._native import lib
                    lib.pyckd_save_abort(owner)
                    return 0
                frame = frame.f_back
        return 1

    store.save(LARGE, run="a", step=1, progress=fork)
    assert store.verify() and bits(store.state_dict()["w3"]) == bits(LARGE["w3"])


def test_processes_of_both_kinds_save_side_by_side(store):
    for number, kind in enumerate(("fork", "spawn")):
        code = textwrap.dedent(f"""
            import multiprocessing, numpy as np, ckptdelta
            def work(store, n):
                store.save({{"w": np.full(10, n)}}, run="r%d" % n, step=1)
            def again(path, n):
                with ckptdelta.open(path) as store:
                    work(store, n)
            if __name__ == "__main__":
                context = multiprocessing.get_context({kind!r})
                with ckptdelta.open({store.path!r}) as store:
                    target, first = (work, store) if {kind!r} == "spawn" else (again, store.path)
                    jobs = [context.Process(target=target, args=(first, {number} * 10 + n)) for n in range(2)]
                    for job in jobs: job.start()
                    for job in jobs: job.join()
                    assert [j.exitcode for j in jobs] == [0, 0]
        """)
        script = os.path.join(os.path.dirname(store.path), f"job{number}.py")
        with open(script, "w") as file:
            file.write(code)
        subprocess.run([sys.executable, script], env=environment(), check=True, timeout=120)
    assert store.runs() == ["r0", "r1", "r10", "r11"]
    assert multiprocessing.active_children() == []


def test_a_kill_during_a_save_loses_nothing(store):
    store.save(LARGE, run="a", step=1)
    code = f"""
import ckptdelta, numpy as np, os, signal
store = ckptdelta.open({store.path!r})
store.save({{"w": np.random.default_rng(0).standard_normal((1024, 1024))}}, run="a", step=2,
           progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment(), timeout=120).returncode == -signal.SIGKILL
    with ckptdelta.open(store.path) as again:
        assert [c.step for c in again.list()] == [1] and again.verify()
        again.save(LARGE, run="a", step=2)


# ------------------------------------------------------------------------------------------------------------ DLPack


class Foreign:
    """An array of a library that only speaks DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("with_numpy", [True, False])
def test_arrays_of_other_libraries_are_saved_through_dlpack(store, with_numpy, monkeypatch):
    from ckptdelta import _dlpack
    if not with_numpy:
        monkeypatch.setattr(_dlpack, "_packed", lambda view: _dlpack._packed_slowly(view, view.strides))
    arrays = {"f": RNG.standard_normal((3, 4)), "i": np.arange(6, dtype=np.int16), "t": RNG.standard_normal((4, 6)).T, "back": np.arange(9, dtype="f2")[::-2], "z": np.ones(3, "c8"),
              "empty": np.zeros((0, 2))}
    store.save({name: Foreign(a) for name, a in arrays.items()}, run="a", step=1)
    found = store.state_dict()
    for name, array in arrays.items():
        assert bits(found[name]) == bits(array) and found[name].dtype == array.dtype, name
    with pytest.raises(ckptdelta.InvalidError, match="in place"):
        store.load({"f": Foreign(np.zeros((3, 4)))})


def test_plain_dicts_and_lists_are_refilled_where_they_are(tmp_path):
    inner, log = {"best": 1.5}, ["a"]
    state = {"w": np.ones(3), "progress": {"epoch": 1, "inner": inner}, "log": log, "members": [np.zeros(2), inner], "kind": {"x": 1}}
    progress = state["progress"]
    with ckptdelta.open(tmp_path / "store") as store:
        store.save(state, run="a", step=1)
        progress.update(epoch=2, other=3), inner.update(best=0.5), log.append("b")
        state["kind"] = collections.OrderedDict(x=2)
        store.load(state, run="a")
    assert state["progress"] is progress == {"epoch": 1, "inner": {"best": 1.5}} and progress["inner"] is inner is state["members"][1]
    assert state["log"] is log == ["a"] and type(state["kind"]) is dict and state["kind"] == {"x": 1}
