"""policy: it is stored with the store. Prunes and saves apply it."""

import pytest

from support_cli import CORRUPT, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401


def steps(store, run_name="a"):
    return [c["step"] for c in store.checkpoints() if c["run"] == run_name]


def save(store, step, run_name="a", **options):
    return store.save(step, state(1, step), "--base", run_name=run_name, **options)


@pytest.fixture
def bases(store):
    for step in (1, 2, 3, 4, 5):
        save(store, step)
    return store


def test_set_show_clear(bases):
    assert "no policy" in bases.call("policy").out
    shown = bases.json("policy", "--keep-last", 3, "--keep-every", 1000, "--keep-newer", "2h", "--auto", "--undo", "1h")
    check_documented(shown, "`policy`")
    [one] = shown["policies"]
    assert one.pop("since") and one == {
        "run": None, "readable": True, "keep_last": 3, "keep_every": 1000, "keep_first": False, "keep_best": 0,
        "highest_is_best": False, "keep_newer_s": 7200, "keep_within_s": 0, "keep_daily": 0, "keep_weekly": 0, "keep_monthly": 0, "keep_tagged": False, "automatic": 1, "compact_percent": 25, "undo_s": 3600}
    out = bases.call("policy", "--run", "b", "--keep-best", 2, "--highest-is-best", "--keep-first", "--auto=7").out
    assert "the first, the best 2 (highest)" in out and "from 7 on" in out
    assert [p["run"] for p in bases.json("policy")["policies"]] == [None, "b"]
    bases.call("policy", "--clear", "--run", "b")
    assert "no policy for run b" in bases.call("policy", "--clear", "--run", "b", expect=NOT_FOUND).err
    bases.call("policy", "--clear")
    assert bases.json("policy")["policies"] == [] and steps(bases) == [1, 2, 3, 4, 5]


def test_compaction_option(bases):
    def percent(*args):
        return bases.json("policy", "--keep-last", 3, *args)["policies"][0]["compact_percent"]

    assert percent() == 0 and percent("--auto") == 25 and percent("--auto", "--compact") == 25
    assert percent("--auto", "--compact=40") == 40
    assert "beyond 40 %" in bases.call("policy").out
    assert percent("--auto", "--compact=off") == 0
    assert "--compact goes with --auto" in bases.call("policy", "--keep-last", 3, "--compact=40", expect=USAGE).err
    for wrong in ("0", "100", "x"):
        assert "from 1 to 99, or off" in bases.call("policy", "--keep-last", 3, "--auto", f"--compact={wrong}", expect=USAGE).err


def chunk_bytes(store):
    return sum(p.stat().st_size for p in store.files().values() if "data/c" in str(p))


def test_it_compacts_after_a_save(store):
    """The remaining checkpoints take little more space than in a fresh store, and load as before."""
    for step in range(1, 9):
        store.save(step, state(1, step))
    store.call("policy", "--keep-last", 2, "--auto", "--undo", "0s", "--compact=off", "-q")
    store.save(9, state(1, 9), expect_message="deleted 7 checkpoints of a, by its policy")
    wasted = chunk_bytes(store)
    assert store.json("prune", "--dry-run")["compaction_bytes"] > 0.25 * wasted
    store.call("policy", "--keep-last", 2, "--auto", "--undo", "0s", "-q")
    store.save(10, state(1, 10), expect_message="compacted a, by its policy: its chunk files are")
    assert steps(store) == [9, 10] and chunk_bytes(store) < 0.75 * wasted
    assert store.json("prune", "--dry-run")["compaction_bytes"] <= 0.25 * chunk_bytes(store)
    assert store.json("verify")["ok"]
    for step in (9, 10):
        loaded, _ = store.load("--step", step, "--run", "a")
        assert loaded["layers.0.weight"][2] == state(1, step)["layers.0.weight"].tobytes()


def test_prune_applies_it(bases):
    for step in (1, 2, 3, 4, 5):
        save(bases, step, "b")
    assert "policy, there is none: ckptdelta help policy" in bases.call("prune", expect=USAGE).err
    assert "2 of 10 checkpoints can be deleted now" in bases.call("policy", "--keep-last", 4, "--keep-every", 2).out
    bases.call("policy", "--run", "b", "--keep-first", "--undo", "0s")
    plan = bases.json("prune", "--dry-run")
    assert {d["checkpoint"] for d in plan["checkpoints"] if d["deleted"]} == {"a@1", "b@2", "b@3"}
    only_b = bases.json("prune", "--run", "b")
    assert only_b["deleted"] == 2 and len(only_b["checkpoints"]) == 5
    assert bases.json("trash")["checkpoints"] == []  # there is no time to undo
    assert bases.json("prune")["deleted"] == 1
    assert steps(bases) == [2, 3, 4, 5] and steps(bases, "b") == [1, 4, 5]
    assert [t["checkpoint"] for t in bases.json("trash")["checkpoints"]] == ["a@1"]
    bases.call("policy", "--clear")
    assert "none for run a" in bases.call("prune", "--run", "a", expect=USAGE).err


def test_after_each_save(bases):
    bases.call("policy", "--keep-last", 3, "--auto=2", "-q")
    assert steps(bases) == [1, 2, 3, 4, 5]
    save(bases, 6, expect_message="deleted 3 checkpoints of a, by its policy")
    assert steps(bases) == [4, 5, 6]
    save(bases, 7)
    assert steps(bases) == [4, 5, 6, 7]
    save(bases, 8, expect_message="deleted 2 checkpoints of a, by its policy")
    assert steps(bases) == [6, 7, 8] and len(bases.json("trash")["checkpoints"]) == 5
    assert bases.json("verify")["ok"]


def test_a_save_does_not_fail(bases):
    bases.call("policy", "--keep-last", 3, "--auto", "-q")
    [note] = bases.path.glob("data/n/policy.-.*")
    content = note.read_bytes()
    note.write_bytes(content[:-1])
    save(bases, 6, expect_message="the policy of a was not applied")
    assert steps(bases) == [1, 2, 3, 4, 5, 6]
    assert "policy.-" in bases.call("prune", expect=CORRUPT).err
    assert "unreadable" in bases.call("policy").out
    check_documented(bases.json("policy"), "`policy`")
    assert [d["file"] for d in bases.json("verify", expect=CORRUPT)["damage"]] == ["data/n/" + note.name]
    note.write_bytes(content)
    save(bases, 7, expect_message="deleted 4 checkpoints")


def test_policies_survive_a_lost_catalog(bases):
    bases.call("policy", "--keep-last", 3, "--auto", "-q")
    (bases.path / "catalog.db").unlink()
    bases.call("rebuild")
    save(bases, 6, expect_message="deleted 3 checkpoints")


@pytest.mark.parametrize("args", [
    ["--auto"], ["--undo", "1h"], ["--highest-is-best"], ["--keep-last", "0"], ["--keep-last", "1", "--auto=0"], ["--keep-last", "1", "--auto=x"],
    ["--clear", "--keep-last", "1"], ["--clear", "--auto"], ["--keep-last", "1", "--highest-is-best"], ["--keep-last", "1", "--run", "a b"], ["x"]])
def test_usage(store, args):
    store.save(1, state(1))
    store.call("policy", *args, expect=USAGE)
    assert store.json("policy")["policies"] == []


def test_a_store_that_is_not_there(tmp_path):
    run("prune", tmp_path / "none", expect=NOT_FOUND)
    run("policy", tmp_path / "none", expect=NOT_FOUND)
    assert not list(tmp_path.iterdir())
