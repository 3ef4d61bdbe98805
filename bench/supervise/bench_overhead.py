"""What supervision and sensors cost a training.

    bench_overhead.py [--build DIR] [--repeats N] [--steps N] [--width N] [--json FILE]

The example GPT trains below `ckptdelta run`, where its session reports each step, and without it. Both save alike, so
saves are no part of the difference. The order of the two alternates, and each pair starts from the same weights.
A second row has a single save, at the end. A run's figure is the median step, from the speeds that the trainer prints; the
table has medians of runs, and the median and the quartiles of the differences within pairs. The goal is less than .5 % of a
step. What the sensors take in a session, supervised or not, is measured by bench_sensors.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.5  # percent
BATCH, CONTEXT = 8, 64


def measure(args, supervised, saves, seed):
    """Returns milliseconds of the median step."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [args.build / "train_gpt", "--width", args.width, "--layers", 4, "--heads", 4, "--context", CONTEXT, "--batch", BATCH, "--threads", 1,
                   "--seed", seed, "--steps", args.steps, "--store", f"{folder}/store", "--background", "copy", "--log-every", max(1, args.steps // 20),
                   "--save-every", max(1, args.steps // 4) if saves else args.steps]
        if supervised:
            command = [args.build / "ckptdelta", "run", f"{folder}/store", "--run", "gpt", "--max-restarts", 0, "--", *command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTDELTA")}
        done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment, check=True)
        speeds = [float(speed) for speed in re.findall(r"([0-9]+) tokens/s", done.stdout)]
        if len(speeds) < 3:
            raise SystemExit(f"the trainer printed no speeds:\n{done.stdout}{done.stderr}")
        return 1e3 * BATCH * CONTEXT / statistics.median(speeds[1:])


def row_of(args, what, saves):
    plain, supervised, ratios = [], [], []
    for pair in range(args.repeats):
        both = {}
        for under in (False, True) if pair % 2 else (True, False):
            both[under] = measure(args, under, saves, pair + 1)
        plain.append(both[False])
        supervised.append(both[True])
        ratios.append(100 * (both[True] / both[False] - 1))
        print(f"\r{what}: {pair + 1} of {args.repeats}", end="", file=sys.stderr)
    print(file=sys.stderr)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"training": what, "plain_ms": statistics.median(plain), "supervised_ms": statistics.median(supervised),
            "overhead_percent": middle, "quartiles": [low, high]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", help="for stores; default the temporary folder")
    parser.add_argument("--json", type=Path, help="also as JSON")
    args = parser.parse_args()
    args.build = args.build.resolve()
    rows = [row_of(args, "four saves", True), row_of(args, "one save, at the end", False)]
    print(f"{args.repeats} pairs of {args.steps} steps, width {args.width}\n")
    print("| training | step, ms | below run, ms | overhead, % | quartiles |\n|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        print(f"| {row['training']} | {row['plain_ms']:.3f} | {row['supervised_ms']:.3f} | {row['overhead_percent']:+.2f} | {low:+.2f} to {high:+.2f} |")
    print(f"\nGoal: less than {GOAL} %.")
    if args.json:
        args.json.write_text(json.dumps({"benchmark": "overhead", "date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(),
                                         "cores": os.cpu_count(), "repeats": args.repeats, "steps": args.steps, "width": args.width,
                                         "goal_percent": GOAL, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
