"""Suspect checkpoints in the command: list and show mark them, load and export pass them over, prune does not count them."""

import json
import os

import numpy as np
import pytest

import support_safetensors as st
from support_cli import CORRUPT, FAILED, check_documented, run, state, store  # noqa: F401
from support_run import Job


def broken(step):
    tensors = state(1, step)
    tensors["layers.0.weight"][1, :7] = np.nan
    return tensors


@pytest.fixture
def gone_wrong(store):
    for step in (1, 2):
        store.save(step, state(1, step))
    for step in (3, 4):
        store.save(step, broken(step), expect_message=f"a@{step}: 1 tensor has become NaN or infinite (first: layers.0.weight, 7 of 4096 "
                   "values); the checkpoint is marked suspect")
    return store


def test_list_and_show(gone_wrong):
    listed = gone_wrong.json("list")
    check_documented(listed, "`list`")
    assert [c["suspect"] for c in listed["checkpoints"]] == [None, None, "nonfinite", "nonfinite"]
    lines = gone_wrong.call("list").out.splitlines()
    assert lines[0].split()[-1] == "MARKS" and [line.split()[-1] for line in lines[1:5]] == ["-", "-", "suspect", "suspect"]
    gone_wrong.call("pin", "a@3")
    assert "suspect pinned" in gone_wrong.call("list").out
    shown = gone_wrong.json("show", "a@4")
    check_documented(shown, "`show`")
    assert {t["name"]: t["nonfinite"] for t in shown["tensors"] if t["nonfinite"]} == {"layers.0.weight": 7}
    text = gone_wrong.call("show").out
    assert "suspect       values became NaN or infinite: layers.0.weight (7 of 4096)\n" in text and "NONFINITE" in text
    assert "suspect" not in gone_wrong.call("show", "a@2").out


def test_load_and_export_pass_them_over(gone_wrong, tmp_path):
    for latest in ([], ["--step", "latest"], ["a@latest"]):
        out = tmp_path / "out.safetensors"
        done = gone_wrong.call("load", *latest, "--force", "--out", out, "--json", expect_message="a@4 is suspect and passed over: a@2 is used instead")
        assert done.json()["checkpoints"][0]["step"] == 2
        assert st.read(out)[0]["layers.0.weight"][2] == state(1, 2)["layers.0.weight"].tobytes()
    tensors, _ = gone_wrong.load("--step", 4)
    assert tensors["layers.0.weight"][2] == broken(4)["layers.0.weight"].tobytes()
    gone_wrong.call("tag", "newest", "a@4")
    assert gone_wrong.load("--tag", "newest")[0]["layers.0.weight"][2] == broken(4)["layers.0.weight"].tobytes()
    gone_wrong.call("export", "--out", tmp_path / "exported", expect_message="a@4 is suspect and passed over")


def test_a_damaged_manifest_between(gone_wrong, tmp_path):
    """It is a healthy one's, and no catalog tells: an older one is loaded only if that is asked for."""
    manifest = gone_wrong.path / "data/m/a.2.0"
    content = bytearray(manifest.read_bytes())
    content[60] ^= 1
    manifest.write_bytes(content)
    (gone_wrong.path / "catalog.db").unlink()
    newest = ("load", "--out", tmp_path / "out", "--json")
    failed = gone_wrong.call(*newest, expect=CORRUPT, expect_message="is not used")
    assert "a@2 is newer than a@1 and cannot be read" in failed.err and not (tmp_path / "out").exists()
    done = gone_wrong.call(*newest, "--or-older", expect_message="a@2 is damaged and skipped").json()
    assert done["checkpoints"][0]["step"] == 1 and [s["checkpoint"] for s in done["skipped"]] == ["a@2"]


def test_only_suspect_ones(store, tmp_path):
    tensors = state(1)
    tensors["exp_avg.layers.0.weight"][:] = np.inf
    store.save(5, tensors, expect_message="marked suspect")
    failed = store.call("load", "--out", tmp_path / "out", expect=FAILED)
    assert "all checkpoints of run 'a' are suspect" in failed.err and "name its step, 5" in failed.err and not (tmp_path / "out").exists()
    store.call("load", "--step", 5, "--out", tmp_path / "out")


def test_prune(gone_wrong):
    plan = gone_wrong.json("prune", "--keep-last", 1, "--dry-run")
    check_documented(plan, "`prune`")
    assert [(c["checkpoint"], c["kept_as"]) for c in plan["checkpoints"]] == [
        ("a@1", ["safety"]), ("a@2", ["last", "safety"]), ("a@3", []), ("a@4", ["suspect"])]
    gone_wrong.call("prune", "--keep-last", 1)
    assert [c["step"] for c in gone_wrong.checkpoints()] == [1, 2, 4]


# A trainer whose weights are NaN from step 4 of its first attempt on; it fails when it sees that.
SICK = """
import json, os, struct, subprocess, sys
command, store, run = os.environ["COMMAND"], os.environ["CKPTDELTA_STORE"], os.environ["CKPTDELTA_RUN"]
start, attempt = os.environ.get("CKPTDELTA_CHECKPOINT"), int(os.environ["CKPTDELTA_ATTEMPT"])
step = int(os.environ.get("CKPTDELTA_STEP", 0))
with open("starts", "a") as starts:
    print(attempt, start, file=starts)
while step < 7:
    step += 1
    values = [float(step)] * 16
    if step >= 4 and attempt <= SICK_ATTEMPTS:
        values[3] = float("nan")
    header = json.dumps({"layer.weight": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    with open("state.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header + struct.pack("<16f", *values))
    parent = ["--parent", start] if start else []
    subprocess.run([command, "save", store, "-q", "--run", run, "--step", str(step), "--on-duplicate", "branch", *parent, "state.safetensors"], check=True)
    start = None
    if values[3] != values[3] and step == 6:
        sys.exit(1)
"""


def sick(job, attempts):
    path = job.folder / "train.py"
    path.write_text(SICK.replace("SICK_ATTEMPTS", str(attempts)))
    return [os.environ.get("PYTHON", "python3"), path]


def test_run_goes_on_from_the_last_healthy_one(tmp_path):
    job = Job(tmp_path)
    out, err = job.run(*sick(job, 1))
    assert job.starts() == ["1 None", "2 gpt@3"]
    for step in (4, 5, 6):
        assert f"gpt@{step} is suspect and passed over: values became NaN or infinite" in err
    listed = run("list", job.store, "--json").json()["checkpoints"]
    assert [(c["run"], c["step"]) for c in listed if not c["suspect"]][-4:] == [("gpt~2", step) for step in (4, 5, 6, 7)]


def test_run_gives_up_if_it_fails_there_again(tmp_path):
    """Suspect checkpoints are no progress: else attempts would go on for ever."""
    job = Job(tmp_path)
    out, err = job.run(*sick(job, 99), expect=93)
    assert "gave up" in err and job.starts()[:2] == ["1 None", "2 gpt@3"] and len(job.starts()) < 8
    attempts = [json.loads(line) for line in (job.store / "attempts.jsonl").read_text().splitlines()]
    assert attempts
