"""Random failures of trainers with an agent: kills of either or both, stops, flipped bits, full disks, small budgets.

    agents.py [--cases N] [--seconds N] [--seed N] [--kind NAME] [--out FILE] [--record]

The trainer is the example train_gpt, started again and again until it ends, by this program or by `ckptdelta run`. The
oracle: every step was trained, each loss is, bit for bit, that of a training without failures, the store is intact and
has no branch, and each restart goes on from no older step than was promised: one that was durable before the kill, or
one that the agent showed as complete, if it lived on. A failed case can be repeated by its seed and kind. The last line
reads `N passed, N failed, N skipped`; --out writes the counts by kind as JSON, --record adds them to agents.json (record.py).
"""

import argparse
import contextlib
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
from jobs_support import ROOT, Failure, check, kill, losses_of, wait_for

FILE = Path(__file__).with_name("agents.json")
SOURCES = ("agent", "peers", "engine/session", "engine/slots", "cli/commands/agent.c")

STEPS = 60
WAIT = 3  # seconds without a sign of life
MPI = {"OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


class Reference:
    """The losses of a training without failures."""

    def __init__(self, build, folder):
        self.build, self.folder, self.ranked = build, folder, {}
        self.losses = self.train("one", command(build, folder / "store", folder / "losses-one", 7, "copy"))

    def train(self, name, words):
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300,
                       env=dict(os.environ, CKPTDELTA_AGENT="", **MPI))
        return dict(losses_of(self.folder / f"losses-{name}"))

    def of_ranks(self, ranks):
        """The sums of gradients are others with each number of ranks."""
        if ranks not in self.ranked:
            words = command(self.build, self.folder / f"store-{ranks}", self.folder / f"losses-{ranks}", 7, "copy")
            self.ranked[ranks] = self.train(ranks, of_ranks(words, ranks))
        return self.ranked[ranks]


def command(build, store, losses, every, background):
    return list(map(str, [build / "train_gpt", "--width", 32, "--layers", 1, "--heads", 2, "--context", 32, "--batch", 4, "--threads", 1, "--steps", STEPS,
                          "--save-every", every, "--background", background, "--store", store, "--run", "gpt", "--resume", "--losses", losses]))


def of_ranks(words, ranks):
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), words[0].replace("train_gpt", "train_mpi"), *words[1:]]


