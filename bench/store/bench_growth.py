"""How cost grows with tensors, with checkpoints and with bytes: processor time and memory of the command.

    bench_growth.py [--only tensors|checkpoints|bytes] [--quick] [--folder DIR] [--out FILE]

The states are synthetic: f32 weights with both moments, to all of which each state adds noise. Three series:

  tensors      100 to 50,000 tensors of 256 elements, in each fidelity
  checkpoints  a run of 100 to 5,000 checkpoints of 12 small tensors
  bytes        states of 10 MB to 4 GB, in tensors of 16 MB

Each command runs alone, with one thread. Processor time is user and system time. Memory is the largest resident set. The
exponent is the slope between the last two sizes on logarithmic scales: 1 is linear. Commands below a tenth of a second say
little. The first lossy delta looks for a low-rank part as long as it finds one, and noise of that size is one; in a training it
takes what others take.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(os.environ.get("CKPTDELTA_BUILD", ROOT / "build" / "current")) / "ckptdelta"
SERIES = {"tensors": (100, 1_000, 10_000, 50_000), "checkpoints": (100, 500, 1_000, 5_000), "bytes": (10_000_000, 100_000_000, 1_000_000_000, 4_000_000_000)}
FIDELITIES = ("exact", "near", "coarse")


# Starts the commands. A process counts the memory of the one that it was forked from as its own, so that one must be small.
STARTER = """
import os, sys
for line in sys.stdin:
    args = line.rstrip("\\n").split("\\t")
    pid = os.posix_spawn(args[0], args, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
    _, status, used = os.wait4(pid, 0)
    print(status, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, flush=True)
"""
starter = subprocess.Popen([sys.executable, "-S", "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measured(*args):
    """Processor seconds and peak memory in MB of one command."""
    print(COMMAND, *args, sep="\t", file=starter.stdin, flush=True)
    status, cpu, memory = starter.stdout.readline().split()
    if status != "0":
        raise SystemExit(f"{' '.join(map(str, args))}: status {status}")
    return float(cpu), float(memory)


def write_state(path, weights, shape, step):
    """Writes a state of `weights` weights with moments. Each is made when it is written, so that no state is in memory."""
    kinds = (("", .05, 1e-3), ("exp_avg.", 1e-3, 1e-3), ("exp_avg_sq.", 1e-6, 1e-3))
    size, header, at = 4 * math.prod(shape), {}, 0
    for i in range(weights):
        for prefix, _, _ in kinds:
            header[f"{prefix}layer{i}.weight"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for i in range(weights):
            for k, (_, scale, change) in enumerate(kinds):
                values = np.random.default_rng([i, k]).standard_normal(shape, np.float32)
                for n in range(1, step + 1):
                    values += change * np.random.default_rng([i, k, n]).standard_normal(shape, np.float32)
                f.write((np.abs(values) if k == 2 else values) * np.float32(scale))


def save(store, step, file, *more):
    return measured("save", store, f"r@{step}", file, "--threads", 1, "-q", *more)


def by_state(folder, weights, shape, fidelity):
    """Yields a command's name and its cost, for a store of three checkpoints."""
    files = [folder / f"state-{i}" for i in range(3)]
    for i, file in enumerate(files):
        write_state(file, weights, shape, i)
    store = folder / "store"
    for i, file in enumerate(files):
        cost = save(store, i, file, "--fidelity", fidelity)
        yield ("save, base", "save, first delta", "save, second delta")[i], cost
    yield "load", measured("load", store, "r@2", "--out", folder / "out", "--threads", 1, "-q")
    yield "verify", measured("verify", store, "--threads", 1, "-q")
    yield "diff", measured("diff", store, "r@1", "r@2", "--threads", 1, "-q")
    yield "list", measured("list", store)


def by_count(folder, count):
    store, file = folder / "store", folder / "state"
    for step in range(count):
        if step % 20 == 0:
            write_state(file, 4, (64, 64), step // 20 % 7)
        cost = save(store, step, file)
    yield "save of the last", cost
    for name, args in (("list", ()), ("report", ()), ("verify", ()), ("compact, dry run", ("-n",)),
                       ("prune, dry run", ("-n", "--keep-every", "10", "--keep-last", "5"))):
        command = name.split(",")[0]
        yield name, measured(command, store, *args, *(("--threads", 1) if command == "verify" else ()))
    yield "load", measured("load", store, f"r@{count - 1}", "--out", folder / "out", "-q")
    yield "catalog rebuilt", measured("rebuild", store, "-q")


def run(series, size, fidelity, base):
    folder = Path(tempfile.mkdtemp(prefix="growth-", dir=base))
    try:
        if series == "checkpoints":
            rows = by_count(folder, size)
        elif series == "tensors":
            rows = by_state(folder, max(1, size // 3), (16, 16), fidelity)
        else:
            rows = by_state(folder, max(1, size // (3 * 4 << 20)), (1024, 1024), fidelity)
        for name, (cpu, memory) in rows:
            yield {"series": series, "size": size, "fidelity": fidelity, "command": name, "cpu_seconds": round(cpu, 4), "peak_mb": round(memory, 1)}
    finally:
        shutil.rmtree(folder)


def exponent(rows, key):
    """The slope between the last two sizes."""
    (a, b) = sorted(rows, key=lambda r: r["size"])[-2:]
    return math.log(max(b[key], 1e-9) / max(a[key], 1e-9)) / math.log(b["size"] / a["size"])


def print_series(rows):
    sizes = sorted({r["size"] for r in rows})
    print(f"\n{rows[0]['series']}, processor seconds (peak MB)")
    print(f"{'':>8} {'':<20}" + "".join(f"{s:>20,}" for s in sizes) + f"{'exponent':>16}")
    for fidelity, command in dict.fromkeys((r["fidelity"], r["command"]) for r in rows):
        line = [r for r in rows if (r["fidelity"], r["command"]) == (fidelity, command)]
        cells = "".join(f"{r['cpu_seconds']:>11.3f} ({r['peak_mb']:>6.0f})" for r in sorted(line, key=lambda r: r["size"]))
        slopes = f"{exponent(line, 'cpu_seconds'):>8.2f} ({exponent(line, 'peak_mb'):.2f})" if len(line) > 1 else ""
        print(f"{fidelity:>8} {command:<20}{cells}{slopes}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--only", choices=SERIES)
    p.add_argument("--quick", action="store_true", help="leave the two largest sizes of each series out")
    p.add_argument("--folder", type=Path, help="where the states and stores are made and removed (a temporary folder)")
    p.add_argument("--out", type=Path, default=ROOT / "bench/results/bench_growth.json")
    a = p.parse_args()
    version = subprocess.run([COMMAND, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n", maxsplit=1)[0]
    results = []
    for series in [a.only] if a.only else SERIES:
        for fidelity in ("exact",) if series == "checkpoints" else FIDELITIES:
            for size in SERIES[series][:2 if a.quick else None]:
                for row in run(series, size, fidelity, a.folder):
                    results.append(row)
                    print(f"{row['series']} {size:,} {fidelity} {row['command']}: {row['cpu_seconds']:.3f} s, {row['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
        print_series([r for r in results if r["series"] == series])
        a.out.write_text(json.dumps({"benchmark": "growth", "version": version, "machine": f"{platform.machine()}, {os.cpu_count()} cores", "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
