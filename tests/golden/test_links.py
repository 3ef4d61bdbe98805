"""The golden store of an early version: manifests that name own files only, and links that other checkpoints build on. Whatever is done to it, what stays loads to the same bits."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import ckd_reader
import make_links
from support_cli import CORRUPT, DONE, NOT_FOUND, Store

GOLDEN = Path(__file__).resolve().parent / "v1/links"
EXPECTED = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))["links"]["checkpoints"]
STEPS = (5, 6, 7, 8)
DEPENDENT = 8  # builds on a link of another one


@pytest.fixture
def old(tmp_path):
    store = Store(tmp_path)
    shutil.copytree(GOLDEN, store.path)
    return store


def name(step):
    return f"run@{step}"


def check(store, *steps):
    """By the command, without what it keeps ready, and by the reader."""
    shutil.rmtree(store.path / "data/k", ignore_errors=True)
    assert [c["step"] for c in store.checkpoints()] == list(steps)
    store.call("verify", "--quiet")
    for step in steps:
        out = store.folder / "loaded.safetensors"
        store.call("load", "--run", "run", "--step", step, "--out", out, "--force", "--quiet")
        size = int.from_bytes(out.read_bytes()[:8], "little")
        header, data = json.loads(out.read_bytes()[8:8 + size]), out.read_bytes()[8 + size:]
        checkpoint = ckd_reader.Store(store.path).checkpoint("run", step)
        tensors = EXPECTED[name(step)]["tensors"]
        assert set(checkpoint.tensors) == set(tensors) == set(header) - {"__metadata__"}
        for tensor, expected in tensors.items():
            begin, end = header[tensor]["data_offsets"]
            for values in (data[begin:end], checkpoint.tensor(tensor).tobytes()):
                assert hashlib.sha256(values).hexdigest() == expected["sha256"], (step, tensor)


def own_only(store):
    return {step for (_, step), m in ckd_reader.Store(store.path).manifests.items() if m.own_only}


def manifests(store):
    return {p.name: p.read_bytes() for p in (store.path / "data/m").iterdir()}


def test_the_store_has_what_it_is_for(old):
    opened = ckd_reader.Store(old.path)
    (_, step), holder = next(iter(make_links.links_of_others(opened)))
    assert step == DEPENDENT and any(m.id == holder for m in opened.manifests.values())
    assert own_only(old) == set(STEPS) - {5}
    check(old, *STEPS)


@pytest.mark.parametrize("options", [[], ["--max-depth", "1"], ["--max-depth", "2"], ["--recode-but", "1"]])
def test_compaction_names_all_files(old, options):
    """Also where nothing else is to be done."""
    for _ in range(2):
        old.call("compact", "--quiet", *options)
        assert own_only(old) == set()
        check(old, *STEPS)
    before = manifests(old)
    old.call("compact", "--quiet")
    assert manifests(old) == before


def test_dry_run_changes_nothing(old):
    before = manifests(old)
    old.call("compact", "--quiet", "--max-depth", "1", "--dry-run")
    assert manifests(old) == before


def test_compaction_with_a_policy(old):
    old.call("compact", "--quiet", "--keep-last", 2, "--undo", "0s")
    assert own_only(old) == set()
    check(old, 7, 8)


def test_compaction_spares_what_the_trash_needs(old):
    old.call("delete", name(DEPENDENT), "--undo", "1h", "--quiet")
    old.call("compact", "--quiet", "--max-depth", "1")
    check(old, *[s for s in STEPS if s != DEPENDENT])
    old.call("trash", "--restore", name(DEPENDENT), "--quiet")
    assert own_only(old) == set()
    check(old, *STEPS)


def test_the_trash_knows_another_checkpoint_of_that_name(old):
    """What was saved under the name of a dead checkpoint stays what it is."""
    old.call("delete", name(DEPENDENT), "--undo", "1h", "--quiet")
    old.call("load", "--run", "run", "--step", 7, "--out", old.folder / "7.safetensors", "--quiet")
    old.call("save", "--run", "run", "--step", DEPENDENT, "--base", "--quiet", old.folder / "7.safetensors")
    old.call("compact", "--quiet", "--max-depth", "1")
    listed = {c["step"]: c for c in old.checkpoints()}
    assert set(listed) == set(STEPS) and listed[DEPENDENT]["kind"] == "base"
    old.call("verify", "--quiet")
    old.call("trash", "--restore", name(DEPENDENT), expect=1, expect_message="was saved again; the earlier checkpoint cannot be restored")


@pytest.mark.parametrize("undo", ["0s", "1h"])
def test_deletion_of_what_others_build_on(old, undo):
    """No checkpoint needs the manifest of one in the trash."""
    old.call("delete", name(5), "--undo", undo, "--quiet")
    assert own_only(old) == set()
    check(old, 6, 7, 8)
    old.call("trash", "--empty", "--all", "--quiet")
    check(old, 6, 7, 8)


def test_collection_of_what_the_trash_builds_on(old):
    old.call("delete", name(DEPENDENT), "--undo", "1h", "--quiet")
    old.call("delete", name(5), name(6), name(7), "--undo", "0s", "--quiet")
    old.call("trash", "--empty", "--quiet")
    assert [m for m in manifests(old)] == ["run.8.1"]
    old.call("trash", "--restore", name(DEPENDENT), "--quiet")
    check(old, DEPENDENT)


def test_return_without_what_it_builds_on(old):
    """That may be removed for good then."""
    old.call("delete", *map(name, STEPS), "--undo", "1h", "--quiet")
    old.call("trash", "--restore", name(DEPENDENT), "--quiet")
    assert own_only(old) == set()
    old.call("trash", "--empty", "--all", "--quiet")
    check(old, DEPENDENT)


@pytest.mark.parametrize("dead", [False, True])
def test_a_manifest_that_vanished(old, dead):
    """Until it is back, nobody knows which files its dependents need: what they are known to depend on stays as it is."""
    before = ckd_reader.Store(old.path)
    (_, step), holder = next(iter(make_links.links_of_others(before)))
    lost = next(f"run.{k[1]}.{m.generation}" for k, m in before.manifests.items()
                if m.id in before.manifests["run", step].dependencies and m.id != holder)
    kept = next(m for m in before.manifests.values() if m.id == holder)
    if dead:
        old.call("delete", name(step), "--undo", "1h", "--quiet")
        (old.path / "catalog.db").unlink()  # which would know that it is lost, and let nothing be compacted
    (old.path / "data/m" / lost).rename(old.folder / lost)
    old.call("compact", "--quiet", "--max-depth", "1", expect=DONE if dead else CORRUPT)
    old.call("delete", f"run@{kept.step}", "--undo", "0s", "--quiet")
    old.call("trash", "--empty", "--quiet")
    if dead:
        old.call("trash", "--restore", name(step), expect=NOT_FOUND, expect_message="depends on has been removed")
    assert all((old.path / f"data/c/{f.id.hex()}.ckd").exists() for f in kept.own)
    (old.folder / lost).rename(old.path / "data/m" / lost)
    if dead:
        old.call("trash", "--restore", name(step), "--quiet")
    old.call("trash", "--empty", "--quiet")
    check(old, *[s for s in STEPS if s != kept.step])


def test_copies(old):
    (old.folder / "other").mkdir()
    other = Store(old.folder / "other")
    old.call("push", other.path, "--quiet")
    assert own_only(other) == set()
    check(other, *STEPS)
    other.call("delete", name(DEPENDENT), "--undo", "1h", "--quiet")
    other.call("compact", "--quiet", "--max-depth", "1")
    old.call("push", other.path, "--quiet")
    check(other, *STEPS)
    check(old, *STEPS)


def test_damage_does_not_keep_the_rest(old):
    """What cannot be read names all files that it may need, and is as it was when they are back."""
    links = ckd_reader.Store(old.path)
    holder = next(holder for _, holder in make_links.links_of_others(links))
    file = next(m for m in links.manifests.values() if m.id == holder).own[0].id.hex()
    path = old.path / f"data/c/{file}.ckd"
    path.rename(old.folder / "away")
    old.call("compact", "--quiet", "--max-depth", "1", expect=CORRUPT)
    assert own_only(old) == set()
    (old.folder / "away").rename(path)
    check(old, *STEPS)
