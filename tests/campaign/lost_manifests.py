#!/usr/bin/env python3
"""Random commands beside manifests that are lost, several at a time, and repaired later.

    tests/campaign/lost_manifests.py COMMAND [--seconds N] [--seed N]

In mode `manifests` of campaign.py a loss is repaired at once. Here checkpoints are saved again, deleted, restored and compacted in between. Then
repair must bring back every checkpoint with its values, and verify must find no damage. A lost checkpoint whose step was saved again comes back in
the run RUN.lost. The exit status is 1 if a sequence failed; its commands are printed.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import support_safetensors as st  # noqa: E402
from sequences import Failure, drive, outcome  # noqa: E402

WEIGHTS = {"save": 6, "delete": 3, "restore": 1, "compact": 1, "empty": 1, "lose": 3, "repair": 1, "rebuild": 1}
LOST_AT_ONCE = 3


def split(path):
    """(run, step, generation) of a file in data/m or data/t."""
    run, step, generation = path.name.rsplit(".", 2)
    return run, int(step), int(generation)


class Sequence:
    def __init__(self, command, folder, seed):
        self.command, self.folder, self.store = command, folder, folder / "store"
        self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.listed, self.trash = {}, {}  # (run, step): values
        self.lost = []  # (run, step, values)
        self.weights = [self.draw() for _ in "ab"]
        self.script, self.files = [], 0

    def draw(self):
        return (self.noise.standard_normal((64, 48)) * 0.02).astype(np.float32)

    def run(self, *args):
        done = subprocess.run([self.command, *map(str, args)], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.script.append(f"ckptdelta {' '.join(map(str, args))}  # {done.returncode} {done.stderr.strip()[:200]}")
        return done

    def must(self, *args):
        done = self.run(*args)
        if done.returncode:
            raise Failure(f"{args}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def next_state(self):
        if self.rng.random() < 0.2:
            self.weights[0] = self.draw()
        moved = [(self.noise.random(w.shape) < 0.1) * self.noise.standard_normal(w.shape) * 1e-3 for w in self.weights]
        self.weights = [(w + m).astype(np.float32) for w, m in zip(self.weights, moved)]
        return dict(zip(("a.weight", "b.weight"), self.weights))

    def values(self, name):
        """The bytes of each tensor; None: it cannot be loaded."""
        done = self.run("load", "store", "--run", name[0], "--step", name[1], "--out", "out.st", "--force")
        return {tensor: value[2] for tensor, value in st.read(self.folder / "out.st")[0].items()} if done.returncode == 0 else None

    def in_force(self, name):
        """Its manifests that are not in the trash."""
        deleted = max((split(p)[2] for p in (self.store / "data/t").iterdir() if split(p)[:2] == name), default=-1)
        return [p for p in (self.store / "data/m").iterdir() if split(p)[:2] == name and split(p)[2] > deleted]

    def save(self):
        run = self.rng.choice(["r", "r", "r.1"])
        name = run, self.rng.choice([self.rng.randrange(1, 12), max((s for r, s in self.listed if r == run), default=0) + 1])
        if name in self.listed:
            return
        state, self.files = self.next_state(), self.files + 1
        st.write(self.folder / f"in{self.files}.st", state)
        self.must("save", "store", f"{name[0]}@{name[1]}", f"in{self.files}.st")
        self.listed[name] = {tensor: value.tobytes() for tensor, value in state.items()}
        self.trash.pop(name, None)  # the earlier one can no longer be restored

    def delete(self):
        if len(self.listed) > 1:
            name = self.rng.choice(sorted(self.listed))
            undo = self.rng.choice(["0s", "1h"])
            self.must("delete", "store", f"{name[0]}@{name[1]}", "--undo", undo)
            values = self.listed.pop(name)
            if undo != "0s":
                self.trash[name] = values

    def restore(self):
        names = sorted(set(self.trash) - {n[:2] for n in self.lost})
        if names:
            name = self.rng.choice(names)
            self.must("trash", "store", "--restore", f"{name[0]}@{name[1]}")
            self.listed[name] = self.trash.pop(name)

    def compact(self):
        self.run("compact", "store", *self.rng.choice([[], ["--max-depth", "1"], ["--pack-below", "1M"], ["--max-depth", "2", "--pack-below", "1M"]]))

    def empty(self):
        everything = self.rng.random() < 0.5
        done = self.run("trash", "store", "--empty", *(["--all"] if everything else []))
        if everything and done.returncode == 0:
            self.trash.clear()

    def rebuild(self):
        if not self.lost:
            self.must("rebuild", "store")

    def lose(self):
        if not self.listed or len(self.lost) == LOST_AT_ONCE:
            return
        name = self.rng.choice(sorted(self.listed))
        found = self.in_force(name)
        if len(found) == 1:  # with an older generation of it nothing is lost
            self.script.append(f"rm store/data/m/{found[0].name}")
            found[0].unlink()
            self.lost.append((*name, self.listed.pop(name)))
            if self.run("verify", "store").returncode != 4:
                raise Failure(f"verify does not notice that the manifest of {name} is lost")

    def repair(self):
        self.must("repair", "store")
        self.must("verify", "store")
        names = [(c["run"], c["step"]) for c in json.loads(self.must("list", "store", "--json").stdout)["checkpoints"]]
        for run, step, values in self.lost:
            back = [n for n in names if n[1] == step and (n[0] == run or n[0].startswith(f"{run}.lost")) and n not in self.listed]
            name = next((n for n in back if self.values(n) == values), None)
            if not name:
                raise Failure(f"{run}@{step} did not come back")
            self.listed[name] = values
            self.trash.pop(name, None)
        self.lost = []
        for name, values in self.listed.items():
            if self.values(name) != values:
                raise Failure(f"{name} does not load as it was saved")

    def play(self, length):
        for _ in range(length):
            operation = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0] if self.store.exists() else "save"
            getattr(self, operation)()
        self.repair()


def play(command, seed, folder, length=50):
    """Returns the failure with the commands that led to it, or None."""
    return outcome(Sequence(command, folder, seed), seed, length)


if __name__ == "__main__":
    sys.exit(drive(__doc__, "lost", play))
