"""What whole runs take: bytes stored, bytes written, processor time, and the dearest load.

    bench_runs.py [--series DIR] [--only NAME]... [--fidelity NAME]... [--saves N] [--seeds N] [--loads N] [--out FILE]

Each series is a training of the GPT of examples/train_torch.py, of whose states each becomes a .safetensors file. It is made
once and stays in DIR (by default bench/series), up to 16 GB a series.

- tune-LR: bf16 weights, 512 wide (12.9 million), a save a step of a fine-tuning at the constant learning rate LR, after 150
  steps of training. Only some of the values change between two saves.
- far-WIDTH: weights and both moments of AdamW in f32, 25 steps apart, beta2 0.95.

Each state goes through the command `ckptdelta save` to a store for each fidelity. Counted for each save: bytes stored (all
files of the store, less those before), bytes written (what the process gave to write(), by /proc/self/io), reads, and processor
time with one thread. `free` is a store of its own without a bound on loads. Beside these, for tune-LR: XOR with the state before
and zstd -3; a list of 4-byte positions and new values; gaps between positions in variable length and new values, both through
zstd -3, as PULSE has them.

At the end each checkpoint is loaded with one thread, and an exact base of the same state: the result is the dearest load in base loads,
by processor time (the least of three).
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD", ROOT / "build" / "current"))
RATES = ("1e-6", "3e-6", "1e-5", "4e-5")
FIDELITIES = ("exact", "near", "coarse")


def make_series(folder, *, width, layers, seed, warmup, rate, apart, count, dtype, moments):
    """Trains, and writes folder/STEP.safetensors for count states."""
    import torch
    from safetensors.torch import save_file
    from torch.nn import functional
    sys.path[:0] = [str(ROOT / "examples"), str(BUILD / "python")]
    import train_torch
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "done").exists() and int((folder / "done").read_text()) >= count:
        return
    torch.manual_seed(seed)
    model = train_torch.GPT(width, 4, layers, 64, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    windows = train_torch.Windows(train_torch.read_text(None), 64, 8, seed)
    names = {p: name for name, p in model.named_parameters()}
    steps = warmup + apart * (count - (not moments))
    for step in range(1, steps + 1):
        tuning = rate is not None and step > warmup
        for group in optimizer.param_groups:
            group["lr"] = float(rate) if tuning else 1e-3 * min(1.0, step / 20)
        x, y = next(windows)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= warmup + (apart if moments else 0) and (step - warmup) % apart == 0:
            state = {}
            for p, name in names.items():
                if moments:
                    state[f"exp_avg_sq.{name}"] = optimizer.state[p]["exp_avg_sq"].contiguous()
                    state[f"exp_avg.{name}"] = optimizer.state[p]["exp_avg"].contiguous()
                state[name] = p.detach().to(dtype).contiguous()
            save_file(state, folder / f"{step}.safetensors")
    (folder / "done").write_text(str(count))


def size_of(folder):
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def counters():
    """Bytes and calls of this process and the children that it has waited for."""
    return {key: int(value) for key, value in (line.split(": ") for line in open("/proc/self/io").read().splitlines())}


def save(store, step, file, *options):
    """Saves one state, and returns what that took."""
    before, size, used = counters(), size_of(store), resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run([BUILD / "ckptdelta", "save", store, f"r@{step}", file, "--threads", "1", "--quiet", *options], check=True)
    wall, after, use = time.monotonic() - start, counters(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"stored": size_of(store) - size, "written": after["wchar"] - before["wchar"], "reads": after["syscr"] - before["syscr"],
            "cpu": use.ru_utime - used.ru_utime + use.ru_stime - used.ru_stime, "wall": wall}


def tensors_of(file):
    """Names and values of a .safetensors file, as unsigned integers of the elements' size."""
    import numpy as np
    raw = np.fromfile(file, np.uint8)
    length = int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8:8 + length]))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = {"BF16": np.uint16, "F32": np.uint32}[entry["dtype"]]
            yield name, raw[8 + length + begin:8 + length + end].view(kind)


def peers(before, now):
    """Bytes that other ways take for the difference of two files, and the share of changed values."""
    import numpy as np
    import zstandard
    zstd, old = zstandard.ZstdCompressor(level=3), dict(tensors_of(before))
    xor, gaps, values, changed, all_values = [], [], [], 0, 0
    for name, new in tensors_of(now):
        places = np.flatnonzero(new != old[name])
        xor.append((new ^ old[name]).tobytes())
        gap = np.diff(places, prepend=-1) - 1
        while gap.size:  # seven bits a byte, all of the first bytes before the second ones
            gaps.append(((gap & 127) | np.where(gap > 127, 128, 0)).astype(np.uint8).tobytes())
            gap = gap[gap > 127] >> 7
        values.append(new[places].tobytes())
        changed, all_values = changed + places.size, all_values + new.size
    return {"changed": changed / all_values, "xor": len(zstd.compress(b"".join(xor))),
            "sparse": changed * (4 + new.itemsize), "gaps": len(zstd.compress(b"".join(gaps))) + len(zstd.compress(b"".join(values)))}


