"""scrub: what it reads, what it remembers as verified, and how it reports damage."""

import json
import signal
import subprocess

import numpy as np
import pytest

from support_cli import COMMAND, CORRUPT, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401


@pytest.fixture
def bases(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step), "--base")
    return store


def chunks(store):
    return [p for name, p in store.files().items() if "data/c" in str(name)]


def test_verified_files_are_remembered(bases):
    first = bases.json("scrub")
    check_documented(first, "`scrub`")
    assert first["ok"] and first["files"] == 3 and first["bytes"] == sum(p.stat().st_size for p in chunks(bases))
    assert first["files_left"] == first["bytes_left"] == 0 and first["oldest"]
    assert bases.json("scrub")["files"] == 0
    bases.save(4, state(1, 4), "--base")
    assert bases.json("scrub", "--rate", "max")["files"] == 1
    assert bases.json("scrub", "--older-than", "0s", "--rate", "1G")["files"] == 4
    assert bases.call("scrub").out.startswith("read 0 files, 0 B: no damage\nall files were verified since 20")


def test_damage(bases):
    path = chunks(bases)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    found = bases.json("scrub", expect=CORRUPT)
    check_documented(found, "`scrub`")
    assert not found["ok"] and found["files"] == 3 and found["oldest"] is None
    assert [d["file"] for d in found["damage"]] == [str(path.relative_to(bases.path))] and len(found["damage"][0]["checkpoints"]) == 1
    again = bases.json("scrub", expect=CORRUPT)
    assert again["files"] == 1 and again["damage"] == found["damage"] and again["newest_intact"] == found["newest_intact"]
    assert "DAMAGED" in bases.call("scrub", expect=CORRUPT).out
    path.write_bytes(content)
    assert bases.json("scrub")["files"] == 1


def test_time_and_interruption(store):
    rng = np.random.default_rng(1)
    for step in range(1, 7):
        store.save(step, {"w": rng.standard_normal(1 << 18).astype(np.float32)}, "--base")
    some = store.json("scrub", "--rate", "1M", "--max-time", "1s")
    assert 1 <= some["files"] < 6 and some["files"] + some["files_left"] == 6 and some["oldest"] is None
    process = subprocess.Popen([COMMAND, "scrub", store.path, "--rate", "500K"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "what it verified is remembered" in err
    assert store.json("scrub", "--rate", "max")["files"] <= some["files_left"]
    assert store.json("scrub")["files"] == 0


def test_an_ended_scrub_reports_the_damage_that_it_has_found(store):
    rng = np.random.default_rng(1)
    for step in (1, 2):
        store.save(step, {"w": rng.standard_normal(1 << 18).astype(np.float32)}, "--base")
    chunks(store)[0].unlink()  # a file that was never verified comes first, and its absence is seen at once
    store.json("scrub", "--rate", "max", expect=CORRUPT)
    process = subprocess.Popen([COMMAND, "scrub", store.path, "--rate", "10K", "--older-than", "0s", "--json"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    found = json.loads(out)
    check_documented(found, "`scrub`")
    assert process.returncode == CORRUPT and not found["ok"] and found["files_left"] == 1
    assert "what it verified is remembered" in err and "1 place is damaged; 1 checkpoint cannot be loaded" in err


@pytest.mark.parametrize("args", [["--rate", "0"], ["--rate", "x"], ["--older-than", "7"], ["--max-time", "x"], ["x"]])
def test_usage(bases, args):
    bases.call("scrub", *args, expect=USAGE)


def test_no_store(tmp_path):
    run("scrub", tmp_path / "none", expect=NOT_FOUND)
