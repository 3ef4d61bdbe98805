"""Random failures of training jobs below `ckptdelta run`: kills, hangs, damage, full disks, supervisors that die.

    jobs.py [--cases N] [--seconds N] [--seed N] [--kind NAME] [--torch PYTHON] [--out FILE]

The trainers are the examples: train_gpt, train_mpi on four ranks if there is an mpirun, and with --torch train_torch.py
on two processes of torchrun. Each case
ends as docs/run.md promises: the exit status, the journal, no process left, every step trained, and each loss, bit for
bit, that of a training without failures. A failed case can be repeated by its seed and kind. The last line reads
`N passed, N failed, N skipped`; --out writes the counts by kind as JSON.
"""

import argparse
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

ROOT = Path(__file__).resolve().parents[2]
MARKER = "CKD_TEST_JOB"
STEPS = 40
GAVE_UP, CANNOT_RUN, NOT_FOUND = 93, 126, 127


class Failure(Exception):
    pass


def check(condition, message):
    if not condition:
        raise Failure(message)


def wait_for(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < end, f"waited {seconds} s for {what}")
        time.sleep(0.01)


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def losses_of(path):
    """Step and loss, as hex floats, of each line that was written whole."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line.split()[:2] for line in lines]


class Trainer:
    """The command of a job, and the losses that it must come to."""

    def __init__(self, build, folder):
        self.build, self.reference = build, {}
        self.words = self.command(random.Random(1), folder / "reference", "losses", "reference")
        self.folder = folder

    def find_reference(self):
        subprocess.run(self.words, cwd=self.folder, env=self.environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        self.reference = dict(losses_of(self.folder / "losses"))

    def environment(self):
        return dict(os.environ)


class Gpt(Trainer):
    takes_signals = True  # with --background
    seconds, disk = 2, "16m"

    def command(self, draw, store, losses, run):
        words = [self.build / "train_gpt", "--width", 32, "--layers", 1, "--heads", 2, "--context", 32, "--batch", 4, "--threads", 1,
                 "--steps", STEPS, "--save-every", draw.choice([1, 3, 7]), "--background", draw.choice(["copy", "lazy"]), "--store", store,
                 "--run", run, "--resume", "--losses", losses]
        return list(map(str, words))


class Mpi(Trainer):
    """Four ranks. mpirun passes no SIGUSR1 on, and kills the ranks soon after SIGTERM."""
    takes_signals = False
    seconds, disk = 4, "16m"

    def command(self, draw, store, losses, run):
        words = [self.build / "train_mpi", *Gpt.command(self, draw, store, losses, run)[1:]]
        return list(map(str, ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 4, *words]))

    def environment(self):
        return dict(os.environ, OMPI_MCA_btl="self,vader,tcp", OMPI_MCA_btl_vader_single_copy_mechanism="none")


class Torch(Trainer):
    takes_signals = False  # ranks end by SIGTERM when torchrun does
    seconds, disk = 12, "200m"

    def __init__(self, python, build, folder):
        self.python = python
        super().__init__(build, folder)

    def command(self, draw, store, losses, run):
        words = [self.python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 0,
                 ROOT / "examples/train_torch.py", "--store", store, "--every", draw.choice([1, 3, 7]), "--losses", losses, "--name", run,
                 "--steps", STEPS]
        return list(map(str, words))

    def environment(self):
        return dict(os.environ, PYTHONPATH=str(self.build / "python"), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")


class Job:
    """One case: a store, a trainer, and supervisors one after the other."""

    def __init__(self, build, trainer, folder, seed):
        self.build, self.trainer, self.folder, self.draw = build, trainer, folder, random.Random(seed)
        self.store, self.losses = folder / "store", folder / "losses"
        self.marker = f"{MARKER}_{os.getpid()}_{seed}"
        self.env = {**trainer.environment(), self.marker: "1"}
        self.command = trainer.command(self.draw, self.store, self.losses, "gpt")
        self.output = open(folder / "output", "w+b")

    def start(self, *command, options=(), store=None):
        words = [self.build / "ckptdelta", "run", store or self.store, "--run", "gpt", "--pause", "0s", *options, "--", *(command or self.command)]
        return subprocess.Popen(list(map(str, words)), cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=self.output,
                                stderr=subprocess.STDOUT)

    def finish(self, supervisor, expect=0):
        try:
            status = supervisor.wait(300)
        except subprocess.TimeoutExpired:
            raise Failure("the supervisor has not ended after 300 s") from None
        check(status == expect, f"exit status {status} instead of {expect}")
        check(not self.left(), f"processes are left: {self.left()}")

    def sleep(self, share=1.0):
        time.sleep(self.draw.random() * self.trainer.seconds * share)

    def attempts(self, store=None):
        done = subprocess.run([self.build / "ckptdelta", "attempts", store or self.store, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return json.loads(done.stdout)["attempts"] if done.returncode == 0 else []

    def running(self):
        """The process of the attempt that runs now, or None."""
        attempts = self.attempts()
        return attempts[-1]["pid"] if attempts and not attempts[-1]["end"] else None

    def wait_for_attempt(self, supervisor):
        """The process of an attempt, or None if the supervisor ended before."""
        found = []
        wait_for(lambda: found.append(self.running()) or found[-1] or supervisor.poll() is not None, "an attempt")
        return found[-1]

    def left(self):
        """The processes below the supervisors, by a mark in their environment."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.marker.encode() in Path(f"/proc/{entry}/environ").read_bytes() and " Z " not in Path(f"/proc/{entry}/stat").read_text():
                    found.append(int(entry))
            except OSError:
                pass
        return found

    def below(self, pid):
        """The processes of the tree below one, and the process itself."""
        parents = collections.defaultdict(list)
        for entry in self.left():
            try:
                parents[int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])].append(entry)
            except OSError:
                pass
        tree = [pid]
        for process in tree:
            tree += parents[process]
        return tree

    def keeper(self, supervisor):
        return next((pid for pid in self.below(supervisor.pid)[1:2]), None)

    def check_trained(self, damaged=False):
        """Every step was trained, each time with the loss of a training without failures, and what is listed loads."""
        seen = losses_of(self.losses)
        for step, loss in seen:
            check(loss == self.trainer.reference[step], f"step {step}: loss {loss} instead of {self.trainer.reference[step]}")
        check({step for step, _ in seen} == set(self.trainer.reference), "steps are missing")
        for number, attempt in enumerate(self.attempts(), 1):
            check(attempt["attempt"] == number and attempt["end"] and attempt["reason"] and attempt["verdict"], f"attempt {number} in the journal: {attempt}")
        if not damaged:
            subprocess.run([self.build / "ckptdelta", "verify", self.store, "-q"], check=True)

    def last(self):
        return self.attempts()[-1]


