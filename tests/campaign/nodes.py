"""Random failures of nodes with agents that keep copies for each other: of ranks, agents, nodes, networks and bits.

    nodes.py [--cases N] [--seconds N] [--seed N] [--kind NAME] [--out FILE] [--record]

A case draws how many nodes there are, in which domains, how many copies are wanted, or which parity, whether nodes have
disks for copies, and how many ranks train where; then it plays a few launches that end in failures. The oracle: each launch goes on
from no older step than was promised (one that was durable, one whose copies were in place if no more nodes were lost than there are
copies, or one that all disks had), the last state is bit for bit that of a training without failures, and the store is intact.
Options and output are those of agents.py.
"""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import agents
from jobs_support import ROOT, Failure, check, kill, wait_for

sys.path.insert(0, str(ROOT / "tests/support"))

from free_ports import ports  # noqa: E402

SILENCE = 2  # seconds after which a peer is gone
EVER = 10 ** 7


class Node:
    def __init__(self, case, number, address):
        self.case, self.address, self.agent = case, address, None
        self.socket, self.memory, self.disk = (case.folder / f"{name}{number}" for name in ("socket", "memory", "disk"))

    def start(self):
        words = [self.case.build / "ckptdelta", "agent", self.case.store, "--socket", self.socket, "--peers", self.case.hosts, "--self", self.address,
                 "--secret", self.case.secret, "--copies", self.memory, "--silence", f"{SILENCE}s", *self.case.redundancy,
                 "--store-every", self.case.store_every, *(["--local", self.disk, *self.case.local_every] if self.case.disks else [])]
        self.agent = self.case.popen(words, stdout=subprocess.PIPE)
        if not self.agent.stdout.readline():
            raise Failure("an agent has not started")

    def status(self):
        done = self.case.cli("agent", self.case.store, "--socket", self.socket, "--status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {"sessions": [], "copies": None}

    def in_place(self):
        copies = self.status()["copies"]
        return bool(copies) and copies["replicated"] == copies["replicate"] and all(not p["behind"] for p in copies["peers"] if p["partner"])

    def lose(self):
        """Its processes and its memory are gone, and its own ranks first; sometimes its disk, too."""
        self.halt()
        self.end(with_memory=True, with_disk=self.case.draw_disk.random() < 0.5)

    def halt(self):
        for process in [r for r, node in self.case.ranks if node is self] + [self.agent]:
            kill(process.pid, signal.SIGSTOP)

    def end(self, with_memory, with_disk):
        for process in [r for r, node in self.case.ranks if node is self] + [self.agent]:
            kill(process.pid)
            process.wait()
        for folder in [self.memory] * with_memory + [self.disk] * with_disk:
            shutil.rmtree(folder, ignore_errors=True)
        self.agent = None


class Case:
    def __init__(self, build, folder, seed):
        self.build, self.folder, self.draw = build, folder, random.Random(seed)
        self.store, self.hosts, self.secret = folder / "store", folder / "hosts", folder / "secret"
        self.output = open(folder / "output", "w+b")
        self.started, self.ranks, self.launches, self.story = [], [], 0, []
        count = self.draw.randint(2, 4)
        self.copies = self.draw.randint(1, min(2, count - 1))  # nodes that can be lost
        self.parity = count > self.copies + 1 and self.draw.random() < 0.5
        self.redundancy = ["--parity", f"{count - self.copies}+{self.copies}"] if self.parity else ["--replicate", self.copies]
        self.store_every = self.draw.choice(["1h", "1h", "1s", "3s"])
        self.draw_disk = random.Random(f"disks {seed}")  # the rest of a case is the same with and without them
        self.disks = self.draw_disk.random() < 0.6
        self.local_every = self.draw_disk.choice([[], [], ["--local-every", "1s"]])
        domains = [self.draw.choice("abcd") for _ in range(count)]
        self.nodes = [Node(self, i, f"127.0.0.1:{port}") for i, port in enumerate(ports(count))]
        self.hosts.write_text("".join(f"{n.address} domain={d}\n" for n, d in zip(self.nodes, domains)))
        self.secret.write_text("a secret of this campaign\n")
        self.secret.chmod(0o600)
        self.tell(f"{count} nodes in {''.join(domains)}, {' '.join(map(str, self.redundancy))}, stored every {self.store_every}"
                  f"{', with disks' + ' every 1s' * bool(self.local_every) if self.disks else ''}")

    def tell(self, what):
        self.story.append(what)

    def popen(self, words, env=None, **options):
        process = subprocess.Popen(list(map(str, words)), cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stderr=self.output, **options)
        self.started.append(process)
        return process

    def cli(self, *args):
        return subprocess.run(list(map(str, [self.build / "ckptdelta", *args])), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)

    def newest(self):
        """The id and step of the checkpoint that a restart from the store alone goes on from."""
        done = self.cli("show", self.store, "--json")
        found = json.loads(done.stdout)["checkpoints"][0] if done.returncode == 0 else {"id": None, "step": 0}
        return found["id"], found["step"]

    def durable(self):
        return self.newest()[1]

    def wait_for_a_save(self, before, what, or_end=False):
        """Whether there is one. Ranks that end by themselves have found another launch's checkpoint."""
        wait_for(lambda: self.newest()[0] != before[0] or or_end and all(r.poll() is not None for r, _ in self.ranks), what, 60)
        return self.newest()[0] != before[0]

    def launch(self, steps, promised, nodes=None, with_agents=True):
        """Ranks on some of these nodes; they go on from no older step than was promised."""
        for node in self.nodes:
            if not node.agent:
                node.start()
        places = [self.draw.choice(nodes or self.nodes) for _ in range(self.world())]
        self.launches += 1
        every = self.draw.choice([1, 2, 5])
        first = self.start_ranks(places, steps, every, [str(n.socket) if with_agents else "" for n in places])
        self.tell(f"{len(places)} ranks on {[self.nodes.index(n) for n in places]} go on after {first}, every {every}"
                  f"{'' if with_agents else ', without agents'}")
        check(first >= promised, f"they go on after step {first}, and {promised} was promised")
        return first

    def world(self):
        return self.draw.randint(1, 4)

    def start_ranks(self, places, steps, every, sockets):
        """Returns the step after which they go on."""
        self.ranks = []
        for rank, (node, socket) in enumerate(zip(places, sockets)):
            words = [self.build / "tests/rank_trainer", self.store, rank, len(places), f"job{self.launches}", steps, every]
            env = dict(os.environ, CKPTDELTA_AGENT=socket, CKPTDELTA_AGENT_WAIT="5")
            self.ranks.append((self.popen(words, env, stdout=subprocess.PIPE, text=True), node))
        firsts = {r.stdout.readline() for r, _ in self.ranks}
        check(len(firsts) == 1 and firsts != {""}, f"the ranks go on differently: {firsts}")
        return int(firsts.pop().split()[-1])

    def least(self, kind):
        """The oldest step of this kind that a rank's session shows; 0: some have none yet."""
        sessions = [s for node in {n for _, n in self.ranks} for s in node.status()["sessions"] if s["connected"]]
        steps = [s[kind] or 0 for s in sessions]
        return min(steps) if len(steps) == len(self.ranks) else 0

    def copied(self):
        """The step whose copies are in place for all ranks; 0: there is none yet."""
        return self.least("copied_step")

    def train(self, first):
        """Some steps. Returns what a loss of one node may not cost."""
        steps = first + self.draw.randint(1, 60)
        if self.draw.random() < 0.7 and self.store_every == "1h":
            wait_for(lambda: self.copied() > steps or any(r.poll() is not None for r, _ in self.ranks), "a copied step", 60)
        else:
            wait_for(lambda: self.durable() > first or any(r.poll() is not None for r, _ in self.ranks), "a step", 60)
        time.sleep(self.draw.random() * 0.2)
        copied = self.copied()
        promised = max(self.durable(), copied)
        self.tell(f"step {copied} is copied, {promised} promised")
        return promised

    def kill_ranks(self):
        one_first = self.draw.random() < 0.3
        ranks = [r for r, _ in self.ranks]
        self.draw.shuffle(ranks)
        for number, rank in enumerate(ranks):
            kill(rank.pid)
            if one_first and number == 0:
                time.sleep(self.draw.random() * 0.5)
        for rank in ranks:
            rank.wait()

    def finish(self, promised):
        steps = self.launch("+40", promised) + 40
        for rank, _ in self.ranks:
            check(rank.wait(120) == 0, "a rank has failed")
        check(self.cli("verify", self.store, "-q").returncode == 0, "the store is damaged")
        environment = dict(os.environ, CKPTDELTA_AGENT="")
        subprocess.run(list(map(str, [self.build / "tests/rank_trainer", self.folder / "plain", 0, 1, "plain", steps, steps])), check=True, env=environment,
                       stdout=subprocess.DEVNULL, timeout=120)
        states = []
        for store in (self.store, self.folder / "plain"):
            check(self.cli("load", store, "--step", steps, "-o", self.folder / "out.safetensors", "--force").returncode == 0, "the last step does not load")
            states.append((self.folder / "out.safetensors").read_bytes())
        check(states[0] == states[1], "the last state is another one than without failures")

    def close(self):
        for process in self.started:
            if process.poll() is None:
                kill(process.pid, signal.SIGCONT)
                kill(process.pid)
                process.wait()
            if process.stdout:
                process.stdout.close()
        self.output.close()


# ---- failures: each plays one launch, and returns the step that the next one may not fall behind ----


def killed_ranks(case, first):
    promised = case.train(first)
    case.kill_ranks()
    return promised


def lost_node(case, first):
    """The ranks of other nodes see it, or are killed."""
    promised = case.train(first)
    node = case.draw.choice([n for _, n in case.ranks] + case.nodes)
    case.tell(f"node {case.nodes.index(node)} is lost")
    orders = [node.lose, case.kill_ranks]
    case.draw.shuffle(orders)
    orders[0]()
    time.sleep(case.draw.random() * 0.3)
    orders[1]()
    return promised


def killed_agent_and_ranks(case, first):
    """Of a node at once. Its next agent removes the files that are left in memory, and gets the state from other nodes."""
    promised = case.train(first)
    node = case.draw.choice([n for _, n in case.ranks])
    case.tell(f"the agent and the ranks of node {case.nodes.index(node)} are killed")
    node.halt()
    node.end(with_memory=False, with_disk=False)
    case.kill_ranks()
    return promised


def lost_nodes(case, first):
    """As many as there are copies, or more: then what is in the store is promised."""
    promised = case.train(first)
    lost = case.draw.sample(case.nodes, case.draw.randint(1, len(case.nodes)))
    if len(lost) > case.copies:
        promised = case.durable()
    case.tell(f"nodes {[case.nodes.index(n) for n in lost]} are lost")
    for node in lost:
        node.lose()
    case.kill_ranks()
    return promised


def lost_memory(case, first):
    """The power fails on all nodes at once: what is on their disks is left."""
    case.train(first)
    if case.disks and case.draw.random() < 0.8:
        wait_for(lambda: case.least("local_step") > first or any(r.poll() is not None for r, _ in case.ranks), "a step on all disks", 60)
    on_disk = case.least("local_step") if case.disks else 0
    promised = max(case.durable(), on_disk)
    case.tell(f"step {on_disk} is on the disks, {promised} promised")
    time.sleep(case.draw.random() * 0.1)
    for act in (lambda node: node.halt(), lambda node: node.end(with_memory=True, with_disk=False)):
        for node in case.nodes:
            act(node)
    return promised


def killed_agent(case, first):
    """The ranks save by themselves; then they are killed."""
    case.train(first)
    node = case.draw.choice([n for _, n in case.ranks])
    case.tell(f"the agent of node {case.nodes.index(node)} is killed")
    node.agent.kill()
    node.agent.wait()
    node.agent = None
    case.wait_for_a_save(case.newest(), "a save without the agent")
    promised = case.durable()
    case.kill_ranks()
    return promised


def stopped_agent(case, first):
    """One of a node without ranks, if there is one: it comes back, or is lost."""
    case.train(first)
    node = case.draw.choice([n for n in case.nodes if n not in [m for _, m in case.ranks]] or case.nodes)
    case.tell(f"the agent of node {case.nodes.index(node)} is stopped")
    node.agent.send_signal(signal.SIGSTOP)
    time.sleep(case.draw.random() * 2 * SILENCE)
    promised = case.durable()
    if case.draw.random() < 0.5:
        case.kill_ranks()
    node.agent.send_signal(signal.SIGCONT)
    case.kill_ranks()
    return promised


def flipped_bits(case, first):
    """In copies that one node has; then another node is lost. With two copies, the other one is used."""
    promised = case.train(first)
    lost, damaged = case.draw.sample(case.nodes, 2)
    case.kill_ranks()
    files = [f for f in damaged.memory.rglob("held/**/*") if f.is_file() and not f.name.startswith(".")]  # others are still arriving
    for f in case.draw.sample(files, min(len(files), 3)):
        data = bytearray(f.read_bytes())
        if data:
            data[case.draw.randrange(len(data))] ^= 1 << case.draw.randrange(8)
            f.write_bytes(data)
    case.tell(f"node {case.nodes.index(damaged)} has flipped bits in {len(files)} files, node {case.nodes.index(lost)} is lost")
    lost.lose()
    return promised if case.copies > 1 else min(promised, case.durable())


def launch_without_agents(case, first):
    """It goes on from the store. What agents have is stored by a drain before, or meanwhile, or is older than what it saves and does not count."""
    promised = case.train(first)
    lost = case.draw.choice(case.nodes) if case.draw.random() < 0.5 else None
    if lost:
        lost.lose()
    if all(node is lost for _, node in case.ranks):  # a drain of other nodes does not store what they only keep for it
        promised = case.durable()
    case.kill_ranks()
    if case.draw.random() < 0.5:
        drains = [case.cli("agent", case.store, "--socket", n.socket, "--drain", "-q") for n in case.nodes if n.agent]
        check(all(d.returncode == 0 for d in drains), f"a drain has failed: {[d.stderr for d in drains]}")
    else:
        promised = 0
    saved = False
    while not saved:  # it ends if an agent stores what it has after the launch began
        case.launch(EVER, promised, with_agents=False)
        saved = case.wait_for_a_save(case.newest(), "a save without agents", or_end=True)
    case.kill_ranks()
    return case.durable()


def node_that_cannot_be_asked(case, first):
    """A launch begins while it is stopped. It is asked later; by then what it has is older than what that launch saved."""
    promised = case.train(first)
    stopped = case.draw.choice(case.nodes)
    with_ranks = stopped in [n for _, n in case.ranks]
    case.tell(f"node {case.nodes.index(stopped)} is stopped")
    stopped.agent.send_signal(signal.SIGSTOP)
    case.kill_ranks()
    others = [n for n in case.nodes if n is not stopped]
    lost = case.draw.choice(others) if case.draw.random() < 0.5 else None
    if lost:
        case.tell(f"node {case.nodes.index(lost)} is lost")
        lost.lose()
    case.launch(EVER, case.durable() if with_ranks or lost else promised, others)
    case.wait_for_a_save(case.newest(), "a save while a node is stopped")
    stopped.agent.send_signal(signal.SIGCONT)
    time.sleep(case.draw.random() * 2 * SILENCE)
    promised = case.durable()
    case.kill_ranks()
    return promised


def drained(case, first):
    case.train(first)
    node = case.draw.choice(case.nodes)
    reached = case.copied()
    done = case.cli("agent", case.store, "--socket", node.socket, "--drain", "-q")
    check(done.returncode == 0, f"a drain has failed: {done.stderr}")
    if any(n is node for _, n in case.ranks):
        check(case.durable() >= reached, f"step {case.durable()} is durable after a drain, and {reached} had copies")
    promised = case.durable()
    case.kill_ranks()
    return promised


def ended_agent(case, first):
    """By SIGTERM, while its ranks train: they go on by themselves."""
    case.train(first)
    node = case.draw.choice([n for _, n in case.ranks])
    reached = case.copied()
    case.tell(f"the agent of node {case.nodes.index(node)} ends")
    node.agent.terminate()
    check(node.agent.wait(60) == 0, "an agent that got SIGTERM has failed")
    node.agent = None
    check(case.durable() >= reached, f"step {case.durable()} is durable after an agent's end, and {reached} had copies")
    promised = case.durable()
    case.kill_ranks()
    return promised


KINDS = {f.__name__: f for f in (killed_ranks, lost_node, lost_nodes, lost_memory, killed_agent, stopped_agent, flipped_bits, drained, ended_agent,
                                 launch_without_agents, node_that_cannot_be_asked, killed_agent_and_ranks)}


def play(make_case, kind, seed, folder, kinds=KINDS):
    """Plays one case, of which the first failure is of this kind. Returns (None or why it was skipped, None or what went wrong, number of failures)."""
    case = make_case(folder, seed)
    number = promised = 0
    try:
        for number in range(case.draw.randint(1, 3)):
            failure = kinds[kind] if number == 0 else case.draw.choice(list(kinds.values()))
            first = case.launch(EVER, promised)
            case.tell(failure.__name__)
            promised = max(promised, failure(case, first))
        case.finish(promised)
        return None, None, number + 1
    except (Failure, subprocess.SubprocessError, OSError) as error:
        case.output.seek(0)
        said = case.output.read().decode(errors="replace").splitlines()
        return None, "\n".join([f"{kind}, seed {seed}: {error}", *case.story, *said[-60:]]), number + 1
    finally:
        case.close()


def main():
    return agents.drive(__doc__, KINDS, lambda build, folder: functools.partial(Case, build), play, "nodes")


if __name__ == "__main__":
    sys.exit(main())
