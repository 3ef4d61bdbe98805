"""What failures cost a training a day, by how its states are kept: a simulation of 64 to 16,384 nodes.

    bench_scale.py [--months N] [--measured FILE] [--out FILE] [--svg FILE]

docs/scale.md has the model: its formulas, and where each number is from. Failures come at the rate of Llama 3 405B (Llama
Team 2024, "The Llama 3 Herd of Models", section 3.3.4 and table 5). The ways:

    store       every state goes to a shared store, as fast as it takes them
    replicas    full states in the memory of K other nodes (Gemini, SOSP 2023), in groups of neighbours; or spread, as ours
    parity      XOR of full states over G neighbours (REFT, arXiv 2310.12670)
    ckptdelta   exact deltas on K other nodes of other domains

All but the first store a state every half hour besides. What ckptdelta sends and keeps is what bench_nodes.py measured.
"""

import argparse
import bisect
import collections
import json
import math
import random
import statistics
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DAY = 86400.0
NODES, SPEEDS = (64, 256, 1024, 4096, 16384), (25, 100, 400)
BYTES, LARGEST = 14, 405e9  # of a parameter: bf16 weights, fp32 master and moments; parameters of the largest model
DOMAIN = 16                 # nodes that fail together
GROUP = 8                   # nodes that share a parity
PLAIN = {                   # what is assumed, unless a row says otherwise
    "rate": 419 / 54 / 2048,  # interruptions of a node a day: 16,384 GPUs, 8 a node
    "lost": 0.25,             # of them take the node's memory with them
    "domains": 0.05,          # of these take that of the whole domain
    "copies": 1,              # K
    "store": 100e9,           # bytes a second that the shared store takes and gives; a node, at most 2e9
    "backup": 1800.0,         # seconds between states that go there besides
    "step": 10.0,             # seconds
    "start": 185.0,           # seconds from a failure to the first step, without loading
    "idle": 0.25,             # of the network, which training leaves to copies
    "memory": 10e9,           # bytes a second: a copy in memory
    "devices": 160e9,         # bytes a second: from the devices of a node
    "coding": 16 * 0.35e9,    # bytes a second that the cores of a node code at low priority
}
WAYS = ("store", "replicas", "replicas, spread", "parity", "ckptdelta")


class Way:
    """What one way does with a state of `size` bytes a node, on a network of `speed` bytes a second."""

    def __init__(self, name, nodes, size, speed, measured, p):
        self.name, self.p, self.size = name, p, size
        ours, k = name == "ckptdelta", p["copies"]
        self.from_store = size / min(2e9, p["store"] / nodes, speed)
        sent = {"store": 0, "parity": 1.0}.get(name, measured["sent"] * k if ours else float(k))
        self.transfer = sent * size / (speed * p["idle"]) + (size / p["coding"] if ours else 0)
        self.stall = size / p["devices"]
        # the interval that costs least (Young 1974), if the network or the store bears it; a whole number of steps
        least = size / min(2e9, p["store"] / nodes, speed * p["idle"]) if name == "store" else self.transfer
        best = math.sqrt(2 * self.stall * DAY / (p["rate"] * nodes))
        self.interval = p["step"] * math.ceil(max(least, best, p["step"]) / p["step"])
        self.late = least  # a state counts when it has arrived
        self.fetch = {"parity": GROUP - 1.0}.get(name, measured["kept"] if ours else 1.0) * size / speed
        self.members, self.bears = {"store": (1, 0), "parity": (GROUP, 1)}.get(name, (k + 1, k))
        self.spread = name in ("replicas, spread", "ckptdelta")
        self.again = p["start"] + self.transfer + self.fetch  # seconds until all copies are there again

    def group(self, node, nodes):
        """Nodes of one group are neighbours, or one of each of `members` neighbouring domains."""
        if not self.spread:
            return node // self.members
        domain, place = divmod(node, DOMAIN)
        return domain // self.members * DOMAIN + place if nodes > DOMAIN * self.members else node // self.members

    def cost(self, gone, lost_memory, draw):
        """Seconds of steps that are made again, and of loading. gone: only the store has a state."""
        if self.name == "store" or gone:
            return draw.random() * (self.interval if self.name == "store" else self.p["backup"]) + self.late + self.from_store
        since = draw.random() * self.interval
        return since + self.late + self.fetch if lost_memory else since + self.size / self.p["memory"]


