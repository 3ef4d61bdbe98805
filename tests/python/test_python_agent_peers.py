"""A trainer of PyTorch whose node is lost: its agent's peers have the newest state, to the last bit."""

import shutil
import subprocess
import sys
import time

import pytest

from free_ports import ports
from support_cli import COMMAND, run, stop
from support_python import environment, needs_package, needs_torch

pytestmark = [needs_package, needs_torch]

# Adam on a small model, the generator of random numbers included. Prints each loss.
TRAINER = """
import sys, torch, ckptdelta
store, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Dropout(0.2), torch.nn.Linear(96, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with ckptdelta.open(store) as opened, ckptdelta.Session(opened, "net", model=model, optimizer=optimizer, every=1, alone=True) as session:
    at = session.restore() or 0
    print("from", at, flush=True)
    for step in range(at + 1, steps + 1):
        loss = model(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        session.fence()
        optimizer.step()
        print(step, loss.item().hex(), flush=True)
        session.step(step)
"""


class Nodes:
    def __init__(self, folder):
        self.folder, self.store, self.agents = folder, folder / "store", {}
        self.addresses = [f"127.0.0.1:{port}" for port in ports(2)]
        (folder / "hosts").write_text("\n".join(self.addresses))
        (folder / "secret").write_text("a secret of this test")
        (folder / "secret").chmod(0o600)

    def start(self, number):
        with open(self.folder / f"log{number}", "a") as log:
            agent = subprocess.Popen(
                [COMMAND, "agent", self.store, "--socket", self.folder / f"socket{number}", "--peers", self.folder / "hosts", "--self",
                 self.addresses[number], "--secret", self.folder / "secret", "--copies", self.folder / f"memory{number}", "--store-every", "1h"],
                stdout=subprocess.PIPE, stderr=log, text=True)
        assert agent.stdout.readline(), self.said(number)
        self.agents[number] = agent

    def said(self, number):
        return (self.folder / f"log{number}").read_text()

    def train(self, steps, store=None, agent=True):
        env = environment(CKPTDELTA_AGENT=str(self.folder / "socket0") if agent else "", OMP_NUM_THREADS="1")
        return subprocess.Popen([sys.executable, "-c", TRAINER, str(store or self.store), str(steps)], stdout=subprocess.PIPE, text=True, env=env)

    def copied_step(self):
        sessions = run("agent", self.store, "--socket", self.folder / "socket0", "--status", "--json").json()["sessions"]
        return (sessions[0]["copied_step"] or 0) if sessions else 0


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    for agent in made.agents.values():
        agent.kill()
        agent.wait()


def test_a_node_is_lost(nodes):
    nodes.start(0)
    nodes.start(1)
    trainer = nodes.train(10 ** 6)
    deadline = time.monotonic() + 100
    while nodes.copied_step() < 15:
        assert time.monotonic() < deadline and trainer.poll() is None
        time.sleep(0.02)
    reached = nodes.copied_step()
    for act in (stop, subprocess.Popen.kill, subprocess.Popen.wait):  # neither process sees the other one's end
        act(nodes.agents[0])
        act(trainer)
    shutil.rmtree(nodes.folder / "memory0")
    nodes.start(0)
    again = nodes.train(reached + 30).communicate()[0].splitlines()
    at = int(again[0].split()[1])
    assert at >= reached
    assert f"step {at} of run 'net' comes from the memory of node {nodes.addresses[1]}, verified" in nodes.said(0)
    # A trainer that nothing has stopped has the same losses: weights, moments and random numbers came back to the bit.
    plain = nodes.train(reached + 30, nodes.folder / "plain", agent=False).communicate()[0].splitlines()
    assert again[1:] == plain[1 + at:] and len(again) == 1 + reached + 30 - at
