"""A run that saves under an automatic policy keeps what the policy says, and takes little more space than a
fresh store of that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "retention.py"
COMMAND = os.environ.get("CKPTDELTA") or str(SCRIPT.parents[2] / "build/current/ckptdelta")


ENDS = (52, 57, 61, 66)  # where a run ends decides how long the chains of its last checkpoints are


def retention(folder, fidelity, policy, *args, saves=60):
    done = subprocess.run([sys.executable, SCRIPT, COMMAND, str(saves), fidelity, policy, "--json", "--folder", folder, *args],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


PAGE = 4096

# Lossy checkpoints that are far apart take more space than in a fresh store, which saves coarser states. Chunk
# files are compared apart from the rest: in a store as small as this the catalog would hide them. The rest is
# compared by its bytes: the catalog grows by pages of 2,048 bytes, and here it is no more than ten of them.
@pytest.mark.parametrize("fidelity, policy, most", [
    ("exact", "--keep-last 5", 1.3), ("exact", "--keep-last 3 --keep-every 20", 1.3), ("exact", "--keep-every 10 --keep-first", 1.3),
    ("near", "--keep-last 5", 1.9), ("coarse", "--keep-last 5", 2.0),
    ("near", "--keep-every 10 --keep-first", 2.7), ("coarse", "--keep-every 10 --keep-first", 3.6)])
@pytest.mark.sampled(7)
def test_retention(tmp_path, fidelity, policy, most):
    factors = []
    for saves in ENDS:
        folder = tmp_path / str(saves)
        folder.mkdir()
        found = retention(folder, fidelity, policy, saves=saves)
        rest, fresh_rest = (found[total] - found[by]["c"] for total, by in (("bytes", "by_folder"), ("fresh_bytes", "fresh_by_folder")))
        assert found["as_policy_says"] and rest <= fresh_rest + PAGE, found
        assert found["chunk_files"] <= len(found["listed"]) + 8, found  # those of deleted checkpoints are packed
        factors.append(found["by_folder"]["c"] / found["fresh_by_folder"]["c"])
    assert sum(factors) / len(factors) <= most, factors


def test_without_compaction_it_takes_more(tmp_path):
    found = retention(tmp_path, "exact", "--keep-every 10 --keep-first", "--compact", "off")
    assert found["as_policy_says"] and found["by_folder"]["c"] > 1.3 * found["fresh_by_folder"]["c"], found
