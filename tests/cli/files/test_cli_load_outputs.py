"""The files that load, export and report write: none of them replaces what it should not, and those of one command appear
together."""

import fcntl
import os
import signal
import struct
import subprocess
import termios
import time

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, FAILED, USAGE, run, state, store  # noqa: F401

MESH = "mesh tp=4\n.* sharded dim=0 over=tp\n"


@pytest.fixture
def saved(store, tmp_path):
    for name in ("config", "position"):
        (tmp_path / name).write_text(name)
    store.save(1, state(1), "--blob", f"x={tmp_path}/config", "--blob", f"y={tmp_path}/position")
    return store


def layout(store, text=MESH):
    path = store.folder / "layout"
    path.write_text(text)
    return path


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}


# ------------------------------------------------------------------------------------------------- one file for two


def test_outputs_that_are_the_same_file(saved, tmp_path):
    saved.save(1, {"w": np.arange(8, dtype=np.float32)}, "--blob", f"x={tmp_path}/config", "--blob", f"y={tmp_path}/position", run_name="b")
    mesh = layout(saved)
    (tmp_path / "there").write_text("mine")
    (tmp_path / "linked").symlink_to("layout")
    (tmp_path / "here").symlink_to(tmp_path)
    before = content(tmp_path)
    for args in (["-o", "F", "--blob", "x=F"], ["-o", "F", "--blob", "x=./F"], ["--blob", "x=bb", "--blob", "y=bb"], ["--blob", "x=bb", "--blob", "y=here/bb"],
                 ["-o", "there", "--blob", "x=here/there"], ["--layout", mesh, "--shard", "0/4", "-o", "layout"],
                 ["--layout", "linked", "--shard", "0/4", "-o", "layout"], ["--layout", mesh, "-o", "all", "--blob", "x=all/rank00003.safetensors"],
                 ["--layout", mesh, "--shard", "0/4", "-o", "F", "--blob", "x=here/layout"]):
        assert "the same file" in saved.call("load", "b@1", "--force", *args, cwd=tmp_path, expect=USAGE).err
        assert content(tmp_path) == before and not (tmp_path / "all").exists()
    saved.call("load", "b@1", "--force", "--layout", mesh, "-o", "all", "--blob", "x=all/x", "--blob", "y=y", cwd=tmp_path)
    assert len(list((tmp_path / "all").iterdir())) == 5


# ------------------------------------------------------------------------------------------------------- the store


def test_outputs_inside_the_store(saved, tmp_path):
    (tmp_path / "linked").symlink_to("store/data")
    chunk = next((saved.path / "data/c").iterdir()).relative_to(tmp_path)
    before = content(saved.path)
    mesh = layout(saved)
    for out in ("store/catalog.db", chunk, "store/new", "store/deep/er/new", "absent/../store/new", "linked/c/new", "./store/./new", "store/data/../new"):
        for args in (["load", "--force", "-o", out], ["load", "--force", "--blob", f"x={out}"], ["load", "-o", "F", "--force", "--blob", f"x={out}"],
                     ["load", "--layout", mesh, "-o", out], ["export", "-o", out, "--overwrite"], ["report", "--force", "--html", out],
                     ["timeline", "--force", "--svg", out]):
            assert "inside the store" in run(args[0], "store", *args[1:], cwd=tmp_path, expect=USAGE).err
    run("load", "store", "--layout", mesh, "--force", "-o", "store", cwd=tmp_path, expect=USAGE)
    assert content(saved.path) == before and not (tmp_path / "F").exists()
    run("load", "../store", "-o", "../store-new", cwd=saved.path)
    assert st.same(st.read(tmp_path / "store-new")[0], state(1))


# --------------------------------------------------------------------------------------------------- all or nothing


def test_nothing_is_written_if_a_blob_cannot_be(saved, tmp_path):
    saved.call("load", "-o", tmp_path / "F", "--blob", f"x={tmp_path}/absent/G", expect=3)
    assert not (tmp_path / "F").exists() and not saved.temporary_files()
    (tmp_path / "F").write_text("mine")
    saved.call("load", "--force", "-o", tmp_path / "F", "--blob", f"x={tmp_path}/H", "--blob", f"y={tmp_path}/absent/G", expect=3)
    assert (tmp_path / "F").read_text() == "mine" and not (tmp_path / "H").exists() and not saved.temporary_files()


@pytest.fixture
def big(store):
    store.save(1, {f"w{i}": np.random.default_rng(i).integers(0, 255, 32 << 20, dtype=np.uint8) for i in range(2)}, "--codec", "raw")
    return store


