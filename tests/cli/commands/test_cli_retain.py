"""delete, prune, trash: what is deleted, what is kept and why, and that it can be restored."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support_cli import (COMMAND, CORRUPT, FAILED, NOT_FOUND, USAGE, check_documented, run, state,  # noqa: F401
                         store)


def steps(store, run_name="a"):
    return [c["step"] for c in store.checkpoints() if c["run"] == run_name]


@pytest.fixture
def bases(store):
    """Steps 1 ... 6, all bases. The loss is lowest at step 2, then at step 4."""
    for step, loss in enumerate((9, 1, 7, 3, 8, 5), 1):
        store.save(step, state(1, step), "--base", "--metric", f"loss={loss}")
    return store


@pytest.fixture
def chain(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    return store


def kept(store, *policy):
    plan = store.json("prune", "--dry-run", *policy)
    assert plan["deleted"] == sum(d["deleted"] for d in plan["checkpoints"])
    assert all(d["deleted"] == (not d["kept_as"]) for d in plan["checkpoints"])
    return {d["checkpoint"]: d["kept_as"] for d in plan["checkpoints"] if not d["deleted"]}


def test_policies(bases):
    safe = {"a@5": ["safety"], "a@6": ["safety"]}
    assert kept(bases, "--keep-last", 3) == {"a@4": ["last"], "a@5": ["last", "safety"], "a@6": ["last", "safety"]}
    assert kept(bases, "--keep-every", 2) == {"a@2": ["every"], "a@4": ["every"], "a@6": ["every", "safety"], "a@5": ["safety"]}
    assert kept(bases, "--keep-first") == {"a@1": ["first"], **safe}
    assert kept(bases, "--keep-best", 2) == {"a@2": ["best"], "a@4": ["best"], **safe}
    assert kept(bases, "--keep-best", 1, "--highest-is-best") == {"a@1": ["best"], **safe}
    assert len(kept(bases, "--keep-newer", "1h")) == 6
    assert kept(bases, "--keep-first", "--keep-every", 3) == {"a@1": ["first"], "a@3": ["every"], "a@5": ["safety"],
                                                            "a@6": ["every", "safety"]}
    assert steps(bases) == [1, 2, 3, 4, 5, 6]


def test_prune_deletes_and_frees_what_the_dry_run_says(bases):
    said = bases.json("prune", "--keep-first", "--dry-run")
    size = sum(p.stat().st_size for p in bases.files().values() if "data/c" in str(p))
    done = bases.json("prune", "--keep-first", "--undo", "0s")
    assert {**said, "dry_run": False} == done and done["deleted"] == 3
    assert steps(bases) == [1, 5, 6]
    left = sum(p.stat().st_size for p in bases.files().values() if "data/c" in str(p))
    assert size - left == pytest.approx(done["bytes"], rel=0.01)
    assert bases.json("trash")["checkpoints"] == []
    assert bases.json("verify")["ok"]


def chunk_bytes(store):
    return sum(p.stat().st_size for p in store.files().values() if "data/c" in str(p))


def test_what_a_compaction_can_free(store):
    for step in range(1, 7):
        store.save(step, state(1, step))
    own = sum(c["stored_bytes"] for c in store.checkpoints() if c["step"] > 4)
    assert store.json("prune", "--dry-run", "--keep-last", 6)["compaction_bytes"] == 0  # nothing is deleted
    said = store.json("prune", "--dry-run", "--keep-last", 2)
    assert said["deleted"] == 4 and said["compaction_bytes"] > 0
    store.call("prune", "--keep-last", 2, "--undo", "1h", "-q")
    # the trash still needs these files
    assert store.json("prune", "--dry-run", "--keep-last", 2)["compaction_bytes"] == 0
    store.call("trash", "--empty", "--all", "-q")
    left = store.json("prune", "--dry-run", "--keep-last", 2)
    assert left["deleted"] == 0 and left["bytes"] == 0 and left["compaction_bytes"] == said["compaction_bytes"]
    before = chunk_bytes(store)
    # the size of checkpoints that are stored whole
    assert before - left["compaction_bytes"] == pytest.approx(own, rel=0.05)
    assert "ckptdelta compact can free: at most" in store.call("prune", "--dry-run", "--keep-last", 2).out
    store.call("compact", "-q")
    assert before - left["compaction_bytes"] <= chunk_bytes(store) < before
    assert store.json("prune", "--dry-run", "--keep-last", 2)["compaction_bytes"] < left["compaction_bytes"]


def test_it_says_when_space_is_freed(store):
    for step in range(1, 7):
        store.save(step, state(1, step))
    out = store.call("prune", "--keep-last", 4, "--undo", "2h").out
    assert "deleted 2 of 6 checkpoints, which frees" in out and "when they leave the trash, after 2 h 0 min" in out
    out = store.call("prune", "--keep-last", 2, "--undo", "0s").out
    assert "deleted 2 of 4 checkpoints, which frees" in out and " now\n" in out


def test_the_hint_restores_what_was_deleted(store):
    """And nothing else that is in the trash; pasted into a shell."""
    store.path = store.folder / "it's a store"
    for step in range(1, 10):
        store.save(step, state(1, step), "--base")
    store.call("delete", "a@1")
    said = store.call("delete", "a@2", "a@3", "--undo", "99999d").out.splitlines()[-1]
    assert said.startswith("to undo this within 99999 days: ckptdelta trash ") and said.endswith(" --restore a@2 a@3")
    subprocess.run(["sh", "-c", said.split(": ", 1)[1].replace("ckptdelta", f"'{COMMAND}'", 1)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert steps(store) == list(range(2, 10))
    assert store.call("prune", "--keep-last", 5).out.endswith("--restore a@2 a@3 a@4\n")
    assert store.call("delete", "a@5", "a@6", "a@7", "a@8", "a@9").out.endswith("--restore RUN@STEP...\n")


def test_a_checkpoint_is_named_once(bases):
    bases.call("tag", "best", "a@1")
    for twice in ["a@1", "a@1"], ["a@1", "@best"]:
        assert "a@1 is named twice" in bases.call("delete", *twice, expect=USAGE).err
    bases.call("delete", "a@2")
    assert "a@2 is named twice" in bases.call("trash", "--restore", "a@2", "a@2", expect=USAGE).err


def test_each_run_by_itself(bases):
    for step in (1, 2, 3):
        bases.save(step, state(2, step), "--base", run_name="b")
    assert set(kept(bases, "--run", "b", "--keep-last", 1)) == {"b@2", "b@3"}
    assert bases.json("prune", "--run", "b", "--keep-last", 1)["deleted"] == 1
    assert steps(bases) == [1, 2, 3, 4, 5, 6] and steps(bases, "b") == [2, 3]
    assert bases.call("prune", "--run", "c", "--keep-last", 1, expect=NOT_FOUND).err


def test_parents_of_deltas_are_kept(chain):
    chain.save(4, state(1, 4), "--base")
    chain.save(5, state(1, 5), "--base")
    chain.save(1, state(1, 3), "--parent", "a@2", run_name="branch")
    assert kept(chain, "--run", "a", "--keep-every", 5) == {"a@4": ["safety"], "a@5": ["every", "safety"]}
    before = chain.load("--run", "branch", "--step", 1), chain.load("--run", "a", "--step", 3)
    chain.call("delete", "a@1", "a@2", "--undo", "0s")
    chain.call("trash", "--empty", "--all")
    assert steps(chain) == [3, 4, 5] and chain.json("verify")["ok"]
    assert before == (chain.load("--run", "branch", "--step", 1), chain.load("--run", "a", "--step", 3))


def test_delete_and_restore(chain):
    before = chain.load("--step", 3)
    chain.call("delete", "a@2", "a@3")
    assert steps(chain) == [1]
    assert chain.call("load", "--step", 3, "--out", chain.folder / "no", expect=NOT_FOUND).err
    assert [t["checkpoint"] for t in chain.json("trash")["checkpoints"]] == ["a@2", "a@3"]
    assert chain.json("trash", "--restore", "a@3")["restored"] == 1
    assert chain.load("--step", 3) == before
    assert chain.json("trash", "--restore", "a@2")["restored"] == 1
    assert chain.call("trash").out == "the trash is empty\n"
    assert chain.call("trash", "--restore", "a@3", expect=NOT_FOUND).err


def test_delete_nothing(chain):
    files = chain.files()
    done = chain.call("delete", "a@2", "a@3", "-n").out
    assert done.startswith("would delete 2 checkpoints, ")
    assert chain.json("delete", "a@2", "-n") == {**chain.json("delete", "a@2", "--dry-run"), "dry_run": True, "deleted": 1}
    chain.call("delete", "a@4", "--dry-run", expect=NOT_FOUND)
    assert chain.files() == files and steps(chain) == [1, 2, 3]
    chain.call("pin", "a@3")
    assert "pinned" in chain.call("delete", "a@2", "a@3", "-n", expect=FAILED).err
    assert chain.json("delete", "a@2") == {"schema": 1, "dry_run": False, "deleted": 1, "bytes": chain.json("trash")["checkpoints"][0]["stored_bytes"]}
    assert steps(chain) == [1, 3]


def test_the_rest_is_restored(chain):
    """Of a name that was deleted twice, only the later checkpoint can be restored. That is no reason to leave the others."""
    chain.call("delete", "a@3")
    chain.save(3, state(9, 3))
    before = chain.load("--step", 3)
    chain.call("delete", "a@3", "a@2")
    said = chain.call("trash", "--restore", expect=CORRUPT)
    assert said.out == "restored 2 checkpoints\n"
    assert "a@3 was saved again, and deleted again" in said.err
    assert steps(chain) == [1, 2, 3] and chain.load("--step", 3) == before
    assert chain.call("trash", "--restore", "a@3", expect=FAILED).err
    chain.call("delete", "a@2")
    result = chain.json("trash", "--restore", expect=CORRUPT)
    check_documented(result, "trash --restore")
    assert result["restored"] == 1 and [x["checkpoint"] for x in result["left"]] == ["a@3"]
    assert "saved again;" in result["left"][0]["why"]
    chain.call("delete", "a@3")
    chain.save(3, state(8, 3))
    assert "2 checkpoints stay in the trash; the first: a@3" in chain.call("trash", "--restore", "-q", expect=CORRUPT).err


def test_restoring_damaged_checkpoints(bases):
    names = {p.name for p in (bases.path / "data/c").iterdir()}
    bases.save(7, state(1, 7), "--base")
    (new,) = {p.name for p in (bases.path / "data/c").iterdir()} - names
    bases.call("delete", "a@7")
    path = bases.path / "data/c" / new
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "a@7 is restored, but damaged" in bases.call("trash", "--restore", "a@7", expect=CORRUPT).err
    assert 7 in steps(bases)


def test_emptying_the_trash(chain):
    chain.call("delete", "a@3")
    assert chain.json("trash", "--empty") == {"schema": 1, "dry_run": False, "checkpoints": 0, "files": 0, "bytes": 0,
                                              "waiting": 1}
    would = chain.json("trash", "--empty", "--all", "--dry-run")
    assert would["checkpoints"] == 1 and would["bytes"] == chain.json("trash")["bytes"]
    assert chain.json("trash", "--empty", "--all") == {**would, "dry_run": False}
    assert chain.call("trash", "--restore", "a@3", expect=NOT_FOUND).err
    chain.save(3, state(1, 3))
    assert steps(chain) == [1, 2, 3] and chain.json("verify")["ok"]


def test_nothing_is_deleted_while_the_newest_are_damaged(bases):
    for path in (p for name, p in bases.files().items() if "data/c" in str(name)):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    refused = bases.call("prune", "--keep-last", 1, expect=CORRUPT)
    assert "nothing was deleted" in refused.err
    assert steps(bases) == [1, 2, 3, 4, 5, 6]


def test_nothing_is_deleted_while_ancestors_of_the_newest_are_damaged(store):
    """The base of the chain is damaged, several deltas before the two that would be kept."""
    store.save(1, state(1, 1), "--base")
    [base] = [p for name, p in store.files().items() if "data/c" in str(name)]
    store.save(2, state(5), "--base")
    for step, parent in ((3, 1), (4, 3), (5, 4)):
        store.save(step, state(1, step), "--parent", f"a@{parent}")
    intact = base.read_bytes()
    base.write_bytes(intact[:len(intact) // 2] + bytes([intact[len(intact) // 2] ^ 1]) + intact[len(intact) // 2 + 1:])
    refused = store.call("prune", "--keep-last", 1, expect=CORRUPT)
    assert "which the newest remaining checkpoints need, is damaged" in refused.err and "nothing was deleted" in refused.err
    assert steps(store) == [1, 2, 3, 4, 5]
    base.write_bytes(intact)
    assert store.json("prune", "--keep-last", 1)["deleted"] == 3 and steps(store) == [4, 5]


def test_usage(bases):
    assert "say what to keep" in bases.call("prune", expect=USAGE).err
    assert "RUN@STEP" in bases.call("delete", "6", expect=USAGE).err
    run("delete", bases.path, "a@7", expect=NOT_FOUND)


# ------------------------------------------------------------------------------------------ rules about time

DAY = 86400
SUNDAY = 1718496000  # 2024-06-16 00:00 UTC


@pytest.fixture
def at(store):
    """Runs a command on the store with another clock."""
    shim = Path(os.environ.get("CKPTDELTA_BUILD") or "build/current").resolve() / "tests/libcampaign_faults.so"
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("nothing can be preloaded under a sanitizer")
    assert shim.exists()

    def call(now, command, *args):
        env = dict(os.environ, LD_PRELOAD=str(shim), CAMPAIGN_NOW=str(now), CAMPAIGN_CLOCK="0")
        return store.call(command, *args, env=env)
    return call


@pytest.fixture
def dated(store, at):
    """Steps saved at known times: two on each of some days, over two weeks and three months."""
    days = {1: -40, 2: -40, 3: -20, 4: -1, 5: -1, 6: 0, 7: 0, 8: 1, 9: 1}
    for step, day in days.items():
        at(SUNDAY + day * DAY + 3600 * step, "save", "--run", "a", "--step", step, "--base", "-q", store.file(state(1, step)))
    return store


@pytest.mark.parametrize("command", [["trash", "--empty", "--dry-run"], ["compact", "--plan"], ["compact", "--dry-run"],
                                     ["rename", "--dry-run", "a", "b"], ["parity", "--group", "4+1", "--dry-run"], ["prune", "--keep-last", 2, "-n"],
                                     ["delete", "a@2", "-n"]])
def test_dry_runs_leave_the_trash(dated, at, command):
    """Although the time in it is over, and the next command that writes empties it."""
    at(SUNDAY, "delete", "a@1", "--undo", "1h", "-q")
    def files():
        return [f for f in dated.files() if f.parts[:2] in (("data", "c"), ("data", "m"), ("data", "t"))]
    before = files()
    at(SUNDAY + DAY, *command, "-q")
    assert files() == before
    counts = json.loads(at(SUNDAY + DAY, "trash", "--empty", "--json").out)
    assert (counts["checkpoints"], counts["waiting"]) == (1, 0)
    assert len(files()) < len(before)


def test_what_can_be_restored_until_it_is_removed(dated, at):
    at(SUNDAY, "delete", "a@1", "a@2", "--undo", "1h", "-q")
    at(SUNDAY + DAY, "trash", "--restore", "a@1", "-q")
    assert [c["step"] for c in dated.checkpoints()][:2] == [1, 3]
    assert json.loads(at(SUNDAY + DAY, "trash", "--empty", "--json").out)["checkpoints"] == 1


def kept_at(at, now, *policy):
    plan = json.loads(at(now, "prune", "-n", "--json", *policy).out)
    return {int(d["checkpoint"].split("@")[1]): [w for w in d["kept_as"] if w != "safety"] for d in plan["checkpoints"] if d["kept_as"]}


def test_days_weeks_and_months(dated, at):
    now = SUNDAY + 200 * DAY  # the present time does not matter
    safe = {8: [], 9: []}
    assert kept_at(at, now, "--keep-daily", 1) == {**safe, 9: ["daily"]}
    assert kept_at(at, now, "--keep-daily", 3) == {**safe, 9: ["daily"], 7: ["daily"], 5: ["daily"]}
    assert kept_at(at, now, "--keep-daily", 4) == {**safe, 9: ["daily"], 7: ["daily"], 5: ["daily"], 3: ["daily"]}
    assert len(kept_at(at, now, "--keep-daily", 99)) == 6
    # Weeks begin on Monday, so the Sunday belongs to the previous week.
    assert kept_at(at, now, "--keep-weekly", 2) == {**safe, 9: ["weekly"], 7: ["weekly"]}
    assert kept_at(at, now, "--keep-weekly", 3) == {**safe, 9: ["weekly"], 7: ["weekly"], 3: ["weekly"]}
    # May has steps 1 to 3, on the 7th and the 27th.
    assert kept_at(at, now, "--keep-monthly", 1) == {**safe, 9: ["monthly"]}
    assert kept_at(at, now, "--keep-monthly", 5) == {**safe, 9: ["monthly"], 3: ["monthly"]}
    assert kept_at(at, now, "--keep-monthly", 2, "--keep-daily", 1, "--keep-first") == {**safe, 1: ["first"], 3: ["monthly"], 9: ["daily", "monthly"]}


def test_within_a_time_of_the_newest(dated, at):
    for now in (SUNDAY + 2 * DAY, SUNDAY + 200 * DAY):  # counted from the newest checkpoint, not from now
        assert kept_at(at, now, "--keep-within", "90m") == {8: ["within"], 9: ["within"]}
        assert sorted(kept_at(at, now, "--keep-within", "2d")) == [6, 7, 8, 9]
        assert sorted(kept_at(at, now, "--keep-within", "3d")) == [4, 5, 6, 7, 8, 9]
        assert len(kept_at(at, now, "--keep-within", "9999d")) == 9
    # Counted from now if the newest checkpoint is from the future.
    at(SUNDAY + 900 * DAY, "save", "--run", "a", "--step", 10, "-q", dated.file(state(1, 10)))
    assert sorted(kept_at(at, SUNDAY + 2 * DAY, "--keep-within", "1d")) == [8, 9, 10]


def test_a_policy_of_days_is_applied(dated, at):
    at(SUNDAY + 2 * DAY, "policy", "--keep-daily", 2, "--keep-monthly", 2, "--keep-within", "90m", "--undo", "0s")
    policy = dated.json("policy")["policies"][0]
    assert (policy["keep_daily"], policy["keep_weekly"], policy["keep_monthly"], policy["keep_within_s"], policy["keep_tagged"]) == (2, 0, 2, 5400, False)
    assert "within 1 h 30 min of the newest, 2 daily, 2 monthly" in dated.call("policy").out
    assert at(SUNDAY + 2 * DAY, "prune", "-q").out == ""
    assert steps(dated) == [3, 7, 8, 9]


def test_only_what_is_tagged(bases):
    bases.call("tag", "best", "a@2")
    bases.call("tag", "other", "a@3")
    assert kept(bases, "--keep-tag", "best") == {"a@2": ["tagged"], "a@3": ["tagged"], "a@5": ["safety"], "a@6": ["safety"]}
    bases.call("policy", "--keep-tag", "best")
    assert bases.json("policy")["policies"][0]["keep_tagged"] is True
    assert "tagged ones" in bases.call("policy").out
    bases.call("prune", "-q")
    assert steps(bases) == [2, 3, 5, 6]


@pytest.mark.parametrize("args", [["--keep-daily", "0"], ["--keep-weekly", "x"], ["--keep-monthly", "-1"], ["--keep-within", "3"], ["--keep-tag"],
                                  ["--keep-newer", "0s"], ["--keep-within", "0h"]])
def test_invalid_rules(bases, args):
    bases.call("policy", "--keep-last", 2)  # which a rule that counts as not given would apply
    bases.call("prune", *args, expect=USAGE)
    assert len(steps(bases)) == 6


def test_prune_reads_what_packed_deltas_build_on(store):
    """The newest two are deltas on a record of a deleted checkpoint that compaction put in the same file."""
    for step in range(1, 13):
        store.save(step, state(1, step))
    store.call("compact")
    for step in (1, 9, 10, 11, 12):
        store.call("delete", f"a@{step}", "--undo", "0s")
    pack = max((store.path / "data/c").iterdir(), key=lambda path: path.stat().st_size)
    intact = pack.read_bytes()
    out = store.folder / "out.safetensors"
    for at in range(200, len(intact), 1009):
        pack.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1:])
        loads = [[COMMAND, "load", store.path, f"a@{step}", "-o", out, "--force"] for step in (7, 8)]
        if all(subprocess.run(load, capture_output=True).returncode == CORRUPT for load in loads):
            break
    else:
        pytest.fail("no byte is needed by both")
    refused = store.call("prune", "--keep-last", "2", "--undo", "0s", expect=CORRUPT)
    assert "nothing was deleted" in refused.err
    assert steps(store) == [2, 3, 4, 5, 6, 7, 8]


def test_prune_ignores_damage_that_the_newest_do_not_need(store):
    """A pack has records of two chains. The newest two need it, but build on the second chain alone."""
    for step in range(1, 15):
        store.save(step, state(1, step), *(["--base"] if step in (1, 7) else []))
    store.call("compact")
    pack = max((store.path / "data/c").iterdir(), key=lambda path: path.stat().st_size)
    intact = pack.read_bytes()
    out = store.folder / "out.safetensors"

    def loads(step):
        return subprocess.run([COMMAND, "load", store.path, f"a@{step}", "-o", out, "--force"],
                              capture_output=True).returncode == 0

    for at in range(200, len(intact), 1009):
        pack.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1:])
        if not loads(1) and loads(13) and loads(14):
            break
    else:
        pytest.fail("no byte is needed by the first chain alone")
    assert store.json("prune", "--keep-last", "2")["deleted"] == 12
    assert steps(store) == [13, 14] and loads(13) and loads(14)
