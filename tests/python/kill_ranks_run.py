"""Kills jobs of torchrun at random times, restarts them, and checks what they resume: kill_ranks_run.py FOLDER [--kills N] [--seed S]
[--how fsdp|ddp|fsdp1]

Two ranks train, as in support_ranked.py, and save every few steps through a Session. Runs of FSDP2, DistributedDataParallel and
FSDP1 take turns; a run takes dozens of kills, so --how makes all of them one kind. SIGKILL hits one rank or all processes, at
any time from the start of the job on. After each kill:

- the newest checkpoint loads, and all its hashes are right;
- it is not older than any that a rank had seen committed;
- fewer than twice `every` steps are lost;
- the next job resumes from it, and all losses of both ranks are those of an uninterrupted run, bit for bit.

Exits 1 with a message at the first difference. The last line of its output is a JSON object with figures. Most of the time goes
into imports. --fork starts jobs without them: the launcher of torchrun runs in a copy of this process, and so do its ranks.
"""

import argparse
import collections
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

EVERY, STEPS, RANKS = 3, 240, 2
KINDS = ("fsdp", "ddp", "fsdp1")


class Wrong(Exception):
    """Something is not as it must be."""


# ------------------------------------------------------------------------------------------------------- the training


def train(folder, how, run, log):
    """One rank. Each step is a line of the log, which a kill cannot take back: step, loss, newest durable step."""
    import torch.distributed as dist

    import ckptdelta
    from support_ranked import Training

    rank = int(os.environ["RANK"])
    out = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, f"pid {os.getpid()}\n".encode())
    dist.init_process_group("gloo")
    training = Training(how, rank, dist.init_device_mesh("cpu", (RANKS,)))

    def report(step, loss, durable):
        os.write(out, f"{step} {loss.hex()} {durable}\n".encode())

    if not run:
        for step in range(1, STEPS + 1):
            report(step, training.step(), 0)
    else:
        with ckptdelta.open(Path(folder) / "store") as store, ckptdelta.Session(store, run, **training.parts(), every=EVERY) as session:
            at = session.restore()
            os.write(out, f"from {at}\n".encode())
            for step in range(at + 1, STEPS + 1):
                loss = training.step()
                session.step()
                report(step, loss, session.last.step if session.last else 0)
    dist.destroy_process_group()


class Log:
    """What the ranks of one job have written."""

    def __init__(self, path):
        self.path = path

    def lines(self, rank):
        try:
            return Path(f"{self.path}-{rank}").read_text().split("\n")[:-1]  # the last line is not complete, or empty
        except FileNotFoundError:
            return []

    def pids(self):
        return [int(line.split()[1]) for rank in range(RANKS) for line in self.lines(rank)[:1]]

    def start(self):
        """The step that the job resumed from; None: it did not get so far."""
        found = {line for rank in range(RANKS) for line in self.lines(rank) if line.startswith("from")}
        if len(found) > 1:
            raise Wrong(f"the ranks resumed {found}")
        return int(found.pop().split()[1]) if found else None

    def steps(self, rank):
        """(step, loss, newest durable step) of each step."""
        fields = [line.split() for line in self.lines(rank) if line[0].isdigit()]
        return [(int(step), loss, int(durable)) for step, loss, durable in fields]


# ----------------------------------------------------------------------------------------------------------- the kills