class Case:
    """A store, an agent, and trainers one after the other."""

    def __init__(self, reference, folder, seed):
        self.reference, self.build, self.folder, self.draw = reference, reference.build, folder, random.Random(seed)
        self.store, self.losses, self.socket = folder / "store", folder / "losses", folder / "agent"
        self.env = dict(os.environ, CKPTDELTA_AGENT=str(self.socket), CKPTDELTA_AGENT_WAIT=str(WAIT))
        self.words = command(self.build, self.store, self.losses, self.draw.choice([1, 2, 5]), self.draw.choice(["copy", "lazy"]))
        self.output = open(folder / "output", "w+b")
        self.started, self.agent, self.supervised, self.expected = [], None, False, reference.losses

    def popen(self, words, **options):
        process = subprocess.Popen(list(map(str, words)), cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stderr=self.output, **options)
        self.started.append(process)
        return process

    def cli(self, *args, timeout=120):
        return subprocess.run(list(map(str, [self.build / "ckptdelta", *args])), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=timeout)

    def start_agent(self, *options):
        self.agent = self.popen([self.build / "ckptdelta", "agent", self.store, "--socket", self.socket, *options], stdout=subprocess.PIPE)
        check(self.agent.stdout.readline(), "the agent has not started")

    def train(self):
        self.seen = len(losses_of(self.losses))
        if self.supervised:
            words = [self.build / "ckptdelta", "run", self.store, "--run", "gpt", "--pause", "0s", "--max-futile", 50, "--max-restarts", 50, "--", *self.words]
            return self.popen(words, stdout=self.output)
        return self.popen(self.words, stdout=self.output)

    def trainer(self, process):
        """The process that trains, below a supervisor if there is one; None: there is none now."""
        if not self.supervised:
            return process.pid if process.poll() is None else None
        done = self.cli("attempts", self.store, "--json")
        attempts = json.loads(done.stdout)["attempts"] if done.returncode == 0 else []
        return attempts[-1]["pid"] if attempts and not attempts[-1]["end"] else None

    def sleep(self, seconds=1.0):
        """Until some steps of this launch, and a little longer. An attempt that makes no step lets `run` go further back."""
        if self.supervised:
            self.seen = len(losses_of(self.losses)) + 1
        steps = self.seen + self.draw.randint(0, 12)
        wait_for(lambda: len(losses_of(self.losses)) >= min(steps, STEPS - 2) or any(p.poll() is not None for p in self.started[-1:]), "steps")
        time.sleep(self.draw.random() * 0.1 * seconds)

    def durable(self, run=None):
        done = self.cli("list", self.store, "--json")
        found = [c["step"] for c in json.loads(done.stdout)["checkpoints"] if run in (None, c["run"])] if done.returncode == 0 else []
        return max(found, default=0)

    def in_memory(self):
        """The newest step that the agent shows as complete."""
        done = self.cli("agent", self.store, "--socket", self.socket, "--status", "--json")
        sessions = json.loads(done.stdout)["sessions"] if done.returncode == 0 else []
        return max((s["newest_step"] or 0 for s in sessions), default=0)

    def kill_trainer(self, process):
        pid = self.trainer(process)
        killed = pid is not None and kill(pid)
        if killed and not self.supervised:
            process.wait()
        return killed

    def restart(self, process, promised):
        """Starts training again if it has ended; it goes on after the promised step."""
        if self.supervised:
            return process
        before = len(losses_of(self.losses))
        process = self.train()
        wait_for(lambda: len(losses_of(self.losses)) > before or process.poll() is not None, "a step after a restart")
        after = losses_of(self.losses)[before:]
        check(not after or int(after[0][0]) > promised, f"went on with step {after[0][0] if after else 0} after step {promised} was promised")
        return process

    def finish(self, process, tries=4):
        """
        A trainer that an agent's late save has got in the way of may fail, and is started again. An agent that was stopped
        while it held the store's lock is let go on, as the message says.
        """
        for _ in range(tries):
            if process.wait(300) == 0:
                return
            self.agent.send_signal(signal.SIGCONT)
            process = self.train()
        raise Failure(f"the trainer has failed {tries} times")

    def check_all(self, runs=frozenset(["gpt"])):
        seen = losses_of(self.losses)
        for step, loss in seen:
            check(loss == self.expected[step], f"step {step}: loss {loss} instead of {self.expected[step]}")
        check({step for step, _ in seen} == set(self.expected), "steps are missing")
        check(self.cli("verify", self.store, "-q").returncode == 0, "the store is damaged")
        listed = json.loads(self.cli("list", self.store, "--json").stdout)["checkpoints"]
        steps = [(c["run"], c["step"]) for c in listed]
        check(self.supervised or {c["run"] for c in listed} == runs and len(steps) == len(set(steps)), f"checkpoints: {steps}")

    def stop_agent(self):
        if self.agent and self.agent.poll() is None:
            done = self.cli("agent", self.store, "--socket", self.socket, "--stop", "-q")
            check(done.returncode == 0, f"the agent cannot be stopped: {done.stderr}")
            check(self.agent.wait(60) == 0, "the agent has failed")

    def close(self):
        for process in self.started:
            if process.poll() is None:
                kill(process.pid, signal.SIGCONT)
                kill(process.pid)
                process.wait()
            if process.stdout:
                process.stdout.close()
        self.output.close()


# ---- the kinds ----


def killed_trainers(case):
    process = case.train()
    for _ in range(case.draw.randint(1, 4)):
        case.sleep()
        promised = max(case.durable(), case.in_memory())
        case.kill_trainer(process)
        process = case.restart(process, promised)
    case.finish(process)


