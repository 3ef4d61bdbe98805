"""A process that saves again and again does not grow. Skipped where torch is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support_python import environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]
SAVES = 40 if os.environ.get("CKD_TEST_LEVEL") == "quick" else 300
HAS_DISTRIBUTED = torch is not None and torch.distributed.is_available()


@pytest.mark.parametrize("kind", ["store", "session", "dcp"])
def test_saves_leave_nothing_behind(tmp_path, kind):
    """Files, threads and objects stay as many, and memory grows by less than a tenth of a state for each save."""
    if kind == "dcp" and not HAS_DISTRIBUTED:
        pytest.skip("this torch was built without distributed")
    script = Path(__file__).with_name("growth_run.py")
    done = subprocess.run([sys.executable, "-W", "ignore", script, kind, str(SAVES), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True,
                          timeout=900, env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0
    marks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(marks) >= 8 and marks[-1]["saves"] == SAVES
    first, last = marks[len(marks) // 2], marks[-1]
    saves = last["saves"] - first["saves"]
    assert (last["files"], last["threads"]) == (first["files"], first["threads"]), marks
    assert last["objects"] - first["objects"] < saves, marks
    half = len(marks) // 2  # memory that one save happens to keep until the next is in some marks and not in others
    heap, resident = (min(mark[name] for mark in marks[half:]) - min(mark[name] for mark in marks[1:half])
                      for name in ("heap_kib", "anonymous_kib"))
    assert heap < saves * first["state_kib"] / 10, marks
    # Pages that malloc keeps for its arenas vary by a few MiB between runs of the same program.
    assert resident < saves * first["state_kib"] / 10 + 8192, marks