def events(draw, nodes, seconds, p):
    """Failures: (time, nodes whose memory is lost; none: all memory survives)."""
    now, out = 0.0, []
    while True:
        now += draw.expovariate(p["rate"] * nodes / DAY)
        if now > seconds:
            return out
        node, kind = draw.randrange(nodes), draw.random()
        first = node // DOMAIN * DOMAIN
        together = range(first, min(first + DOMAIN, nodes))
        out.append((now, () if kind > p["lost"] else together if kind < p["lost"] * p["domains"] else (node,)))


def simulate(way, nodes, happened, seconds, draw):
    """Returns seconds wasted besides starting again, and how often the copies did not suffice."""
    wasted, without, missing = seconds / way.interval * way.stall, 0, []  # missing: (until, group), by time
    for now, lost in happened:
        missing = missing[bisect.bisect(missing, (now, -1)):]
        for node in lost:
            bisect.insort(missing, (now + way.again, way.group(node, nodes)))
        counts = collections.Counter(group for _, group in missing)
        gone = any(counts[way.group(node, nodes)] > way.bears for node in lost)
        without += gone
        wasted += way.cost(gone, bool(lost), draw)
    return wasted, without


def row_of(nodes, gigabits, months, measured, **other):
    p, month = {**PLAIN, **other}, 30 * DAY
    size = BYTES * min(LARGEST, 1.1e9 * nodes) / nodes
    row = {"nodes": nodes, "gigabits": gigabits, "state_bytes": size, "starts_share": p["rate"] * nodes * p["start"] / DAY, **other}
    ways = [Way(name, nodes, size, gigabits / 8 * 1e9, measured, p) for name in WAYS]
    results = {way.name: [] for way in ways}
    for seed in range(months):
        happened = events(random.Random(seed), nodes, month, p)
        for way in ways:
            results[way.name].append(simulate(way, nodes, happened, month, random.Random(seed)))
    for way in ways:
        row[way.name] = {"wasted_share": statistics.mean(w for w, _ in results[way.name]) / month, "interval_s": way.interval,
                         "to_store_a_month": statistics.mean(n for _, n in results[way.name])}
    return row


def table(rows, first, cells):
    out = ["| " + " | ".join(first) + " | starting | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + len(first) + 1) + "|"]
    for row in rows:
        figures = [f"{r['wasted_share'] * 1440:.1f} ({r['interval_s']:.0f} s)" + (f" {r['to_store_a_month']:.1f}" if w != "store" else "")
                   for w, r in ((w, row[w]) for w in WAYS)]
        out.append("| " + " | ".join([*cells(row), f"{row['starts_share'] * 1440:.1f}", *figures]) + " |")
    return "\n".join(out) + "\n"


def variations(months, measured):
    """1,024 nodes at 100 Gb/s, with one assumption changed at a time."""
    changes = [("as assumed", {})]
    changes += [(f"{f:g} times as many failures", {"rate": PLAIN["rate"] * f}) for f in (0.2, 5)]
    changes += [(f"{100 * v:g} % of failures lose memory", {"lost": v}) for v in (0.05, 1.0)]
    changes += [(f"{100 * v:g} % of these a whole domain", {"domains": v}) for v in (0.0, 0.3)]
    changes += [(f"{k} copies", {"copies": k}) for k in (2, 3)]
    changes += [(f"a store of {v / 1e9:g} GB/s", {"store": v}) for v in (10e9, 1000e9)]
    changes += [(f"{100 * v:g} % of the network for copies", {"idle": v}) for v in (0.02, 0.1)]
    changes += [(f"to the store every {v / 60:g} min besides", {"backup": v}) for v in (300.0, 10800.0)]
    return [{"change": name, **row_of(1024, 100, months, measured, **change)} for name, change in changes]


# ---- the picture: a panel for each speed, the share of a day that is wasted over the number of nodes ----

PANEL, HEIGHT, LEFT, TOP = 270, 220, 52, 64
STYLE = (".paper{fill:#fff}text{font:13px sans-serif;fill:#1b1f24}.head{font-weight:600;font-size:15px}.grid{stroke:#d8dde3}"
         "polyline{fill:none;stroke-width:2.5}"
         "@media(prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#e6e9ee}.grid{stroke:#363c45}}")
COLOURS = dict(zip(WAYS, ("#8b95a1", "#c77d1a", "#b0439c", "#2f8f5b", "#1d5fd6")))


def panel(rows, x, most):
    def at(index, share):
        return x + index * PANEL / (len(NODES) - 1), TOP + HEIGHT * (1 - share / most)
    out = [f'<text x="{x}" y="{TOP - 12}">{rows[0]["gigabits"]} Gb/s a node</text>']
    for tick in range(0, round(most * 100) + 1, 5):
        y = at(0, tick / 100)[1]
        out.append(f'<line class="grid" x1="{x}" x2="{x + PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{tick} %</text>')
    for i, nodes in enumerate(NODES):
        out.append(f'<text x="{at(i, 0)[0]:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{nodes:,}</text>')
    for way in WAYS:
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(i, r[way]["wasted_share"]) for i, r in enumerate(rows)))
        out.append(f'<polyline stroke="{COLOURS[way]}" points="{points}"><title>{escape(way)}</title></polyline>')
    return out


