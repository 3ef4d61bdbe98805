"""What a new version of a model costs: bytes, and the time to publish, fetch and apply it.

    bench_publish.py [--series DIR] [--rate LR]... [--versions N] [--seeds N] [--copies N] [--out FILE]

Versions are bf16 weights after each step of a fine-tuning: the series `tune-LR` of bench_runs.py (GPT, 512 wide). They are made
once and stay in DIR (by default bench/series). The learning rate decides how many values change. Each version is published by
`ckptdelta publish`, and applied to a folder by `ckptdelta follow --once`; the folder is compared with the file. Beside this:

- xor-1, xor-3: XOR with the version before, zstd -1 and -3.
- sparse: a list of 4-byte positions and new values, as sparse safetensors have them.
- pulse: gaps between positions in variable length, and new values, each through zstd -3.

Bytes are means over versions. For ours they are the version's chunk files; beside them stand the payloads that the follower
read, and by how much the store grew, with manifests, catalog and anchors. Times are processor time, one thread, medians over versions: `encode` makes the update from the two versions in memory (ours: the
whole command), `apply` turns the old version in memory into the new one (ours: the whole command, which also copies the file,
syncs it and reads back what it wrote). With --copies N each tensor is there N times, so that fixed costs weigh as little
as in a larger model. The results go to FILE as JSON, by default bench/results/bench_publish.json.
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

import numpy as np
import zstandard

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD", ROOT / "build" / "current"))
sys.path.insert(0, str(ROOT / "bench" / "save"))
from bench_runs import make_series, size_of, tensors_of  # noqa: E402

RATES = ("2.5e-7", "7e-7", "2.5e-6", "5e-6", "8e-6")
WAYS = ("ours", "xor-1", "xor-3", "sparse", "pulse")


# ---- other ways: each encodes all tensors at once, and applies to the values in place

class Xor:
    def __init__(self, level):
        self.coder = zstandard.ZstdCompressor(level=level)

    def encode(self, old, new):
        return self.coder.compress((old ^ new).tobytes())

    def apply(self, values, update):
        values ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(update), np.uint16)


class Sparse:
    def encode(self, old, new):
        places = np.flatnonzero(old != new)
        return places.astype(np.uint32).tobytes() + new[places].tobytes()

    def apply(self, values, update):
        count = len(update) // 6
        places = np.frombuffer(update, np.uint32, count)
        values[places] = np.frombuffer(update, np.uint16, count, 4 * count)


class Pulse:
    def encode(self, old, new):
        places = np.flatnonzero(old != new)
        gap = np.diff(places, prepend=-1) - 1
        wide = gap >= 255  # a byte each; 255 stands for a gap that follows in four
        narrow = np.where(wide, 255, gap).astype(np.uint8).tobytes()
        coder = zstandard.ZstdCompressor(level=3)
        parts = [coder.compress(p) for p in (narrow, gap[wide].astype(np.uint32).tobytes(), new[places].tobytes())]
        return b"".join(len(p).to_bytes(4, "little") for p in parts) + b"".join(parts)

    def apply(self, values, update):
        sizes = [int.from_bytes(update[4 * i:4 * i + 4], "little") for i in range(3)]
        parts, at = [], 12
        for size in sizes:
            parts.append(zstandard.ZstdDecompressor().decompress(update[at:at + size]))
            at += size
        gap = np.frombuffer(parts[0], np.uint8).astype(np.int64)
        gap[gap == 255] = np.frombuffer(parts[1], np.uint32)
        values[np.cumsum(gap + 1) - 1] = np.frombuffer(parts[2], np.uint16)


# ---- a series

def joined(file):
    return np.concatenate([values for _, values in tensors_of(file)])


def copied(file, to, copies):
    """Writes a file with each tensor `copies` times."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:8 + length]), raw[8 + length:]
    out = {f"{i}.{name}": dict(entry, data_offsets=[i * len(data) + offset for offset in entry["data_offsets"]])
           for i in range(copies) for name, entry in header.items() if name != "__metadata__"}
    text = json.dumps(out).encode()
    text += b" " * (-len(text) % 8)
    with open(to, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _ in range(copies):
            f.write(data)


def command(*args):
    """Processor time of a command, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([BUILD / "ckptdelta", *args], check=True, stdout=subprocess.PIPE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def processor(work, *args):
    start = time.process_time()
    result = work(*args)
    return time.process_time() - start, result


def ours(store, into, file, step):
    size = size_of(store)
    encode, _ = command("publish", store, f"r@{step}", file, "--threads", "1", "--quiet")
    grown = size_of(store) - size
    listed = json.loads(command("list", store, "--run", "r", "--json")[1])["checkpoints"]
    stored = next(c["stored_bytes"] for c in listed if c["step"] == step)
    apply, said = command("follow", store, "--run", "r", "--into", into, "--once", "--json")
    if dict_of(into / "model.safetensors") != dict_of(file):
        raise SystemExit(f"bench_publish.py: version {step} was not applied")
    return {"bytes": stored, "read": json.loads(said)["read_bytes"], "grown": grown, "encode": encode, "apply": apply}


def dict_of(file):
    return {name: values.tobytes() for name, values in tensors_of(file)}


def other(way, before, now):
    encode, update = processor(way.encode, before, now)
    values = before.copy()
    apply, _ = processor(way.apply, values, update)
    if not np.array_equal(values, now):
        raise SystemExit(f"bench_publish.py: {type(way).__name__} does not give the version")
    return {"bytes": len(update), "encode": encode, "apply": apply}


def run_series(name, files, folder, copies):
    others = {"xor-1": Xor(1), "xor-3": Xor(3), "sparse": Sparse(), "pulse": Pulse()}
    found = {way: [] for way in WAYS}
    before, changed, store, into = None, [], folder / "store", folder / "model"
    for i, file in enumerate(files):
        copied(file, folder / "now.safetensors", copies)
        now = joined(folder / "now.safetensors")
        record = ours(store, into, folder / "now.safetensors", i + 1)
        if before is None:
            base = record
        else:
            changed.append(float(np.mean(before != now)))
            found["ours"].append(record)
            for way, coder in others.items():
                found[way].append(other(coder, before, now))
        before = now
        print(f"\r{name}: {i + 1} of {len(files)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    shutil.rmtree(folder / "late", ignore_errors=True)
    _, late = command("follow", store, "--run", "r", "--into", folder / "late", "--once", "--json")
    of = {"encode": statistics.median, "apply": statistics.median}
    result = {way: {key: of.get(key, statistics.mean)(r[key] for r in found[way]) for key in found[way][0]} for way in WAYS}
    return {"series": name, "versions": len(files), "model_bytes": int(now.nbytes), "changed": statistics.mean(changed), "base_bytes": base["bytes"],
            "late_bytes": json.loads(late)["read_bytes"], "ways": result}


def print_table(r):
    size = r["model_bytes"]
    print(f"\n{r['series']}, {r['versions']} versions of {size / 1e6:.1f} MB, {100 * r['changed']:.2f} % of the values changed; "
          f"who joins late reads {r['late_bytes'] / r['base_bytes']:.2f} bases\n\n"
          "| | bytes | of xor-3 | of pulse | encode, GB/s of model | apply, GB/s of model |\n|---|---|---|---|---|---|")
    for way, m in r["ways"].items():
        print(f"| {way} | {m['bytes']:,.0f} | {m['bytes'] / r['ways']['xor-3']['bytes']:.2f} | {m['bytes'] / r['ways']['pulse']['bytes']:.2f} | "
              f"{size / m['encode'] / 1e9:.2f} | {size / m['apply'] / 1e9:.2f} |")
    print(f"payloads that the follower read: {r['ways']['ours']['read']:,.0f}; the store grew by {r['ways']['ours']['grown']:,.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, default=ROOT / "bench" / "series")
    parser.add_argument("--rate", action="append", help="a learning rate of the fine-tuning; may be repeated")
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "bench_publish.json")
    o = parser.parse_args()
    import torch
    results = []
    for seed in range(1, o.seeds + 1):
        for rate in o.rate or RATES:
            name = f"tune-{rate}"
            series = o.series / f"{name}-seed{seed}"
            make_series(series, width=512, layers=4, seed=seed, warmup=150, rate=rate, apart=1, count=o.versions, dtype=torch.bfloat16,
                        moments=False)
            files = sorted(series.glob("*.safetensors"), key=lambda f: int(f.stem))[:o.versions]
            with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
                results.append(run_series(name, files, Path(folder), o.copies) | {"seed": seed, "copies": o.copies})
            print_table(results[-1])
            o.out.write_text(json.dumps({"benchmark": "publish", "machine": f"{platform.processor() or platform.machine()}, "
                             f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}", "series": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
