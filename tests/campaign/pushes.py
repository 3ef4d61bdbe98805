#!/usr/bin/env python3
"""Pushes of several stores into one at the same time, some of them from damaged stores.

    tests/campaign/pushes.py COMMAND [--seconds N] [--seed N]

The stores share chunk files, as one is a copy of the other. While they are pushed, processes are stopped and killed, and commands change the target.
Afterwards the target must be whole: whatever it lists loads with its values, verify finds no damage, a push that ended with 0 has left everything
there, and a push of an intact store completes the rest. The exit status is 1 if a case failed; its commands are printed.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import support_safetensors as st  # noqa: E402
from sequences import Failure, drive, outcome  # noqa: E402

SOURCES = ("a", "b", "c")
REFUSED = re.compile("in progress|another process|try again|meanwhile|being (deleted|copied|rewritten)|is busy|has begun|in the trash")
TIMEOUT = 120


class Case:
    def __init__(self, command, folder, seed):
        self.command, self.folder = command, folder
        self.rng, self.noise = random.Random(f"pushes {seed}"), np.random.default_rng(seed)
        self.values = {}  # by id
        self.script = []

    # ------------------------------------------------------------------------------------------------ commands

    def told(self, args, code, err=""):
        self.script.append(f"ckptdelta {' '.join(map(str, args))}  # {code} {err.strip()[:200]}")

    def run(self, *args):
        done = subprocess.run([self.command, *map(str, args)], cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT)
        self.told(args, done.returncode, done.stderr)
        return done

    def must(self, *args):
        done = self.run(*args)
        if done.returncode:
            raise Failure(f"{args}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def listed(self, store):
        """{id: run@step}"""
        if not (self.folder / store / "data/store").exists():
            return {}
        return {c["id"]: f"{c['run']}@{c['step']}" for c in json.loads(self.must("list", store, "--json").stdout)["checkpoints"]}

    # -------------------------------------------------------------------------------------------------- stores

    def save(self, store, run, steps):
        weights = [(self.noise.standard_normal(shape) * 0.02).astype(np.float32) for shape in ((64, 96), (48, 200))]
        for step in steps:
            moved = self.noise.random() < 0.3
            weights = [w if not moved else (w + self.noise.standard_normal(w.shape) * 1e-3).astype(np.float32) for w in weights]
            st.write(self.folder / "in.st", dict(zip(("a.weight", "b.weight"), weights)))
            self.must("save", store, "--run", run, "--step", step, *self.rng.choice([[], [], ["--base"]]), "in.st")
            for id in set(self.listed(store)) - set(self.values):
                self.values[id] = [w.tobytes() for w in weights]

    def change(self, store):
        way = self.rng.choice(["pack", "depth", "delete", "prune", "none"])
        if way == "pack":
            self.must("compact", store, "--pack-below", "1M")
        elif way == "depth":
            self.must("compact", store, "--max-depth", "1")
        elif way == "delete":
            names = sorted(self.listed(store).values())
            self.must("delete", store, self.rng.choice(names), "--undo", self.rng.choice(["0s", "1h"]))
        elif way == "prune":
            self.must("prune", store, "--keep-last", "3", "--undo", self.rng.choice(["0s", "1h"]))

    def make_sources(self):
        self.save("whole", "r", range(self.rng.randrange(3, 8)))
        self.save("whole", "s", range(self.rng.randrange(1, 4)))
        if self.rng.random() < 0.6:
            self.must("compact", "whole", "--pack-below", "1M")
        else:
            self.change("whole")
        self.sources = SOURCES[:self.rng.choice([2, 2, 3])]
        for source in self.sources:
            if self.rng.random() < 0.5:
                shutil.copytree(self.folder / "whole", self.folder / source)
            else:
                self.must("push", "whole", source)
            if self.rng.random() < 0.4:
                self.save(source, f"own.{source}", range(2))
            if self.rng.random() < 0.2:
                self.change(source)

    def make_target(self):
        if self.rng.random() < 0.3:
            self.must("push", "whole", "t", *self.rng.choice([[], ["--run", "r"], ["--run", "s"]]))
            for _ in range(self.rng.randrange(3)):
                if self.listed("t"):
                    self.change("t")

    def damage(self):
        self.damaged = set()
        for source in self.sources:
            if self.rng.random() < 0.4:
                continue
            self.damaged.add(source)
            for path in self.rng.sample(sorted((self.folder / source / "data/c").glob("*.ckd")), self.rng.choice([1, 1, 2])):
                data, how = bytearray(path.read_bytes()), self.rng.choice(["flip", "flip", "zero", "cut", "lose"])
                at = self.rng.randrange(len(data))
                self.script.append(f"# {path.relative_to(self.folder)}: {how} at {at}")
                if how == "lose":
                    path.unlink()
                    continue
                if how == "flip":
                    data[at] ^= 1 << self.rng.randrange(8)
                elif how == "zero":
                    data[at:at + 4096] = bytes(len(data[at:at + 4096]))
                path.write_bytes(data[:at] if how == "cut" else data)

    # ------------------------------------------------------------------------------------------- all at the same time

    def begin(self, args):
        process = subprocess.Popen([self.command, *args], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return args, process

    def pushes(self):
        begun = {}
        for source in self.rng.sample(self.sources, len(self.sources)):
            words = ["pull", "t", source] if self.rng.random() < 0.3 else ["push", source, "t"]
            if self.rng.random() < 0.7:
                words += ["--rate", self.rng.choice(["200K", "1M", "3M"])]
            begun[source] = self.begin(words)
            time.sleep(self.rng.choice([0, 0, 0.01, 0.1]))
        return begun

    def disturb(self, processes):
        """Stops some processes for a while, and kills some."""
        for _ in range(self.rng.randrange(4)):
            process = self.rng.choice(processes)
            time.sleep(self.rng.random() * self.rng.choice([0.02, 0.2]))
            process.send_signal(signal.SIGSTOP)
            time.sleep(self.rng.random() * 0.3)
            if self.rng.random() < 0.2:
                process.kill()
            process.send_signal(signal.SIGCONT)

    def changes(self):
        if self.rng.random() < 0.6 or not (self.folder / "t/data/store").exists():
            return None
        return self.begin(self.rng.choice([["compact", "t", "--pack-below", "1M"], ["compact", "t", "--max-depth", "1"], ["trash", "t", "--empty", "--all"],
                                           ["repair", "t"], ["verify", "t"], ["prune", "t", "--keep-last", "2", "--undo", "0s"]]))

    def end(self, args, process):
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(f"{args} hangs") from None
        self.told(args, process.returncode, err)
        return process.returncode, out + err

    def check_status(self, args, code, said, damaged):
        killed = code == -signal.SIGKILL
        if code and not killed and not (code == 4 and damaged) and not (code in (1, 3) and REFUSED.search(said)):
            raise Failure(f"{args}: {code}: {said}")

    def all_at_once(self):
        begun, other = self.pushes(), self.changes()
        self.disturb([process for _, process in [*begun.values(), *([other] if other else [])]])
        ended = {source: self.end(*begun[source]) for source in begun}
        deletes = other is not None and other[0][0] == "prune"
        if other:
            self.check_status(other[0], *self.end(*other), False)
        there = self.listed("t")
        for source, (code, said) in ended.items():
            self.check_status(begun[source][0], code, said, source in self.damaged)
            missing = [name for id, name in self.listed(source).items() if id not in there]
            if code == 0 and missing and not deletes:
                raise Failure(f"{begun[source][0]} ended with 0, and {missing} are not there")

    # -------------------------------------------------------------------------------------------------- checks

    def check(self, store):
        self.must("verify", store)
        for id, name in self.listed(store).items():
            self.must("load", store, name, "--out", "out.st", "--force")
            have = [value[2] for _, value in sorted(st.read(self.folder / "out.st")[0].items())]
            if have != self.values[id]:
                raise Failure(f"{name} of {store} does not load as it was saved")

    def play(self):
        self.make_sources()
        self.make_target()
        self.damage()
        for _ in range(self.rng.choice([1, 1, 2])):
            self.all_at_once()
            if self.listed("t"):
                self.check("t")
        self.must("push", "whole", "t")
        missing = set(self.listed("whole").values()) - set(self.listed("t").values())
        if missing:
            raise Failure(f"an intact store was pushed, and {missing} are not there")
        self.check("t")


def play(command, seed, folder):
    """Returns the failure with the commands that led to it, or None."""
    return outcome(Case(command, folder, seed), seed)


if __name__ == "__main__":
    sys.exit(drive(__doc__, "pushes", play))
