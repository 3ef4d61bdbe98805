"""report: sums are right in every format; growth, policies and prices are compared with calculations in the
test."""

import csv
import io
import json

import numpy as np
import pytest

from support_cli import DOC, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401

EXAMPLE = DOC.parent / "prices-example.json"
HOSTILE = "a<b>&\"c', \u20ac=1\n"
GROUPS = {"total", "part", "run", "role", "fidelity", "time", "tensor", "growth", "projection", "pruning", "trash", "checkpoint", "checkpoint role"}


@pytest.fixture
def full(store):
    """Two runs, one of them a branch; two fidelities; a tensor whose name is special in CSV and HTML;
    metadata."""
    for step in (10, 20, 30, 40):
        tensors = {**state(1, step), HOSTILE: np.full(100, step, np.float32)}
        store.save(step, tensors, *(["--fidelity", "near"] if step > 20 else []), run_name="gpt", metadata={"k": "v"})
    store.save(45, state(1, 45), "--parent", "gpt@20", run_name="tuned", expect_message="lacks 1 tensor")
    return store


def report(store, *args):
    said = store.json("report", *args)
    check_documented(said, "`report`", where="report")
    return said


def table(store, *args):
    """The rows of the CSV by group: {group: [row]}."""
    out = store.call("report", "--csv", *args).out
    rows = list(csv.reader(io.StringIO(out, newline=""), strict=True))
    assert all(len(row) == len(rows[0]) for row in rows)
    groups = {}
    for row in rows[1:]:
        groups.setdefault(row[0], []).append({k: v for k, v in zip(rows[0], row)})
    return groups


def total(rows, field):
    return sum(int(r[field] or 0) for r in rows)


def check_sums(r):
    assert r["stored_bytes"] == sum(r[f"{part}_bytes"] for part in ("chunk", "manifest", "catalog", "materialized", "parity", "other"))
    assert total(r["by_run"], "stored_bytes") + r["unlisted_bytes"] == r["chunk_bytes"] + r["manifest_bytes"]
    listed = total(r["by_checkpoint"], "stored_bytes")
    assert listed == total(r["by_run"], "stored_bytes") == total(r["by_fidelity"], "stored_bytes") == total(r["by_time"], "stored_bytes")
    for rows in ("by_run", "by_role", "by_fidelity", "by_time", "by_checkpoint"):
        assert total(r[rows], "raw_bytes") == r["raw_bytes"], rows
    for rows in ("by_run", "by_fidelity", "by_time"):
        assert total(r[rows], "checkpoints") == r["checkpoints"], rows
    roles = {role["role"]: role for role in r["by_role"] if role["role"] != "overhead"}
    for name, role in roles.items():
        tensors = [t for t in r["by_tensor"] if t["role"] == name]
        assert [total(tensors, f) for f in ("elements", "raw_bytes", "stored_bytes")] == [
            role["elements"], role["raw_bytes"], role["stored_bytes"]]
        assert role["bits_per_element"] == pytest.approx(8 * role["stored_bytes"] / role["elements"])
    assert r["by_time"][-1]["stored_so_far"] == listed and r["by_time"][-1]["raw_so_far"] == r["raw_bytes"]
    chunks = total(r["by_role"], "stored_bytes")
    assert 0 < listed - chunks < r["manifest_bytes"] + 1, "what is left are the manifests"
    assert r["by_tensor"] == sorted(r["by_tensor"], key=lambda t: -t["stored_bytes"])


