"""Trainers of several ranks on the nodes of support_nodes.py."""

import os
import re
import subprocess
from pathlib import Path

from support_cli import COMMAND, run
from support_nodes import until

TRAINER = str(Path(COMMAND).parent / "tests" / "rank_trainer")
EVER = 10 ** 7


class Job:
    """A launch: a rank on each of these nodes, several on a node that is there several times."""

    count = 0

    def __init__(self, cluster, nodes, steps=EVER, every=5, timeout=60):
        Job.count += 1
        self.ranks = []
        for rank, node in enumerate(nodes):
            command = [TRAINER, cluster.store, str(rank), str(len(nodes)), f"job-{os.getpid()}-{Job.count}", str(steps),
                       str(every), str(timeout)]
            self.ranks.append(node.train(command=command))

    def kill(self):
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.communicate()

    def finish(self):
        """Returns the step after which all ranks have gone on."""
        first = {rank.communicate()[0].splitlines()[0] for rank in self.ranks}
        assert [rank.returncode for rank in self.ranks] == [0] * len(self.ranks)
        line, = first
        return int(re.fullmatch(r"resumes after step (\d+)", line).group(1))


def copied(nodes, step):
    """Have all sessions of these nodes a state of this step or a later one on other nodes?"""
    sessions = [s for node in set(nodes) for s in node.status()["sessions"]]
    return len(sessions) == len(nodes) and all((s["copied_step"] or 0) >= step for s in sessions)


def least_copied(nodes):
    return min(s["copied_step"] for node in set(nodes) for s in node.status()["sessions"])


def train_until_copied(cluster, nodes, step=30, **options):
    until(lambda: all(node.in_place() for node in nodes))
    job = Job(cluster, nodes, **options)
    until(lambda: copied(nodes, step))
    return job, least_copied(nodes)


def check_state(cluster, steps):
    """The state of the last step is that of a training by one rank that nothing has stopped."""
    plain = cluster.folder / "plain"
    environment = dict(os.environ, CKPTDELTA_AGENT="")
    subprocess.run([TRAINER, plain, "0", "1", "plain", str(steps)], stdout=subprocess.PIPE, check=True, env=environment)
    states = []
    for store in (cluster.store, plain):
        run("load", store, "--step", steps, "-o", cluster.folder / "out.safetensors", "--force")
        states.append((cluster.folder / "out.safetensors").read_bytes())
    assert states[0] == states[1]
    run("verify", cluster.store)
