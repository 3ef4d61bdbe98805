#!/usr/bin/env python3
"""Stores in a bucket, used by several machines, with kills of processes and of the server, and damaged traffic.

    buckets.py [--cases N] [--seconds N] [--seed N] [--length N] [--out FILE] [--record]

A case has two or three machines, which are cache folders, and one store. Savers, some of which race for a step, compactors, pruners and loaders run side
by side on all machines for `length` seconds. Many are killed at random moments, and some are stopped for a while. The server, SeaweedFS, is killed and
started again with the data that it has on disk. A proxy damages one request in ten. The oracle:

- A save that ended with 0 loads bit for bit, until a deletion may have removed it. Of savers that race for a step, one at most ends with 0.
- Everything that `list` shows loads as somebody tried to save it.
- A command that fails says that somebody else was first, or that the server or the lease was out of reach. No command finds damage.
- At the end the same holds on each machine, and on one that never saw the store; `verify` finds no damage there.

The order of events is that of the machine, so a seed repeats only what is drawn. The last line reads `N passed, N failed, N skipped`. --record adds the
figures to buckets.json (record.py). CKD_S3_SERVERS names the servers (tests/support/support_s3.py).
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import record  # noqa: E402
import support_safetensors as st  # noqa: E402
from jobs_support import ROOT, Failure, check  # noqa: E402
from support_s3 import environment, make_bucket, seaweed  # noqa: E402
from support_s3_faults import FaultProxy  # noqa: E402

FILE = HERE / "buckets.json"
SOURCES = (*record.PRODUCT, "objects")
TIMEOUT = 240
KEPT = 4  # of a run: what is pruned has at least so many newer steps
RUNS = ("a", "b", "c")
# Messages of commands that fail because of others, or because of the server and the proxy.
EXPECTED = re.compile("already has a checkpoint|another writer has committed|another machine|holds the lease|"
                      "may have been written|changed each time|try again|no checkpoint|is not in the store|no such|has no run|gone|being (deleted|rewritten)|"
                      "is busy|in progress|changed meanwhile|was deleted|the server of|no run |for the lock")
LOST = re.compile(r"no complete answer|\d attempts|answered 5\d\d|before its deadline")


def content(seed, run, step, variant):
    """The tensors of a save. Steps of a run differ little; variants of a step are what racing savers have."""
    base = np.random.default_rng([seed, run.encode()[0]])
    weight = base.standard_normal((40, 64)).astype(np.float32)
    noise = np.random.default_rng([seed, run.encode()[0], step, variant])
    moved = weight + (1e-3 * noise.standard_normal(weight.shape)).astype(np.float32)
    return {"layer.weight": moved, "exp_avg.layer.weight": moved * np.float32(0.1), "step": np.array([step, variant], np.int64)}


class Machine:
    def __init__(self, folder, name):
        self.name, self.folder = name, folder / name
        self.cache = self.folder / "cache"
        self.folder.mkdir()


def draws(seed):
    """How a case is played."""
    rng = random.Random(f"draws {seed}")
    return {"machines": rng.choice([2, 3]), "killed": rng.choice([0.0, 0.2, 0.4]), "stopped": rng.choice([0.0, 0.05]), "server_kills": rng.choice([0, 1, 1, 2]),
            "faults": rng.choice([0.0, 0.1, 0.1])}


class Case:
    def __init__(self, build, server, folder, seed, length):
        self.command, self.server, self.folder, self.seed, self.length = build / "ckptdelta", server, folder, seed, length
        self.rng, self.drawn = random.Random(f"buckets {seed}"), draws(seed)
        self.address = f"s3://bucket/{seed}-{os.getpid()}-{folder.name}"
        self.machines = [Machine(folder, f"M{i}") for i in range(self.drawn["machines"])]
        self.proxy = FaultProxy(server.endpoint, share=self.drawn["faults"], seed=seed)
        self.lock, self.done, self.log = threading.Lock(), collections.Counter(), []
        self.next = dict.fromkeys(RUNS, 0)
        self.tried = collections.defaultdict(set)  # (run, step): variants
        self.saved = {}                            # (run, step): the variant of the save that ended with 0
        self.removable, self.removed = set(), set()
        self.missed = []                           # loads that found nothing: right if the checkpoint was removable
        self.failure, self.files = None, 0

    # ------------------------------------------------------------------------------------------ commands

    def note(self, text):
        with self.lock:
            self.log.append(f"{time.monotonic():.3f} {text}")

    def count(self, what):
        with self.lock:
            self.done[what] += 1

    def run(self, machine, rng, *args, kill=True):
        """Returns (exit status or None if it was killed, output, messages)."""
        env = {**environment(self.proxy.endpoint), "CKPTDELTA_CACHE": str(machine.cache)}
        args = [args[0], self.address, *map(str, args[1:])]
        begun = time.monotonic()
        process = subprocess.Popen([self.command, *args], cwd=machine.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        if kill and rng.random() < self.drawn["killed"]:
            time.sleep(rng.random() ** 2 * 1.5)
            process.kill()
        elif kill and rng.random() < self.drawn["stopped"]:
            time.sleep(rng.random() ** 2)
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 2, 26]))
            process.send_signal(signal.SIGCONT)
            self.count("stops")
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise Failure(f"{' '.join(args)} hung: {out}{err}")
        code = None if process.returncode == -signal.SIGKILL else process.returncode
        self.note(f"{machine.name} {' '.join(args)} from {begun:.3f}: {'killed' if code is None else code} {err.strip()}")
        self.count("kills" if code is None else "commands")
        if code not in (None, 0):
            check(code in (1, 3), f"{machine.name}: {' '.join(args)}: exit status {code}\n{out}{err}")
            check(EXPECTED.search(err) or LOST.search(err), f"{machine.name}: {' '.join(args)}: exit status {code}\n{out}{err}")
            self.count("failed: server" if LOST.search(err) else "failed: others")
        return code, out, err

    def write(self, machine, tensors):
        with self.lock:
            self.files += 1
            number = self.files
        return st.write(machine.folder / f"in{number}.safetensors", tensors)

    # ------------------------------------------------------------------------------------------ what is played

    def choose_step(self, rng):
        with self.lock:
            run = rng.choice(RUNS)
            if rng.random() < 0.7 or not self.next[run]:
                self.next[run] += 1
            key = run, self.next[run]
            variant = len(self.tried[key])
            self.tried[key].add(variant)
            return key, variant

    def save(self, machine, rng):
        key, variant = self.choose_step(rng)
        path = self.write(machine, content(self.seed, *key, variant))
        code, _, err = self.run(machine, rng, "save", "--run", key[0], "--step", key[1], path)
        path.unlink()
        with self.lock:
            if code == 0:
                check(key not in self.saved, f"two saves of {key} ended with 0: {self.saved.get(key)} and {variant}")
                self.saved[key] = variant
                self.done["saves"] += 1

    def compact(self, machine, rng):
        self.run(machine, rng, "compact", *rng.choice([("--max-depth", 2), ("--recode-but", 2), ("--max-depth", 1, "--run", rng.choice(RUNS))]))

    def prune(self, machine, rng):
        """What may go is known when it has ended: everything older than the newest KEPT that anybody tried to save."""
        run = rng.choice(RUNS)
        code, out, _ = self.run(machine, rng, "prune", "--run", run, "--keep-last", KEPT, "--undo", rng.choice(["0s", "24h"]), "--json")
        with self.lock:
            steps = sorted((step for r, step in self.tried if r == run), reverse=True)
            self.removable |= {(run, step) for step in steps[KEPT:]}
            if code == 0:
                gone = {c["checkpoint"] for c in json.loads(out)["checkpoints"] if c["deleted"]}
                self.removed |= {(run, step) for step in steps if f"{run}@{step}" in gone}
                self.done["pruned"] += len(gone)

    def empty(self, machine, rng):
        self.run(machine, rng, "trash", "--empty", "--all")

    def load(self, machine, rng):
        """Something that was saved, or something that is listed."""
        if rng.random() < 0.5:
            code, out, _ = self.run(machine, rng, "list", "--json")
            found = [(c["run"], c["step"]) for c in json.loads(out)["checkpoints"]] if code == 0 else []
        else:
            with self.lock:
                found = sorted(self.saved.keys() - self.removed)
        if found:
            self.load_one(machine, rng, rng.choice(found[-6:]))

    def load_one(self, machine, rng, key):
        path = machine.folder / f"out-{threading.get_ident()}.safetensors"
        code, _, err = self.run(machine, rng, "load", "--run", key[0], "--step", key[1], "--out", path, "--force")
        if code == 0:
            self.compare(key, st.read(path)[0], f"{machine.name} loaded {key}")
            self.count("loads")
        elif code is not None and not LOST.search(err):
            self.missed.append((key, f"{machine.name} cannot load {key}: {err}"))

    def compare(self, key, found, who):
        with self.lock:
            variants = [self.saved[key]] if key in self.saved else sorted(self.tried[key])
        for variant in variants:
            try:
                return st.same(found, content(self.seed, *key, variant))
            except AssertionError:
                pass
        raise Failure(f"{who}, and it has other values than {variants}")

    def act(self, index):
        """A thread plays what one process after the other does on a machine."""
        rng = random.Random(f"{self.seed}/{index}")
        machine = self.machines[index % len(self.machines)]
        kinds = [self.save] * 6 + [self.load] * 4 + [self.compact, self.prune] + ([self.empty] if index == 0 else [])
        try:
            while time.monotonic() < self.end and not self.failure:
                rng.choice(kinds)(machine, rng)
        except Exception as error:  # noqa: BLE001: a thread's failure is the case's
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def kill_servers(self):
        rng = random.Random(f"{self.seed}/server")
        try:
            for _ in range(self.drawn["server_kills"]):
                time.sleep(rng.random() * self.length / self.drawn["server_kills"])
                self.server.stop()
                self.note("the server was killed")
                time.sleep(rng.choice([0, 1, 5]))
                self.server.start()
                self.note("the server is back")
                self.count("kills of the server")
        except Exception as error:  # noqa: BLE001
            self.failure = self.failure or f"the server does not come back: {error}"

    # ------------------------------------------------------------------------------------------ the end

    def check_machine(self, machine):
        """Without faults."""
        run = lambda *args: self.run(machine, self.rng, *args, kill=False)  # noqa: E731
        code, out, err = run("list", "--json")
        check(code == 0, f"list on {machine.name}: {code} {err}")
        listed = {(c["run"], c["step"]) for c in json.loads(out)["checkpoints"]}
        lost = self.saved.keys() - listed - self.removable
        check(not lost, f"{machine.name} does not list {sorted(lost)}, which were saved and never deleted")
        check(not listed & self.removed, f"{machine.name} lists {sorted(listed & self.removed)}, which were deleted")
        check(listed <= self.tried.keys(), f"{machine.name} lists {sorted(listed - self.tried.keys())}, which nobody saved")
        path = machine.folder / "out.safetensors"
        for key in sorted(listed):
            code, _, err = run("load", "--run", key[0], "--step", key[1], "--out", path, "--force")
            check(code == 0, f"{machine.name} cannot load {key}: {code} {err}")
            self.compare(key, st.read(path)[0], f"{machine.name} loaded {key}")
            self.count("loads at the end")
        code, out, err = run("verify")
        check(code == 0, f"verify on {machine.name}: {code} {out}{err}")

    def play(self):
        tensors = content(self.seed, "a", 0, 0)
        self.tried["a", 0].add(0)
        path = self.write(self.machines[0], tensors)
        code, _, err = self.run(self.machines[0], self.rng, "save", "--run", "a", "--step", 0, path, kill=False)
        check(code == 0, f"the first save: {code} {err}")
        self.saved["a", 0] = 0
        self.end = time.monotonic() + self.length
        threads = [threading.Thread(target=self.act, args=(i,)) for i in range(6)] + [threading.Thread(target=self.kill_servers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        check(not self.failure, self.failure)
        wrong = [why for key, why in self.missed if key not in self.removable]
        check(not wrong, "\n".join(wrong))
        self.done["faults"] = sum(count for fault, count in self.proxy.counts.items() if fault)
        self.proxy.share = 0.0
        for machine in (Machine(self.folder, "new"), *self.machines):
            self.check_machine(machine)


def play(build, server, seed, folder, length):
    """Returns (what was done, None or what went wrong)."""
    case = Case(build, server, folder, seed, length)
    try:
        case.play()
        return case.done, None
    except (Failure, subprocess.SubprocessError, AssertionError) as error:
        return case.done, "\n".join([f"seed {seed}: {error}", *case.log[-60:]])
    finally:
        case.proxy.close()


class Run(record.Recorded):
    def __init__(self, seed, path=FILE):
        super().__init__(path, seed, record.hash_of(record.sources_below(SOURCES)))

    def add(self, seed, cases, counts, failed):
        self.write({"last_seed": seed, "cases": cases, "counts": dict(sorted(counts.items())), "failed": failed})


def summary(path=FILE):
    """One sentence on the cases that were played, on any sources; None if there are none."""
    mine = record.runs(path)
    if not mine:
        return None
    failed = [seed for r in mine for seed in r["failed"]]
    count = lambda name: sum(r["counts"].get(name, 0) for r in mine)  # noqa: E731
    return (f"{sum(r['cases'] for r in mine)} cases with {count('saves')} saves, {count('kills')} kills, {count('kills of the server')} of the server, "
            f"{count('faults')} faults on sources {', '.join(sorted({r['source'] for r in mine}))}, "
            + (f"**failed: seeds {', '.join(map(str, failed))}**" if failed else "0 failed"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=float, default=20)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    counts, failed, played = collections.Counter(), [], 0
    run = Run(args.seed) if args.record else None
    with tempfile.TemporaryDirectory(prefix="campaign-") as top:
        (Path(top) / "server").mkdir()
        server = seaweed(Path(top) / "server")
        try:
            make_bucket(server.endpoint, "bucket")
            end = time.monotonic() + args.seconds
            for seed in range(args.seed, args.seed + args.cases):
                if time.monotonic() > end:
                    break
                folder = Path(top) / str(seed)
                folder.mkdir()
                done, failure = play(args.build.resolve(), server, seed, folder, args.length)
                shutil.rmtree(folder, ignore_errors=True)
                if failure:
                    print(failure, flush=True)
                    failed.append(seed)
                    if args.out:
                        args.out.with_suffix(f".{seed}.txt").write_text(failure)
                counts += done
                played += 1
                if run:
                    run.add(seed, played, counts, failed)
        finally:
            server.stop()
    for name, count in sorted(counts.items()):
        print(f"  {count:6}  {name}")
    print(f"{played - len(failed)} passed, {len(failed)} failed, 0 skipped; seeds {args.seed} to {args.seed + played - 1}")
    return 1 if failed or not played else 0


if __name__ == "__main__":
    sys.exit(main())
