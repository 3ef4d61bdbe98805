"""Trainers of transformers below `ckptdelta run` report their steps, and are in no hang while they evaluate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support_cli import COMMAND
from support_python import environment, needs_package, needs_torch

pytestmark = [needs_package, needs_torch]
pytest.importorskip("torch", reason="torch cannot be imported here")
transformers = pytest.importorskip("transformers", reason="transformers cannot be imported here")
pytest.importorskip("accelerate", reason="accelerate cannot be imported here")

SCRIPT = """
import sys, time
import transformers
from ckptdelta.transformers import CheckpointCallback, Trainer
from support_transformers import arguments, data, gpt2

class slow(data):
    def __getitem__(self, i):
        time.sleep(0.6 if i else 0)
        return super().__getitem__(i)

args = arguments("out", save_steps=5, eval_strategy="steps", eval_steps=14, per_device_eval_batch_size=1, logging_strategy="no")
made = {"model": gpt2(), "args": args, "train_dataset": data(40), "eval_dataset": slow(8)}
if sys.argv[1] == "trainer":
    trainer = Trainer(**made, store="store", run="gpt")
else:
    trainer = transformers.Trainer(**made, callbacks=[CheckpointCallback("store", "gpt")])
%s
trainer.train()
"""


def supervised(folder, kind, more=""):
    """The attempts of `ckptdelta run`, which ends what is silent for more than two seconds after 12 steps."""
    (folder / "train.py").write_text(SCRIPT % more)
    env = environment()
    env["PYTHONPATH"] += f":{Path(__file__).resolve().parent.parent / 'support'}"
    done = subprocess.run([COMMAND, "run", "store", "gpt", "--pause", "0s", "--hang-floor", "2s", "--max-restarts", "0", "--", sys.executable, "train.py",
                           kind], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    listed = subprocess.run([COMMAND, "attempts", "store", "--json"], cwd=folder, stdout=subprocess.PIPE, check=True)
    return json.loads(listed.stdout)["attempts"], done.stderr


@pytest.mark.parametrize("kind", ["trainer", "callback"])
def test_each_step_is_reported_and_an_evaluation_is_no_hang(tmp_path, kind):
    (attempt,), err = supervised(tmp_path, kind)
    assert not attempt["hung"] and attempt["exit"] == 0, err
    assert (attempt["first_trained"], attempt["last_trained"]) == (1, 15)


def test_a_step_that_hangs_after_an_evaluation(tmp_path):
    (attempt,), err = supervised(tmp_path, "trainer", """
class Hang(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 14:
            time.sleep(600)
trainer.add_callback(Hang())
""")
    assert attempt["hung"] and "has made no step after step 14 for " in attempt["hang"], err