def picture(rows):
    most = math.ceil(max(r[w]["wasted_share"] for r in rows for w in WAYS) * 20) / 20
    width = len(SPEEDS) * (PANEL + LEFT + 20) + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 70}" role="img"><style>{STYLE}</style>',
           f'<title>Share of a day that failures waste</title><rect class="paper" width="{width}" height="{TOP + HEIGHT + 70}"/>',
           f'<text class="head" x="{LEFT}" y="26">Share of a day that failures waste, over the number of nodes (simulated)</text>']
    for i, speed in enumerate(SPEEDS):
        out += panel([r for r in rows if r["gigabits"] == speed], LEFT + i * (PANEL + LEFT + 20), most)
    x = LEFT
    for way in WAYS:
        out.append(f'<rect x="{x}" y="{TOP + HEIGHT + 42}" width="14" height="4" fill="{COLOURS[way]}"/>')
        out.append(f'<text x="{x + 20}" y="{TOP + HEIGHT + 48}">{escape(way)}</text>')
        x += 46 + 8 * len(way)
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--months", type=int, default=40, help="simulated for each row")
    parser.add_argument("--measured", type=Path, default=ROOT / "bench/results/bench_nodes-bytes.json")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/bench_scale.json")
    parser.add_argument("--svg", type=Path, default=ROOT / "docs/pictures/scale.svg")
    args = parser.parse_args()
    nodes = json.loads(args.measured.read_text())
    measured = {"sent": nodes["sent_share"], "kept": nodes["kept_share"]}
    rows = [row_of(n, speed, args.months, measured) for n in NODES for speed in SPEEDS]
    varied = variations(args.months, measured)
    print("Minutes of a day: starting again, which is the same for all; then steps that are made again, loading, and stalls (seconds\n"
          "between two states), and how often a month the copies did not suffice.\n")
    print(table(rows, ["nodes", "Gb/s", "state a node"], lambda r: [f"{r['nodes']:,}", str(r["gigabits"]), f"{r['state_bytes'] / 1e9:.1f} GB"]))
    print("1,024 nodes at 100 Gb/s:\n")
    print(table(varied, ["with"], lambda r: [r["change"]]))
    args.svg.write_text(picture(rows))
    args.out.write_text(json.dumps({"benchmark": "scale", "date": time.strftime("%Y-%m-%d"), "months": args.months, "assumed": PLAIN, "measured": measured,
                                    "rows": rows, "varied": varied},
                                   indent=1) + "\n")


if __name__ == "__main__":
    main()
