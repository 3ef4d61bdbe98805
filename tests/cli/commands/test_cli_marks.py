"""pin and tag: what they keep and print, and that a tag may be used wherever a checkpoint is named."""

import shutil

import pytest

from support_cli import CORRUPT, FAILED, NOT_FOUND, USAGE, check_documented, failures_downwards, state, store  # noqa: F401


@pytest.fixture
def bases(store):
    for step in (1, 2, 3, 4, 5):
        store.save(step, state(1, step), "--base")
    return store


def kept(store):
    plan = store.json("prune", "--keep-last", 1, "--dry-run")
    return {d["checkpoint"]: d["kept_as"] for d in plan["checkpoints"] if not d["deleted"]}


def note(store, pattern):
    [path] = store.path.glob(f"data/n/{pattern}")
    return path


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_pins(bases):
    assert bases.call("pin").out == "no checkpoint is pinned\n"
    pinned = bases.json("pin", "a@1", "a@latest", "--reason", "caf\u00e9")
    check_documented(pinned, "`pin`")
    assert {p["checkpoint"]: p["reason"] for p in pinned["pins"]} == {"a@1": "caf\u00e9", "a@5": "caf\u00e9"}
    assert bases.json("pin") == pinned and bases.json("list")["pins"] == pinned["pins"]
    assert [p["checkpoint"] for p in bases.json("show", "--step", 1)["pins"]] == ["a@1"]
    assert bases.json("show", "--step", 2)["pins"] == []
    assert "pinned" in bases.call("list").out and "pinned        20" in bases.call("show", "--step", 1).out
    refused = bases.call("delete", "a@1", expect=FAILED)
    assert "a@1 is pinned (caf\u00e9)" in refused.err and "ckptdelta pin --delete" in refused.err
    assert kept(bases) == {"a@1": ["pinned"], "a@4": ["safety"], "a@5": ["last", "safety", "pinned"]}
    assert bases.call("pin", "--delete", "a@1").out == "unpinned a@1\n"
    assert "a@1 is not pinned" in bases.call("pin", "--delete", "a@1", expect=NOT_FOUND).err
    bases.call("delete", "a@1")
    assert "no checkpoint at step 1" in bases.call("pin", "a@2", "a@1", expect=NOT_FOUND).err
    assert [p["checkpoint"] for p in bases.json("pin")["pins"]] == ["a@5"]


def test_unpinning_is_checked_before_it_begins(bases):
    bases.call("pin", "a@1", "a@2")
    unknown = "0123456789abcdef0123456789abcdef"
    for wrong in "a@3", unknown:
        refused = bases.call("pin", "--delete", "--json", "a@1", "a@2", wrong, expect=NOT_FOUND)
        assert f"{wrong} is not pinned; nothing was changed" in refused.err
    left = bases.json("pin")["pins"]
    assert {p["checkpoint"] for p in left} == {"a@1", "a@2"}
    by_id, = (p["id"] for p in left if p["checkpoint"] == "a@1")
    assert bases.call("pin", "--delete", "a@1", "a@1", by_id).out == "unpinned a@1\n"


def test_pins_that_are_changed_before_a_failure_are_counted(bases):
    bases.call("pin", "a@1", "a@2")
    whole = bases.folder / "whole"
    shutil.copytree(bases.path, whole)

    def begin():
        shutil.rmtree(bases.path)
        shutil.copytree(whole, bases.path)
        return ["pin", bases.path, "--delete", "a@1", "a@2"]
    found = next(said for done in failures_downwards(begin) if "checkpoints" in (said := done.stderr))
    assert "1 of 2 checkpoints is unpinned, then a@2 failed" in found
    assert "a@1" not in [p["checkpoint"] for p in bases.json("pin")["pins"]]


