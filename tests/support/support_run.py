"""Jobs below `ckptdelta run`: a trainer in a few lines, and what a test asks of its attempts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import pytest

from support_cli import COMMAND, run

GAVE_UP, STOPPED = 93, 128 + signal.SIGTERM

# A trainer in a few lines: it loads the checkpoint that its environment names, and saves every step.
TRAINER = """
import json, os, signal, struct, subprocess, sys, time
command, store, run = os.environ["COMMAND"], os.environ["CKPTDELTA_STORE"], os.environ["CKPTDELTA_RUN"]
start = os.environ.get("CKPTDELTA_CHECKPOINT")
attempt, step = int(os.environ["CKPTDELTA_ATTEMPT"]), int(os.environ.get("CKPTDELTA_STEP", 0))
file = f"state{os.getpid()}.safetensors"
value = 0.0
if start:
    subprocess.run([command, "load", store, start, "-q", "--force", "-o", file], check=True)
    value = struct.unpack("<f", open(file, "rb").read()[-4:])[0]
assert value == step, (value, step)
with open("starts", "a") as starts:
    print(attempt, start, file=starts)

def save():
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header + struct.pack("<f", step))
    subprocess.run([command, "save", store, "-q", "--run", run, "--step", str(step), "--on-duplicate", "branch", file], check=True)

def train(steps):
    global step
    for _ in range(steps):
        step += 1
        save()
"""


class Job:
    def __init__(self, folder):
        self.folder, self.store = folder, folder / "store"
        self.marker = f"MARKER_{uuid.uuid4().hex}"
        self.env = dict(os.environ, COMMAND=COMMAND, **{self.marker: "1"})
        self.env.pop("CKPTDELTA_STORE", None)

    def trainer(self, text):
        path = self.folder / "train.py"
        path.write_text(TRAINER + textwrap.dedent(text))
        return [sys.executable, path]

    def begin(self, *command, options=(), run_name="gpt"):
        words = [COMMAND, "run", self.store, "--run", run_name, "--pause", "0s", *options, "--", *command]
        return subprocess.Popen(list(map(str, words)), env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def finish(self, process, expect=0):
        out, err = process.communicate(timeout=120)
        assert process.returncode == expect, out + err
        assert self.left() == []
        return out, err

    def run(self, *command, expect=0, **options):
        return self.finish(self.begin(*command, **options), expect)

    def attempts(self, *args):
        return run("attempts", self.store, "--json", *args).json()["attempts"]

    def steps(self):
        return [(c["run"], c["step"]) for c in run("list", self.store, "--json").json()["checkpoints"]]

    def starts(self):
        return (self.folder / "starts").read_text().split("\n")[:-1]

    def lines(self):
        return [json.loads(line) for line in (self.store / "attempts.jsonl").read_text().splitlines()]

    def left(self):
        """Processes that were started below the job and are still there."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and self.marker.encode() in open(f"/proc/{entry}/environ", "rb").read():
                    found.append(open(f"/proc/{entry}/cmdline").read().replace("\0", " "))
            except OSError:
                pass
        return found

    def damage(self, step):
        """Damages the end of a checkpoint's only chunk file, without which nothing of it can be read."""
        files = sorted((self.store / "data/c").rglob("*"), key=lambda p: p.stat().st_mtime_ns)
        chunks = [p for p in files if p.is_file()]
        content = bytearray(chunks[step - 1].read_bytes())
        content[-1] ^= 0xFF
        chunks[step - 1].chmod(0o644)
        chunks[step - 1].write_bytes(content)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    assert until(lambda: not job.left()), job.left()


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def exists(path):
    return lambda: path.exists()
