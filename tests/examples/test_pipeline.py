"""train_pipeline: any number of stages trains the same model, bit for bit, also after a stage has been killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or Path(__file__).resolve().parents[2] / "build/current")
PIPELINE, TRAINER, COMMAND = BUILD / "train_pipeline", BUILD / "train_gpt", BUILD / "ckptdelta"
STEPS, EVERY = 40, 3
MODEL = ["--width", "32", "--heads", "2", "--layers", "4", "--context", "16", "--batch", "8", "--threads", "1", "--schedule", "constant",
         "--lr", "3e-3"]

pytestmark = pytest.mark.skipif(not PIPELINE.exists() or not shutil.which("mpirun"), reason="built without MPI, or there is no mpirun here")


def options(folder, *args):
    text = folder / "text"
    if not text.exists():
        text.write_text("\n".join(map(str, range(60000))))
    return [*MODEL, "--text", text, "--store", folder / "store", *map(str, args)]


def start(folder, stages, *args):
    environment = {**os.environ, "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return subprocess.Popen(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(stages), PIPELINE,
                             *options(folder, "--background", "lazy", "--save-every", EVERY, "--micro-batches", 4, *args)],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def train(folder, stages, *args):
    job = start(folder, stages, *args)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    return out


def command(*args):
    return json.loads(subprocess.run([COMMAND, *map(str, args), "--json"], check=True, capture_output=True, text=True, timeout=60).stdout)


def losses_of(path):
    """The last line of each step, as bits. A step is repeated after a kill."""
    return {int(line.split()[0]): line.split()[1] for line in path.read_text().splitlines() if line.count(" ") == 2}


def same(folder, a, b):
    tensors = command("diff", folder / "store", a, b)["tensors"]
    assert len(tensors) > 3 * 50
    return all(t["comparable"] and t["changed"] == 0 for t in tensors)


def test_any_number_of_stages_is_the_same_model(tmp_path):
    for stages in (1, 2, 4):
        out = train(tmp_path, stages, "--run", f"of-{stages}", "--steps", STEPS, "--losses", tmp_path / f"of-{stages}.losses")
        assert f"stage {stages - 1}: " in out
    losses = losses_of(tmp_path / "of-4.losses")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == losses_of(tmp_path / "of-1.losses") == losses_of(tmp_path / "of-2.losses")
    assert float.fromhex(losses[STEPS]) < 0.8 * float.fromhex(losses[1])
    assert same(tmp_path, f"of-1@{STEPS}", f"of-4@{STEPS}") and same(tmp_path, f"of-2@{EVERY}", f"of-4@{EVERY}")
    # It is the model of train_gpt: the same loss at the first step, and state that train_gpt goes on from.
    subprocess.run([TRAINER, *options(tmp_path, "--run", "single", "--steps", 1, "--losses", tmp_path / "single")], check=True, timeout=60,
                   stdout=subprocess.DEVNULL)
    assert float.fromhex(losses_of(tmp_path / "single")[1]) == pytest.approx(float.fromhex(losses[1]), rel=1e-9)
    out = subprocess.run([TRAINER, *options(tmp_path, "--run", "of-4", "--steps", STEPS + 1, "--resume")], check=True, timeout=60,
                         capture_output=True, text=True).stdout
    assert f"resumed from of-4 at step {STEPS}" in out


def stages_of(job):
    """The process numbers of the stages: mpirun's children."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in children if PIPELINE.name in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")]


def newest(folder):
    steps = [c["step"] for c in command("list", folder / "store")["checkpoints"] if c["run"] == "killed"]
    return max(steps, default=0)


def test_killed_stage(tmp_path):
    train(tmp_path, 4, "--run", "whole", "--steps", STEPS, "--losses", tmp_path / "whole")
    losses, chance = tmp_path / "losses", random.Random(5)
    for stages in (4, 2):
        before = newest(tmp_path)
        job = start(tmp_path, stages, "--run", "killed", "--steps", 100000, "--losses", losses, "--resume")
        for _ in range(6000):  # so that there is something to go on from
            if newest(tmp_path) > before or job.poll() is not None:
                break
            time.sleep(0.02)
        pids = stages_of(job)
        assert len(pids) == stages
        os.kill(chance.choice(pids), signal.SIGKILL)
        out, _ = job.communicate(timeout=120)
        assert job.returncode != 0
        assert ("resumed from killed" in out) == (before > 0), out
    command("verify", tmp_path / "store")
    last = newest(tmp_path)
    out = train(tmp_path, 4, "--run", "killed", "--steps", max(STEPS, last + EVERY), "--losses", losses, "--resume")
    assert f"resumed from killed at step {last}" in out
    whole, killed = losses_of(tmp_path / "whole"), losses_of(losses)
    assert {step: killed[step] for step in whole} == whole
    assert same(tmp_path, f"whole@{STEPS - STEPS % EVERY}", f"killed@{STEPS - STEPS % EVERY}")


def test_what_does_not_fit_is_refused(tmp_path):
    for args, message in ((["--micro-batches", 3], "must be a multiple of --micro-batches"), (["--layers", 1], "more ranks than --layers")):
        job = start(tmp_path, 2, "--steps", 1, *args)
        out, _ = job.communicate(timeout=120)
        assert job.returncode != 0 and message in out
