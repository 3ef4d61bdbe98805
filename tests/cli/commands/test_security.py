"""SECURITY.md says how the command treats stores, files and names from other people. Each test checks one of
its statements."""

import os
import pickle
import shutil
import sqlite3
import stat
import struct
import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, DONE, FAILED, NOT_FOUND, USAGE, run, store  # noqa: F401

FOLDERS = ["data", "data/c", "data/m", "data/i", "data/t", "data/k", "data/n", "data/p", "data/q", "data/r", "data/x"]
CHANGING = [("save", "--run", "a", "--step", 9), ("prune", "--keep-last", 1, "--undo", "0s"), ("compact",), ("repair",),
            ("rebuild",), ("trash", "--empty", "--all")]


def tensors(seed=0):
    return {"w": np.random.default_rng(seed).standard_normal((8, 8)).astype("<f4")}


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def any_end(store, name, *rest):
    files = [store.file(tensors(9))] if name == "save" else []
    done = subprocess.run([COMMAND, name, store.path, *map(str, rest), *files], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode in (DONE, FAILED, NOT_FOUND, CORRUPT), (name, done.returncode, done.stderr)
    return done


# ---- names

NAMES = ["../out", "/absolute", "..", "a/../../b", "x\x1b[31m", "con", "-rf", "$(id)", "'; rm -rf /; '"]


def test_names_of_tensors_are_no_paths(store, tmp_path):
    values = {name: np.full(4, i, "<f4") for i, name in enumerate(NAMES)}
    store.save(1, values)
    below = tmp_path / "deep" / "deeper"
    below.mkdir(parents=True)
    before = set(tmp_path.rglob("*")) | {below / "one.safetensors"}
    run("load", store.path, "--out", below / "one.safetensors")
    run("export", store.path, "--out", below / "model")
    back, _ = st.read(below / "one.safetensors")
    assert set(back) == set(NAMES)
    made = set(tmp_path.rglob("*")) - before
    assert {p.relative_to(below).parts[0] for p in made if store.path not in p.parents} == {"model"}
    assert "\x1b" not in store.call("show").out


@pytest.mark.parametrize("name", ["../a", "a/b", "/a", ".a", "-a", "", "a\nb", "a\x1b[1m", "a" * 129, "ä"])
def test_runs_and_tags_have_plain_names(store, name):
    store.save(1, tensors())
    before = contents(store.path)
    run("save", store.path, f"--run={name}", "--step", 2, store.file(tensors()), expect=USAGE)
    assert any_end_of_tag(store, name) != DONE
    assert contents(store.path) == before


def any_end_of_tag(store, name):
    done = subprocess.run([COMMAND, "tag", store.path, "--", name, "a@1"], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode in (FAILED, USAGE, NOT_FOUND)
    return done.returncode


# ---- links

@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_that_are_links_are_refused(store, tmp_path, folder):
    """Otherwise the folder behind the link would lose all files that this store does not name."""
    store.save(1, tensors())
    victim = type(store)(tmp_path / "victim")
    victim.folder.mkdir()
    victim.save(1, tensors(1))
    victim.save(2, tensors(2))
    target = victim.path / folder
    target.mkdir(exist_ok=True)
    before = contents(victim.path)
    shutil.rmtree(store.path / folder, ignore_errors=True)
    (store.path / folder).symlink_to(target)
    for command in CHANGING + [("list",), ("verify",), ("load", "--out", tmp_path / "x")]:
        done = any_end(store, *command)
        assert done.returncode == CORRUPT and "symbolic link" in done.stderr, (command, done.stderr)
    assert contents(victim.path) == before


@pytest.mark.parametrize("which", ["data/c", "data/m", "data/n"])
def test_files_that_are_links_are_not_followed(store, tmp_path, which):
    store.save(1, tensors())
    store.call("pin", "a@1")
    file = next(p for p in sorted((store.path / which).iterdir()))
    outside = tmp_path / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)
    before = outside.read_bytes()
    for command in [("list",), ("verify",), ("load", "--run", "a", "--step", 1, "--out", tmp_path / "x")] + CHANGING:
        any_end(store, *command)
    assert outside.read_bytes() == before
    if which == "data/c":
        assert not (tmp_path / "x").exists()


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(store, tmp_path):
    store.save(1, tensors())
    for name in ("lock", "readers"):
        (store.path / "data" / name).unlink(missing_ok=True)
        (store.path / "data" / name).symlink_to(tmp_path / "made")
    for command in CHANGING + [("list",), ("load", "--out", tmp_path / "x")]:
        any_end(store, *command)
    assert not (tmp_path / "made").exists()


def test_an_output_that_is_a_link_is_not_written_through(store, tmp_path):
    store.save(1, tensors())
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    run("load", store.path, "--out", tmp_path / "out", expect=FAILED)
    any_end(store, "load", "--force", "--out", tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"


# ---- the catalog

def test_a_catalog_that_is_a_link_is_left_alone(store, tmp_path):
    store.save(1, tensors())
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    (tmp_path / "empty.db").write_bytes(b"")
    for step, target in enumerate((other, tmp_path / "empty.db", tmp_path / "absent.db"), start=2):
        before = target.read_bytes() if target.exists() else None
        (store.path / "catalog.db").unlink()
        (store.path / "catalog.db").symlink_to(target)
        assert f"a@{step - 1}" in store.call("show", expect_message="not a regular file").out
        store.save(step, tensors(step), expect_message="not a regular file")
        assert (target.read_bytes() if target.exists() else None) == before
        assert not (store.path / "catalog.db").is_symlink()


def write_journal(database, victim):
    """Writes a journal as if a writer had left it, of a transaction over several databases, which the file
    `victim` lists."""
    raw = database.read_bytes()
    page = struct.unpack(">H", raw[16:18])[0] or 65536
    magic = bytes.fromhex("d9d505f920a163d7")
    head = magic + struct.pack(">IIIII", 0, 1, len(raw) // page, 512, page)
    name = str(victim).encode()
    record = struct.pack(">I", 2 ** 30 // page + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    database.with_name(database.name + "-journal").write_bytes(head.ljust(512, b"\0") + record)


def test_a_journal_deletes_no_file_that_it_names(store, tmp_path):
    store.save(1, tensors())
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for command in [("save", "--run", "a", "--step", 2), ("list",), ("pin", "a@1"), ("rebuild",)]:
        write_journal(store.path / "catalog.db", victim)
        any_end(store, *command)
        assert victim.read_text() == "precious", command
    assert [c["step"] for c in store.checkpoints()] == [1, 2]


def test_triggers_of_a_catalog_do_not_run(store, tmp_path):
    store.save(1, tensors())
    db = sqlite3.connect(store.path / "catalog.db")
    db.execute("CREATE TRIGGER steal AFTER INSERT ON checkpoints BEGIN DELETE FROM runs; END")
    db.execute("CREATE VIEW endless AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n")
    db.commit()
    db.close()
    any_end(store, "list")
    any_end(store, "save", "--run", "a", "--step", 2)
    assert [c["step"] for c in store.checkpoints()] == [1, 2]


# ---- permissions

@pytest.mark.parametrize("mode, warned", [(0o777, True), (0o775, False), (0o1777, False)])
def test_world_writable_stores_are_reported(store, mode, warned):
    store.save(1, tensors())
    (store.path / "data" / "c").chmod(mode)
    store.call("list", expect_message="is world-writable" if warned else "")
    assert ("is world-writable" in any_end(store, "list").stderr) == warned


def test_files_have_the_permissions_of_the_umask(store):
    before = os.umask(0o077)
    try:
        store.save(1, tensors())
        store.save(2, tensors(1))
    finally:
        os.umask(before)
    for path in [store.path, *store.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


# ---- archives from elsewhere

def test_a_copy_does_not_follow_links(store, tmp_path):
    source = type(store)(tmp_path / "source")
    source.folder.mkdir()
    source.save(1, tensors())
    chunk = next((source.path / "data/c").iterdir())
    shutil.move(chunk, tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    store.save(5, tensors(5), run_name="own")
    before = store.checkpoints()
    run("pull", store.path, source.path, expect=CORRUPT)
    assert store.checkpoints() == before


def test_a_copy_refuses_damaged_files(store, tmp_path):
    source = type(store)(tmp_path / "source")
    source.folder.mkdir()
    source.save(1, tensors())
    chunk = next((source.path / "data/c").iterdir())
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 1
    chunk.write_bytes(raw)
    store.save(5, tensors(5), run_name="own")
    before = store.checkpoints()
    run("pull", store.path, source.path, expect=CORRUPT)
    assert store.checkpoints() == before


# ---- no code

def test_pickles_are_not_read(store, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    run("save", store.path, "--run", "a", "--step", 1, tmp_path / "model.safetensors", expect=CORRUPT)
    assert not (tmp_path / "ran").exists()
