"""Sessions of two ranks, below torchrun, below `ckptdelta run`. Skipped where torch is not installed, or was built without distributed."""

import json
import subprocess
import sys

import pytest

from support_cli import COMMAND
from support_python import ROOT, ckptdelta, environment, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]

# Attempt 1 loses rank 1 after step 5. Attempt 2 loses rank 0 after step 7, and the checkpoint of step 6 is damaged.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
import ckptdelta
from support_ranked import STEPS, Training

rank, attempt = int(os.environ["RANK"]), int(os.environ["CKPTDELTA_ATTEMPT"])
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
straight = Training(sys.argv[1], rank, mesh)
expected = [straight.step() for _ in range(STEPS)]
training = Training(sys.argv[1], rank, mesh, seed=attempt)

def damage_newest(folder):
    newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 0xFF
    newest.chmod(0o644)
    newest.write_bytes(content)

with ckptdelta.open(os.environ["CKPTDELTA_STORE"]) as store, ckptdelta.Session(store, "gpt", **training.parts(), every=2) as session:
    at = session.restore()
    with open(f"log{rank}", "a") as log:
        print("attempt", attempt, "told", os.environ.get("CKPTDELTA_CHECKPOINT"), "from", at, file=log)
    for step in range(at + 1, STEPS + 1):
        loss = training.step()
        assert loss == expected[step - 1], (step, rank, loss, expected)
        session.step()
        if (attempt, step) in ((1, 5), (2, 7)):
            session.wait()
            dist.barrier()
            if rank == 2 - attempt:
                if attempt == 2:
                    damage_newest(Path(store.path) / "data/c")
                os.kill(os.getpid(), signal.SIGKILL)
    session.save()
assert training.content() == straight.content()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_the_ranks_resume_bit_for_bit_from_the_checkpoint_that_was_chosen(tmp_path, how):
    """The newest, and the one before it where the newest is damaged. Each rank compares its losses with an uninterrupted run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = environment(OMP_NUM_THREADS="1")
    env["PYTHONPATH"] += f":{ROOT / 'tests/support'}"
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    done = subprocess.run([COMMAND, "run", tmp_path / "store", "gpt", "--pause", "0s", "--", *torchrun, "train.py", how],
                          cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "gpt@6 is damaged and passed over" in done.stdout
    for rank in range(2):
        assert (tmp_path / f"log{rank}").read_text().splitlines() == \
            ["attempt 1 told None from 0", "attempt 2 told gpt@4 from 4", "attempt 3 told gpt@4 from 4"], done.stdout
    with ckptdelta.open(tmp_path / "store") as store:
        assert [str(c) for c in store.checkpoints()] == ["gpt@2", "gpt@4", "gpt@6", "gpt~2@6", "gpt~2@8", "gpt~2@9"]
        assert [c.world for c in store.checkpoints()] == [2] * 6
    # Both ranks, which torchrun has started, have reported their steps to the supervisor.
    listed = subprocess.run([COMMAND, "attempts", tmp_path / "store", "--json"], stdout=subprocess.PIPE, check=True)
    attempts = json.loads(listed.stdout)["attempts"]
    assert [(a["first_trained"], a["last_trained"], a["steps_lost"]) for a in attempts] == [(1, 5, None), (5, 7, 1), (5, 9, 3)]
