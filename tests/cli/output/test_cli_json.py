"""--json: the output has exactly the fields and types of docs/cli.md, with the right values."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, FAILED, check_documented, documented, run, state, store  # noqa: F401


@pytest.fixture
def full(store):
    """Two runs, one of them a branch; a metric, metadata, a scalar, an empty tensor."""
    store.save(1, state(1, 1), "--metric", "val_loss=2.5", run_name="gpt", metadata={"k": "v"})
    store.save(2, {**state(1, 2), "empty": np.zeros((0, 3), np.float32)}, run_name="gpt")
    store.save(3, state(1, 3), "--parent", "gpt@2", "--resumed-from", "gpt@1", "-q", run_name="tuned")
    return store


def printed(text):
    """The JSON as jansson formats it, except the digits of reals."""
    return re.sub(r"(?<= )-?\d+(\.\d+)?(e-?\d+)?(?=,?\n)", lambda n: n[0] if n[0].lstrip("-").isdigit() else repr(float(n[0])), text)


def test_checkpoints_of_a_list_are_those_that_are_shown(store):
    """list and report print checkpoints one by one, and everything else as one tree."""
    store.save(1, state(1, 1), "--metric", 'lo"ss\\ größe=1e-20', run_name="gpt")
    store.save(2, state(1, 2), "--metric", "a\\b=1", run_name="gpt")
    store.save(5, state(1, 5), "--parent", "gpt@1", "--metric", 'e"=-3', run_name="tuned")
    store.save(7, state(1, 7), "--parent", "tuned@5", "--resumed-from", "gpt@1", run_name="tuned")
    listed = store.call("list", "--json")
    shown = [store.json("show", "--run", c["run"], "--step", c["step"])["checkpoints"][0] for c in listed.json()["checkpoints"]]
    assert [(c["run"], c["step"]) for c in shown] == [("gpt", 1), ("gpt", 2), ("tuned", 5), ("tuned", 7)]
    assert shown[0]["metric_name"] == 'lo"ss\\ größe' and shown[2]["parent"] == "gpt@1" and shown[3]["resumed_from"] == "gpt@1"
    assert listed.json()["checkpoints"] == shown
    reported = store.call("report", "--json")
    assert reported.json()["by_checkpoint"] == shown
    for output in (listed, reported, store.call("list", "--json", "--run", "gpt")):
        assert printed(output.out) == json.dumps(json.loads(output.out), indent=2, ensure_ascii=False) + "\n"


def checked(value, name, seen=None):
    check_documented(value, f"`{name}`", where=name, seen=seen)
    return value


def test_the_documentation_is_read():
    objects = documented()
    assert {"list", "save", "import --dry-run", "show", "load", "diff", "report", "verify", "rebuild", "checkpoint"} <= set(objects)
    assert all(objects[name] for name in objects)
    with pytest.raises(AssertionError):
        check_documented({"run": "a", "step": "1", "id": ""}, "`side`")
    with pytest.raises(AssertionError):
        check_documented({"run": "a", "step": 1}, "`side`")
    with pytest.raises(AssertionError):
        check_documented({"run": "a", "step": 1, "id": "", "more": 1}, "`side`")
    with pytest.raises(AssertionError):
        check_documented({"run": "a", "step": True, "id": ""}, "`side`")


def test_all_documented_objects_are_printed(full):
    """Each object in docs/cli.md is printed by some command, with exactly its fields."""
    seen = set()
    checked(full.json("list"), "list", seen)
    checked(full.json("show", "--run", "gpt"), "show", seen)
    lossy = Path(__file__).resolve().parents[2] / "golden/v1/lossy"
    assert checked(run("list", lossy, "--json", expect_message="").json(), "list", seen)["errors"]
    checked(run("show", lossy, "--json", expect_message="").json(), "show", seen)
    checked(full.json("diff", "gpt@1", "tuned@3"), "diff", seen)
    prices = Path(__file__).resolve().parents[3] / "docs/prices-example.json"
    checked(full.json("report"), "report", seen)
    assert checked(full.json("timeline"), "timeline", seen)["saves"]
    checked(full.json("report", "--prices", prices, "--until", 10, "--keep-last", 1), "report", seen)
    checked(full.json("load", "--run", "gpt", "--out", full.folder / "o"), "load", seen)
    checked(full.json("load", "--run", "gpt", "--explain"), "load --explain", seen)
    checked(full.json("export", "--run", "gpt", "--out", full.folder / "e", "--dry-run"), "export", seen)
    layout = full.folder / "layout"
    layout.write_text("mesh tp=1\nstep skipped\n.* replicated\n")
    plan = full.json("import", "--layout", layout, "--dry-run", full.file(state(1)))
    assert checked(plan, "import --dry-run", seen)["skipped"]
    checked(full.save(4, state(1, 4), "--json", run_name="gpt", expect_message="lacks").json(), "save", seen)
    checked(full.call("rebuild", "--json", expect_message="").json(), "rebuild", seen)
    checked(full.json("verify"), "verify", seen)
    checked(run("run", full.path, "gpt", "-q", "--json", "--", "true").json(), "run", seen)
    assert checked(full.json("attempts"), "attempts", seen)["attempts"]
    assert checked(full.json("report"), "report", seen)["supervised"]
    assert checked(full.json("scrub"), "scrub", seen)["files"]
    for command in "copy", "push":
        checked(full.json(command, full.folder / "copied"), command, seen)
    checked(full.json("pull", full.folder / "copied"), "pull", seen)
    checked(full.json("prune", "--keep-first", "--dry-run"), "prune", seen)
    checked(full.json("rename", "tuned", "fine", "--dry-run"), "rename", seen)
    checked(full.json("delete", "tuned@3"), "delete", seen)
    assert checked(full.json("policy", "--keep-last", 3), "policy", seen)["policies"]
    checked(full.json("trash"), "trash", seen)
    assert checked(full.json("pin", "gpt@1", "--reason", "x"), "pin", seen)["pins"]
    assert checked(full.json("tag", "best", "gpt@1"), "tag", seen)["tags"]
    for step in (5, 5):  # the earlier one of two cannot be restored
        full.save(step, state(5, step), "--base", run_name="fine")
        full.call("delete", f"fine@{step}")
    assert checked(full.call("trash", "--restore", "--json", expect=CORRUPT).json(), "trash --restore", seen)["left"]
    checked(full.json("trash", "--empty"), "trash --empty", seen)
    checked(full.json("compact", "--dry-run", "--max-depth", 1), "compact", seen)
    checked(full.json("parity", "--group", "8+1"), "parity", seen)
    assert checked(full.json("parity", "--status"), "parity --status", seen)["settings"]
    chunk = max((full.path / "data/c").iterdir(), key=lambda p: p.stat().st_size)
    flip(chunk, chunk.stat().st_size // 2)
    checked(full.call("verify", "--json", expect=CORRUPT).json(), "verify", seen)
    assert checked(full.json("repair"), "repair", seen)["repaired"]
    full.save(9, state(9), "--base", run_name="gpt")
    newest = max((full.path / "data/c").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    flip(newest, newest.stat().st_size // 2)
    older = full.call("load", "--run", "gpt", "--or-older", "--out", full.folder / "older", "--json", expect_message="gpt@9 is damaged")
    assert checked(older.json(), "load", seen)["skipped"]
    check_documented(older.messages, "list of `message`", seen=seen)
    seen |= {"follow"}  # by test_cli_follow.py
    seen |= {"agent --status", "agent_session", "agent --drain", "agent --stop"}  # by test_cli_agent.py
    seen |= {"agent_copies", "agent_peer"}  # by test_cli_agent_peers.py
    seen |= {"agent_parity"}  # by test_cli_agent_parity.py
    seen |= {"agent_local"}  # by test_cli_agent_local.py
    assert seen == set(documented()), seen ^ set(documented())


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_list(full):
    listed = checked(full.json("list"), "list")["checkpoints"]
    assert [(c["run"], c["step"]) for c in listed] == [("gpt", 1), ("gpt", 2), ("tuned", 3)]
    assert len({c["id"] for c in listed}) == 3 and all(re.fullmatch("[0-9a-f]{32}", c["id"]) for c in listed)
    assert [c["parent"] for c in listed] == [None, "gpt@1", "gpt@2"]
    assert [c["kind"] for c in listed] == ["base", "delta", "delta"]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", c["created"]) for c in listed)
    assert all(c["fidelity"] == "exact" and c["lossy_resumes"] == 0 and c["world"] == 1 for c in listed)
    assert listed[0]["tensor_count"] == len(state(1)) and listed[1]["tensor_count"] == len(state(1)) + 1
    tensors = sum(a.nbytes for a in state(1).values())
    assert listed[0]["raw_bytes"] == tensors + len('{"k":"v"}') and listed[1]["raw_bytes"] == tensors
    assert listed[0]["ratio"] == pytest.approx(listed[0]["raw_bytes"] / listed[0]["stored_bytes"])
    assert [c["step"] for c in full.json("list", "--run", "tuned")["checkpoints"]] == [3]
    assert full.json("list", "--run", "tuned")["checkpoints"][0] == listed[2]


def test_an_empty_store_lists_nothing(store):
    store.save(1, state(1))
    store.save(1, state(1), expect=FAILED)
    bad = store.folder / "other"
    run("save", bad, "--run", "a", "--step", 1, "--parent", "x@1", store.file({}), expect=3)
    assert run("list", bad, "--json").json() == {"schema": 1, "checkpoints": [], "errors": [], "pins": [], "tags": []}
    assert checked(run("report", bad, "--json").json(), "report")["ratio"] is None
    assert checked(run("verify", bad, "--json").json(), "verify")["ok"] is True


def test_show(full):
    shown = checked(full.json("show", "--run", "gpt", "--step", 2), "show")
    assert shown["checkpoints"] == [c for c in full.checkpoints() if (c["run"], c["step"]) == ("gpt", 2)]
    assert shown["chain"] == ["gpt@2", "gpt@1"]
    assert shown["without_parent"] == ["empty"]
    tensors = {t["name"]: t for t in shown["tensors"]}
    weight = tensors["layers.0.weight"]
    assert (weight["role"], weight["dtype"], weight["shape"]) == ("weight", "f32", [64, 64])
    assert weight["raw_bytes"] == 4 * weight["elements"] == 4 * 64 * 64
    assert weight["bits_per_element"] == pytest.approx(8 * weight["stored_bytes"] / weight["elements"])
    assert weight["method"] == "delta" and weight["depth"] == 1 and weight["shards"] == 1
    assert all(t["rel_l2"] == 0 and t["max_error"] == 0 for t in tensors.values())
    assert tensors["step"]["shape"] == [] and tensors["step"]["role"] == "other"
    assert tensors["empty"]["bits_per_element"] is None and tensors["empty"]["elements"] == 0
    assert sum(t["stored_bytes"] for t in tensors.values()) < shown["checkpoints"][0]["stored_bytes"]
    first = full.json("show", "--run", "gpt", "--step", 1)
    assert first["chain"] == ["gpt@1"]
    assert first["without_parent"] is None


def test_method_same(store):
    store.save(1, state(1))
    store.save(2, state(1))
    methods = {t["name"]: t["method"] for t in store.json("show", "--step", 2)["tensors"]}
    assert methods["layers.0.weight"] == methods["exp_avg.layers.0.weight"] == "same"


@pytest.mark.parametrize("names", [["plain"], ["with \"quotes\" and \\", "\u20ac", "\u0001\u007f"]])
def test_names_are_escaped(store, names):
    store.save(1, {n: np.ones(2, np.float32) for n in names})
    assert {t["name"] for t in store.json("show")["tensors"]} == set(names)


# ---------------------------------------------------------------------------------------------------- report

def test_report_is_the_size_of_the_files(full):
    report = checked(full.json("report"), "report")
    sizes = {str(name): p.stat().st_size for name, p in full.files().items()}
    assert report["stored_bytes"] == sum(sizes.values())
    assert report["stored_bytes"] == sum(report[f"{part}_bytes"] for part in ("chunk", "manifest", "catalog", "materialized", "other"))
    assert report["catalog_bytes"] == sum(s for n, s in sizes.items() if n.startswith("catalog.db"))
    assert report["chunk_bytes"] > 0 and report["manifest_bytes"] > 0
    listed = full.checkpoints()
    assert report["by_checkpoint"] == listed and report["checkpoints"] == len(listed)
    assert report["raw_bytes"] == sum(c["raw_bytes"] for c in listed)
    assert report["ratio"] == pytest.approx(report["raw_bytes"] / report["stored_bytes"])


def test_report_by_run_and_role(full):
    report = full.json("report")
    listed = full.checkpoints()
    assert [r["run"] for r in report["by_run"]] == ["gpt", "tuned"]
    for usage in report["by_run"]:
        mine = [c for c in listed if c["run"] == usage["run"]]
        assert usage["checkpoints"] == len(mine)
        assert usage["raw_bytes"] == sum(c["raw_bytes"] for c in mine)
        assert usage["stored_bytes"] == sum(c["stored_bytes"] for c in mine)
    assert sum(r["stored_bytes"] for r in report["by_run"]) == report["chunk_bytes"] + report["manifest_bytes"]
    roles = {r["role"]: r for r in report["by_role"]}
    assert {"weight", "exp_avg", "exp_avg_sq", "other"} <= set(roles) <= {
        "weight", "exp_avg", "exp_avg_sq", "other", "master", "overhead"}
    assert roles["weight"]["raw_bytes"] == 3 * (64 * 64 + 64) * 4
    assert roles["exp_avg"]["raw_bytes"] == 3 * 64 * 64 * 4 and roles["exp_avg"]["checkpoints"] == 3
    assert sum(r["stored_bytes"] for r in report["by_role"]) == report["chunk_bytes"]


def test_report_counts_unknown_files(full):
    before = full.json("report")["stored_bytes"]
    (full.path / "note.txt").write_bytes(bytes(1000))
    after = full.json("report")
    assert after["stored_bytes"] == before + 1000 and after["other_bytes"] >= 1000


# ------------------------------------------------------------------------------------------------------ diff

def test_diff(store):
    a = {"w": np.arange(8, dtype=np.float32), "n": np.arange(3), "gone": np.ones(2, np.float32),
         "dtype": np.ones(2, np.float32), "shape": np.ones((2, 3), np.float32), "empty": np.zeros(0, np.float32),
         "zero": np.zeros(4, np.float32)}
    b = {"w": a["w"].copy(), "n": np.array([0, 1, 7]), "new": np.ones(2, np.float32),
         "dtype": np.ones(2, np.float64), "shape": np.ones((3, 2), np.float32), "empty": np.zeros(0, np.float32),
         "zero": np.array([0.0, -0.0, 0.0, 0.0], np.float32)}
    b["w"][3] += 2
    b["w"][5] = np.nan
    store.save(1, a)
    store.save(2, b, expect_message="shape is stored without a delta: in the parent it is f32, with a different shape")
    diff = checked(store.json("diff", 1, 2), "diff")
    assert (diff["a"]["run"], diff["a"]["step"], diff["b"]["step"]) == ("a", 1, 2)
    assert diff["a"]["id"] == store.checkpoints()[0]["id"]
    tensors = {t["name"]: t for t in diff["tensors"]}
    assert tensors.keys() == a.keys() | b.keys()
    w = tensors["w"]
    assert (w["comparable"], w["why"], w["elements"], w["changed"], w["changed_fraction"]) == (True, None, 8, 2, 0.25)
    assert w["norm_a"] == pytest.approx(np.linalg.norm(a["w"]))
    finite = np.isfinite(b["w"])
    assert w["norm_b"] == pytest.approx(np.linalg.norm(b["w"][finite]))
    assert w["norm_diff"] == pytest.approx(2) and w["max_diff"] == pytest.approx(2)
    assert tensors["n"]["changed"] == 1 and tensors["n"]["norm_a"] == tensors["n"]["max_diff"] == 0
    assert tensors["zero"]["changed"] == 1 and tensors["zero"]["norm_diff"] == 0
    assert tensors["empty"]["changed_fraction"] == 0
    reasons = {n: tensors[n]["why"] for n in ("gone", "new", "dtype", "shape")}
    assert reasons == {"gone": "only in A", "new": "only in B", "dtype": "dtype", "shape": "shape"}
    for name in reasons:
        assert not tensors[name]["comparable"]
        assert tensors[name]["changed_fraction"] is tensors[name]["norm_a"] is tensors[name]["max_diff"] is None


def test_diff_of_places(full):
    by_option = full.json("diff", "--run", "gpt", 1, 2)
    assert by_option == full.json("diff", "gpt@1", "gpt@2") == full.json("diff", "--run", "tuned", "gpt@1", "gpt@latest")
    assert full.json("diff", "--run", "tuned", "gpt@1", "latest")["b"]["run"] == "tuned"
    same = full.json("diff", "gpt@1", "gpt@1")
    assert all(t["changed"] == 0 and t["norm_diff"] == 0 for t in same["tensors"])


# ---------------------------------------------------------------------------------- load, rebuild, text, output

def test_load_says_what_it_wrote(full):
    out = full.folder / "o"
    said = checked(full.json("load", "--run", "gpt", "--step", 1, "--tensor", "layers*", "--out", out), "load")
    assert said["out"] == str(out) and said["bytes"] == out.stat().st_size and said["tensor_count"] == 2
    assert (said["checkpoints"][0]["run"], said["checkpoints"][0]["step"]) == ("gpt", 1)


def test_rebuild(full):
    before = full.checkpoints(), full.json("show", "--run", "gpt"), full.json("report")["by_run"]
    (full.path / "catalog.db").unlink()
    said = checked(full.call("rebuild", "--json", expect_message="").json(), "rebuild")
    assert said == {"schema": 1, "checkpoints": 3, "skipped": 0}
    assert (full.checkpoints(), full.json("show", "--run", "gpt"), full.json("report")["by_run"]) == before
    assert "3 checkpoints" in full.call("rebuild", expect_message="").out
    assert (full.path / "catalog.db.old").exists()


@pytest.mark.parametrize("command, says", [
    (["list"], ["RUN", "gpt", "tuned", "delta"]),
    (["list", "-v"], ["PARENT", "gpt@2", "val_loss=2.5"]),
    (["show", "--run", "gpt"], ["gpt@2 -> gpt@1", "layers.0.weight", "[64, 64]", "BITS/ELEMENT"]),
    (["show", "--run", "tuned", "-v"], ["MAX ERROR", "resumed from  gpt@1"]),
    (["diff", "gpt@1", "gpt@2"], ["A: gpt@1, B: gpt@2", "layers.0.weight", "only in B"]),
    (["report"], ["3 checkpoints", "KiB", "x\n", "exp_avg_sq", "overhead"]),
    (["report", "-v"], ["tuned@3"]),
    (["verify"], ["no damage", "verified 3 checkpoints"]),
    (["verify", "--run", "gpt", "--step", "latest", "--quick"], ["no damage"]),
])
def test_text(full, command, says):
    out = full.call(*command).out
    for text in says:
        assert text in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert full.call(*command, "-q").out == ""
    assert full.call(*command, "-q", "--json").out == full.call(*command, "--json").out


def test_columns_are_aligned(store):
    store.save(1, {"short": np.ones(2, np.float32), "\u20ac\u00e9 long name of a tensor": np.ones(200, np.float32)})
    rows = store.call("show").out.split("\n\n")[1].splitlines()
    assert len(rows) == 3
    column = rows[0].index("ROLE")
    assert all(row[column:].startswith(("ROLE", "weight")) for row in rows)
    assert len({len(row) for row in rows}) == 1, "the last column is aligned to the right"


def test_saving_says_what_it_did(store):
    assert re.match(r"saved a@1: base, [0-9.]+ KiB in [0-9.]+ KiB, [0-9.]+x\n", store.save(1, state(1, 1)).out)
    assert "delta on a@1" in store.save(2, state(1, 2)).out
    assert store.save(3, state(1, 3), "-q").out == ""
    assert re.search(r"id [0-9a-f]{32}", store.save(4, state(1, 4), "-v").out)
    assert st.same(store.load()[0], state(1, 4))


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["--help"], ["help", "save"]])
def test_full_disk_behind_standard_output(full, command):
    store_argument = [] if command[0] in ("--help", "help") else [full.path]
    with open("/dev/full", "w") as device:
        done = subprocess.run([COMMAND, command[0], *store_argument, *command[1:]], stdout=device,
                              stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == FAILED and "standard output" in done.stderr


def test_json_is_utf8(store):
    store.save(1, {"\u20ac": np.ones(1, np.float32)})
    raw = subprocess.run([COMMAND, "show", store.path, "--json"], stdout=subprocess.PIPE, check=True, timeout=60).stdout
    assert json.loads(raw.decode("utf-8"))["tensors"][0]["name"] == "\u20ac"


def test_only_bytes_that_are_not_utf8_are_replaced(store, tmp_path):
    """Messages name paths, which may be any bytes."""
    source = os.fsencode(tmp_path) + b"/st\xff\xe2\x82\xac\xe2\x82"
    for step in (1, 2):
        subprocess.run([COMMAND, "save", source, "--run", "a", "--step", str(step), "--base", "-q", store.file(state(1, step))], check=True, timeout=60)
    next(iter(Path(os.fsdecode(source)).glob("data/c/*"))).unlink()
    done = subprocess.run([COMMAND, "copy", source, store.path, "--json"], capture_output=True, timeout=60)
    assert done.returncode == CORRUPT
    left, = (c["why"] for c in json.loads(done.stdout)["checkpoints"] if c["state"] == "left")
    assert "/st?\u20ac??" in left and all("/st?\u20ac??" in json.loads(line)["message"] for line in done.stderr.splitlines())