# ---------------------------------------------------------------------------------------------------- the kinds


def healthy(job):
    job.finish(job.start())
    check(len(job.attempts()) == 1 and job.last()["verdict"] == "done", "more than one attempt")


def killed_command(job):
    """The command, one of its processes, or all of them at once."""
    before, kills = len(job.attempts()), 0
    supervisor = job.start(options=["--max-futile", "20"])
    for _ in range(job.draw.randint(1, 3)):
        job.sleep()
        pid = job.running()
        if pid is None or supervisor.poll() is not None:
            continue
        victims = job.draw.choice([job.below(pid), [pid], [job.draw.choice(job.below(pid))]])
        kills += any([kill(victim) for victim in victims])
    job.finish(supervisor)
    ends = [a for a in job.attempts()[before:] if a["exit"] != 0]
    check(len(ends) <= kills, f"{len(ends)} attempts failed by {kills} kills")


def hang(job):
    """A process is stopped. It is noticed by its steps, or by checkpoints."""
    how = job.draw.choice([["--hang-floor", "1s"], ["--hang", f"{2 + job.trainer.seconds}s"]])
    supervisor = job.start(options=[*how, "--grace", "1s", "--max-futile", "20"])
    job.sleep(0.7)
    pid = job.wait_for_attempt(supervisor)
    stopped = pid is not None and kill(job.draw.choice(job.below(pid)), signal.SIGSTOP)
    job.finish(supervisor)
    check(not stopped or len(job.attempts()) == 1 or job.attempts()[0]["hung"], "a stopped process was not noticed")


def exit_in_a_loop(job):
    """Training ends, but the command fails: the same exit without a newer checkpoint."""
    status = job.draw.choice([1, 3, 42])
    job.finish(job.start("sh", "-c", '"$@"; exit ' + str(status), "sh", *job.command), GAVE_UP)
    check(job.last()["exit"] == status and "gave up" in job.last()["verdict"], f"journal: {job.last()}")