def test_figures_add_up(full):
    r = report(full)
    check_sums(r)
    assert r["unlisted_bytes"] == 0 and r["file_count"] == 10
    assert total(r["by_role"], "stored_bytes") == r["chunk_bytes"]
    assert {f["fidelity"]: f["checkpoints"] for f in r["by_fidelity"]} == {"exact": 3, "near": 2}
    weight = next(t for t in r["by_tensor"] if (t["run"], t["tensor"]) == ("gpt", "layers.0.weight"))
    assert (weight["checkpoints"], weight["elements"], weight["raw_bytes"]) == (4, 4 * 64 * 64, 4 * 64 * 64 * 4)
    shown = [t for step in (10, 20, 30, 40) for t in full.json("show", "--run", "gpt", "--step", step)["tensors"]]
    assert weight["stored_bytes"] == sum(t["stored_bytes"] for t in shown if t["name"] == "layers.0.weight")
    assert {t["tensor"] for t in r["by_tensor"]} == {*state(1), HOSTILE}
    newest = r["by_checkpoint"][-1]["raw_bytes"]
    assert r["full_instead"] == pytest.approx(r["stored_bytes"] / newest)
    assert r["projection"] == [] and r["pruning"] is r["prices"] is r["cost"] is None
    assert r["trash"] == {"checkpoints": 0, "bytes": 0, "saved_per_month": None}
    assert all(row["cost_per_month"] is None for row in r["by_run"])


def test_deleted_and_restored_checkpoints(full):
    before = report(full)
    full.call("delete", "gpt@40", "-q")
    r = report(full)
    check_sums(r)
    gone = before["by_checkpoint"][3]
    assert r["unlisted_bytes"] == gone["stored_bytes"] and r["checkpoints"] == 4
    assert "belong to no listed checkpoint: checkpoints in the trash, deleted ones that others still build on" in full.call("report").out
    full.call("trash", "--restore", "-q")
    after = report(full)
    assert after["by_tensor"] == before["by_tensor"] and after["unlisted_bytes"] == 0
    full.call("delete", "gpt@40", "gpt@30", "--undo", "0s", "-q")
    r = report(full)
    check_sums(r)
    assert [f["fidelity"] for f in r["by_fidelity"]] == ["exact"]
    (full.path / "catalog.db").unlink()
    full.call("rebuild", "-q")
    again = report(full)
    assert again["by_tensor"] == r["by_tensor"] and again["by_role"] == r["by_role"]


def test_csv_has_the_same_numbers(full):
    args = ["--until", 100, "--keep-last", 1, "--prices", EXAMPLE]
    r, groups = report(full, *args), table(full, *args)
    assert set(groups) == GROUPS
    fields = ("checkpoints", "raw_bytes", "stored_bytes")

    def numbers(rows, names=fields):
        return [[int(row[f]) for f in names] for row in rows]
    assert numbers(groups["total"]) == numbers([r])
    for group, rows in [("run", "by_run"), ("role", "by_role"), ("fidelity", "by_fidelity"), ("time", "by_time"),
                        ("tensor", "by_tensor"), ("projection", "projection")]:
        assert numbers(groups[group]) == numbers(r[rows]), group
    assert [t["name"] for t in groups["tensor"]] == [t["tensor"] for t in r["by_tensor"]]
    assert HOSTILE in [t["name"] for t in groups["tensor"]]
    assert [f"{c['run']}@{c['step']}" for c in groups["checkpoint"]] == [f"{c['run']}@{c['step']}" for c in r["by_checkpoint"]]
    assert [c["time"] for c in groups["checkpoint"]] == [c["created"] for c in r["by_checkpoint"]]
    for role in r["by_role"][:-1]:
        mine = [row for row in groups["checkpoint role"] if row["name"] == role["role"]]
        assert [total(mine, f) for f in ("elements", "raw_bytes", "stored_bytes")] == [
            role["elements"], role["raw_bytes"], role["stored_bytes"]]
    parts = {p["name"]: int(p["stored_bytes"]) for p in groups["part"]}
    assert sum(b for n, b in parts.items() if n != "unlisted") == r["stored_bytes"]
    assert float(groups["total"][0]["cost_per_month"]) == pytest.approx(r["cost"]["per_month"])
    assert groups["total"][0]["currency"] == "USD" and groups["time"][0]["currency"] == ""
    assert int(groups["pruning"][0]["stored_bytes"]) == r["pruning"]["bytes"]
    assert "cost_per_month" in groups["total"][0] and table(full)["total"][0]["cost_per_month"] == ""


# -------------------------------------------------------------------------------------------- growth, policies