def stopped(store, pattern, *args):
    """A load that is stopped once this temporary file is there."""
    process = subprocess.Popen([COMMAND, "load", store.path, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(store.folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    return process


def test_an_interrupted_load_leaves_no_rank(big):
    out = big.folder / "all"
    args = ["--layout", layout(big), "-o", out]
    process = stopped(big, "all/.rank00001.safetensors.tmp-*", *args)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and b"nothing was written" in err
    assert not list(out.iterdir())
    big.call("load", *args)
    assert len(list(out.iterdir())) == 4


def test_a_killed_load_is_tidied_up_by_the_next(big):
    out = big.folder / "out"
    process, other = (stopped(big, f".{name}.tmp-*", "-o", big.folder / name) for name in ("out", "busy"))
    busy, = big.folder.glob(".busy.tmp-*")
    process.kill()
    process.communicate(timeout=60)
    assert len(list(big.folder.glob(".out.tmp-*"))) == 1
    for path in (out, big.folder / "busy"):
        big.call("load", "-o", path, "--tensor", "w0")
    assert list(big.folder.glob(".*.tmp-*")) == [busy], "only the file of the load that goes on is there"
    (big.folder / "busy").unlink()
    other.send_signal(signal.SIGCONT)
    other.communicate(timeout=120)
    assert other.returncode == 0 and len(st.read(big.folder / "busy")[0]) == 2 and not big.temporary_files()


@pytest.fixture
def damaged(store):
    """Two checkpoints. The part that ranks 2 and 3 hold of the newer one is damaged."""
    for step in (1, 2):
        values = np.random.default_rng(step).integers(0, 255, 4 << 20, dtype=np.uint8)
        store.save(step, {"w": values}, "--base", "--codec", "raw")
    for path in (store.path / "data/c").iterdir():
        found = path.read_bytes().find(values[-64:].tobytes())
        if found >= 0:
            with open(path, "r+b") as file:
                file.seek(found)
                file.write(bytes([values[-64] ^ 1]))
            return store
    raise AssertionError("the values are in no file")


def test_a_later_rank_that_is_damaged(damaged):
    out = damaged.folder / "all"
    args = ["--layout", layout(damaged), "-o", out]
    damaged.call("load", *args, expect=4)
    assert not list(out.iterdir())
    damaged.call("load", *args, "--or-older", expect_message="a@2 is damaged and skipped")
    before = content(out)
    assert len(before) == 4 and b"".join(st.read(out / name)[0]["w"][2] for name in sorted(before)) == \
        np.random.default_rng(1).integers(0, 255, 4 << 20, dtype=np.uint8).tobytes()
    damaged.call("load", "a@2", *args, "--force", expect=4)
    assert content(out) == before


# ------------------------------------------------------------------------------------------------------------- pipes


def test_a_reader_that_does_not_read(store):
    store.save(1, state(1, width=300))
    process = subprocess.Popen([COMMAND, "load", store.path, "-o", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    size, deadline = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ), time.monotonic() + 60
    while struct.unpack("i", fcntl.ioctl(process.stdout, termios.FIONREAD, b"\0" * 4))[0] <= size - 4096:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert b"standard output is incomplete" in process.communicate()[1]


def opened(process, path):
    try:
        return any(os.readlink(entry.path) == str(path) for entry in os.scandir(f"/proc/{process.pid}/fd"))
    except OSError:  # a descriptor was closed meanwhile
        return False


@pytest.mark.parametrize("writer", [True, False])
def test_a_blob_that_nobody_writes(store, tmp_path, writer):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen([COMMAND, "save", store.path, "a@1", store.file(state(1)), "--blob", f"x={pipe}"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    held = open(pipe, "wb") if writer else None
    try:
        while not opened(process, pipe):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert b"interrupted" in process.communicate()[1]
    assert not store.checkpoints()
    if held:
        held.close()


def test_blobs_from_pipes(store, tmp_path):
    """One whose writer has ended, one whose writer begins later, one that is written slowly."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4096)
    os.mkfifo(tmp_path / "pipe")
    shell = f"""(sleep 0.2; cat big >pipe) & '{COMMAND}' save '{store.path}' a@1 '{store.file(state(1))}' \
        --blob x=<(echo 1; echo 2) --blob y=pipe --blob z=<(echo 3; sleep 0.2; echo 4) --blob e=<(true)"""
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    store.call("load", *[f"--blob={name}={tmp_path}/{name}" for name in "xyze"])
    assert [(tmp_path / name).read_bytes() for name in "xze"] == [b"1\n2\n", b"3\n4\n", b""]
    assert (tmp_path / "y").read_bytes() == (tmp_path / "big").read_bytes()


# ---------------------------------------------------------------------------------------- folders that export replaces


@pytest.mark.parametrize("name", ["mine/notes.txt", "a b", ".hidden", "%41", "a%2f", "%", "%2E%2E", "safetensors.metadata"])
def test_files_among_exported_blobs_stay(saved, name):
    out = saved.folder / "ex"
    saved.call("export", "-o", out)
    mine = out / "blobs" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("precious")
    before = content(out)
    assert name.split("/")[0] in saved.call("export", "--overwrite", "-o", out, expect=FAILED).err
    assert content(out) == before


def test_blobs_without_a_model_stay(saved):
    out = saved.folder / "ex"
    for name in ("notes.txt", "mine/notes.txt"):
        path = out / "blobs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
        assert "'blobs'" in saved.call("export", "--overwrite", "-o", out, expect=FAILED).err
        assert path.read_text() == "precious"


def test_exported_blobs_are_replaced(store, tmp_path):
    (tmp_path / "config").write_text("1")
    for step, names in ((1, ["a/b.c", ".x", "é", "plain-1.json"]), (2, ["other"])):
        store.save(step, state(step), *[f"--blob={name}={tmp_path}/config" for name in names])
    out = tmp_path / "ex"
    for step, names in ((1, ["%2Ex", "%C3%A9", "a%2Fb.c", "plain-1.json"]), (2, ["other"])):
        store.call("export", f"a@{step}", "--overwrite", "--max-shard-size", "20K", "-o", out)
        assert sorted(p.name for p in (out / "blobs").iterdir()) == names
