"""Many commands at a time: savers, readers and maintenance work in the same stores, and some of them are
killed or stopped.

The crowd records what each command may have done. In the end, each store must have a state that some order of
the commands explains. Steps that are multiples of 10, and all steps of the runs e0 and r0, are never deleted;
of the other runs the newest four stay. A save that ended with 0 must be there, and one that was killed may
be. The run r0 has its own store, and is renamed often.
"""

import json
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import commands  # noqa: E402
import states  # noqa: E402
import support_safetensors as st  # noqa: E402
from model import Content, Failure  # noqa: E402
from play import Player  # noqa: E402

SIGNALS = [signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
KEEP = {"last": 4, "every": 10}
# Messages of commands that may fail because others changed the store meanwhile.
EXPECTED = re.compile("in progress|is not in the (store|trash)|no such|is pinned|"
                      "already|has changed|changed meanwhile|try again|is busy|being (deleted|rewritten|copied)|no parity is configured|"
                      "was deleted|gone|no checkpoint|run .* is not|there is no run|has no run|another process|"
                      "saved again|is using run|has begun|was renamed|is being renamed|no run '|are not removed yet")
RENAMED = [f"r{i}" for i in range(6)]


def first_name(run):
    return "r0" if run in RENAMED else run


class Crowd:
    def __init__(self, settings, seed, seconds):
        self.settings, self.seed = settings, seed
        self.rng = random.Random(f"crowd {seed}")
        self.folder = settings.folder / f"crowd{seed}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.end = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.log, self.failure = [], None
        self.killing = self.rng.choice([0.0, 0.2, 0.45])
        self.jumping = self.rng.choice([0.0, 0.0, 0.1])  # clocks that are wrong
        self.flavour = states.flavour(self.rng, self.rng.choice(["plain", "plain", "tied", "adamw"]))
        self.lines = {run: [[self.rng.randrange(1 << 30), 0]] for run in ("e0", "p0", "n0", "c0", "r0")}
        self.fidelity = {"e0": "exact", "r0": "exact", "p0": "exact", "n0": "near", "c0": "coarse"}
        self.contents = {}  # by id
        self.saved = set()  # (run, step) of saves that ended with 0
        self.tried = set()
        self.pushed = set()  # must be in B, as a push of it ended with 0
        self.commands = self.loads = 0

    # ------------------------------------------------------------------------------------------- one command

    def run(self, rng, op, args=None, hurt=True):
        """Runs a command, and may stop it at any time. Returns None if it was killed or stopped: it may have
        had any part of its effect."""
        args = args or commands.line(op)
        fault, clock = None, 0
        if hurt and rng.random() < self.killing * 0.3:
            fault = f"{rng.choice(['kill', 'EIO', 'ENOSPC', 'EINTR', 'short'])}:{rng.randrange(1, 400)}"
        if hurt and rng.random() < self.jumping:
            clock = rng.choice([-3600, -3 * 86400, 3 * 86400])
        began = time.monotonic()
        process = commands.start(self.settings.command, args, self.folder, commands.environment(self.settings.shim, fault, clock=clock))
        sent = self.disturb(rng, process) if hurt and not fault and rng.random() < self.killing else None
        result = commands.finish(process, args, (signal.SIGKILL,) if fault else tuple(SIGNALS) if sent else ())
        with self.lock:
            self.commands += 1
            self.log.append({"began": began, "ended": time.monotonic(), "op": op, "args": args, "fault": fault, "clock": clock,
                             "signal": sent and sent.name, "code": result.code, "err": result.err[:500]})
        if result.code in (0, 1, 3) and not fault and not sent and result.code and not clock and not EXPECTED.search(result.err):
            raise Failure(f"status {result.code} of {args[0]}", f"{shlex.join(args)}: exit status {result.code}\n{result.err}")
        left = result.code == 4 and "saved again" in result.err  # what stays in the trash, and nothing else
        if result.code in (2, 4) and not fault and not left:
            raise Failure(f"status {result.code} of {args[0]}", f"{shlex.join(args)}: exit status {result.code}\n{commands.reported_errors(result)}{result.err}")
        return None if (sent or fault) and result.code != 0 else result

    def disturb(self, rng, process):
        try:
            process.wait(rng.choice([0.002, 0.01, 0.03, 0.1]) * rng.random() * 2)
            return None
        except commands.subprocess.TimeoutExpired:
            pass
        if rng.random() < 0.3:
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * 0.3)
            process.send_signal(signal.SIGCONT)
        sent = rng.choice(SIGNALS)
        process.send_signal(sent)
        return sent

    # ------------------------------------------------------------------------------------------- kinds of work

    def work(self, act, *about):
        """A thread: repeats one kind of work until the time is over, or something failed."""
        rng = random.Random(f"{self.seed} {act.__name__} {about}")
        try:
            while time.monotonic() < self.end and not self.failure:
                act(rng, *about)
        except Failure as failure:
            with self.lock:
                self.failure = self.failure or failure

    def save(self, rng, name, steps, store="A"):
        run, step = first_name(name), next(steps)
        tensors = states.tensors(self.flavour, self.lines[run], step)
        file = f"{run}-{step}.safetensors"
        st.write(self.folder / file, tensors)
        with self.lock:
            self.tried.add((run, step))
        args = ["--metric", f"loss={step % 7}"] * (rng.random() < 0.2) + ["--base"] * (rng.random() < 0.05)
        op = {"op": "save", "store": store, "run": name, "step": step, "fidelity": {"": self.fidelity[run]}, "args": args, "file": file,
              "flavour": self.flavour, "line": self.lines[run]}
        for _ in range(1 if store == "D" else 5):  # in D the run may have another name by then
            result = self.run(rng, op)
            if result and (result.code == 0 or "already" in result.err):
                with self.lock:
                    self.saved.add((run, step))
                break
        (self.folder / file).unlink()

    def read(self, rng, number):
        listing = self.run(rng, {"op": "other"}, ["list", "A", "--json"])
        found = listing.json()["checkpoints"] if listing and listing.code == 0 else []
        for _ in range(4 if found else 0):
            c = rng.choice(found)
            out = f"out{number}.safetensors"
            result = self.run(rng, {"op": "other"}, ["load", "A", "--run", c["run"], "--step", str(c["step"]), "--out", out, "--force", "--json"])
            if result and result.code == 0:
                self.check(result.json()["checkpoints"][0], self.folder / out, "A")
            if rng.random() < 0.2:
                shutil.rmtree(self.folder / "A/data/k", ignore_errors=True)

    def rename(self, rng, steps):
        """Store D has one run, which has several names in turn. This saves to it, renames it, and maintains
        the store."""
        time.sleep(rng.random() * 0.2)
        listing = self.run(rng, {"op": "other"}, ["list", "D", "--json"]) if (self.folder / "D/data/store").exists() else None
        found = listing.json()["checkpoints"] if listing and listing.code == 0 else []
        names = sorted({c["run"] for c in found})
        old = rng.choice(names if len(names) > 2 or (names and rng.random() < 0.9) else RENAMED)
        new = rng.choice([n for n in RENAMED if n not in names or rng.random() < 0.1] or RENAMED)
        what = rng.random() if found else 0
        if what < 0.3:
            self.save(rng, old, steps, "D")
        elif what < 0.7 and old != new:
            self.run(rng, {"op": "rename", "store": "D", "run": old, "to": new})
        elif what < 0.8:
            c = rng.choice(found)
            out = f"out{threading.get_ident()}.safetensors"
            result = self.run(rng, {"op": "other"}, ["load", "D", "--run", c["run"], "--step", str(c["step"]), "--out", out, "--force", "--json"])
            if result and result.code == 0:
                self.check(result.json()["checkpoints"][0], self.folder / out, "D")
        elif what < 0.9:
            args = rng.choice([["verify", "D"], ["repair", "D"], ["parity", "D", "--group", "4+1"], ["parity", "D", "--off"],
                               ["scrub", "D", "--rate", "max", "--older-than", "0s"], ["rebuild", "D"], ["trash", "D", "--empty"]])
            self.run(rng, {"op": args[0], "store": "D", "args": args[2:]} if args[0] in ("repair", "parity", "rebuild") else {"op": "other"}, args)
        else:
            self.run(rng, {"op": "compact", "store": "D", "args": ["--max-depth", rng.choice(["1", "2", "4"])]})

    def check(self, c, path, store):
        run, step = first_name(c["run"]), c["step"]
        with self.lock:
            self.loads += 1
            content = self.contents.setdefault(c["id"], Content(self.flavour, self.lines[run], step, {"": self.fidelity[run]}))
            content.check(f"{run}@{step} of {store}", st.read(path)[0])

    def clean(self, rng):
        """Deletes and rewrites checkpoints."""
        time.sleep(rng.random() * 0.2)
        undo = rng.choice(["0s", "1s", "1h"])
        run = rng.choice([None, "p0", "n0", "c0"])
        depth = ["--max-depth", rng.choice(["1", "2", "4", "8"])]
        what = rng.randrange(8)
        if what == 0 and run:
            op = {"op": "prune", "store": "A", "run": run, "keep": KEEP, "undo": undo}
        elif what in (1, 2) and run:
            op = {"op": "compact", "store": "A", "run": run, "keep": KEEP, "undo": undo, "args": depth if rng.random() < 0.5 else []}
        elif what == 3:
            op = {"op": "empty", "store": "A", "all": rng.random() < 0.4}
        elif what == 4:
            op = {"op": "restore", "store": "A", "names": []}
        elif what == 5:
            op = {"op": "compact", "store": "B", "args": depth}
        else:
            args = depth + (["--pack-below", "1M"] if rng.random() < 0.4 else []) + (["--recode-but", "2"] if rng.random() < 0.2 else [])
            op = {"op": "compact", "store": "A", "args": args, **({"run": run} if run else {})}
        if op["store"] == "A" or (self.folder / "B/data/store").exists():
            self.run(rng, op)

    def keep_whole(self, rng):
        """Checks and repairs the store."""
        time.sleep(rng.random() * 0.3)
        args = rng.choice([["verify", "A"], ["verify", "A", "--quick"], ["verify", "A", "--sample", "30"], ["repair", "A"], ["parity", "A", "--group", "4+1"],
                           ["parity", "A"], ["parity", "A", "--off"], ["scrub", "A", "--rate", "max", "--older-than", "0s"], ["rebuild", "A"],
                           ["report", "A", "--json"], ["show", "A", "--run", "e0", "--step", "latest"], ["trash", "A"]])
        op = {"op": args[0], "store": "A", "args": args[2:]} if args[0] in ("repair", "parity", "rebuild") else {"op": "other"}
        self.run(rng, op, args)

    def carry(self, rng):
        """Copies to other stores and back."""
        time.sleep(rng.random() * 0.3)
        with self.lock:
            before = {s for s in self.saved if s[0] != "r0" and self.never_deleted(*s)}
        what = rng.randrange(4)
        if what < 2:
            result = self.run(rng, {"op": "copy", "from": "A", "to": "B", "args": []})
            if result and result.code == 0:
                with self.lock:
                    self.pushed |= before
        elif what == 2:
            self.run(rng, {"op": "copy", "from": "A", "to": "C", "pull": True, "run": rng.choice(["e0", "c0"]), "args": ["--step", "latest"]})
        elif (self.folder / "B/data/store").exists():
            self.run(rng, {"op": "other"}, ["verify", "B"])

    @staticmethod
    def never_deleted(run, step):
        return run in ("e0", "r0") or step % KEEP["every"] == 0

    # ---------------------------------------------------------------------------------------- the whole crowd

    def play(self):
        """Returns the Failure, or None."""
        self.save(random.Random(0), "e0", iter([0]))
        odd, even = (i for i in range(1, 10**6, 2)), (i for i in range(2, 10**6, 2))
        acts = [(self.save, "e0", odd), (self.save, "e0", even), (self.save, "p0", iter(range(1, 10**6))), (self.save, "n0", iter(range(1, 10**6))),
                (self.save, "c0", iter(range(1, 10**6))), (self.read, 0), (self.read, 1), (self.clean,), (self.clean,), (self.keep_whole,), (self.carry,),
                (self.rename, iter(range(1, 10**6, 2))), (self.rename, iter(range(2, 10**6, 2)))]
        threads = [threading.Thread(target=self.work, args=act) for act in acts]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        try:
            if self.failure:
                raise self.failure
            self.settle()
        except Failure as failure:
            self.failure = failure
        return self.failure

    def settle(self):
        """After all commands: a writer opens each store, which must then be as the rules say."""
        quiet = random.Random(0)
        for store in "ABCD":
            if not (self.folder / store / "data/store").exists():
                continue
            for args in (["trash", store, "--empty"], ["repair", store], ["verify", store]):
                self.run(quiet, {"op": "other"}, args, hurt=False)
            shutil.rmtree(self.folder / store / "data/k", ignore_errors=True)
            listed = self.run(quiet, {"op": "other"}, ["list", store, "--json"], hurt=False).json()["checkpoints"]
            self.check_listed(store, {(first_name(c["run"]), c["step"]) for c in listed}, len(listed))
            for c in listed:
                self.run(quiet, {"op": "other"}, ["load", store, "--run", c["run"], "--step", str(c["step"]), "--out", "out.safetensors", "--force"], hurt=False)
                self.check(c, self.folder / "out.safetensors", store)
            self.check_files(store)

    def check_listed(self, store, listed, count):
        if len(listed) != count:
            raise Failure("listed twice", f"{store} lists a run and step twice")
        if listed - self.tried:
            raise Failure("came from nowhere", f"{store}: {sorted(listed - self.tried)}")
        there = {s for s in self.saved if (s[0] == "r0") == (store == "D")}
        must = {"B": self.pushed, "C": set()}.get(store, {s for s in there if self.never_deleted(*s)})
        for run in self.lines if store == "A" else ():
            newest = sorted(step for r, step in there | listed if r == run)[-KEEP["last"]:]
            must |= {(run, step) for step in newest} & there
        if must - listed:
            raise Failure("lost", f"{store} does not list {sorted(must - listed)}")

    def check_files(self, store):
        """Uses the checks of the other modes, a week later, when unfinished files have been removed."""
        player = Player(self.settings, self.folder, self.seed)
        player.world.clock += 8 * 86400
        if self.settings.shim:
            player.expect(player.run("trash", store, "--empty"), 0)
            player.check_catalog(store)
            player.check_files(store)

    def counts(self):
        return {"commands": self.commands, "loads": self.loads}

    def serialised(self):
        """The commands in the order in which they ended, to be played one by one."""
        ops = [entry["op"] for entry in sorted(self.log, key=lambda e: e["ended"]) if entry["op"]["op"] in commands.LINES]
        return [{k: v for k, v in op.items() if k != "file"} for op in ops]

    def save_log(self, path):
        with open(path, "w") as f:
            for entry in self.log:
                f.write(json.dumps(entry) + "\n")