def test_growth_and_the_end_of_the_run(full):
    r = report(full, "--until", 105)
    growth = {g["run"]: g for g in r["growth"]}
    gpt = growth["gpt"]
    assert (gpt["first_step"], gpt["last_step"], gpt["interval"]) == (10, 40, 10)
    newest = [c for c in r["by_checkpoint"] if c["run"] == "gpt"][1:]
    stored = sum(c["stored_bytes"] for c in newest) / 3
    assert gpt["stored_bytes"] == pytest.approx(stored)
    assert gpt["over"] == 3 and gpt["ratio"] == pytest.approx(gpt["raw_bytes"] / stored)
    rows = [row for row in table(full)["checkpoint role"] if row["run"] == "gpt" and int(row["step"]) > 10]
    for role in gpt["roles"]:
        mine = [row for row in rows if row["name"] == role["role"]]
        assert role["stored_bytes"] == pytest.approx(total(mine, "stored_bytes") / 3)
        assert role["raw_bytes"] == pytest.approx(total(mine, "raw_bytes") / 3)
        assert role["bits_per_element"] == pytest.approx(8 * total(mine, "stored_bytes") / total(mine, "elements"))
    sums = [row for row in table(full)["growth"] if row["run"] == "gpt"]
    assert int(sums[0]["stored_bytes"]) == sum(c["stored_bytes"] for c in newest) and sums[0]["checkpoints"] == "3"
    assert [row["name"] for row in sums[1:]] == [role["role"] for role in gpt["roles"]] == ["weight", "exp_avg", "exp_avg_sq", "other"]
    assert growth["tuned"]["interval"] is growth["tuned"]["seconds"] is growth["tuned"]["stored_bytes_per_day"] is None
    if gpt["seconds"]:
        assert gpt["stored_bytes_per_day"] == pytest.approx(stored / gpt["seconds"] * 86400)
    end, = r["projection"]
    usage = r["by_run"][0]
    assert (end["run"], end["until"], end["checkpoints"]) == ("gpt", 105, 4 + 6)
    assert end["stored_bytes"] == pytest.approx(usage["stored_bytes"] + 6 * stored, abs=1)
    assert end["raw_bytes"] == pytest.approx(usage["raw_bytes"] + 6 * newest[0]["raw_bytes"], abs=1)
    assert report(full, "--until", 40)["projection"][0]["checkpoints"] == report(full, "--until", 3)["projection"][0]["checkpoints"] == 4
    far = report(full, "--until", 2**63 - 1)["projection"][0]
    assert far["reached"] is None and far["checkpoints"] > 10**17 and far["raw_bytes"] == 2**63 - 1
    assert report(full, "--until", 100, "--run", "tuned")["projection"] == []
    assert "nothing can be projected" in full.call("report", "--until", 100, "--run", "tuned").out
    for args in (["--until", "x"], ["--until", str(2**63)], ["--until", "-1"]):
        full.call("report", *args, expect=USAGE)
    assert "no run 'x'" in full.call("report", "--until", 1, "--run", "x", expect=NOT_FOUND).err


def test_only_the_newest_32_checkpoints_count(store):
    for step in [*range(8), *range(1000, 1000 + 33 * 5, 5)]:
        store.save(step, {"w": np.full(10 if step < 1000 else 1000, step, np.float32)}, "--base", "--codec", "raw")
    r = report(store, "--until", 2**63 - 1)
    assert r["projection"][0]["checkpoints"] > 10**18 and r["projection"][0]["raw_bytes"] == 2**63 - 1
    growth, = r["growth"]
    assert growth["interval"] == 5 and growth["raw_bytes"] == 4000


def test_what_a_policy_would_save(full):
    policy = ["--keep-last", 1, "--run", "gpt"]
    plan = full.json("prune", "--dry-run", *policy)
    said = report(full, *policy)["pruning"]
    assert said == {"stored": False, "checkpoints": 4, "deleted": plan["deleted"], "bytes": plan["bytes"], "saved_per_month": None}
    assert report(full, "--keep-every", 10)["pruning"]["checkpoints"] == 5
    assert len(full.checkpoints()) == 5
    assert f"would delete {plan['deleted']} of 4" in full.call("report", *policy).out
    full.call("report", "--keep-last", 0, expect=USAGE)