def killed_trainers_below_run(case):
    case.supervised = True
    process = case.train()
    for _ in range(case.draw.randint(1, 4)):
        case.sleep()
        case.kill_trainer(process)
    case.finish(process, 1)


def killed_agents(case):
    """The trainer goes on by itself; the next restart may use the next agent."""
    process = case.train()
    for _ in range(case.draw.randint(1, 3)):
        case.sleep()
        case.agent.kill()
        case.agent.wait()
        if case.draw.random() < 0.7:
            case.start_agent()
        if case.draw.random() < 0.5:
            case.sleep()
            promised = case.durable()
            case.kill_trainer(process)
            process = case.restart(process, promised)
        if case.agent.poll() is not None:
            case.start_agent()
    case.finish(process)


def killed_both(case):
    case.supervised = case.draw.random() < 0.4
    process = case.train()
    for _ in range(case.draw.randint(1, 3)):
        case.sleep()
        promised = case.durable()
        kills = [lambda: case.kill_trainer(process), lambda: (case.agent.kill(), case.agent.wait())]
        case.draw.shuffle(kills)
        for one in kills:
            one()
            time.sleep(case.draw.random() * case.draw.choice([0, 0.05]))
        case.start_agent()
        process = case.restart(process, promised)
    case.finish(process)


def stopped_agents(case):
    """Training goes on; a kill meanwhile loses no more than what was not durable."""
    case.supervised = case.draw.random() < 0.3
    process = case.train()
    case.sleep()
    case.agent.send_signal(signal.SIGSTOP)
    time.sleep(case.draw.random() * 2 * WAIT)
    if case.draw.random() < 0.6:
        promised = case.durable()
        case.kill_trainer(process)
        if case.draw.random() < 0.5:
            case.agent.send_signal(signal.SIGCONT)
        process = case.restart(process, promised)
    if case.draw.random() < 0.5:
        case.agent.send_signal(signal.SIGCONT)
    case.finish(process)
    case.agent.send_signal(signal.SIGCONT)


def memories(pid):
    folder = Path(f"/proc/{pid}/fd")
    found = []
    for fd in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += [fd] if "memfd:ckptdelta" in os.readlink(fd) else []
    return found


def flipped_bits(case):
    """In a slot of a trainer that lives, or of one that was killed."""
    process = case.train()
    for _ in range(case.draw.randint(1, 3)):
        case.sleep()
        promised = case.durable()
        first = case.draw.random() < 0.5
        if first:
            case.kill_trainer(process)
        found = memories(case.agent.pid)
        if found and first:  # a trainer that lives saves what is in its memory, wherever that is
            with open(case.draw.choice(found), "r+b") as f:
                size = f.seek(0, os.SEEK_END)
                for _ in range(case.draw.randint(1, 3)):
                    at = case.draw.choice([case.draw.randrange(8192), case.draw.randrange(size), case.draw.randrange(size)])
                    f.seek(at)
                    byte = f.read(1)[0]
                    f.seek(at)
                    f.write(bytes([byte ^ 1 << case.draw.randrange(8)]))
        if not first:
            case.kill_trainer(process)
        process = case.restart(process, promised)
    case.finish(process)


def full_disk(case):
    """What a killed trainer leaves cannot be saved before there is room again."""
    disk = case.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode != 0:
        return "cannot mount a file system"
    try:
        case.stop_agent()
        case.store = disk / "store"
        case.words = command(case.build, case.store, case.losses, 1, "copy")
        case.start_agent()
        process = case.train()
        case.sleep()
        subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], stderr=subprocess.DEVNULL)
        time.sleep(case.draw.random() * 0.2)
        if case.draw.random() < 0.7:
            case.kill_trainer(process)
        else:
            process.wait(60)
        (disk / "filler").unlink()
        promised = case.durable()
        case.finish(case.restart(process, promised))
        case.stop_agent()
        case.check_all()
    finally:
        for started in case.started:
            kill(started.pid)
            started.wait()
        subprocess.run(["umount", disk], check=True)
    return None


