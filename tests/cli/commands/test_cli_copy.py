"""copy, push, pull: what is selected, printed and refused."""

import signal
import subprocess
import time

import numpy as np
import pytest

from support_cli import (COMMAND, CORRUPT, FAILED, NOT_FOUND, USAGE, Store, check_documented, run, state,  # noqa: F401
                         store)


@pytest.fixture
def runs(store):
    """Run a: a base at 1, deltas at 2 and 3, a base at 4. Run b: a base at 1."""
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    store.save(4, state(1, 4), "--base")
    store.save(1, state(7, 1), run_name="b")
    return store


@pytest.fixture
def other(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    return Store(folder)


def names(of):
    return [f"{c['run']}@{c['step']}" for c in of.checkpoints()]


def same(a, b, name):
    run_name, step = name.split("@")
    x, y = a.load("--run", run_name, "--step", step), b.load("--run", run_name, "--step", step)
    assert x == y and x[0]


def copied(result):
    return [c["checkpoint"] for c in result["checkpoints"] if c["state"] == "copied"]


def test_push_and_pull(runs, other):
    done = runs.json("push", other.path)
    check_documented(done, "`push`")
    assert done["copied"] == 5 and done["files"] == 5 and not done["dry_run"]
    assert names(other) == names(runs)
    for name in names(runs):
        same(runs, other, name)
    assert other.json("verify")["ok"]
    again = runs.json("push", other.path)
    assert again["copied"] == again["files"] == again["bytes"] == 0
    assert {c["state"] for c in again["checkpoints"]} == {"present"}
    other.save(5, state(1, 5))
    assert copied(runs.json("pull", other.path, "--run", "a")) == ["a@5"]
    same(runs, other, "a@5")


def test_selection(runs, other):
    assert copied(run("copy", runs.path, other.path, "--run", "b", "--json").json()) == ["b@1"]
    runs.call("tag", "good", "a@2")
    done = runs.json("push", other.path, "--tag", "good", "--tags")
    assert [c["checkpoint"] for c in done["checkpoints"]] == ["a@2"]
    assert other.load("--run", "a", "--step", 2) == runs.load("--run", "a", "--step", 2)
    assert done["tags"] == 1 and other.json("tag")["tags"][0]["checkpoint"] == "a@2"
    assert copied(runs.json("push", other.path, "--run", "a", "--step", "latest", "--dry-run")) == ["a@4"]
    assert copied(runs.json("push", other.path, "--run", "a", "--step", "2:3", "--dry-run")) == ["a@3"]
    assert copied(runs.json("push", other.path, "--run", "a", "--step", ":3", "--step", "4", "--dry-run")) == ["a@1", "a@3", "a@4"]
    assert copied(runs.json("push", other.path, "--run", "a", "--step", "3:", "--dry-run")) == ["a@3", "a@4"]
    assert names(other) == ["a@2", "b@1"]


def test_output(runs, other):
    out = runs.call("push", other.path, "--run", "a", "--step", "2", "--dry-run").out
    assert "would be copied" in out and "would copy 1 checkpoint in 2 files" in out
    assert not other.path.exists()
    out = runs.call("push", other.path, "--run", "a", "--step", "2").out
    assert "copied 1 checkpoint in 2 files" in out
    out = runs.call("push", other.path, "--run", "a").out
    assert out.endswith("; 1 is there already\n") and out.count("is there already") == 1
    assert "is there already" in runs.call("push", other.path, "--run", "a", "-v").out
    assert runs.call("push", other.path, "-q").out == ""


def test_the_size_is_exact(runs, other):
    def size():
        return sum(p.stat().st_size for n, p in other.files().items() if str(n).startswith(("data/c", "data/m")))
    said = runs.json("push", other.path, "--dry-run")
    assert runs.json("push", other.path)["bytes"] == said["bytes"] == size()
    other.call("delete", "a@4", "--undo", "0s")
    other.call("trash", "--empty")
    before = size()
    said = runs.json("push", other.path, "--dry-run", "--as", "c", "--run", "a", "--step", 4)
    runs.json("push", other.path, "--as", "c", "--run", "a", "--step", 4)
    assert size() - before == said["bytes"] and names(other)[-1] == "c@4"
    same_values = [s.load("--run", r, "--step", 4)[0]["step"] for s, r in ((runs, "a"), (other, "c"))]
    assert same_values[0] == same_values[1]


def test_refused(runs, other):
    other.save(2, state(9, 2))
    before = other.files().keys()
    said = runs.call("push", other.path, expect=FAILED).err
    assert "a@2 is another checkpoint in the destination; nothing was copied" in said and "--as RUN" in said
    assert other.files().keys() == before
    runs.call("push", runs.path, expect=USAGE, expect_message="are the same store")
    link = runs.folder / "link"
    link.symlink_to(runs.path)
    runs.call("pull", link, expect=USAGE, expect_message="are the same store")
    runs.call("push", other.path, "--run", "none", expect=NOT_FOUND, expect_message="there is no run none")
    runs.call("push", other.path, "--run", "a", "--step", "7:9", expect=NOT_FOUND, expect_message="from step 7 to 9")
    runs.call("push", other.path, "--step", "1", expect=USAGE, expect_message="several runs")
    runs.call("push", other.path, "--as", "c", expect=USAGE, expect_message="as one run")
    runs.call("tag", "good", "a@2")
    for named in (["a@1"], ["@good"], ["--tag", "good"], ["--step", "1", "a@1"]):
        runs.call("push", other.path, "--run", "b", *named, expect=USAGE, expect_message="is not of the run b")
    assert other.files().keys() == before
    assert copied(runs.json("push", other.path, "--run", "a", "a@1", "@good", "--as", "c", "--dry-run")) == ["c@1", "c@2"]
    run("copy", other.folder / "none", other.path, expect=NOT_FOUND)
    for bad in ("--step", "9:1"), ("--step", ":"), ("--step", "x"), ("--rate", "0"), ("third",):
        runs.call("push", other.path, *bad, expect=USAGE)
    runs.call("push", expect=USAGE, expect_message="name two stores")


def test_damage_is_named(runs, other):
    manifest = runs.json("show", "--run", "a", "--step", 4)
    assert manifest
    newest = max((p for n, p in runs.files().items() if "data/c" in str(n)), key=lambda p: p.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[200] ^= 1
    newest.write_bytes(content)
    said = runs.call("push", other.path, expect=CORRUPT).err
    assert "b@1 in" in said and newest.name in said and "ckptdelta verify" in said
    assert names(other) == ["a@1", "a@2", "a@3", "a@4"] and other.json("verify")["ok"]


def test_the_hint_names_the_store_that_is_damaged(runs, other):
    runs.call("push", other.path, "a@4")
    chunk, = (name for name in other.files() if str(name).startswith("data/c/"))
    for path in runs.path / chunk, other.path / chunk:
        path.unlink()
    said = runs.call("push", other.path, "a@4", expect=CORRUPT).err
    assert "the source cannot replace it" in said and f"'ckptdelta verify {other.path}'" in said
    said = runs.call("push", other.folder / "third", "a@4", expect=CORRUPT).err
    assert f"'ckptdelta verify {runs.path}'" in said


def test_the_rest_is_copied(runs, other):
    """a@2 is damaged, and a@3 builds on it. All others are copied. Each that is not copied is named, also
    with -q."""
    by_age = sorted((p for n, p in runs.files().items() if "data/c" in str(n)), key=lambda p: p.stat().st_mtime_ns)
    content = bytearray(by_age[1].read_bytes())
    content[200] ^= 1
    by_age[1].write_bytes(content)
    said = runs.call("push", other.path, "-q", expect=CORRUPT)
    assert "a@2 in" in said.err and not said.out
    assert "2 checkpoints were not copied" in said.err
    assert names(other) == ["a@1", "a@4", "b@1"] and other.json("verify")["ok"]
    result = runs.json("push", other.path, expect=CORRUPT)
    check_documented(result, "copy")
    assert result["left"] == 2 and result["copied"] == 0
    assert {c["checkpoint"]: bool(c["why"]) for c in result["checkpoints"] if c["state"] == "left"} == \
        {"a@2": True, "a@3": True}
    text = runs.call("push", other.path, expect=CORRUPT)
    assert "3 are there already" in text.out


def test_one_stays_in_the_trash(runs, other):
    """a@4 is in the trash of the destination, where another a@4 was saved and deleted as well. The others are copied."""
    runs.call("push", other.path, "--run", "a")
    other.call("delete", "a@4")
    other.save(4, state(5, 4), "--base", run_name="a")
    other.call("delete", "a@4", "a@3")
    said = runs.call("push", other.path, expect=CORRUPT)
    assert "a@4 was not copied: it is in the trash of" in said.err and "--as" not in said.err
    assert names(other) == ["a@1", "a@2", "a@3", "b@1"] and other.json("verify")["ok"]
    result = other.json("pull", runs.path, expect=CORRUPT)
    check_documented(result, "copy")
    assert result["left"] == 1 and [c["checkpoint"] for c in result["checkpoints"] if c["state"] == "left"] == ["a@4"]
    other.call("trash", "--empty", "--all")
    runs.call("push", other.path)
    assert names(other) == names(runs)


def test_two_pushes_of_one_file(store, other, tmp_path):
    """A push is stopped while another one commits most of the same checkpoints, with a damaged copy of their common file."""
    noise = np.random.default_rng(4).integers(0, 256, (10, 40000), dtype=np.uint8)
    for step in range(10):
        store.save(step, {"w": noise[step]}, "--base")
    store.call("compact", "--pack-below", "8M")
    (tmp_path / "whole").mkdir()
    whole = Store(tmp_path / "whole")
    store.call("push", whole.path)
    pack = max((p for n, p in store.files().items() if str(n).startswith("data/c/")), key=lambda p: p.stat().st_size)
    content = bytearray(pack.read_bytes())
    assert noise[1][:64].tobytes() in content
    content[content.index(noise[0][:64].tobytes())] ^= 1
    pack.write_bytes(content)
    slow = subprocess.Popen([COMMAND, "push", whole.path, other.path, "--rate", "200K", "-q"])
    while not other.path.exists() or not any(p.stat().st_size > 4096 for n, p in other.files().items() if str(n).startswith("data/x/")):
        time.sleep(0.01)
    slow.send_signal(signal.SIGSTOP)
    assert "a@0 in" in store.call("push", other.path, expect=CORRUPT).err
    assert names(other) == [f"a@{step}" for step in range(1, 10)]
    slow.send_signal(signal.SIGCONT)
    assert slow.wait(60) == 0
    for step in range(10):
        same(whole, other, f"a@{step}")
    assert other.json("verify")["ok"]


def test_a_refused_push_restores_nothing(runs, other):
    """Of what is pushed one is in the destination's trash, and the name of another one is taken."""
    runs.call("push", other.path, "a@1")
    other.call("delete", "a@1")
    other.save(4, state(9, 4))
    before = other.json("trash"), names(other)
    assert "a@4" in runs.call("push", other.path, "--run", "a", expect=FAILED).err
    assert (other.json("trash"), names(other)) == before


@pytest.mark.parametrize("way", ["push", "rename"])
def test_a_lost_manifest_comes_back_too_late(runs, other, way):
    """Another checkpoint has its name by now. That one stays, and the lost one does not take its place."""
    for generation in range(3):
        other.save(2, state(generation, 2), run_name="c")
        if generation < 2:
            other.call("delete", "c@2")
    manifest = other.path / "data/m/c.2.2"
    content = manifest.read_bytes()
    manifest.unlink()
    other.save(1, state(9, 1), run_name="d", expect_message="the manifest of c@2 is gone")
    assert "the manifest is lost" in other.call("verify", expect=CORRUPT).out
    if way == "push":
        runs.call("rename", "a", "c")
        runs.call("push", other.path, "c@2", "c@1")
    else:
        runs.call("push", other.path, "--run", "a")
        other.call("rename", "a", "c")
        runs.call("rename", "a", "c")
    manifest.write_bytes(content)
    same(runs, other, "c@2")
    other.call("rebuild")
    same(runs, other, "c@2")


def test_an_interrupted_copy_continues(store, other):
    noise = np.random.default_rng(3).integers(0, 256, 1 << 22, dtype=np.uint8)
    store.save(1, {"w": noise})
    process = subprocess.Popen([COMMAND, "push", store.path, other.path, "--rate", "1M"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "the next copy continues" in err
    assert names(other) == []
    part = [p for n, p in other.files().items() if str(n).startswith("data/x/")]
    assert len(part) == 2 and 1 << 18 <= max(p.stat().st_size for p in part) < 1 << 22
    assert store.json("push", other.path)["copied"] == 1
    assert not [n for n in other.files() if str(n).startswith("data/x/")]
    same(store, other, "a@1")
