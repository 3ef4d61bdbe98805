"""Agents of several nodes, as processes on one machine, with a store that they share."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from free_ports import ports
from support_cli import COMMAND, run, stop

TRAINER = str(Path(COMMAND).with_name("examples") / "session")
STEPS = 2000
# The leak sanitizer crashes now and then while it stops the threads of UCX.
WITHOUT_LEAKS = dict(os.environ, ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0")


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Node:
    """A node: its agent, its trainer, its memory. The nodes share a store."""

    def __init__(self, cluster, number, address):
        self.cluster, self.address, self.agent, self.trainer = cluster, address, None, None
        self.socket, self.memory, self.log = (cluster.folder / f"{name}{number}" for name in ("socket", "memory", "log"))

    def start(self, *args):
        self.start_alone("--peers", self.cluster.hosts, "--self", self.address, "--secret", self.cluster.secret, "--copies", self.memory,
                         "--silence", "3s", *args)

    def start_alone(self, *args):
        self.errors = open(self.log, "a")
        self.agent = subprocess.Popen([COMMAND, "agent", self.cluster.store, "--socket", self.socket, *args],
                                      stdout=subprocess.PIPE, stderr=self.errors, text=True, env=WITHOUT_LEAKS)
        ready = self.agent.stdout.readline()
        assert ready == f"listens at {self.socket}\n", self.said()

    def suspend(self):
        """Stops the agent at a moment at which it holds no lock of the store, except those by which ranks show that they live. Everybody
        would wait for that."""
        while True:
            stop(self.agent)
            files = Path(f"/proc/{self.agent.pid}/fdinfo").iterdir()
            locked = [os.readlink(f"/proc/{self.agent.pid}/fd/{f.name}") for f in files if "lock:" in f.read_text()]
            if not any(Path(path).is_relative_to(self.cluster.store) and Path(path).parent.name != "r" for path in locked):
                return
            self.resume()
            time.sleep(0.01)

    def resume(self):
        self.agent.send_signal(signal.SIGCONT)

    def ask(self, *args, **options):
        return run("agent", self.cluster.store, "--socket", self.socket, *args, **options)

    def status(self):
        return self.ask("--status", "--json").json()

    def copies(self):
        return self.status()["copies"]

    def said(self):
        return self.log.read_text()

    def train(self, steps=STEPS, command=None):
        env = dict(os.environ, CKPTDELTA_AGENT=str(self.socket))
        self.trainer = subprocess.Popen(command or [TRAINER, self.cluster.store, str(steps)], stdout=subprocess.PIPE, text=True, env=env)
        return self.trainer

    def copied(self, step):
        """Has a state of this step or a later one its copies?"""
        sessions = self.status()["sessions"]
        return bool(sessions) and (sessions[0]["copied_step"] or 0) >= step

    def in_place(self):
        copies = self.copies()
        return copies["replicated"] == copies["replicate"] and all(p["behind"] == 0 for p in copies["peers"] if p["partner"])

    def lose(self):
        """The node fails: its processes and its memory are gone. Neither process sees the other one's end."""
        alive = [p for p in (self.agent, self.trainer) if p and p.poll() is None]
        for act in (stop, subprocess.Popen.kill, subprocess.Popen.wait):
            for process in alive:
                act(process)
        shutil.rmtree(self.memory, ignore_errors=True)
        self.agent = self.trainer = None

    def stop(self):
        self.ask("--stop", "-q")
        self.agent.communicate(timeout=100)
        assert self.agent.returncode == 0
        self.agent = None

    def held(self):
        """Files of other nodes' states in this one's memory."""
        return [f for f in (self.memory / "held").rglob("*") if f.is_file()]


class Cluster:
    def __init__(self, folder, domains):
        self.folder, self.store, self.hosts, self.secret = folder, folder / "store", folder / "hosts", folder / "secret"
        addresses = [f"127.0.0.1:{port}" for port in ports(len(domains))]
        self.hosts.write_text("".join(f"{a} domain={d}\n" for a, d in zip(addresses, domains)))
        self.secret.write_text("a secret of these tests\n")
        self.secret.chmod(0o600)
        self.nodes = [Node(self, i, a) for i, a in enumerate(addresses)]

    def newest(self):
        return max((c["step"] for c in run("list", self.store, "--json").json()["checkpoints"]), default=0)


def check_weights(cluster, steps):
    """The state of the last step is that of a training that nothing has stopped."""
    plain = cluster.folder / "plain"
    subprocess.run([TRAINER, plain, str(steps)], stdout=subprocess.PIPE, check=True, env=dict(os.environ, CKPTDELTA_AGENT=""))
    states = []
    for store in (cluster.store, plain):
        run("load", store, "--step", steps, "-o", cluster.folder / "out.safetensors", "--force")
        states.append((cluster.folder / "out.safetensors").read_bytes())
    assert states[0] == states[1]
    run("verify", cluster.store)


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(domains, *args):
        made.append(Cluster(tmp_path, domains))
        for node in made[0].nodes:
            node.start(*args)
        return made[0]
    yield make
    for one in made:
        for node in one.nodes:
            if node.agent:
                node.agent.send_signal(signal.SIGCONT)
            node.lose()
