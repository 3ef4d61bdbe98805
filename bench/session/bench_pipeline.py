"""What saves cost training in a pipeline: with phases, without them, and without saves.

    bench_pipeline.py [--build DIR] [--stages N] [--repeats N] [--steps N] [--every N] [--width N] [--out FILE]

Runs train_pipeline (1F1B, lazy snapshots) in three ways, in turns, and prints the median of each. With phases, a stage
says when it waits for another one, and the library copies, encodes and writes then. A stage stands still for a save while
its fence copies what is left; the figure is that of the stage that stands still longest.

With fewer cores than stages nothing is idle while a stage waits: the others compute. The figures then show what phases
cost, and not what they gain.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("no saves", "no phases", "phases")


def train(args, way):
    """Returns milliseconds of a step, the largest stall and the bubbles of one training."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(args.stages), args.build / "train_pipeline", "--threads", "1",
                   "--layers", str(2 * args.stages), "--width", str(args.width), "--batch", "16", "--steps", str(args.steps), "--log-every",
                   str(args.steps), "--store", f"{folder}/store", "--background", "lazy"]
        command += [] if way == "no saves" else ["--save-every", str(args.every)]
        command += ["--no-phases"] if way == "no phases" else []
        out = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}).stdout
    stages = re.findall(r"stage \d+: ([\d.]+) s, of which ([\d.]+) % in bubbles; stood still for saves for ([\d.]+) ms", out)
    assert len(stages) == args.stages, out
    return {"step_ms": 1e3 * max(float(s[0]) for s in stages) / args.steps, "bubbles_percent": statistics.mean(float(s[1]) for s in stages),
            "stall_ms": max(float(s[2]) for s in stages)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also as JSON")
    args = parser.parse_args()
    args.build = args.build.resolve()
    runs = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            runs[way].append(train(args, way))
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"{args.stages} stages on {cores} cores, load {load:.1f}; {args.steps} steps, a save every {args.every}; medians of {args.repeats}\n")
    print("| | step ms | over no saves | bubbles % | stands still for a save, ms |\n|---|---|---|---|---|")
    saves = args.steps // args.every
    rows = []
    for way in WAYS:
        row = {name: statistics.median(run[name] for run in runs[way]) for name in runs[way][0]}
        # of the same turn: a machine that others use is slower in some turns
        over = statistics.median(run["step_ms"] / without["step_ms"] for run, without in zip(runs[way], runs["no saves"]))
        rows.append({"way": way, **row, "over_no_saves": over, "runs": runs[way]})
        stall = "-" if way == "no saves" else f"{row['stall_ms'] / saves:.2f}"
        print(f"| {way} | {row['step_ms']:.1f} | {over:.2f} | {row['bubbles_percent']:.0f} | {stall} |")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "pipeline", "date": time.strftime("%Y-%m-%d"), "stages": args.stages, "cores": cores,
                                        "load": load, "steps": args.steps, "every": args.every, "width": args.width, "rows": rows}, indent=1)
                            + "\n")


if __name__ == "__main__":
    main()