def exit_at_the_start(job):
    job.finish(job.start("sh", "-c", "exit 5"), GAVE_UP)
    check([a["exit"] for a in job.attempts()] == [5, 5], f"attempts: {job.attempts()}")
    job.finish(job.start())


def usage_error(job):
    status = job.draw.choice([2, CANNOT_RUN, NOT_FOUND])
    job.finish(job.start("sh", "-c", f"exit {status}"), status)
    check(len(job.attempts()) == 1, "tried again")
    job.finish(job.start())


def missing_program(job):
    name = job.draw.choice(["no-such-program", "/no/such/program"])
    job.finish(job.start(name), NOT_FOUND)
    check(len(job.attempts()) == 1, "tried again")
    job.finish(job.start())


def out_of_memory(job):
    """The limit is below what training takes: nothing helps. Then one process is killed, as the kernel does it."""
    job.finish(job.start("sh", "-c", 'ulimit -v 100000; exec "$@"', "sh", job.build / "train_gpt", "--width", "512", "--store", job.store, "--threads", "1",
                         "--steps", "5"), GAVE_UP)
    killed_command(job)


def full_disk(job):
    """A small file system fills up in the middle; there is room again when somebody has cleaned up."""
    disk = job.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={job.trainer.disk}", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode != 0:
        return "cannot mount a file system"
    try:
        job.store = disk / "store"
        job.command = job.trainer.command(job.draw, job.store, job.losses, "gpt")
        supervisor = job.start(options=["--max-futile", "20"])
        job.sleep(0.5)
        subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], stderr=subprocess.DEVNULL)
        status = supervisor.wait(120)
        check(status in (0, 1), f"exit status {status} on a full disk")
        check(not job.left(), "processes are left")
        (disk / "filler").unlink()
        job.finish(job.start())
        job.check_trained()
    finally:
        subprocess.run(["umount", disk], check=True)
    return None


DAMAGER = """
import os, pathlib, signal, subprocess, sys, time
store, times, seconds, *command = sys.argv[1:]
if int(os.environ["CKPTDELTA_ATTEMPT"]) > int(times):
    os.execvp(command[0], command)
process = subprocess.Popen(command, start_new_session=True)

def files():
    return [f for f in pathlib.Path(store, "data/c").rglob("*.ckd") if f.is_file()]

while len(files()) < 4 and process.poll() is None:
    time.sleep(0.01)
time.sleep(float(seconds))
os.killpg(process.pid, signal.SIGKILL)
process.wait()
if len(files()) > 3:
    newest = max(files(), key=lambda f: f.stat().st_mtime_ns)
    newest.chmod(0o644)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 255
    newest.write_bytes(content)
sys.exit(1)
"""


def damaged_newest(job):
    """The newest chunk file is damaged when the command has died, once or twice."""
    seconds = job.draw.random() * job.trainer.seconds / 2
    job.finish(job.start(sys.executable, "-c", DAMAGER, job.store, job.draw.randint(1, 2), seconds, *job.command, options=["--max-futile", "20"]))
    job.check_trained(damaged=True)


def stopped(job):
    """SIGTERM to the supervisor, and the same command line again."""
    supervisor = job.start(options=["--grace", "10s"])
    job.sleep()
    number = job.draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    ended = supervisor.poll() is not None
    kill(supervisor.pid, number)
    status = supervisor.wait(120)
    check(status in (0, 128 + number, -number), f"exit status {status} after signal {number}")
    check(status != -number or not job.attempts(), "killed by a signal that it should handle")
    check(not job.left(), "processes are left")
    check(ended or status == 0 or not job.attempts() or job.last()["stopped_by"] == number, f"journal: {job.attempts()}")
    job.finish(job.start())


def save_now(job):
    """SIGUSR1 to the supervisor: the command saves, and goes on."""
    if not job.trainer.takes_signals:
        return "this trainer ends by SIGUSR1"
    supervisor = job.start()
    wait_for(lambda: len(losses_of(job.losses)) > 2 or supervisor.poll() is not None, "the first steps")
    kill(supervisor.pid, signal.SIGUSR1)
    job.finish(supervisor)
    check(len(job.attempts()) == 1, "the command ended by SIGUSR1")
    return None


