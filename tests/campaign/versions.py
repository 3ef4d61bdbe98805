#!/usr/bin/env python3
"""Versions of weights that are published and followed, with kills of both sides.

    tests/campaign/versions.py COMMAND [--versions N] [--seed N]

A publisher publishes N versions, in which few, many, all or no values change, with policies and bounds on loads that change. Publishers and followers
are killed at any moment, and started again. A follower keeps up, a second one lags, and others join late; old versions are deleted meanwhile.
Somebody changes a folder. Each folder must then have the version bit for bit, and at the end verify must find no damage. It prints the seed and what
was done; the exit status is 1 after a failure.
"""

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import support_safetensors as st  # noqa: E402
from sequences import Failure  # noqa: E402

TIMEOUT = 120
CHANGED = (0, 0.001, 0.01, 0.01, 0.03, 0.06, 1)  # shares of the values


class Case:
    def __init__(self, command, folder, seed):
        self.command, self.folder = str(command), Path(folder)
        self.rng, self.noise = random.Random(f"versions {seed}"), np.random.default_rng(seed)
        self.store, self.file = self.folder / "store", self.folder / "now.safetensors"
        embed = (self.noise.standard_normal(300 * 1024) * 0.02).astype(np.float32)
        self.tensors = {"embed.weight": embed.reshape(300, 1024), "layer.weight": (self.noise.standard_normal(70000) * 0.02).astype(np.float16).reshape(70, 1000),
                        "norm.bias": np.zeros(64, np.float32), "positions": np.arange(16, dtype=np.int64)}
        self.version, self.done, self.script = 0, collections.Counter(), []

    def run(self, *args, kill=0.0):
        """Runs a command. With `kill`, the share of runs that are killed; those return None."""
        self.script.append(" ".join(map(str, args)))
        process = subprocess.Popen([self.command, *map(str, args)], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        if self.rng.random() < kill:
            time.sleep(self.rng.random() ** 2 * 0.15)
            process.send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT)
        if process.returncode == -signal.SIGKILL:
            self.script[-1] += "  # killed"
            self.done[f"kills of {args[0]}"] += 1
            return None
        if process.returncode != 0:
            raise Failure(f"{self.script[-1]}: {process.returncode}: {out}{err}")
        return out

    def change(self):
        share = self.rng.choice(CHANGED)
        for value in self.tensors.values():
            flat = value.reshape(-1).view(f"u{value.itemsize}")
            places = slice(None) if share == 1 else self.noise.integers(0, flat.size, int(flat.size * share))
            flat[places] ^= self.noise.integers(1, 8, flat[places].shape).astype(flat.dtype)

    def publish(self):
        self.version += 1
        self.change()
        st.write(self.file, self.tensors)
        options = ["--max-load-cost", self.rng.choice((1.2, 2, 10))]
        if self.version == 1 or self.rng.random() < 0.1:
            options += ["--keep-last", self.rng.randrange(1, 6)]
        while self.run("publish", "store", f"w@{self.version}", self.file, "-q", *options, kill=0.15) is None:
            pass  # what is there with the same content is no error
        self.done["versions"] += 1

    def follow(self, name, late=False):
        into = self.folder / name
        if not late and into.exists() and self.rng.random() < 0.05:
            path = into / "model.safetensors"
            if path.exists():
                time.sleep(0.02)  # the clock of the file system ticks
                with open(path, "r+b") as file:
                    file.seek(self.rng.randrange(path.stat().st_size // 2, path.stat().st_size))
                    file.write(b"\x5a")
                self.done["changed folders"] += 1
        said = None
        while said is None:
            said = self.run("follow", "store", "--run", "w", "--into", name, "--once", "--json", kill=0.25)
        found = json.loads(said)
        if found["checkpoint"] != f"w@{self.version}" or not self.is_now(into):
            raise Failure(f"{name} has {found['checkpoint']} after {self.script[-1]}, and should have w@{self.version}")
        self.done["late followers" if late else "applied"] += 1
        self.done["bytes read"] += found["read_bytes"]

    def is_now(self, into):
        try:
            return st.same(st.read(into / "model.safetensors")[0], self.tensors)
        except AssertionError:
            return False

    def play(self, versions):
        for _ in range(versions):
            self.publish()
            if self.rng.random() < 0.8:
                self.follow("near")
            if self.rng.random() < 0.15:
                self.follow("lags")
            if self.rng.random() < 0.05:
                self.follow(f"late{self.version}", late=True)
                for path in (self.folder / f"late{self.version}").iterdir():
                    path.unlink()
        self.run("verify", "store")


def play(command, seed, folder, versions):
    """Returns what was done, and why it failed or None."""
    case = Case(command, folder, seed)
    try:
        case.play(versions)
    except (Failure, subprocess.SubprocessError, OSError, ValueError) as error:
        return case.done, f"seed {seed}: {error}\n" + "\n".join(case.script[-30:])
    return case.done, None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", type=lambda text: Path(text).resolve())
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        done, why = play(args.command, args.seed, folder, args.versions)
    print(f"seed {args.seed}: " + ", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    print(why or "each folder had its version; verify found no damage")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
