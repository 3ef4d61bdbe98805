"""follow: a folder has the weights of the newest checkpoint, as load gives them, whatever happens to follower, store and
folder."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, DONE, FAILED, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401

INDEX = "model.safetensors.index.json"
STATE = ".ckptdelta-follow.json"
WEIGHTS = {"layers.0.weight", "layers.0.bias"}


def read_folder(folder):
    """The tensors, read as a loader does: index first."""
    if not (folder / INDEX).exists():
        return st.read(folder / "model.safetensors")[0]
    index = json.loads((folder / INDEX).read_text(), object_pairs_hook=st.reject_duplicates)
    files = sorted(set(index["weight_map"].values()))
    assert files == [p.name for p in sorted(folder.glob("model*.safetensors"))]
    tensors = {}
    for name in files:
        part, metadata = st.read(folder / name)
        assert metadata == {"format": "pt"}
        assert all(index["weight_map"][tensor] == name for tensor in part)
        tensors.update(part)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {"total_size": sum(len(t[2]) for t in tensors.values())}
    return tensors


def expected(store, *pick):
    return {name: value for name, value in store.load(*pick)[0].items() if name in WEIGHTS}


def check(store, into, step, run_name="a"):
    st.same(read_folder(into), expected(store, "--run", run_name, "--step", step))
    said = json.loads((into / STATE).read_text())
    assert (said["run"], said["step"]) == (run_name, step)
    assert {p.name for p in into.iterdir() if p.name.startswith(".")} == {STATE, ".ckptdelta-follow.lock"}


def follow(store, into, *args, **options):
    return store.call("follow", "--into", into, "--once", *args, **options)


def wait_until(condition, what):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def step_of(into):
    try:
        return json.loads((into / STATE).read_text())["step"]
    except FileNotFoundError:
        return None


class Follower:
    """A follower that goes on until it is told to stop."""

    def __init__(self, path, into, *args):
        self.process = subprocess.Popen([COMMAND, "follow", path, "--into", into, "--interval", "1s", *map(str, args)], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.out, self.err = self.process.communicate(timeout=60)
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def into(tmp_path):
    return tmp_path / "model"


def big(step, rows=600):
    """Weights of several blocks, of which a step changes a few elements of one."""
    weight = np.random.default_rng(5).standard_normal((rows, 1024)).astype(np.float32)
    for s in range(step):
        weight[s % 7, s % 1000] += 1
    return {"layers.0.weight": weight, "layers.0.bias": np.full(8, step, np.float32), "exp_avg.layers.0.weight": weight * np.float32(0.1)}


def test_steps(store, into):
    into.mkdir()
    (into / "config.json").write_text("{}")
    for step in (1, 2, 3):
        store.save(step, state(1, step))
        said = follow(store, into, "--json").json()
        check_documented(said, "`follow`", where="follow")
        assert said["checkpoint"] == f"a@{step}" and said["applied"] and said["files"] == 1
        check(store, into, step)
    assert follow(store, into).out == f"{into} has a@3 already: {64 * 65 * 4 / 1024:.1f} KiB\n"
    assert not follow(store, into, "--json").json()["applied"]
    assert follow(store, into, "-q").out == ""
    assert (into / "config.json").read_text() == "{}"


def test_only_changed_blocks_are_written(store, into):
    store.save(1, big(1))
    assert follow(store, into, "--json").json()["written_bytes"] == 600 * 1024 * 4 + 32
    store.save(2, big(2))
    said = follow(store, into, "--json").json()
    assert 0 < said["written_bytes"] <= (1 << 20) + 32
    check(store, into, 2)


def test_tensors_are_chosen(store, into):
    store.save(1, state(1, 1))
    follow(store, into, "--tensor", "layers*", "--tensor", "exp_avg.*", "--exclude", "*bias")
    assert set(read_folder(into)) == {"layers.0.weight", "exp_avg.layers.0.weight"}
    follow(store, into)  # the same checkpoint, another choice
    check(store, into, 1)
    result = follow(store, into, "--tensor", "none*", expect=FAILED)
    assert "the patterns match none" in result.err
    check(store, into, 1)


def test_a_member_has_its_own_names(store, into):
    store.save(1, state(1, 1))
    follow(store, into, "--member", "layers")
    whole = store.load("--run", "a")[0]
    st.same(read_folder(into), {name.removeprefix("layers."): value for name, value in whole.items() if name.startswith("layers.")})
    follow(store, into, "--member", "layers", "--tensor", "*.weight")
    assert set(read_folder(into)) == {"0.weight"}
    result = follow(store, into, "--member", "layer", expect=FAILED)
    assert "no name begins with 'layer.'" in result.err
    follow(store, into, "--member", "", expect=USAGE)
    assert set(read_folder(into)) == {"0.weight"}


def test_shards(store, into):
    tensors = {f"layers.{i}.weight": np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in range(5)}
    store.save(1, tensors)
    follow(store, into, "--shard-size", "40000")
    assert sorted(p.name for p in into.glob("model-*")) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    st.same(read_folder(into), tensors)
    tensors["layers.4.weight"][3, 3] += 1
    store.save(2, tensors)
    said = follow(store, into, "--shard-size", "40000", "--json").json()
    assert said["files"] == 1  # the others stay
    st.same(read_folder(into), tensors)
    follow(store, into)  # one file again
    assert sorted(p.name for p in into.glob("model*")) == ["model.safetensors"]
    st.same(read_folder(into), tensors)


def test_every_dtype(store, into):
    tensors = {f"w.{dtype}": (dtype, [3], bytes(3 * size)) for dtype, size in st.SIZES.items()}
    tensors |= {"scalar": ("F32", [], b"abcd"), "none": ("BF16", [0, 3], b""), 'odd "\\\n\u00e9\x7f': ("I8", [1], b"x")}
    store.save(1, tensors)
    follow(store, into, "--tensor", "*")
    st.same(read_folder(into), tensors)


def test_a_mapped_file_stays(store, into):
    store.save(1, big(1))
    follow(store, into)
    with (into / "model.safetensors").open("rb") as f:
        before = f.read()
        store.save(2, big(2))
        follow(store, into)
        f.seek(0)
        assert f.read() == before
    check(store, into, 2)


def test_follows_as_it_is_saved(store, into):
    """The store does not exist at first."""
    ran = into.parent / "ran"
    told = f'echo "$CKPTDELTA_STEP $CKPTDELTA_ID $CKPTDELTA_INTO"; echo >> {ran}'
    with Follower(store.path, into, "--run", "a", "--json", "--exec", told) as f:
        for step in (1, 2, 3):
            store.save(step, state(1, step))
            wait_until(lambda: step_of(into) == step, f"step {step} was not applied")
            wait_until(lambda: ran.exists() and ran.read_text() == step * "\n", f"--exec did not run for step {step}")
        assert f.stop() == 128 + signal.SIGTERM
    lines = [json.loads(line) for line in f.out.splitlines()]
    assert [line["checkpoint"] for line in lines] == ["a@1", "a@2", "a@3"]
    assert [line for line in f.err.splitlines() if str(into) in line] == [f"{i + 1} {line['id']} {into}" for i, line in enumerate(lines)]
    check(store, into, 3)


def test_late_joiner_and_pruned_history(store, into):
    for step in range(1, 5):
        store.save(step, big(step))
    follow(store, into)
    check(store, into, 4)
    for step in range(5, 9):
        store.save(step, big(step))
    store.call("prune", "--keep-last", 1, "--undo", "0s")
    said = follow(store, into, "--json").json()
    assert said["written_bytes"] < said["bytes"]  # compared with the folder's own blocks
    check(store, into, 8)


def test_foreign_changes_are_undone(store, into):
    store.save(1, big(1))
    follow(store, into)
    time.sleep(0.05)
    file = into / "model.safetensors"
    with file.open("r+b") as f:
        f.seek(-100, os.SEEK_END)
        f.write(b"changed")
    assert follow(store, into, "--json").json()["applied"]
    check(store, into, 1)
    shutil.copy(file, into / "copy")
    (into / "copy").rename(file)
    said = follow(store, into, "--json").json()
    assert said["written_bytes"] == 0  # each block was compared
    file.write_bytes(b"")
    store.save(2, big(2))
    follow(store, into)
    check(store, into, 2)
    (into / STATE).write_text("{}")
    follow(store, into)
    check(store, into, 2)


def test_model_files_of_others_stay(store, into):
    store.save(1, state(1, 1))
    into.mkdir()
    (into / "model.safetensors").write_bytes(b"theirs")
    assert "--overwrite" in follow(store, into, expect=FAILED).err
    assert (into / "model.safetensors").read_bytes() == b"theirs"
    follow(store, into, "--overwrite")
    check(store, into, 1)
    (into / "model-00001-of-00002.safetensors").write_bytes(b"theirs")
    store.save(2, state(1, 2))
    assert "model-00001-of-00002.safetensors; --overwrite" in follow(store, into, expect=FAILED).err
    assert (into / "model-00001-of-00002.safetensors").read_bytes() == b"theirs" and step_of(into) == 1
    follow(store, into, "--overwrite")
    check(store, into, 2)


def test_model_files_that_appear_later_stay(store, into):
    store.save(1, state(1, 1))
    with Follower(store.path, into) as f:
        wait_until(lambda: step_of(into) == 1, "step 1 was not applied")
        (into / INDEX).write_bytes(b"theirs")
        store.save(2, state(1, 2))
        f.out, f.err = f.process.communicate(timeout=60)
    assert f.process.returncode == FAILED and "no follower wrote" in f.err
    assert (into / INDEX).read_bytes() == b"theirs" and step_of(into) == 1


def test_a_store_that_is_made_anew(store, into):
    store.save(5, state(1, 5))
    with Follower(store.path, into) as f:
        wait_until(lambda: step_of(into) == 5, "step 5 was not applied")
        shutil.rmtree(store.path)
        store.save(1, state(2, 1))
        wait_until(lambda: step_of(into) == 1, "the new store was not followed")
        f.stop()
    assert "was replaced, and is opened again" in f.err and "another store" not in f.err
    check(store, into, 1)


def test_what_is_waited_for_is_said(store, into):
    store.save(1, state(1, 1))
    with Follower(store.path, into, "--run", "b") as f:
        time.sleep(2.5)
        store.save(1, state(1, 1), run_name="b")
        wait_until(lambda: step_of(into) == 1, "step 1 was not applied")
        f.stop()
    assert f.err.splitlines()[0] == "ckptdelta: waiting: the store has no run 'b'; it has: a" and f.err.count("waiting:") == 1


def test_a_tag_is_followed_back_and_forth(store, into):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    for step in (2, 3, 1):
        store.call("tag", "prod", f"a@{step}", *(["--move"] if step != 2 else []))
        follow(store, into, "--tag", "prod")
        check(store, into, step)


def test_suspect_and_damaged_checkpoints_are_passed_over(store, into):
    store.save(1, state(1, 1))
    follow(store, into)
    bad = state(1, 2)
    bad["layers.0.weight"][0, 0] = np.nan
    store.save(2, bad, expect_message="suspect")
    assert "suspect" in follow(store, into, expect_message="suspect and passed over").err
    check(store, into, 1)
    files = set(store.files())
    store.save(3, {name: value + np.float32(1) if value.dtype == np.float32 else value for name, value in state(9, 3).items()})
    chunk, = [p for p in set(store.files()) - files if p.parts[1] == "c"]
    content = bytearray((store.path / chunk).read_bytes())
    for i in range(len(content) // 4, len(content) // 2):
        content[i] ^= 0xff
    (store.path / chunk).write_bytes(content)
    result = follow(store, into, "--json", expect=CORRUPT)
    assert result.json()["passed_over"] == 1 and result.json()["checkpoint"] == "a@1"
    assert "a@3 is passed over" in result.err
    check(store, into, 1)
    assert "is behind" in follow(store, into, "--max-lag", "1", expect=CORRUPT).err
    store.call("tag", "bad", "a@3")
    assert "a@3 is passed over" in follow(store, into, "--tag", "bad", expect=CORRUPT).err
    check(store, into, 1)
    follow(store, into.with_name("other"), "--tag", "bad", expect=CORRUPT)
    assert not list(into.with_name("other").glob("model*"))
    store.save(4, state(1, 4), expect_message="damaged")
    follow(store, into)
    check(store, into, 4)


def test_a_damaged_manifest_is_named(store, into):
    store.save(1, state(1, 1))
    follow(store, into)
    store.save(2, state(1, 2))
    manifest, = (store.path / "data/m").glob("a.2.*")
    manifest.write_bytes(b"x" * 100)
    (store.path / "catalog.db").unlink()
    result = follow(store, into, "--json", expect=CORRUPT)
    assert result.json()["passed_over"] == 1 and "a newer checkpoint is passed over" in result.err
    assert step_of(into) == 1


def test_a_renamed_run_is_followed_on(store, into):
    store.save(1, state(1, 1))
    with Follower(store.path, into, "--run", "a") as f:
        wait_until(lambda: step_of(into) == 1, "step 1 was not applied")
        store.call("rename", "a", "b")
        store.save(2, state(1, 2), run_name="b")
        wait_until(lambda: step_of(into) == 2, "step 2 was not applied")
        f.stop()
    assert "run 'a' is now 'b'" in f.err
    check(store, into, 2, "b")


def test_a_branch_is_named(store, into):
    store.save(1, state(1, 1))
    store.save(2, state(1, 2))
    store.save(2, state(7, 2), run_name="a~2")
    assert "continues as 'a~2'" in follow(store, into, "--run", "a", expect_message="a~2").err
    check(store, into, 2)


def test_a_failing_command(store, into):
    store.save(1, state(1, 1))
    assert "exit status 7" in follow(store, into, "--exec", "exit 7", expect_message="exit status 7").err
    store.save(3, state(1, 3))
    with Follower(store.path, into, "--exec", "exit 7", "--exec-fails", "stop") as f:
        f.out, f.err = f.process.communicate(timeout=60)
    assert f.process.returncode == FAILED and "stopped, as --exec failed" in f.err
    check(store, into, 3)


def test_lag(store, into):
    store.save(1, state(1, 1))
    follow(store, into)
    bad = state(1, 2)
    bad["layers.0.weight"][0, 0] = np.inf
    store.save(2, bad, expect_message="suspect")
    follow(store, into, "--max-lag", "1", expect_message="suspect")
    assert subprocess.run([COMMAND, "follow", store.path, "--into", into, "--once", "--max-lag", "0", "-q"], capture_output=True).returncode == FAILED


def test_wrong_usage(store, into):
    store.save(1, state(1, 1))
    run("follow", store.path, "--once", expect=USAGE)
    follow(store, into, "--run", "a", "--tag", "b", expect=USAGE)
    follow(store, into, "--exec-fails", "never", expect=USAGE)
    for interval in "0s", "366d":
        follow(store, into, "--interval", interval, expect=USAGE)
    follow(store, into, "--run", "b", expect=NOT_FOUND)
    follow(store, into, "--tag", "b", expect=NOT_FOUND)
    run("follow", store.folder / "none", "--once", "--into", into, expect=NOT_FOUND)
    store.save(1, state(1, 1), run_name="c")
    follow(store, into, expect=USAGE)  # which of them?


def test_one_follower_for_a_folder(store, into):
    store.save(1, state(1, 1))
    with Follower(store.path, into):
        wait_until(lambda: step_of(into) == 1, "step 1 was not applied")
        assert "another process already follows" in follow(store, into, expect=FAILED).err


@pytest.mark.parametrize("shards", [False, True])
def test_kills(store, into, shards):
    """Killed at any time, a follower leaves the weights of one step, once the next one has started."""
    args = ["--shard-size", "1M"] if shards else []
    chance = random.Random(int(shards))
    store.save(1, big(1))
    begun = time.monotonic()
    follow(store, into, *args)
    took = time.monotonic() - begun
    killed = 0
    for step in range(2, 26):
        store.save(step, big(step))
        process = subprocess.Popen([COMMAND, "follow", store.path, "--into", into, "--once", "-q", *args])
        time.sleep(chance.random() * took)
        process.kill()
        killed += process.wait() != DONE
        if chance.random() < 0.5:
            follow(store, into, *args)
            check(store, into, step)
    follow(store, into, *args)
    check(store, into, 25)
    assert killed
