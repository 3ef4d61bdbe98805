"""Sessions below `ckptdelta run`: the first restore takes the checkpoint that it has chosen."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support_cli import COMMAND
from support_python import ckptdelta, environment, needs_package, needs_torch

pytestmark = needs_package


class Model:
    def __init__(self):
        self.weight = np.zeros(100, np.float32)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


@pytest.fixture
def tell(store, monkeypatch):
    def tell(name, run="gpt", where=None):
        for variable, value in (("STORE", where or store.path), ("RUN", run), ("STEP", name.rpartition("@")[2]), ("CHECKPOINT", name if "@" in name else "")):
            monkeypatch.setenv(f"CKPTDELTA_{variable}", str(value))
    return tell


def train(store, steps, to, run="gpt", start=None):
    """Steps from a restore on; the weights are the sum of all steps and of `to`. Returns (step that was restored, weight)."""
    model = Model()
    with ckptdelta.Session(store, run, model=model, every=1, alone=True) as session:
        at = session.restore() if start is None else session.restore(start)
        restored = float(model.weight[0])
        for step in range(at + 1, at + 1 + steps):
            model.weight = model.weight + np.float32(to)
            session.step(step)
    return at, restored


def test_the_chosen_checkpoint_is_restored(store, tell):
    train(store, 5, 1)
    tell("gpt@5")
    assert train(store, 0, 1) == (5, 5)
    tell("gpt@3")
    assert train(store, 2, 10) == (3, 3)
    assert [str(c) for c in store.checkpoints()] == [*(f"gpt@{n}" for n in range(1, 6)), "gpt~2@4", "gpt~2@5"]
    # Both the run and its branch have the step.
    tell("gpt~2@5")
    assert train(store, 0, 1) == (5, 23)
    tell("gpt@5")
    assert train(store, 0, 1) == (5, 5)
    tell("5")
    assert train(store, 0, 1) == (5, 5)
    # From an older checkpoint of the branch, another branch.
    tell("gpt~2@4")
    assert train(store, 1, 100) == (4, 13)
    assert str(store.checkpoints()[-1]) == "gpt~3@5"
    tell("gpt~3@5")
    assert train(store, 0, 1) == (5, 113)


def test_a_checkpoint_that_cannot_be_found_by_its_step(store, tell):
    train(store, 5, 1)
    train(store, 2, 10, start=3)
    train(store, 2, 100, start=3)
    assert str(store.checkpoints()[-1]) == "gpt~3@5"
    tell("gpt~2@9")
    with pytest.raises(ckptdelta.NotFoundError):
        train(store, 0, 1)


def test_what_is_told_is_for_one_run_of_one_store(store, tell, tmp_path):
    train(store, 5, 1)
    tell("gpt@3", run="other")
    assert train(store, 0, 1) == (5, 5)
    tell("gpt@3", where=tmp_path / "another")
    assert train(store, 0, 1) == (5, 5)
    tell("gpt@x")
    assert train(store, 0, 1) == (5, 5)
    tell("gpt@3")
    assert train(store, 0, 1, start=4) == (4, 4)
    link = tmp_path / "link"
    link.symlink_to(store.path)
    tell("gpt@3", where=link)
    assert train(store, 0, 1) == (3, 3)


def test_only_the_first_restore_is_told(store, tell):
    train(store, 5, 1)
    tell("gpt@3")
    model = Model()
    with ckptdelta.Session(store, "gpt", model=model, every=1, alone=True) as session:
        assert session.restore() == 3
        session.step(4)
        session.save()
        assert session.restore() == 4


SCRIPT = """
import os, signal, sys
import numpy as np
import ckptdelta
sys.path.insert(0, os.environ["TESTS"])
from test_python_run import Model
model = Model()
with ckptdelta.open(os.environ["CKPTDELTA_STORE"]) as store, ckptdelta.Session(store, os.environ["CKPTDELTA_RUN"], model=model, every=1, alone=True) as session:
    at = session.restore()
    assert at == int(os.environ.get("CKPTDELTA_STEP", 0)) and model.weight[0] == at, (at, model.weight[0])
    print("attempt", os.environ["CKPTDELTA_ATTEMPT"], "from", at, flush=True)
    if os.environ["CKPTDELTA_ATTEMPT"] in ("2", "3"):
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(at + 1, at + 4):
        model.weight = model.weight + np.float32(1)
        session.step(step)
sys.exit(int(model.weight[0] < 5))
"""


def test_under_the_supervisor(tmp_path):
    """Two attempts die at the newest checkpoint. The third one starts from the one before, and continues in a branch."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = Path(__file__).resolve().parent
    env = environment(TESTS=str(folder))
    env["PYTHONPATH"] += f":{folder.parent / 'support'}"
    done = subprocess.run([COMMAND, "run", tmp_path / "store", "gpt", "--pause", "0s", "--max-futile", "4", "--", sys.executable, script],
                          env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["attempt 1 from 0", "attempt 2 from 3", "attempt 3 from 3", "attempt 4 from 2"]
    with ckptdelta.open(tmp_path / "store") as store:
        assert [str(c) for c in store.checkpoints()] == ["gpt@1", "gpt@2", "gpt@3", "gpt~2@3", "gpt~2@4", "gpt~2@5"]
        assert store.verify()


LOADS_IN_WORKERS = """
import os, signal, time
import torch
import ckptdelta

def ignore_sigterm(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
model = torch.nn.Linear(64, 10)
loader = torch.utils.data.DataLoader(torch.randn(100000, 64), batch_size=8, num_workers=2, worker_init_fn=ignore_sigterm)
with ckptdelta.open(os.environ["CKPTDELTA_STORE"]) as store, ckptdelta.Session(store, "gpt", model=model, every=100000) as session:
    at = session.restore()
    for step, batch in enumerate(loader, at + 1):
        time.sleep(0.5)
        session.step(step)
        open("ready", "w").close()
        if told:
            break
    session.save()
"""


@needs_torch
def test_workers_that_ignore_sigterm_let_the_trainer_save(tmp_path):
    """The signal goes to the workers of a DataLoader as well. One that dies of it is an error in the training loop."""
    (tmp_path / "train.py").write_text(LOADS_IN_WORKERS)
    process = subprocess.Popen([COMMAND, "run", tmp_path / "store", "gpt", "--", sys.executable, "train.py"], cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM: exit status 0" in output, output
    with ckptdelta.open(tmp_path / "store") as store:
        assert len(store.checkpoints("gpt")) == 1
