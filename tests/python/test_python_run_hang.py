"""Sessions below `ckptdelta run` report their steps and phases, and write stack traces when they hang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support_cli import COMMAND
from support_python import ckptdelta, environment, needs_package
from test_python_run import Model

pytestmark = needs_package

SCRIPT = """
import faulthandler, os, signal, sys, time
import numpy as np
import ckptdelta
sys.path.insert(0, os.environ["TESTS"])
from test_python_run import Model
attempt, model = int(os.environ["CKPTDELTA_ATTEMPT"]), Model()

def stands_still():
    while True:
        time.sleep(1)

def train(steps):
    for step in range(session.at + 1, session.at + 1 + steps):
        time.sleep(0.01)
        model.weight = model.weight + np.float32(1)
        session.step(step)

with ckptdelta.open(os.environ["CKPTDELTA_STORE"]) as store, ckptdelta.Session(store, "gpt", model=model, every=10, alone=True) as session:
    session.restore()
"""


def supervise(folder, script, *options, expect=0, before=None):
    """Returns (the attempts, standard error)."""
    tests = Path(__file__).resolve().parent
    (folder / "train.py").write_text(SCRIPT + script)
    env = environment(TESTS=str(tests))
    env["PYTHONPATH"] += f":{tests.parent / 'support'}"
    done = subprocess.run([COMMAND, "run", "store", "gpt", "--pause", "0s", *options, "--", sys.executable, "train.py"], cwd=folder, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, preexec_fn=before)
    assert done.returncode == expect, done.stdout + done.stderr
    listed = subprocess.run([COMMAND, "attempts", "store", "--json"], cwd=folder, stdout=subprocess.PIPE, check=True)
    return json.loads(listed.stdout)["attempts"], done.stderr


@pytest.mark.parametrize("before", [None, lambda: signal.signal(signal.SIGQUIT, signal.SIG_IGN)], ids=["foreground", "background"])
def test_a_step_that_hangs(tmp_path, before):
    """The trace says where. The next attempt knows how many steps were lost, those between two saves included."""
    (first, second), err = supervise(tmp_path, """
    train(37 if attempt == 1 else 5)
    if attempt == 1:
        with session.phase("saving"):  # on a busy machine it takes longer than a step may
            session.wait()
        stands_still()
""", "--hang-floor", "2s", before=before)
    assert first["hung"] and f"process {first['pid']} has made no step after step 37 for " in first["hang"]
    assert " in stands_still\n" in err, err
    assert [(a["checkpoint"], a["first_trained"], a["last_trained"], a["steps_lost"]) for a in (first, second)] == [(None, 1, 37, None), ("gpt@30", 31, 35, 7)]
    assert 0 < second["resume_s"] < second["seconds"] and not second["hung"]


def test_an_evaluation_is_no_hang(tmp_path):
    (attempt,), err = supervise(tmp_path, """
    for phase in ("evaluation", "saving"):
        train(20)
        with session.phase(phase):
            time.sleep(4)
    train(20)
time.sleep(4)  # the session is closed: no more steps are expected
""", "--hang-floor", "2s")
    assert not attempt["hung"] and attempt["last_trained"] == 60
    assert 8 < attempt["trained_s"] < attempt["seconds"] - 4


def test_tensors_that_are_registered_again(tmp_path):
    """The library's session is then another one. The steps go on, and an evaluation is still known as one."""
    (attempt,), err = supervise(tmp_path, """
    for size in range(1, 4):
        model.weight = np.zeros(1000 * size, np.float32)
        train(10)
        with session.phase("evaluation"):
            time.sleep(2.5)
    train(5)
""", "--hang-floor", "2s")
    assert not attempt["hung"] and (attempt["first_trained"], attempt["last_trained"]) == (1, 35)


@pytest.mark.parametrize("own", ["signal.signal(signal.SIGQUIT, lambda *_: print('my own', file=sys.stderr, flush=True))",
                                 "faulthandler.register(signal.SIGQUIT, file=open('traces', 'w'), all_threads=False)"])
def test_a_handler_of_the_program_stays(tmp_path, own):
    script = SCRIPT.replace("with ckptdelta.open", own + "\nwith ckptdelta.open")
    (tmp_path / "handler.py").write_text(script + "    os.kill(os.getpid(), signal.SIGQUIT)\n    time.sleep(0.1)\n")
    tests = Path(__file__).resolve().parent
    env = environment(TESTS=str(tests))
    env["PYTHONPATH"] += f":{tests.parent / 'support'}"
    done = subprocess.run([COMMAND, "run", "store", "gpt", "--", sys.executable, "handler.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "most recent call first" not in done.stderr
    assert "my own" in done.stderr if "my own" in own else "most recent call first" in (tmp_path / "traces").read_text()


def test_without_a_supervisor(tmp_path):
    before = Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0]
    with ckptdelta.open(tmp_path / "store") as store, ckptdelta.Session(store, "gpt", model=Model(), every=1, alone=True) as session:
        session.step(1)
        with session.phase("evaluation"):
            pass
        with pytest.raises(ckptdelta.InvalidError, match="'evaluation' or 'saving'"), session.phase("lunch"):
            pass
    after = Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0]
    assert "CKPTDELTA_PROGRESS" not in os.environ
    assert (int(before, 16) ^ int(after, 16)) >> (signal.SIGQUIT - 1) & 1 == 0
