"""Manifests that are lost: the loss is noticed whatever else happened to the name, nothing that the checkpoint needs is
removed, and repair brings every value back."""

import contextlib
import fcntl
import os
import shutil
import sqlite3
import struct
import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, DONE, NOT_FOUND, Store, run, store  # noqa: F401

GONE = "is gone, but the checkpoint was not deleted"


def walk(count, seed=1):
    """States of a run in which a tenth of the values moves at a time."""
    noise = np.random.default_rng(seed)
    state = {name: noise.standard_normal(shape).astype(np.float32) for name, shape in (("a.weight", (96, 64)), ("b.weight", (64, 100)))}
    for _ in range(count):
        state = {name: (x + (noise.random(x.shape) < 0.1) * noise.standard_normal(x.shape) * 1e-3).astype(np.float32) for name, x in state.items()}
        yield state


STATES = [*walk(9)]
OTHER = [*walk(1, seed=2)][0]


def manifest(store, name):
    return store.path / "data/m" / name


def lose(store, name):
    manifest(store, name).unlink()


def chunks(store):
    folder = store.path / "data/c"
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


def save(store, step, tensors, run_name="r", **options):
    """Returns the chunk file that the save adds."""
    before = chunks(store)
    store.save(step, tensors, "--max-load-cost", 100, "--newest-load-cost", 100, run_name=run_name, **options)
    new, = chunks(store) - before
    return store.path / "data/c" / new


def save_all(store, count):
    return [save(store, step + 1, STATES[step]) for step in range(count)]


def loads(store, step, tensors, run_name="r"):
    got, _ = store.load("--run", run_name, "--step", step)
    return st.same(got, tensors)


def damaged(store):
    return [d["file"] for d in store.call("verify", "--json", expect=CORRUPT).json()["damage"]]


def repair(store, *args, message=""):
    """Repairs everything. `verify` agrees."""
    result = store.call("repair", "--json", *args, expect_message=message).json()
    store.call("verify", expect_message="")
    return [r["file"] for r in result["repaired"]]


@contextlib.contextmanager
def reader(store):
    """Somebody reads the store, so no file is removed."""
    with open(store.path / "data/readers", "r+b") as lock:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
        yield


def test_an_earlier_checkpoint_of_the_name_is_in_the_trash(store):
    save_all(store, 2)
    store.call("delete", "r@2", "--undo", "1h")
    save(store, 2, STATES[4])
    save(store, 3, STATES[5])
    lose(store, "r.2.1")
    assert damaged(store) == ["data/m/r.2.1"]
    assert repair(store, message=GONE) == ["data/m/r.2.1"]
    assert loads(store, 2, STATES[4]) and loads(store, 3, STATES[5])


def test_the_trash_is_not_emptied_while_an_earlier_checkpoint_of_the_name_is_in_it(store):
    save_all(store, 2)
    store.call("delete", "r@2", "--undo", "1s")
    save(store, 2, STATES[4])
    store.call("delete", "r@1", "--undo", "1s")
    lose(store, "r.2.1")
    before = chunks(store)
    subprocess.run(["sleep", "1.1"], check=True)
    save(store, 1, OTHER, run_name="z", expect_message="run ckptdelta repair first")
    assert before < chunks(store)
    repair(store, message="")
    assert loads(store, 2, STATES[4])


def test_lost_twice_under_one_name(store):
    """Both come back. The later one keeps the name."""
    save_all(store, 2)
    lose(store, "r.2.0")
    save(store, 2, STATES[4], expect_message=GONE)
    save(store, 3, STATES[5])
    lose(store, "r.2.1")
    save(store, 1, OTHER, run_name="z", expect_message=GONE)
    assert len(list((store.path / "data/q").glob("r.2.*.lost"))) == 2
    assert repair(store, message="r@2 was saved again; the lost checkpoint comes back as r.lost@2") == ["data/m/r.2.1", "data/m/r.2.0"]
    assert loads(store, 2, STATES[4]) and loads(store, 2, STATES[1], "r.lost")
    assert not list((store.path / "data/q").glob("*.lost"))


def test_lost_and_saved_again(store):
    """As a trainer does that starts again. The later checkpoint loads all the time, and nothing stays blocked."""
    save_all(store, 3)
    lose(store, "r.3.0")
    save(store, 3, STATES[6], expect_message=GONE)
    assert loads(store, 3, STATES[6])
    result = store.call("verify", "--json", expect=CORRUPT).json()
    assert [(d["file"], d["checkpoints"]) for d in result["damage"]] == [("data/m/r.3.0", [])]
    assert "an earlier checkpoint of this name is lost" in result["damage"][0]["what"]
    repair(store, message="comes back as r.lost@3")
    assert loads(store, 3, STATES[6]) and loads(store, 3, STATES[2], "r.lost")
    store.call("compact")