def killed_supervisor(job):
    supervisor = job.start(options=["--grace", "10s"])
    job.sleep()
    had_begun, ended = job.attempts() != [], supervisor.poll() is not None
    supervisor.kill()
    supervisor.wait()
    job.finish(job.start(options=["--grace", "10s"]))
    check(ended or not had_begun or job.attempts()[0]["reason"] in ("supervisor died", "exit status 0"), f"journal: {job.attempts()}")


def killed_keeper(job):
    supervisor = job.start(options=["--max-futile", "20"])
    job.sleep()
    pid = job.running() and job.keeper(supervisor)
    if pid:
        kill(pid)
    job.finish(supervisor)


def killed_both(job):
    supervisor = job.start(options=["--grace", "10s"])
    job.sleep()
    keeper = job.running() and job.keeper(supervisor)
    for pid in job.draw.sample([supervisor.pid, keeper] if keeper else [supervisor.pid], 2 if keeper else 1):
        kill(pid)
    supervisor.wait()
    job.finish(job.start(options=["--grace", "10s"]))


def everything(job):
    """Kills of the command, the keeper and supervisors in a row."""
    options = ["--grace", "10s", "--max-futile", "50"]
    supervisor = job.start(options=options)
    for _ in range(job.draw.randint(2, 5)):
        job.sleep(0.6)
        pid = job.running()
        victim = job.draw.choice([pid, job.keeper(supervisor) if pid else None, supervisor.pid])
        if victim:
            kill(victim)
        if victim == supervisor.pid:
            supervisor.wait()
            supervisor = job.start(options=options)
    job.finish(supervisor)


KINDS = {f.__name__: f for f in (healthy, killed_command, hang, exit_in_a_loop, exit_at_the_start, usage_error, missing_program, out_of_memory, full_disk,
                                 damaged_newest, stopped, save_now, killed_supervisor, killed_keeper, killed_both, everything)}
NOT_CHECKED = {"full_disk", "damaged_newest"}  # they check by themselves


def has_mpi(build):
    return (build / "train_mpi").exists() and shutil.which("mpirun") is not None


def play(build, trainer, kind, seed, folder):
    """Plays one case in an empty folder. Returns (None or why it was skipped, None or what went wrong)."""
    job = Job(build, trainer, folder, seed)
    try:
        skipped = KINDS[kind](job)
        if kind not in NOT_CHECKED and not skipped:
            job.check_trained()
        return skipped, None
    except (Failure, subprocess.SubprocessError) as error:
        job.output.seek(0)
        return None, f"{kind}, seed {seed}, {type(trainer).__name__.lower()}: {error}\n{job.output.read().decode(errors='replace')[-3000:]}"
    finally:
        job.output.close()
        for pid in job.left():
            kill(pid)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--torch", metavar="PYTHON", help="some cases train with this Python's torch")
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    build, counts, failed, skipped = args.build.resolve(), collections.Counter(), 0, 0
    with tempfile.TemporaryDirectory(prefix="jobs-") as top:
        trainers = []
        kinds = [Gpt] + [Mpi] * has_mpi(build) + [lambda *a: Torch(args.torch, *a)] * bool(args.torch)
        for number, make in enumerate(kinds):
            (Path(top) / f"reference{number}").mkdir()
            trainers.append(make(build, Path(top) / f"reference{number}"))
            trainers[-1].find_reference()
        end = time.monotonic() + args.seconds
        for seed in range(args.seed, args.seed + args.cases):
            if time.monotonic() > end:
                break
            kind = args.kind or list(KINDS)[seed % len(KINDS)]
            trainer = trainers[seed // len(KINDS) % len(trainers)]
            folder = Path(top) / str(seed)
            folder.mkdir()
            why, failure = play(build, trainer, kind, seed, folder)
            shutil.rmtree(folder, ignore_errors=True)
            if failure:
                print(failure, flush=True)
            if why:
                print(f"skipped: {kind}, seed {seed}: {why}", flush=True)
            skipped += bool(why)
            failed += bool(failure)
            counts[f"{kind}, {type(trainer).__name__.lower()}"] += not failure and not why
    for name, count in sorted(counts.items()):
        print(f"  {count:4}  {name}")
    if args.out:
        args.out.write_text(json.dumps({"first_seed": args.seed, "passed": dict(sorted(counts.items())), "failed": failed, "skipped": skipped}, indent=1) + "\n")
    print(f"{sum(counts.values())} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
