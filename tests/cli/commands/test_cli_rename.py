"""rename: a run gets another name everywhere."""

import pytest

from support_cli import CORRUPT, FAILED, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401
import support_safetensors as st


@pytest.fixture
def filled(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    store.save(7, state(2, 7), run_name="b")
    return store


def names(store):
    return [f"{c['run']}@{c['step']}" for c in store.checkpoints()]


def test_the_new_name_is_used_everywhere(filled):
    filled.call("tag", "best", "a@2")
    filled.call("pin", "a@3")
    filled.call("policy", "--run", "a", "--keep-last", 2)
    before = {c["step"]: c["id"] for c in filled.checkpoints()}
    times = [s["total_s"] for s in filled.json("timeline", "--run", "a")["saves"]]
    told = filled.json("rename", "a", "new.1")
    check_documented(told, "`rename`")
    assert told == {"schema": 1, "dry_run": False, "from": "a", "to": "new.1", "checkpoints": 3}
    assert names(filled) == ["b@7", "new.1@1", "new.1@2", "new.1@3"]
    assert {c["step"]: c["id"] for c in filled.checkpoints()} == before
    assert filled.call("complete", "runs").out.split() == ["b", "new.1"]
    assert "new.1@2" in filled.call("tag").out and "new.1@3" in filled.call("pin").out
    assert [p["run"] for p in filled.json("policy")["policies"]] == ["new.1"]
    assert [s["total_s"] for s in filled.json("timeline", "--run", "new.1")["saves"]] == times
    assert {r["run"] for r in filled.json("report")["by_run"]} == {"b", "new.1"}
    plan = filled.json("prune", "--dry-run")
    assert [(c["checkpoint"], c["deleted"]) for c in plan["checkpoints"]] == [("new.1@1", True), ("new.1@2", False), ("new.1@3", False)]
    tensors, _ = filled.load("new.1@2")
    assert tensors == st.read(filled.folder / "in2.safetensors")[0]
    assert "it has: b, new.1" in filled.call("load", "a@2", "--out", filled.folder / "x", expect=NOT_FOUND).err
    filled.call("verify")
    listed = filled.checkpoints()
    filled.call("rebuild")
    assert filled.checkpoints() == listed


def test_a_run_continues_under_its_new_name(filled):
    assert filled.call("rename", "a", "c").out == "renamed a to c: 3 checkpoints\n"
    filled.save(4, state(1, 4), run_name="c")
    assert filled.checkpoints()[-1]["parent"] == "c@3"
    filled.save(5, state(1, 5))  # a new run begins under the old name
    assert [c["kind"] for c in filled.checkpoints() if c["run"] == "a"] == ["base"]
    refused = filled.call("rename", "c", "a", expect=FAILED)
    assert "has a run 'a' already" in refused.err
    assert filled.call("rename", "a", "d").out == "renamed a to d: 1 checkpoint\n"
    filled.call("rename", "c", "a")
    assert names(filled) == ["a@1", "a@2", "a@3", "a@4", "b@7", "d@5"]


def test_a_dry_run_changes_nothing(filled):
    before = {name: path.read_bytes() for name, path in filled.files().items() if name.parts[:2] in (("data", "m"), ("data", "n"))}
    assert filled.call("rename", "a", "c", "-n").out == "would rename a to c: 3 checkpoints\n"
    assert filled.json("rename", "a", "c", "--dry-run")["dry_run"] is True
    filled.call("rename", "a", "b", "-n", expect=FAILED)
    assert {name: path.read_bytes() for name, path in filled.files().items() if name in before} == before
    assert names(filled) == ["a@1", "a@2", "a@3", "b@7"]


def test_renames_that_are_refused(filled):
    assert "no run 'x'; it has: a, b" in filled.call("rename", "x", "y", expect=NOT_FOUND).err
    assert "not a valid run name" in filled.call("rename", "a", "c/d", expect=USAGE).err
    assert "has the name 'a' already" in filled.call("rename", "a", "a", expect=USAGE).err
    assert "name the run and its new name" in filled.call("rename", "a", expect=USAGE).err
    assert "'d' is one too many" in filled.call("rename", "a", "c", "d", expect=USAGE).err
    filled.call("policy", "--run", "a", "--keep-last", 2)
    filled.call("policy", "--run", "c", "--keep-last", 2)
    assert "both have a policy" in filled.call("rename", "a", "c", expect=FAILED).err
    [manifest] = filled.path.glob("data/m/b.7.0")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    filled.call("rename", "a", "d", expect=CORRUPT)
    assert sorted(p.name for p in filled.path.glob("data/m/*")) == ["a.1.0", "a.2.0", "a.3.0", "b.7.0"]


def test_the_trash_keeps_the_old_name(filled):
    filled.call("delete", "a@3")
    filled.call("rename", "a", "c")
    assert names(filled) == ["b@7", "c@1", "c@2"]
    filled.call("trash", "--restore", "a@3")
    assert names(filled) == ["a@3", "b@7", "c@1", "c@2"]
    filled.call("verify")


def test_a_run_that_was_compacted(filled):
    filled.call("compact", "--keep-last", 1, "--undo", "0s")
    filled.call("rename", "a", "c")
    filled.call("compact")
    assert names(filled) == ["b@7", "c@2", "c@3"]
    filled.call("verify")
    assert filled.load("c@3")[0] == st.read(filled.folder / "in3.safetensors")[0]


def test_copies_know_checkpoints_by_their_ids(filled, tmp_path):
    """Copies made before the rename keep the old name, and are not copied again."""
    other = tmp_path / "other"
    run("push", filled.path, other, "--run", "a")
    filled.call("rename", "a", "c")
    filled.save(4, state(1, 4), run_name="c")
    pushed = run("push", filled.path, other, "--run", "c", "--json").json()
    assert [(c["checkpoint"], c["state"]) for c in pushed["checkpoints"]] == [
        ("a@1", "present"), ("a@2", "present"), ("a@3", "present"), ("c@4", "copied")]
    run("verify", other)
    run("rename", other, "a", "d")
    assert [c["run"] for c in run("list", other, "--json").json()["checkpoints"]] == ["c", "d", "d", "d"]
