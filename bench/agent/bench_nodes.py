"""What agents of several nodes send and keep, and how fast a lost node's state is there again: 2 to 16 agents on one machine.

    bench_nodes.py [--build DIR] [--quick] [--bytes] [--out FILE]

First table: the example trainer, alone on one of two nodes, saves each of 60 steps. What its agent sends and keeps in
memory, as shares of the full state. TEXT names the text. Second table: the example trainer on four nodes, a rank each, exact,
with whole copies and with parity: what a node sends, keeps of its own part of the states, and keeps for others. Third table: one rank on each of N
nodes, all on this machine; seconds until a state of all is on other nodes, and from the start of new ranks after a loss of
one node until all have its state again. The nodes share two cores here, so times say how the work grows, and not what a
cluster takes.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from free_ports import ports  # noqa: E402

EVER = 10 ** 7


class Cluster:
    def __init__(self, build, folder, count, redundancy=()):
        self.build, self.folder, self.store, self.redundancy = build, folder, folder / "store", redundancy
        self.addresses = [f"127.0.0.1:{port}" for port in ports(count)]
        (folder / "secret").write_text("a secret of one measurement\n")
        (folder / "secret").chmod(0o600)
        self.agents = [self.agent(n) for n in range(count)]
        until(lambda: all(c["replicated"] == c["replicate"] for c in (self.status(n)["copies"] for n in range(count))))

    def agent(self, n):
        words = [self.build / "ckptdelta", "agent", self.store, "--socket", self.folder / f"socket{n}", "--peers", ",".join(self.addresses),
                 "--self", self.addresses[n], "--secret", self.folder / "secret", "--copies", self.folder / f"memory{n}", "--store-every", "1h", "--silence", "60s",
                 *self.redundancy]
        said = self.folder / f"said{n}"
        with open(said, "a") as errors:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout.readline(), f"an agent has not started: {said.read_text()}"
        return process

    def status(self, n):
        words = [self.build / "ckptdelta", "agent", self.store, "--socket", self.folder / f"socket{n}", "--status", "--json"]
        return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)

    def environment(self, n):
        return dict(os.environ, CKPTDELTA_AGENT=str(self.folder / f"socket{n}"))

    def ranks(self, launch):
        count = len(self.agents)
        return [subprocess.Popen([self.build / "tests/rank_trainer", self.store, str(r), str(count), f"launch{launch}", str(EVER), "1"], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment(r)) for r in range(count)]

    def lose(self, n):
        self.agents[n].kill()
        self.agents[n].wait()
        shutil.rmtree(self.folder / f"memory{n}")

    def end(self):
        for agent in self.agents:
            agent.kill()
            agent.wait()


def until(condition):
    while not condition():
        time.sleep(0.01)


@contextlib.contextmanager
def cluster(build, count, redundancy=()):
    with tempfile.TemporaryDirectory(prefix="bench-nodes-", dir="/dev/shm") as folder:
        made = Cluster(build, Path(folder), count, redundancy)
        try:
            yield made
        finally:
            made.end()


def train_words(build, store, *args):
    text = [f"--text={os.environ['TEXT']}"] if "TEXT" in os.environ else []
    return [build / "train_gpt", *text, f"--store={store}", "--background=copy", "--save-every=1", "--width=128", "--layers=2", "--threads=1", *args]


def measure_bytes(build, name, args):
    with cluster(build, 2) as two:
        words = train_words(build, two.store, *args)
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True, env=dict(two.environment(0), CKPTDELTA_AGENT_WAIT="600"))
        copies = two.status(0)["copies"]
        # what is kept is measured while a session has its states
        trainer = subprocess.Popen([*words, "--resume", "--steps=100000"], stdout=subprocess.DEVNULL, env=two.environment(0))
        kept = []
        for _ in range(10):
            time.sleep(1)
            kept.append(two.status(0)["copies"]["own_bytes"])
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        state = copies["state_bytes"] / copies["states"]
        return {"trainer": name, "state_bytes": state, "sent_bytes": sum(p["sent_bytes"] for p in copies["peers"]) / copies["states"],
                "kept_bytes": statistics.median(kept)}


def measure_group(build, name, redundancy, steps):
    """Four ranks of one training, one a node. What is kept is measured from the 20th state on."""
    with cluster(build, 4, redundancy) as four:
        words = [str(build / "train_mpi"), *train_words(build, four.store, "--steps=100000")[1:]]
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
        for n in range(4):
            command += [":"] * (n > 0) + ["-n", "1", "env", f"CKPTDELTA_AGENT={four.folder / f'socket{n}'}", "CKPTDELTA_AGENT_WAIT=600", *words]
        trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        own, held = [], []
        while min(four.status(n)["copies"]["states"] for n in range(4)) < steps:
            for copies in (four.status(n)["copies"] for n in range(4)):
                if copies["states"] > 20:
                    own.append(copies["own_bytes"])
                    held.append(copies["held_bytes"])
            time.sleep(0.2)
        all_copies = [four.status(n)["copies"] for n in range(4)]
        trainer.terminate()  # mpirun ends its ranks
        trainer.wait()
        state = statistics.mean(c["state_bytes"] / c["states"] for c in all_copies)
        sent = statistics.mean(sum(p["sent_bytes"] for p in c["peers"]) / c["states"] for c in all_copies)
        return {"redundancy": name, "state_bytes": state, "sent_bytes": sent, "own_bytes": statistics.mean(own), "held_bytes": statistics.mean(held),
                "most_bytes": max(a + b for a, b in zip(own, held))}


def measure_ranks(build, count, repeats):
    deferred, restored = [], []
    with cluster(build, count) as many:
        ranks, lost = many.ranks(0), 0
        for launch in range(1, repeats + 1):
            for rank in ranks:
                rank.stdout.readline()
            before, begun = many.status(count - 1)["sessions"][0]["saved"], time.monotonic()
            until(lambda: many.status(count - 1)["sessions"][0]["saved"] >= before + 20)
            deferred.append((time.monotonic() - begun) / 20)
            lost = launch % count
            many.lose(lost)
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
            many.agents[lost] = many.agent(lost)
            begun = time.monotonic()
            ranks = many.ranks(launch)
            firsts = {int(re.search(r"\d+", rank.stdout.readline())[0]) for rank in ranks}
            restored.append(time.monotonic() - begun)
            assert len(firsts) == 1 and firsts.pop() > 0
            for rank in ranks:
                rank.kill()
            ranks = many.ranks(f"{launch}-again")
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {"nodes": count, "state_s": statistics.median(deferred), "restore_s": statistics.median(restored)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--quick", action="store_true", help="one trainer and four nodes, once")
    parser.add_argument("--bytes", action="store_true", help="only the first two tables, which a busy machine does not change")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or ROOT / f"bench/results/bench_nodes{'-bytes' if args.bytes else ''}.json"
    build = args.build.resolve()
    trainers = [("exact, lr 1e-3", ["--steps=60"]), ("exact, lr 1e-5", ["--steps=60", "--lr=1e-5", "--warmup=1"]),
                ("near, lr 1e-3", ["--steps=60", "--fidelity=near"]), ("coarse, lr 1e-3", ["--steps=60", "--fidelity=coarse"])]
    rows = [measure_bytes(build, name, words) for name, words in trainers[:1 if args.quick else 4]]
    print("| trainer | full state | sent a step | share | kept in memory | share |\n|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['trainer']} | {r['state_bytes'] / 2**20:.2f} MiB | {r['sent_bytes'] / 2**20:.2f} MiB | {r['sent_bytes'] / r['state_bytes']:.2f} | "
              f"{r['kept_bytes'] / 2**20:.2f} MiB | {r['kept_bytes'] / r['state_bytes']:.2f} |")
    ways = [("--replicate 1", ["--replicate", "1"]), ("--parity 3+1", ["--parity", "3+1"]), ("--replicate 2", ["--replicate", "2"]),
            ("--parity 2+2", ["--parity", "2+2"])]
    groups = [measure_group(build, name, words, 30 if args.quick else 80) for name, words in ways[:2 if args.quick else 4]]
    print("\n| of a node's state | sent a step | kept of its own | kept for others | both, at most |\n|---|---|---|---|---|")
    for g in groups:
        print(f"| `{g['redundancy']}` | " + " | ".join(f"{g[k] / g['state_bytes']:.2f}" for k in ("sent_bytes", "own_bytes", "held_bytes", "most_bytes")) + " |")
    counts = () if args.bytes else (4,) if args.quick else (2, 4, 8, 16)
    ranks = [measure_ranks(build, count, 1 if args.quick else 3) for count in counts]
    if ranks:
        print("\n| nodes | a state on other nodes | restored after a loss |\n|---|---|---|")
    for r in ranks:
        print(f"| {r['nodes']} | {r['state_s']:.2f} s | {r['restore_s']:.2f} s |")
    out.write_text(json.dumps({"benchmark": "nodes", "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "trainers": rows, "groups": groups, "ranks": ranks,
                                    "sent_share": max(r["sent_bytes"] / r["state_bytes"] for r in rows[:2]),
                                    "kept_share": max(r["kept_bytes"] / r["state_bytes"] for r in rows[:2])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