def test_tags(bases):
    assert bases.call("tag").out == "there are no tags\n"
    assert bases.call("tag", "best", "a@2").out == "best is now a@2\n"
    assert "--move" in bases.call("tag", "best", "a@3", expect=FAILED).err
    tags = bases.json("tag", "best", "a@3", "--move")
    check_documented(tags, "`tag`")
    assert [(t["tag"], t["checkpoint"]) for t in tags["tags"]] == [("best", "a@3")]
    bases.call("tag", "prod", "@best")
    assert [t["checkpoint"] for t in bases.json("show", "--tag", "prod")["tags"]] == ["a@3", "a@3"]
    assert "@best @prod" in bases.call("list").out and "tags          best, prod" in bases.call("show", "--step", 3).out
    assert "a@3 has the tag best" in bases.call("delete", "a@3", expect=FAILED).err
    assert kept(bases)["a@3"] == ["tagged"]
    bases.call("tag", "--delete", "best")
    assert "no tag best" in bases.call("tag", "--delete", "best", expect=NOT_FOUND).err
    bases.call("tag", "--delete", "prod")
    bases.call("delete", "a@3")


def test_a_tag_names_a_checkpoint(bases):
    bases.save(1, state(2, 1), run_name="b")
    bases.call("tag", "best", "a@2")
    assert bases.load("--tag", "best")[0].keys() == state(1).keys()
    assert bases.json("show", "--tag", "best")["checkpoints"][0]["step"] == 2
    assert bases.json("verify", "--tag", "best")["checkpoints"] == 1
    bases.call("export", "--tag", "best", "--out", bases.folder / "exported")
    assert bases.json("diff", "@best", "a@2")["a"] == bases.json("diff", "a@2", "b@1")["a"]
    bases.save(3, state(1, 3), "--parent", "@best", "--resumed-from", "@best", run_name="branch")
    saved = next(c for c in bases.checkpoints() if c["run"] == "branch")
    assert saved["parent"] == "a@2" and saved["resumed_from"] == "a@2"
    assert "no tag worst" in bases.call("show", "--tag", "worst", expect=NOT_FOUND).err


def test_marks_survive_a_lost_catalog(bases):
    bases.call("pin", "a@1", "--reason", "why")
    bases.call("tag", "best", "a@2")
    before = bases.json("list")
    (bases.path / "catalog.db").unlink()
    assert bases.json("list") == before
    bases.call("rebuild")
    assert bases.json("list") == before
    assert "pinned" in bases.call("delete", "a@1", expect=FAILED).err


def test_damage(bases):
    bases.call("pin", "a@1", "--reason", "why")
    bases.call("tag", "best", "a@2")
    damage(note(bases, "tag.best.*"))
    damage(note(bases, "pin.*"))
    for refused in (bases.call("delete", "a@5", expect=CORRUPT), bases.call("prune", "--keep-last", 1, expect=CORRUPT),
                    bases.call("trash", "--empty", expect=CORRUPT)):
        assert "nothing is deleted" in refused.err and "data/n/pin." in refused.err
    assert [d["file"].split(".")[0] for d in bases.json("verify", expect=CORRUPT)["damage"]] == ["data/n/pin", "data/n/tag"]
    listed = bases.json("list")
    check_documented(listed, "`list`")
    assert [p["readable"] for p in listed["pins"]] == [False] and [t["readable"] for t in listed["tags"]] == [False]
    assert "unreadable" in bases.call("pin").out and "unreadable" in bases.call("tag").out
    bases.call("show", "--tag", "best", expect=CORRUPT)
    bases.call("pin", "--delete", listed["pins"][0]["id"])
    bases.call("tag", "best", "a@2", "--move")
    bases.call("delete", "a@5")
    assert bases.json("verify")["ok"]


@pytest.mark.parametrize("args", [
    ["pin", "--reason", "x"], ["pin", "--delete"], ["pin", "1"], ["pin", "a@1", "--delete", "--reason", "x"], ["pin", "a@1", "--reason", "x" * 256],
    ["pin", "0123456789abcdef0123456789abcdef"], ["pin", "@"], ["tag", "a"], ["tag", "a", "1"], ["tag", "a", "a@1", "a@2"], ["tag", "--move"],
    ["tag", "--delete"], ["tag", "--delete", "a", "a@1"], ["tag", "a b", "a@1"], ["tag", ".a", "a@1"], ["tag", "", "a@1"],
    ["show", "--tag", "a", "--step", "1"], ["show", "--tag", "a", "--run", "a"], ["show", "--tag", "a b"], ["diff", "@", "1"], ["delete", "@"]])
def test_usage(store, args):
    store.save(1, state(1))
    store.call(*args, expect=USAGE)
    assert store.json("list")["pins"] == store.json("list")["tags"] == []