def launched(output, *arguments):
    """What torchrun does, in a process that has imported everything."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.dup2(output, 1)
    os.dup2(output, 2)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=RANKS, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="kills", max_restarts=0,
                          start_method="fork")
    elastic_launch(config, train)(*arguments)


class Job:
    """torchrun and its ranks."""

    def __init__(self, folder, number, how, run, fork):
        self.log = Log(folder / f"log{number}")
        self.output = open(folder / f"output{number}", "w+b")
        arguments = [str(folder), how, run, str(self.log.path)]
        if fork:
            self.process = multiprocessing.get_context("fork").Process(target=launched, args=(self.output.fileno(), *arguments))
            self.process.start()
            return
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "0",
                   "--no-python", sys.executable, "-W", "ignore", __file__, arguments[0], "--train", *arguments[1:]]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait(self, seconds):
        """The exit status; None: it runs on."""
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
        self.process.join(seconds)
        return self.process.exitcode

    def children(self):
        try:
            return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def ended(self):
        return self.wait(0) is not None

    def kill(self, pids):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def stop(self):
        """Returns when no process of the job is left."""
        pids = {*self.children(), *self.log.pids()}
        if self.wait(60) is None:
            raise Wrong("torchrun has not ended a minute after the kill")
        while any(is_running(pid) for pid in pids):
            self.kill(pids)
            time.sleep(0.01)

    def text(self):
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-4000:]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Campaign:
    def __init__(self, folder, seed, fork, kinds):
        self.folder, self.fork, self.chance, self.kinds = folder, fork, random.Random(seed), kinds
        self.jobs, self.counts, self.compared, self.lost = 0, collections.Counter(), 0, 0
        self.expected = {}
        self.run, self.how, self.durable, self.reached = "", "", 0, 0

    def job(self, how, run):
        self.jobs += 1
        return Job(self.folder, self.jobs, how, run, self.fork)

    def reference(self, how):
        """The losses of each rank in an uninterrupted run."""
        job = self.job(how, "")
        if job.wait(300) != 0:
            raise Wrong(f"the uninterrupted run failed: {job.text()}")
        self.expected[how] = [[loss for _, loss, _ in job.log.steps(rank)] for rank in range(RANKS)]
        if any(len(losses) != STEPS for losses in self.expected[how]):
            raise Wrong("the uninterrupted run has not written all of its losses")

    def begin(self):
        """A new run, of the next kind."""
        number = self.counts["runs"]
        self.counts["runs"] += 1
        self.how = self.kinds[number % len(self.kinds)]
        self.run, self.durable, self.reached = f"{self.how}{number}", 0, 0
        if self.how not in self.expected:
            self.reference(self.how)

    def kill_once(self):
        if not self.run or self.reached >= STEPS:
            self.begin()
        job = self.job(self.how, self.run)
        early = self.chance.random() < 0.15  # imports, the group, the restore
        begun = time.monotonic()
        self.wait(job, self.chance.uniform(0, 1 if self.fork else 8) if early else self.wait_for_steps(job, self.chance.randint(1, 5 * EVERY)))
        ranks = sorted(job.log.pids()) or job.children()
        whole = self.chance.random() < 0.5 or not ranks
        victims = [*ranks, job.process.pid] if whole else [self.chance.choice(ranks)]
        ended = job.ended()
        job.kill(victims)
        job.stop()
        self.counts["ended before the kill" if ended else "all killed" if whole else "one rank killed"] += 1
        self.counts["kills"] += not ended
        self.counts[f"kills of {self.how}"] += not ended
        self.check(job, early)
        job.output.close()
        print(f"{self.counts['kills']}: {self.run}, {'all' if whole else 'one rank'}, {time.monotonic() - begun:.1f} s after the start, at step "
              f"{self.reached}, resumed {job.log.start()}, newest checkpoint {self.durable}", flush=True)

    def wait_for_steps(self, job, count):
        """Returns when rank 0 has made steps. Result: seconds to a moment in one of the next two steps."""
        first = None
        while not job.ended() and len(job.log.steps(0)) < count:
            first = time.monotonic() if first is None and job.log.steps(0) else first
            time.sleep(0.005)
        return self.chance.uniform(0, 2 * (time.monotonic() - first) / count) if first is not None else self.chance.uniform(0, 0.1)

    def wait(self, job, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not job.ended():
            time.sleep(0.001)

    def check(self, job, early):
        import ckptdelta

        start, found = job.log.start(), [job.log.steps(rank) for rank in range(RANKS)]
        if start is None and not early:
            raise Wrong(f"the job did not get to its first step: {job.text()}")
        if start is not None and start != self.durable:
            raise Wrong(f"the job resumed step {start}, and the newest checkpoint was that of step {self.durable}")
        for rank, steps in enumerate(found):
            for step, loss, _ in steps:
                self.compared += 1
                if loss != self.expected[self.how][rank][step - 1]:
                    raise Wrong(f"rank {rank} has another loss at step {step} after it resumed step {start}")
            if steps and [step for step, _, _ in steps] != list(range(start + 1, start + 1 + len(steps))):
                raise Wrong(f"rank {rank} has left out a step")
        reached = max((steps[-1][0] for steps in found if steps), default=self.durable)
        seen = max([self.durable, *(durable for steps in found for _, _, durable in steps)])
        with ckptdelta.open(self.folder / "store") as store:
            there = store.checkpoints(self.run)
            newest = there[-1].step if there else 0
            if newest < seen:
                raise Wrong(f"step {seen} was committed, and the newest checkpoint is that of step {newest}")
            if there and not (verified := store.verify(run=self.run, step=newest)):
                raise Wrong(f"the newest checkpoint is damaged: {verified.damage}")
            if there and store.state_dict(run=self.run)["scheduler"]["last_epoch"] != newest:
                raise Wrong("the newest checkpoint has the state of another step")
        lost = reached - newest
        if lost >= 2 * EVERY:
            raise Wrong(f"the job had made step {reached}, and the newest checkpoint is that of step {newest}")
        self.lost, self.durable, self.reached = max(self.lost, lost), newest, reached

    def finish(self):
        """The last run goes on to its end."""
        job = self.job(self.how, self.run)
        if job.wait(300) != 0:
            raise Wrong(f"the last job failed: {job.text()}")
        self.check(job, early=self.reached >= STEPS)
        import ckptdelta
        with ckptdelta.open(self.folder / "store") as store:
            if not store.verify():
                raise Wrong("the store is damaged")
            return len(store.checkpoints())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--how", choices=KINDS)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--train", nargs=3, metavar=("HOW", "RUN", "LOG"), help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.train:
        train(o.folder, *o.train)
        os._exit(0)  # without the threads of torch, which can abort the process
    if o.fork:
        import torch

        import support_ranked  # noqa: F401 (imported once, for all jobs)

        torch.set_num_threads(1)
    o.folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(o.folder.resolve(), o.seed, o.fork, [o.how] if o.how else KINDS)
    try:
        while campaign.counts["kills"] < o.kills:
            campaign.kill_once()
        checkpoints = campaign.finish()
    except Wrong as wrong:
        sys.exit(f"after {campaign.counts['kills']} kills: {wrong}")
    print(json.dumps({**campaign.counts, "losses compared": campaign.compared, "most steps lost": campaign.lost, "every": EVERY,
                      "checkpoints": checkpoints, "seed": o.seed}))


if __name__ == "__main__":
    main()
