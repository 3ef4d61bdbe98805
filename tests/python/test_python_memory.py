"""What a save needs beside the training does not grow by more than it must with the state. Skipped where torch is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support_python import environment, needs_package, needs_torch

pytestmark = [needs_package, needs_torch]
SIZE = 256  # MiB
BUFFERS = 96 << 20  # bytes that the library uses whatever the size of the state; how much of them depends on the course of a save
COPIES = {"session": 1, "store": 0}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fidelity", ["exact", "near", "coarse"])
@pytest.mark.parametrize("kind", ["session", "store"])
def test_no_more_copies_of_the_state_than_needed(tmp_path, kind, fidelity):
    """A Session holds one copy, Store.save() none. Half a copy more would be too much."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this kernel cannot reset the peak of a process's memory: it has no /proc/self/clear_refs")
    script = Path(__file__).with_name("memory_run.py")
    command = [sys.executable, "-W", "ignore", script, kind, fidelity, str(SIZE), "3", tmp_path / "store"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1"), check=True)
    found = json.loads(done.stdout)
    copies, needed = COPIES[kind], found["with_saves"] - found["without_saves"]
    assert found["state_bytes"] > 250 << 20
    assert copies * found["state_bytes"] <= needed < (copies + 0.5) * found["state_bytes"] + BUFFERS, found