def test_what_stored_policies_and_the_trash_hold(full):
    for step in (50, 60, 70):
        full.save(step, state(1), "--base", "-q", run_name="gpt")
    full.call("policy", "--keep-last", 1, "--run", "gpt", "-q")
    plan = full.json("prune", "--dry-run")
    assert plan["deleted"] > 0
    for of in (), ("--run", "gpt"):
        r = report(full, *of)
        assert r["pruning"] == {"stored": True, "checkpoints": 7, "deleted": plan["deleted"], "bytes": plan["bytes"], "saved_per_month": None}
    assert report(full, "--run", "tuned")["pruning"] is None
    assert f"applying the stored policies would delete {plan['deleted']} of 7" in full.call("report").out
    assert not report(full, "--keep-last", 5)["pruning"]["stored"]
    full.call("prune", "-q")
    r = report(full)
    assert r["pruning"]["deleted"] == 0 and r["trash"]["checkpoints"] == plan["deleted"] and r["trash"]["bytes"] == plan["bytes"]
    assert f"the trash holds {plan['deleted']} deleted checkpoint" in full.call("report").out
    assert int(table(full)["trash"][0]["stored_bytes"]) == plan["bytes"]
    page = full.folder / "trash.html"
    full.call("report", "--html", page, "-q")
    assert "the trash holds" in page.read_text() and "applying the stored policies" in page.read_text()
    before = r["stored_bytes"] - r["catalog_bytes"]
    full.call("trash", "--empty", "--all", "-q")
    r = report(full)
    assert r["trash"] == {"checkpoints": 0, "bytes": 0, "saved_per_month": None}
    assert before - (r["stored_bytes"] - r["catalog_bytes"]) >= plan["bytes"]
    note, = (p for n, p in full.files().items() if str(n).startswith("data/n/policy"))
    note.write_bytes(b"damaged")
    said = full.call("report", "--json", expect_message="cannot tell what the stored policies would delete").json()
    assert said["pruning"] is None


# ------------------------------------------------------------------------------------------------------ prices

@pytest.fixture
def prices(store):
    def write(**fields):
        path = store.folder / "prices.json"
        path.write_text(json.dumps({"name": "Far <away> & \"cheap\"", "date": "2026-02-03", "currency": "EUR", "per_gb_month": 20000,
                                    **fields}))
        return path
    return write


def test_costs(full, prices):
    r = report(full, "--prices", prices(per_1000_puts=7, per_1000_gets=3, egress_per_gb=11000), "--keep-last", 1, "--until", 100)
    cost = r["cost"]
    assert r["prices"] == {"name": "Far <away> & \"cheap\"", "date": "2026-02-03", "currency": "EUR", "per_gb_month": 20000,
                           "per_1000_puts": 7, "per_1000_gets": 3, "egress_per_gb": 11000}
    assert cost["per_month"] == pytest.approx(r["stored_bytes"] * 20000 / 1e9)
    assert cost["full_per_month"] == pytest.approx(r["raw_bytes"] * 20000 / 1e9)
    assert cost["saved_per_month"] == pytest.approx(cost["full_per_month"] - cost["per_month"])
    assert cost["upload"] == pytest.approx(10 * 7 / 1000)
    for row in r["by_run"] + r["projection"]:
        assert row["cost_per_month"] == pytest.approx(row["stored_bytes"] * 20000 / 1e9)
    assert r["pruning"]["saved_per_month"] == pytest.approx(r["pruning"]["bytes"] * 20000 / 1e9)
    assert [c["checkpoint"] for c in cost["loads"]] == ["gpt@40", "tuned@45"]
    for load in cost["loads"]:
        run_name, step = load["checkpoint"].split("@")
        explained = full.json("load", "--run", run_name, "--step", step, "--explain")
        assert load["bytes"] == explained["read_bytes"] and load["files"] == 2 * explained["checkpoint_count"]
        assert load["cost"] == pytest.approx(load["bytes"] / 1e9 * 11000 + load["files"] / 1000 * 3)