def test_what_came_back_stays_until_its_run_is_named(store):
    """Four steps were lost and saved again. Neither a policy of all runs nor `prune` without a run deletes them."""
    save_all(store, 4)
    for step in range(1, 5):
        lose(store, f"r.{step}.0")
    for step in range(1, 5):
        save(store, step, STATES[4 + step], expect_message=GONE if step == 1 else "")
    repair(store, message="comes back as r.lost@1")
    back = [f"r.lost@{step}" for step in range(1, 5)]
    listed = lambda: [f"{c['run']}@{c['step']}" for c in store.json("list")["checkpoints"] if c["run"] == "r.lost"]
    store.call("policy", "--keep-last", "2", "--auto")
    store.call("prune")
    store.call("prune", "--keep-last", "2")
    save(store, 9, OTHER, expect_message="by its policy")
    assert listed() == back
    assert loads(store, 1, STATES[0], "r.lost")
    assert "no policy" in store.call("policy", "--run", "r.lost", "--clear", expect=NOT_FOUND).err
    store.call("prune", "--run", "r.lost", "--keep-last", "3")
    assert listed() == back[1:]
    store.call("policy", "--run", "r.lost", "--keep-last", "2")
    store.call("prune")
    assert listed() == back[2:]


def test_another_run_takes_the_name(store):
    save(store, 1, STATES[0], run_name="q")
    save(store, 1, OTHER)
    lose(store, "q.1.0")
    store.call("rename", "r", "q", expect_message=GONE)
    repair(store, message="comes back as q.lost@1")
    assert loads(store, 1, OTHER, "q") and loads(store, 1, STATES[0], "q.lost")


def test_only_a_deleted_child_names_its_file(store):
    save_all(store, 3)
    lose(store, "r.2.0")
    store.call("delete", "r@3", "--undo", "0s", expect_message="their files stay for now")
    repair(store, message="the trash is not emptied")
    assert loads(store, 2, STATES[1])


# This program deletes a checkpoint by a handle that it opened before the loss.
DELETES = """
import os, sys, ckptdelta
store, lost, run, step = sys.argv[1:]
with ckptdelta.open(store) as s:
    os.unlink(lost)
    s.delete(run=run, step=int(step), undo_s=0)
"""


def test_a_deletion_by_a_handle_that_was_opened_before_the_loss(store):
    """The loss stays a loss: the deletion does not make it doubtful."""
    save_all(store, 3)
    package = os.path.join(os.environ.get("CKPTDELTA_BUILD", "build/current"), "python")
    env = {**os.environ, "PYTHONPATH": package}
    python = os.environ.get("PYTHON", "python3")
    if subprocess.run([python, "-c", "import ckptdelta"], env=env, capture_output=True).returncode:
        pytest.skip("the Python package is not built")
    subprocess.run([python, "-c", DELETES, store.path, manifest(store, "r.2.0"), "r", "1"], env=env, check=True, capture_output=True)
    assert damaged(store) == ["data/m/r.2.0"]
    repair(store, message="")
    assert loads(store, 2, STATES[1]) and loads(store, 3, STATES[2])


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_the_writer_died_after_its_commit(store):
    """Recovery does not take its file for that of a save that never ended."""
    save_all(store, 2)
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("the leak sanitizer does not run under strace")
    for at in range(1, 12):
        shutil.copytree(store.path, store.folder / f"try{at}")
        tried = Store(store.folder)
        tried.path = store.folder / f"try{at}"
        done = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=unlink", "-e", f"inject=unlink:signal=KILL:when={at}", COMMAND,
                               "save", tried.path, "r@3", store.file(STATES[2])], capture_output=True)
        if done.returncode == 0:
            break
        with contextlib.closing(sqlite3.connect(tried.path / "catalog.db")) as catalog:
            known = catalog.execute("SELECT count(*) FROM checkpoints WHERE step = 3").fetchone()[0]
        if os.listdir(tried.path / "data/i") and known:
            lose(tried, "r.3.0")
            repair(tried, message="cleaned up after a writer of r@3 that died")
            assert loads(tried, 3, STATES[2])
            return
    pytest.fail("no kill left an intent behind a committed checkpoint")


def test_of_two_copies_of_a_record_the_unnamed_one_is_damaged(store):
    """The other one, in a file that is named, serves."""
    files = save_all(store, 9)
    store.call("delete", "r@9", "--undo", "1h")
    store.call("compact", "--pack-below", "1M")
    store.call("trash", "--restore", "r@9")
    left = [f for f in files[:4] if f.exists()]
    lose(store, "r.9.0")
    for path in left:
        content = bytearray(path.read_bytes())
        for at in range(200, len(content) - 1000, 400):
            content[at] ^= 0x20
        path.write_bytes(content)
    assert "data/m/r.9.0" in repair(store, message=GONE)
    assert loads(store, 9, STATES[8])