def small_budget(case):
    case.stop_agent()
    case.start_agent("--budget", case.draw.choice(["1K", "200K", "500K", "1M"]))
    killed_trainers(case)


def stopped_and_ended(case):
    """--stop and SIGTERM while it is in use; trainers go on by themselves."""
    process = case.train()
    case.sleep()
    if case.draw.random() < 0.5:
        case.stop_agent()
    else:
        case.agent.send_signal(signal.SIGTERM)
        check(case.agent.wait(60) == 0, "an agent that got SIGTERM has failed")
    case.sleep()
    promised = case.durable()
    if case.draw.random() < 0.5:
        case.start_agent()
    case.kill_trainer(process)
    case.finish(case.restart(process, promised))


def restored_from_memory(case):
    """examples/session.c restores through its session. It saves every fifth step; the agent has the values."""
    reached = 0
    for _ in range(case.draw.randint(2, 5)):
        process = case.popen([case.build / "examples/session", case.store, 10**6], stdout=subprocess.DEVNULL)
        wait_for(lambda: case.durable() > reached or process.poll() is not None, "a save")
        time.sleep(case.draw.random() * 0.1)
        reached = max(case.durable(), case.in_memory())
        kill(process.pid)
        process.wait()
    case.cli("agent", case.store, "--socket", case.socket, "--drain", "-q")
    reached = max(reached, case.durable())
    steps = reached + 10
    ends = [subprocess.run([case.build / "examples/session", store, str(steps)], env=env, stdout=subprocess.PIPE, stderr=case.output, text=True,
                           timeout=300).stdout.splitlines() for store, env in ((case.store, case.env), (case.folder / "plain", dict(case.env, CKPTDELTA_AGENT="")))]
    check(ends[0][0] == f"resumes after step {reached}", f"{ends[0][0]}, not {reached}")
    check(ends[0][1] == ends[1][1], f"{ends[0][1]} instead of {ends[1][1]}")
    check(case.cli("verify", case.store, "-q").returncode == 0, "the store is damaged")


def several_runs(case):
    """Another run beside it, in the same store and with the same agent."""
    other = list(case.words)
    other[other.index("--run") + 1] = "other"
    other[other.index("--losses") + 1] = str(case.folder / "other")
    beside = case.popen(other, stdout=case.output)
    process = case.train()
    for _ in range(case.draw.randint(1, 3)):
        case.sleep()
        promised = case.durable("gpt")
        case.kill_trainer(process)
        process = case.restart(process, promised)
    case.finish(process)
    check(beside.wait(300) == 0, "the other run has failed")
    check(dict(losses_of(case.folder / "other")) == case.reference.losses, "losses of the other run")
    case.stop_agent()
    case.check_all({"gpt", "other"})