def load_costs(folder, stores, files):
    """Processor time of loading each checkpoint of each store, in loads of an exact base of the same state."""
    import numpy as np
    sys.path.insert(0, str(BUILD / "python"))
    import ckptdelta

    def seconds(path, step, into):
        least = float("inf")
        with ckptdelta.open(path, readonly=True, threads=1) as store:
            for _ in range(3):
                start = time.process_time()
                store.load(into, run="r", step=step)
                least = min(least, time.process_time() - start)
        return least

    costs = {name: [] for name in stores}
    for file in files:
        step, base = int(file.stem), folder / "base"
        shutil.rmtree(base, ignore_errors=True)
        save(base, step, file)
        import torch
        kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        header.pop("__metadata__", None)
        into = {name: torch.empty(entry["shape"], dtype=kinds[entry["dtype"]]) for name, entry in header.items()}
        one = seconds(base, step, into)
        for name in stores:
            costs[name].append(seconds(folder / name, step, into) / one)
    return costs


def run_series(name, files, folder, *, fidelities, with_peers, loads):
    """Saves all files to one store a fidelity, and returns a record for each store."""
    ways = {f: ["--fidelity", f] for f in fidelities}
    if with_peers:
        ways["free"] = ["--max-load-cost", "100000"]
    saves = {way: [] for way in ways}
    others = []
    for i, file in enumerate(files):
        for way, options in ways.items():
            saves[way].append(save(folder / way, int(file.stem), file, *options))
        if with_peers and i:
            others.append(peers(files[i - 1], file))
        print(f"\r{name}: {i + 1} of {len(files)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    sampled = files[::-max(1, len(files) // loads)] if loads else []
    costs = load_costs(folder, [w for w in ways if w != "free"], sampled)
    raw = sum(f.stat().st_size for f in files)
    found = {}
    for way in ways:
        deltas = saves[way][1:]
        mean = lambda key: sum(s[key] for s in deltas) / len(deltas)
        found[way] = {"first": saves[way][0]["stored"], "delta": mean("stored"), "last": deltas[-1]["stored"],
                      "written": sum(s["written"] for s in saves[way]) / sum(s["stored"] for s in saves[way]),
                      "store": size_of(folder / way), "ratio": raw / size_of(folder / way), "cpu": mean("cpu"), "reads": mean("reads"),
                      "load": max(costs[way]) if costs.get(way) else None, "deltas": [s["stored"] for s in saves[way]]}
    if "free" in ways and "exact" in ways:
        found["exact"]["over_free"] = found["exact"]["store"] / found["free"]["store"]
    if others:
        found["peers"] = {key: sum(o[key] for o in others) / len(others) for key in others[0]}
    return found


def print_table(name, found):
    print(f"\n{name}\n| | first | a delta | last | store | ratio | written | of free | load | CPU s | reads |\n|---|" + "---|" * 10)
    for way, r in found.items():
        if way == "peers":
            print(f"changed {100 * r['changed']:.2f} %; bytes a save: xor + zstd -3 {r['xor']:,.0f}, sparse {r['sparse']:,.0f}, "
                  f"gaps + values {r['gaps']:,.0f}")
            continue
        free = f"{r['over_free']:.2f}" if "over_free" in r else "-"
        load = f"{r['load']:.2f}" if r["load"] else "-"
        print(f"| {way} | {r['first']:,} | {r['delta']:,.0f} | {r['last']:,} | {r['store']:,} | {r['ratio']:.1f} | {r['written']:.2f} | "
              f"{free} | {load} | {r['cpu']:.3f} | {r['reads']:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, default=ROOT / "bench" / "series")
    parser.add_argument("--only", action="append", help="a series, for example tune-1e-5 or far-256")
    parser.add_argument("--fidelity", action="append", choices=FIDELITIES)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=10, help="checkpoints of each store that are loaded at the end [default: 10]")
    parser.add_argument("--train-only", action="store_true", help="make the series, and save nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "bench_runs.json")
    o = parser.parse_args()
    import torch
    results = []
    for seed in range(1, o.seeds + 1):
        for name in [f"tune-{rate}" for rate in RATES] + ["far-256", "far-512"]:
            if o.only and name not in o.only:
                continue
            kind, value = name.split("-", 1)
            tuned = kind == "tune"
            series = o.series / f"{name}-seed{seed}"
            make_series(series, width=512 if tuned else int(value), layers=4, seed=seed, warmup=150, rate=value if tuned else None,
                        apart=1 if tuned else 25, count=o.saves, dtype=torch.bfloat16 if tuned else torch.float32, moments=not tuned)
            files = sorted(series.glob("*.safetensors"), key=lambda f: int(f.stem))[:o.saves]
            if o.train_only:
                continue
            with tempfile.TemporaryDirectory(dir=o.series) as folder:
                found = run_series(name, files, Path(folder), fidelities=o.fidelity or FIDELITIES, with_peers=tuned, loads=o.loads)
            print_table(f"{name}, seed {seed}, {len(files)} saves", found)
            results.append({"series": name, "seed": seed, "saves": len(files), "ways": found})
            o.out.write_text(json.dumps({"benchmark": "runs", "machine": f"{platform.processor() or platform.machine()}, "
                             f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}", "series": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
