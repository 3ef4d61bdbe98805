"""The failures of nodes.py with a real training: the example GPT on four ranks, started by mpirun.

    gpt_nodes.py [--cases N] [--seconds N] [--seed N] [--kind NAME] [--out FILE] [--record]

mpirun ends all ranks when one of them dies. The oracle is that of nodes.py, with the losses in place of the last state:
each loss, also of steps that were trained twice, is bit for bit that of a training without failures. A kill comes at any
moment of a save, as each step or a few of them are saved, and nothing waits for a save before it. Agents are not stopped
here: others wait for them, which would take most of the time. Options and output are those of agents.py.
"""

import functools
import os
import re
import subprocess
import sys

import agents
import nodes
from jobs_support import check, losses_of, read, stat_of, wait_for, words_of

WORLD = 4
RANKS_WAIT = 40  # seconds; agents wait three quarters of it for one that is stopped
STEPS = 1000  # of the training without failures


class Rank:
    """A process that mpirun has started."""

    def __init__(self, pid):
        self.pid = pid

    def poll(self):
        return 0 if stat_of(self.pid)[0] in "ZX" else None

    def wait(self):
        wait_for(lambda: self.poll() is not None, "the end of a rank", 60)


def command(build, store, losses, steps, every, sockets):
    words = [build / "train_mpi", "--width", 32, "--layers", 1, "--heads", 2, "--context", 32, "--batch", 4, "--threads", 1, "--schedule", "constant",
             "--steps", steps, "--save-every", every, "--background", "copy", "--store", store, "--run", "gpt", "--resume", "--losses", losses,
             "--ranks-wait", RANKS_WAIT]
    ranks = [["-n", 1, "env", f"CKPTDELTA_AGENT={socket}", "CKPTDELTA_AGENT_WAIT=5", *words] for socket in sockets]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", *[word for rank in ranks for word in [":", *rank]][1:]]


class GptCase(nodes.Case):
    def __init__(self, build, expected, folder, seed):
        super().__init__(build, folder, seed)
        self.expected, self.losses, self.job = expected, folder / "losses", None
        self.most = max(map(int, expected))

    def world(self):
        return WORLD

    def start_ranks(self, places, steps, every, sockets):
        if self.job:
            self.job.wait(60)
        said = self.folder / f"said{self.launches}"
        # killed ranks leave their shared memory
        env = dict(os.environ, **agents.MPI, OMPI_MCA_btl_vader_backing_directory=str(self.folder))
        with open(said, "wb") as out:
            self.job = self.popen(command(self.build, self.store, self.losses, min(steps, self.most), every, sockets), env, stdout=out)
        begun = wait_for(lambda: re.search(r"(?:resumed from \S+ at|starting at) step (\d+)", said.read_text()) or self.job.poll() is not None, "ranks", 120)
        check(begun is not True, f"the job has ended before its first step: {said.read_text()}")
        ranks = wait_for(self.find_ranks, "the processes of all ranks", 60)
        self.ranks = [(Rank(pid), node) for pid, node in zip(ranks, places)]
        return int(begun.group(1))

    def find_ranks(self):
        """Their process numbers in the order of the ranks, once all run."""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if stat_of(pid)[1] == self.job.pid and os.path.basename((words_of(pid) or [""])[0]) == "train_mpi":
                found[int(re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", read(pid, "environ")).group(1))] = pid
        return [found[rank] for rank in range(WORLD)] if len(found) == WORLD else None

    def finish(self, promised):
        steps = max(int(step) for step, _ in losses_of(self.losses)) + 40
        check(steps <= self.most, f"the training without failures has {self.most} steps, not {steps}")
        self.launch(steps, promised)
        check(self.job.wait(120) == 0, "the job has failed")
        check(self.cli("verify", self.store, "-q").returncode == 0, "the store is damaged")
        check(self.durable() == steps, f"step {self.durable()} is durable at the end, not {steps}")
        losses = losses_of(self.losses)
        check({step for step, _ in losses} == set(map(str, range(1, steps + 1))), "steps are missing")
        for step, loss in losses:
            check(loss == self.expected[step], f"the loss of step {step} is another one than without failures")


def prepare(build, folder, steps=STEPS):
    """Trains without failures and without agents, for the losses."""
    subprocess.run(list(map(str, command(build, folder / "store", folder / "losses", steps, steps, [""] * WORLD))), check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, timeout=1200, env=dict(os.environ, **agents.MPI))
    return functools.partial(GptCase, build, dict(losses_of(folder / "losses")))


KINDS = {name: play for name, play in nodes.KINDS.items() if name not in ("stopped_agent", "node_that_cannot_be_asked")}


def main():
    return agents.drive(__doc__, KINDS, prepare, functools.partial(nodes.play, kinds=KINDS), "gpt_nodes")


if __name__ == "__main__":
    sys.exit(main())
