"""How many flipped bits in the memory of one data-parallel rank a session notices, and what comparing costs.

    bench_replicas.py [--build DIR] [--seeds N] [--ranks N] [--out FILE]

Three processes train the GPT of examples/train_torch.py with DistributedDataParallel (gloo, CPU) and save every fifth step.
In the middle one bit of one element flips on one rank: of a weight or a moment, the lowest bit of the mantissa, the lowest of
the exponent, or the sign. It is noticed if the alarm names that rank and no other one; or as NaN, if it made values of all
ranks NaN before the next save, whose checkpoint is suspect then. A difference that was not noticed and is gone at the end has
vanished: moments forget. As many runs stay healthy; any alarm in these is false. Times are of the sums alone, beside the median step and the median call of a step that saves.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY, AT = 40, 5, 21
KINDS = [(slot, bit, f"{what}, {of}") for slot, what in ((None, "weight"), ("exp_avg", "first moment"), ("exp_avg_sq", "second moment"))
         for bit, of in ((0, "lowest bit of the mantissa"), (23, "lowest bit of the exponent"), (31, "sign"))]


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.alarms = []

    def emit(self, record):
        if "not the same on all ranks: " in record.getMessage():
            self.alarms.append(record.getMessage())


def flip(model, optimizer, draw, slot, bit):
    import torch
    parameters = [p for p in model.parameters()]
    p = draw.choices(parameters, [p.numel() for p in parameters])[0]
    with torch.no_grad():
        words = (p if slot is None else optimizer.state[p][slot]).view(-1).view(torch.int32)
        words[draw.randrange(words.numel())] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


def hash_of(model, optimizer):
    import torch
    hashed = hashlib.sha256()
    for p in model.parameters():
        for t in (p, *optimizer.state[p].values()):
            hashed.update(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def train(rank, seed, width, folder, kind, costs):
    """Returns the alarms of this rank, and its values at the end."""
    import torch
    from torch.nn import functional

    import ckptdelta
    import train_torch
    from ckptdelta._replicas import Replicas
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(train_torch.GPT(width, 4, 4, 64, 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    windows = train_torch.Windows(train_torch.read_text(None), 64, 4, seed=10 * seed + rank)
    torch.manual_seed(100 * seed + rank)
    draw, heard, begin = random.Random(f"{seed} {kind}"), Heard(), Replicas.begin
    victim, values = draw.randrange(torch.distributed.get_world_size()), None
    logging.getLogger("ckptdelta").addHandler(heard)

    def timed(self, *args):
        begun = time.perf_counter()
        begin(self, *args)
        costs["sums"].append(time.perf_counter() - begun)

    Replicas.begin = timed
    try:
        with ckptdelta.open(folder) as store, ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, every=EVERY) as session:
            for step in range(1, STEPS + 1):
                begun = time.perf_counter()
                x, y = next(windows)
                loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if kind and step == AT and rank == victim:
                    flip(model.module, optimizer, draw, *kind)
                trained = time.perf_counter()
                if session.step():
                    costs["save"].append(time.perf_counter() - trained)
                    values = hash_of(model, optimizer)
                costs["step"].append(trained - begun)
            session.wait()
            suspect = any(c.suspect for c in store.checkpoints("gpt"))
    finally:
        Replicas.begin = begin
        logging.getLogger("ckptdelta").removeHandler(heard)
    return {"alarms": heard.alarms, "victim": victim, "values": values, "suspect": suspect}


def outcome(ranks):
    """Of a run in which a bit has flipped."""
    alarms = ranks[0]["alarms"]
    if alarms:
        return "noticed" if all(f": rank {ranks[0]['victim']} differs from" in text for text in alarms) else "wrong rank"
    return "NaN" if ranks[0]["suspect"] else "vanished" if len({one["values"] for one in ranks}) == 1 else "missed"


def process(rank, args, folder, out):
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(args.build / "python"), str(ROOT / "examples")]
    import torch
    torch.set_num_threads(1)
    logging.getLogger("ckptdelta").propagate = False
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=args.ranks)
    results, costs = [], {"sums": [], "save": [], "step": []}
    for seed in range(1, args.seeds + 1):
        for number, kind in enumerate([*KINDS, *[None] * len(KINDS)]):
            found = train(rank, seed if kind else 100 * number + seed, args.width, f"{folder}/store-{seed}-{number}", kind and kind[:2], costs)
            gathered = [None] * args.ranks
            torch.distributed.all_gather_object(gathered, found)
            results.append((kind and kind[2], gathered))
            if rank == 0:
                print(f"\r{len(results)} of {2 * args.seeds * len(KINDS)}", end="", file=sys.stderr)
    if rank == 0:
        size = sum(p.numel() for p in __import__("train_torch").GPT(args.width, 4, 4, 64, 0.1).parameters()) * 12
        out.send({"results": results, "bytes": size, **{k: statistics.median(v) for k, v in costs.items()}})
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, help="also as JSON")
    args = parser.parse_args()
    args.build = args.build.resolve()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.Process(target=process, args=(rank, args, folder, sender)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        sender.close()  # so that a failure of rank 0 ends this
        found = receiver.recv()
        for rank in ranks:
            rank.join()
    print(file=sys.stderr)
    rows = []
    for what in (k[2] for k in KINDS):
        runs = [ranks for name, ranks in found["results"] if name == what]
        ends = [outcome(ranks) for ranks in runs]
        late = [int(text.split("differ at step ")[1].split(";")[0]) - AT for r in runs for text in r[0]["alarms"]]
        rows.append({"bit": what, "runs": len(runs), **{end: ends.count(end) for end in ("noticed", "NaN", "vanished", "missed", "wrong rank")},
                     "steps": max(late, default=None)})
    healthy = [ranks for name, ranks in found["results"] if name is None]
    false = sum(bool(ranks[0]["alarms"]) for ranks in healthy)
    print(f"{args.ranks} ranks, {found['bytes'] / 1e6:.1f} MB of weights and moments, {args.seeds} seeds, a save every {EVERY} steps\n")
    print("| bit that flips on one rank | runs | noticed, and the rank named | noticed as NaN | vanished | missed | wrong rank | "
          "steps until the save that differs, at most |\n|" + "---|" * 8)
    for row in rows:
        print("| " + " | ".join("-" if v is None else str(v) for v in row.values()) + " |")
    print(f"\n{len(healthy)} healthy runs, {false} false alarms.")
    print(f"Sums of a save take {found['sums'] * 1e3:.2f} ms; the step before takes {found['step'] * 1e3:.1f} ms, and the call that saves "
          f"{found['save'] * 1e3:.1f} ms (medians, rank 0).")
    if args.out:
        costs = {k: found[k] for k in ("bytes", "sums", "save", "step")}
        args.out.write_text(json.dumps({"ranks": args.ranks, "seeds": args.seeds, "every": EVERY, "rows": rows, "healthy": len(healthy), "false": false, "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