def processes_of(name, store):
    """The processes of a program that has the store in its arguments."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(name.encode()) and str(store).encode() in words:
            found.append(int(entry))
    return sorted(found)


def killed_ranks(case):
    """All ranks at a time, or one, whose end mpirun passes on; with or without the agent."""
    if not shutil.which("mpirun") or not (case.build / "train_mpi").exists():
        return "no MPI"
    ranks = case.draw.choice([2, 4])
    case.expected = case.reference.of_ranks(ranks)
    case.words = of_ranks(case.words, ranks)
    case.env.update(MPI)
    process = case.train()
    for _ in range(case.draw.randint(1, 3)):
        case.sleep()
        with_agent = case.draw.random() < 0.2
        promised = case.durable()
        alive = processes_of("/train_mpi", case.store)
        for pid in alive if case.draw.random() < 0.6 else alive[:1] and [case.draw.choice(alive)]:
            kill(pid)
            time.sleep(case.draw.random() * case.draw.choice([0, 0.01]))
        if with_agent:
            case.agent.kill()
            case.agent.wait()
        process.wait(120)
        wait_for(lambda: not processes_of("/train_mpi", case.store), "the end of the ranks")
        if with_agent:
            case.start_agent()
        process = case.restart(process, promised)
    case.finish(process)
    return None


KINDS = {f.__name__: f for f in (killed_trainers, killed_trainers_below_run, killed_agents, killed_both, stopped_agents, flipped_bits, full_disk, small_budget,
                                 stopped_and_ended, restored_from_memory, several_runs, killed_ranks)}
CHECK_THEMSELVES = {"full_disk", "restored_from_memory", "several_runs"}


def play(reference, kind, seed, folder):
    """Plays one case in an empty folder. Returns (None or why it was skipped, None or what went wrong, number of failures)."""
    case = Case(reference, folder, seed)
    try:
        case.start_agent()
        skipped = KINDS[kind](case)
        case.stop_agent()
        if kind not in CHECK_THEMSELVES and not skipped:
            case.check_all()
        return skipped, None, 1
    except (Failure, subprocess.SubprocessError) as error:
        case.output.seek(0)
        said = [line for line in case.output.read().decode(errors="replace").splitlines() if not line.startswith(("saved step", "step "))]
        return None, "\n".join([f"{kind}, seed {seed}: {error}", *said[-60:]]), 1
    finally:
        case.close()


class Run(record.Recorded):
    def __init__(self, campaign, seed, path=FILE):
        super().__init__(path, seed, record.hash_of(p for place in SOURCES for p in record.sources_below([place])))
        self.entry["campaign"] = campaign

    def add(self, counts, failures, failed, last_seed):
        self.write({"last_seed": last_seed, "cases": dict(sorted(counts.items())), "failures_played": failures, "failed": failed})


def summary(path=FILE):
    """One sentence on each campaign's cases that were played, on any sources; None if there are none."""
    said = []
    for campaign in sorted({r["campaign"] for r in record.runs(path)}):
        mine = [r for r in record.runs(path) if r["campaign"] == campaign]
        failed = [seed for r in mine for seed in r["failed"]]
        said.append(f"{campaign}: {sum(sum(r['cases'].values()) for r in mine)} cases with {sum(r['failures_played'] for r in mine)} failures on sources "
                    f"{', '.join(sorted({r['source'] for r in mine}))}, " + (f"**failed: seeds {', '.join(map(str, failed))}**" if failed else "0 failed"))
    return "; ".join(said) or None


def drive(about, kinds, prepare, play_one, campaign):
    """Plays cases as the arguments want. prepare(build, folder) returns what play_one gets first."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=kinds)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    counts, failures, failed, skipped = collections.Counter(), 0, [], 0
    run = Run(campaign, args.seed) if args.record else None
    with tempfile.TemporaryDirectory(prefix="campaign-") as top:
        (Path(top) / "reference").mkdir()
        reference = prepare(args.build.resolve(), Path(top) / "reference")
        end = time.monotonic() + args.seconds
        for seed in range(args.seed, args.seed + args.cases):
            if time.monotonic() > end:
                break
            kind = args.kind or list(kinds)[seed % len(kinds)]
            folder = Path(top) / str(seed)
            folder.mkdir()
            why, failure, played = play_one(reference, kind, seed, folder)
            shutil.rmtree(folder, ignore_errors=True)
            if failure:
                print(failure, flush=True)
            if why:
                print(f"skipped: {kind}, seed {seed}: {why}", flush=True)
            skipped += bool(why)
            failed += [seed] if failure else []
            counts[kind] += not failure and not why
            failures += 0 if why else played
            if run:
                run.add(counts, failures, failed, seed)
    for name, count in sorted(counts.items()):
        print(f"  {count:4}  {name}")
    if args.out:
        args.out.write_text(json.dumps({"first_seed": args.seed, "passed": dict(sorted(counts.items())), "failed": len(failed), "skipped": skipped}, indent=1) + "\n")
    print(f"{sum(counts.values())} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed or not counts else 0


def main():
    return drive(__doc__, KINDS, Reference, play, "trainers")


if __name__ == "__main__":
    sys.exit(main())