def test_files_that_nothing_needs_are_no_damage(store):
    """A checkpoint came back by a copy whose files have other names. Repair puts the old file aside."""
    save_all(store, 9)
    other = store.folder / "other"
    store.call("push", other)
    run("compact", other, "--max-depth", "1", "--pack-below", "1M")
    last = chunks(store)
    lose(store, "r.9.0")
    store.call("pull", other, "r@9", expect_message="")
    spare = "belong to no checkpoint"
    store.call("verify", expect_message=spare)
    moved = repair(store, message=spare)
    assert len(moved) == 1 and moved[0].startswith("data/c/") and moved[0].split("/")[-1] in last
    assert all(loads(store, step + 1, STATES[step]) for step in range(9))


def test_only_a_replaced_generation_is_lost(store):
    save_all(store, 5)
    with reader(store):
        store.call("compact", "--max-depth", "1", "--pack-below", "0", expect_message="")
        older = sorted(p.name for p in (store.path / "data/m").iterdir() if p.name.endswith(".0") and manifest(store, p.name[:-1] + "1").exists())
        lose(store, older[-1])
    repair(store, message="")
    assert all(loads(store, step + 1, STATES[step]) for step in range(5))


@pytest.mark.parametrize("how", ["put back", "pulled"])
def test_what_is_kept_of_a_loss_blocks_nothing_once_it_is_back(store, how):
    save_all(store, 3)
    other = store.folder / "other"
    store.call("push", other)
    content = manifest(store, "r.2.0").read_bytes()
    lose(store, "r.2.0")
    save(store, 1, OTHER, run_name="z", expect_message=GONE)
    if how == "put back":
        manifest(store, "r.2.0").write_bytes(content)
        store.call("rename", "r", "rr", expect_message="")
    else:
        store.call("pull", other, "r@2", "--as", "q")
    store.call("compact")
    store.call("delete", "z@1", "--undo", "0s")
    assert len(chunks(store)) == 3
    repair(store, message="")
    assert not list((store.path / "data/q").glob("*.lost"))


def test_a_manifest_that_is_put_back_does_not_take_the_place_of_a_later_save(store):
    save_all(store, 3)
    store.call("rename", "r", "q")
    store.call("rename", "q", "r")
    name, = [p.name for p in (store.path / "data/m").iterdir() if p.name.startswith("r.3.")]
    content = manifest(store, name).read_bytes()
    lose(store, name)
    save(store, 3, STATES[6], expect_message=GONE)
    manifest(store, name).write_bytes(content)
    assert int(name.rsplit(".", 1)[1]) > 0 and loads(store, 3, STATES[6])


def test_members_of_parity_groups_are_not_put_aside(store):
    files = save_all(store, 9)
    other = store.folder / "other"
    store.call("push", other)
    run("compact", other, "--max-depth", "1", "--pack-below", "1M")
    store.call("parity", "--group", "16+1")
    lose(store, "r.9.0")
    store.call("pull", other, "r@9", expect_message="")
    assert files[8].exists() and repair(store) == []
    content = bytearray(files[4].read_bytes())
    content[len(content) // 2] ^= 1
    files[4].write_bytes(content)
    assert store.call("repair", "--json", expect_message="").json()["repaired"]
    assert all(loads(store, step + 1, STATES[step]) for step in range(9))


def test_two_generations_are_lost_with_a_deleted_parent(store):
    """The older generation alone names the file of the deleted parent. Whichever files a repair finds first, none is left."""
    runs = "abcdef"
    for name in runs:
        for step in range(1, 4):
            save(store, step, STATES[step - 1], run_name=name)
        store.call("delete", f"{name}@2", "--undo", "0s")
    with reader(store):
        store.call("compact", "--max-depth", "1", "--pack-below", "0", expect_message="")
    for name in runs:
        lose(store, f"{name}.3.0")
        lose(store, f"{name}.3.1")
    repair(store, message="")
    assert all(loads(store, 3, STATES[2], name) for name in runs)
    store.call("trash", "--empty")


def test_compaction_moved_the_records_since_the_catalog_was_copied(store):
    """The catalog's row is that of the generation before, and knows none of the files."""
    save_all(store, 6)
    copy = shutil.copy(store.path / "catalog.db", store.folder / "catalog.db")
    store.call("compact", "--max-depth", "1", "--pack-below", "1M")
    lose(store, "r.6.1")
    shutil.copy(copy, store.path / "catalog.db")
    assert repair(store, message=GONE) == ["data/m/r.6.0"]
    assert all(loads(store, step + 1, STATES[step]) for step in range(6))


def test_a_file_of_an_unknown_checkpoint_stops_no_removal(store):
    """The catalog is from before the save, so nobody knows whose file it is. It stays, and others go."""
    save_all(store, 2)
    copy = shutil.copy(store.path / "catalog.db", store.folder / "catalog.db")
    unknown = save(store, 3, STATES[2])
    other = save(store, 1, OTHER, run_name="z")
    lose(store, "r.3.0")
    shutil.copy(copy, store.path / "catalog.db")
    assert damaged(store) == [f"data/c/{unknown.name}"]
    store.call("delete", "z@1", "--undo", "0s")
    assert unknown.exists() and not other.exists()
    unknown.unlink()
    store.call("verify")
