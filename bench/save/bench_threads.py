"""What threads gain, and how fast one is: saves, loads, verify, diff and compact by the command.

    bench_threads.py STATE.safetensors... [--repeats N] [--threads N] [--out FILE]

The STATEs are at least three successive states of one training, such as those that bench_runs.py keeps. They are saved as they
are (`large`), and with all matrices cut by rows into tensors of one block each (`small`). Each command runs with one thread and
with --threads. Times are wall clock, medians of the repeats, files in the page cache. Before each row, memcpy of the state and zstd -3
of a piece of it are timed in the same process. Run it on an idle machine.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD", ROOT / "build" / "current"))
BLOCK = 1 << 16  # elements of a small tensor
PIECE = 32 << 20  # bytes that zstd compresses


def cut(source, target):
    """Writes a state with each matrix cut by rows into tensors of at most BLOCK elements."""
    from safetensors.torch import load_file, save_file
    pieces = {}
    for name, tensor in load_file(source).items():
        rows = max(1, BLOCK * tensor.shape[0] // tensor.numel()) if tensor.dim() == 2 else tensor.shape[0]
        for i, piece in enumerate(tensor.split(rows)):
            pieces[f"{name}.{i}" if tensor.dim() == 2 else name] = piece.contiguous()
    save_file(pieces, target)
    return len(pieces)


def timed(*command):
    """Wall clock and processor time of a command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([BUILD / "ckptdelta", *command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def yardsticks(file):
    """Bytes a second of memcpy and of zstd -3, on one core."""
    import numpy as np
    import zstandard
    data = np.fromfile(file, np.uint8)
    to, piece = np.empty_like(data), data[:PIECE].tobytes()
    copies, zstds = [], []
    for _ in range(3):
        start = time.monotonic()
        np.copyto(to, data)
        copies.append(data.size / (time.monotonic() - start))
        start = time.monotonic()
        zstandard.ZstdCompressor(level=3).compress(piece)
        zstds.append(len(piece) / (time.monotonic() - start))
    return statistics.median(copies), statistics.median(zstds)


def operations(folder, files, fidelity, threads):
    """Runs each command once, in an order in which all of them have what they need. Yields its name, wall and processor time."""
    store, t = folder / "store", ["--threads", str(threads)]
    shutil.rmtree(store, ignore_errors=True)
    for i, file in enumerate(files):
        name = ("base", "delta")[i > 0]
        wall, cpu = timed("save", store, f"r@{i}", file, "--fidelity", fidelity, "--max-load-cost", "100", *t)
        if i < 2 or i == len(files) - 1:
            yield ("save, " + (name if i < 2 else "later delta"), wall, cpu)
    for file in store.glob("data/*/*"):
        file.read_bytes()
    yield ("load", *timed("load", store, f"r@{len(files) - 1}", "--out", folder / "out", "--force", *t))
    yield ("verify", *timed("verify", store, *t))
    yield ("diff", *timed("diff", store, "r@1", f"r@{len(files) - 1}", *t))
    yield ("compact", *timed("compact", store, "--max-depth", "1", *t))


def measure(files, fidelity, threads, repeats, parent):
    found = {}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for _ in range(repeats):
            for name, wall, cpu in operations(Path(folder), files, fidelity, threads):
                found.setdefault(name, []).append((wall, cpu))
    return {name: [statistics.median(values) for values in zip(*times)] for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", type=Path, nargs="+", metavar="STATE.safetensors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "bench_threads.json")
    o = parser.parse_args()
    if len(o.states) < 3:
        parser.error("at least three states are needed")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    results = []
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        small = [Path(folder) / file.name for file in o.states]
        tensors = [cut(*pair) for pair in zip(o.states, small)][0]
        print(f"small: {tensors} tensors\n\n| states | fidelity | command | MB/s, one thread | of memcpy | of zstd -3 | gain of {o.threads} threads | CPU of them |")
        print("|---|" + "---|" * 7)
        for kind, files in (("large", o.states), ("small", small)):
            raw = files[0].stat().st_size
            for fidelity in ("exact", "near", "coarse"):
                copy, zstd = yardsticks(files[-1])
                one = measure(files, fidelity, 1, o.repeats, folder)
                more = measure(files, fidelity, o.threads, o.repeats, folder)
                for name, (wall, cpu) in one.items():
                    size = raw * (len(files) if name in ("verify", "compact") else 2 if name == "diff" else 1)
                    gain, extra = wall / more[name][0], more[name][1] / cpu
                    print(f"| {kind} | {fidelity} | {name} | {size / wall / 1e6:.0f} | {size / wall / copy:.3f} | {size / wall / zstd:.2f} | "
                          f"{gain:.2f} | {extra:.2f} |", flush=True)
                    results.append({"states": kind, "fidelity": fidelity, "command": name, "bytes_per_second": size / wall,
                                    "of_memcpy": size / wall / copy, "of_zstd": size / wall / zstd, "gain": gain, "cpu": extra})
    o.out.write_text(json.dumps({"benchmark": "threads", "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
                     f"{time.strftime('%Y-%m-%d')}", "threads": o.threads, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
