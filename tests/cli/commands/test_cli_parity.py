"""parity and repair: what they make, rebuild, report, and leave unchanged."""

import subprocess
from pathlib import Path

import pytest

from support_cli import COMMAND, CORRUPT, FAILED, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401


@pytest.fixture
def bases(store):
    for step in range(1, 10):
        store.save(step, state(1, step), "--base")
    return store


def chunks(store):
    return sorted(p for name, p in store.files().items() if "data/c" in str(name))


def parity_files(store):
    return sorted(p for name, p in store.files().items() if str(name).endswith(".ckp"))


def test_any_chunk_file_can_be_rebuilt(bases):
    assert "--group" in bases.call("parity", expect=NOT_FOUND).err
    plan = bases.json("parity", "--group", "8+1", "--dry-run")
    check_documented(plan, "`parity`")
    assert plan["dry_run"] and plan["files"] == 9 and not parity_files(bases)
    made = bases.json("parity", "--group", "8+1")
    check_documented(made, "`parity`")
    assert made["groups"] == plan["groups"] == 2 and made["files"] == 9
    assert made["parity_bytes"] == plan["parity_bytes"] == sum(p.stat().st_size for p in parity_files(bases))
    again = bases.json("parity")
    assert again["groups"] == again["removed_groups"] == 0
    status = bases.json("parity", "--status")
    check_documented(status, "`parity --status`")
    assert status["covered_files"] == status["files"] == 9 and status["groups"] == 2 and status["weak_groups"] == 0
    assert status["settings"] == [{"run": None, "readable": True, "data": 8, "parity": 1}]
    for path in chunks(bases):
        content = path.read_bytes()
        path.unlink()
        bases.call("verify", expect=CORRUPT)
        status = bases.json("parity", "--status")
        assert status["weak_groups"] == status["spent_groups"] == 1 and status["covered_files"] in (2, 9)
        could = bases.json("repair", "--dry-run")
        assert could["ok"] and could["dry_run"] and not path.exists()
        result = bases.json("repair")
        check_documented(result, "`repair`")
        assert result["ok"] and [r["file"] for r in result["repaired"]] == [str(path.relative_to(bases.path))]
        assert result["repaired"][0]["aside"] is None and result["repaired"] == could["repaired"]
        assert path.read_bytes() == content
        bases.call("verify")
    assert bases.json("report")["parity_bytes"] >= made["parity_bytes"]


def test_damaged_files_are_kept_until_they_are_purged(bases):
    bases.call("parity", "--group", "4+1", "-q")
    path = chunks(bases)[3]
    content = path.read_bytes()
    damaged = bytes([content[0] ^ 1]) + content[1:]
    path.write_bytes(damaged)
    text = bases.call("repair").out
    assert f"repaired {path.relative_to(bases.path)}" in text and text.endswith("1 repaired, no damage is left\n")
    aside = list((bases.path / "data/q").iterdir())
    assert len(aside) == 1 and aside[0].read_bytes() == damaged and path.read_bytes() == content
    purged = bases.json("repair", "--purge")
    assert purged["purged_files"] == 1 and purged["purged_bytes"] == len(damaged) and not purged["repaired"]
    assert not list((bases.path / "data/q").iterdir())


def test_what_cannot_be_repaired(bases):
    assert "no catalog knows" in bases.call("repair", "--manifest", "nobody@7", expect=NOT_FOUND).err
    bases.call("parity", "--group", "16+1", "-q")
    lost = chunks(bases)[:2]
    for path in lost:
        path.unlink()
    result = bases.json("repair", expect=CORRUPT)
    check_documented(result, "`repair`")
    assert not result["ok"] and not result["repaired"]
    assert sorted(d["file"] for d in result["damage"]) == [str(p.relative_to(bases.path)) for p in lost]
    assert all(d["checkpoints"] and "lost or damaged in the same place" in d["what"] for d in result["damage"])
    assert "DAMAGE IS LEFT" in bases.call("repair", expect=CORRUPT).out
    assert "groups of 7 chunk files" in bases.call("parity").out  # the lost ones take no other file along
    assert "7 of 9 chunk files are covered" in bases.call("parity").out
    assert bases.json("parity", "--status")["covered_files"] == 7


def test_everything_is_covered(bases):
    bases.call("parity", "--group", "4+1", "-q")
    assert bases.call("parity").out == "everything is covered\n"
    bases.call("parity", "--off", "--run", "a", "-q")
    assert "0 of 9 chunk files are covered" in bases.call("parity").out


def test_without_the_library(bases, monkeypatch):
    monkeypatch.setenv("CKD_ISAL", "/nonexistent/libisal.so")
    refused = run("parity", bases.path, "--group", "8+2", expect=FAILED)
    assert "libisal2" in refused.err
    bases.call("parity", "--group", "8+1")  # XOR does not need the library
    monkeypatch.delenv("CKD_ISAL")
    made = subprocess.run([COMMAND, "parity", str(bases.path), "--group", "9+2"], capture_output=True, text=True, timeout=60)
    if "libisal2" in made.stderr:
        pytest.skip("ISA-L is not installed")
    for path in chunks(bases)[:2]:
        path.unlink()
    monkeypatch.setenv("CKD_ISAL", "/nonexistent/libisal.so")
    left = bases.json("repair", expect=CORRUPT)
    assert len(left["damage"]) == 2 and "libisal2" in left["damage"][0]["what"]
    step = 9
    bases.call("list")
    monkeypatch.delenv("CKD_ISAL")
    assert len(bases.json("repair")["repaired"]) == 2
    bases.call("verify", "--run", "a", "--step", step)


def test_runs_have_settings_of_their_own(bases):
    for step in (1, 2):
        bases.save(step, state(2, step), "--base", run_name="b")
    bases.call("parity", "--group", "4+1", "--run", "b")
    status = bases.json("parity", "--status")
    assert status["files"] == 11 and status["covered_files"] == 2
    bases.call("parity", "--group", "8+1")
    bases.call("parity", "--off", "--run", "b")
    status = bases.json("parity", "--status")
    assert status["covered_files"] == 9
    assert status["settings"] == [{"run": None, "readable": True, "data": 8, "parity": 1},
                                  {"run": "b", "readable": True, "data": 0, "parity": 0}]
    assert "run b: no parity" in bases.call("parity", "--status").out
    bases.call("parity", "--off")
    assert not parity_files(bases) and bases.json("parity", "--status")["parity_bytes"] == 0


def test_wrong_arguments(store):
    for group in ("8", "8+0", "0+1", "+", "8+17", "129+1", "8+1+1", "a+b", ""):
        assert "8+1" in run("parity", store.path, "--group", group, expect=USAGE).err
    run("parity", store.path, "--group", "8+1", "--off", expect=USAGE)
    run("parity", store.path, "--status", "--run", "a", expect=USAGE)
    run("repair", store.path, "--dry-run", "--purge", expect=USAGE)
    run("repair", store.path, "--rate", "fast", expect=USAGE)
    run("repair", store.path, "--manifest", "latest", expect=USAGE)
    run("repair", Path("/nonexistent/store"), expect=NOT_FOUND)