def test_no_price_no_cost(full, prices):
    cost = report(full, "--prices", prices())["cost"]
    assert cost["upload"] is None and all(load["cost"] is None for load in cost["loads"])
    only_gets = report(full, "--prices", prices(per_1000_gets=3))["cost"]["loads"][0]
    assert only_gets["cost"] == pytest.approx(only_gets["files"] / 1000 * 3)
    out = full.call("report", "--prices", prices(), "--until", 50).out
    assert "Far <away> & \"cheap\", 2026-02-03" in out and "a month costs" in out and "A MONTH" in out
    assert "writing its" not in out and "loading" not in out
    assert "a month" not in full.call("report", "--until", 50, "--keep-last", 1).out
    assert report(full, "--prices", EXAMPLE)["prices"]["currency"] == "USD"


@pytest.mark.parametrize("text, says", [
    ("{", "not valid JSON"), ("[]", "an object"), ("{}", "\"name\""), (b"\xff", "not valid JSON"),
    ({"per_gb_month": None}, "per_gb_month"), ({"per_gb_month": -1}, "per_gb_month"), ({"per_gb_month": "1"}, "per_gb_month"),
    ({"egress_per_gb": 1e300}, "egress_per_gb"), ({"per_gb_monht": 1}, "per_gb_monht"), ({"currency": "moneymoney"}, "currency"),
    ({"date": "3 February"}, "YYYY-MM-DD"), ({"name": ""}, "name"), ({"name": 7}, "name"), (None, "larger"),
])
def test_invalid_price_tables(full, prices, text, says):
    path = prices(**text) if isinstance(text, dict) else full.folder / "bad.json"
    if not isinstance(text, dict):
        text = text or "x" * (2 << 20)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = full.call("report", "--prices", path, expect=USAGE).err
    assert says.replace("an object", "JSON object") in said and str(path) in said
    assert full.call("report", "--prices", full.folder / "absent", expect=NOT_FOUND)


def test_text(full):
    out = full.call("report", "-v").out
    for word in ("BITS/ELEMENT", "FIDELITY", "NEWEST STEP", "NEWEST OF", "SAVED", "TENSOR", "CHECKPOINT", "chunk files", "near"):
        assert word in out
    assert "chunk files" not in full.call("report").out
    assert r"\x0a" in out, "names do not break lines"
    assert "TENSOR" not in full.call("report").out
    assert full.call("report", "-q").out == ""
    full.call("report", "--csv", "--json", expect=USAGE)


def test_the_first_line_says_what_was_saved(store):
    def first():
        return store.call("report").out.splitlines()[0]
    store.save(1, {"w": np.zeros(1000, np.float32)})
    r = report(store)
    assert r["stored_bytes"] > r["raw_bytes"] and first().startswith("1 checkpoint takes ") and first().endswith(f" as full copies, {r['ratio']:.2f}x")
    store.save(2, {"w": np.zeros(1 << 20, np.float32)}, "--base")
    r = report(store)
    saved, share = r["raw_bytes"] - r["stored_bytes"], 100 - 100 * r["stored_bytes"] / r["raw_bytes"]
    assert first().startswith(f"saved you {saved / 2**20:.1f} MiB ({int(share)} %): 2 checkpoints take ")


def test_an_empty_store(store):
    run("save", store.path, "--run", "a", "--step", 1, "--parent", "x@1", store.file({}), expect=NOT_FOUND)
    r = report(store, "--until", 5, "--prices", EXAMPLE)
    assert r["full_instead"] is None and r["by_tensor"] == r["by_time"] == r["growth"] == r["cost"]["loads"] == []
    assert store.call("report", "-v").out.startswith("0 checkpoints")
    assert set(table(store)) == {"total", "part", "role", "trash"}
