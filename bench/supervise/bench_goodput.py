"""What restarts cost a long training: goodput (time of steps that count / wall time) by hand and with `ckptdelta run`.

    bench_goodput.py [--build DIR] [--months N] [--out FILE]

Simulates months of training at the failure rate of Llama 3 405B (Llama Team 2024, "The Llama 3 Herd of Models", section
3.3.4 and table 5): 419 unexpected interruptions of 16,384 GPUs in 54 days. A failure is a hang where the table says
network or NCCL watchdog (42 of 419), and a crash otherwise. Each one costs

    noticing + deciding + starting the job + half of the time between two checkpoints, on average

What `run` needs for noticing a crash and starting again is measured here, with a command that does nothing. A hang is
noticed after the larger of --hang-floor and 10 steps (docs/run.md). The other times are assumptions, printed with the
table; by hand, somebody is on call. Meta published "higher than 90 % effective training time" with automation of its
own: at most 18.6 minutes lost for each interruption.

Verification before an attempt is not in the table: its time depends on the size of the state and the disk.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAILURES, DAYS, HANGS = 419, 54, 42 / 419
MONTH = 30 * 86400.0
STEP = 10.0  # seconds
WATCHDOG = 600.0  # PyTorch's limit for a collective of NCCL
HANG_FLOOR = 300.0
BY_HAND = {"crash": 15 * 60.0, "hang": WATCHDOG + 15 * 60.0}  # until somebody on call has restarted it
INTERVALS, STARTS = (1800.0, 600.0, 120.0), (120.0, 600.0)


def measure_restart(build, repeats=5):
    """Seconds from the exit of a command to the start of its next attempt, without the pause that the user chooses."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        script = f'date +%s.%N >>"{folder}/times"; [ $CKPTDELTA_ATTEMPT -gt {repeats} ]'
        subprocess.run([build / "ckptdelta", "run", f"{folder}/store", "gpt", "--pause", "0s", "--max-futile", "100", "-q", "--",
                        "sh", "-c", script + " || exit $CKPTDELTA_ATTEMPT"], check=True)
        stamps = [float(line) for line in Path(folder, "times").read_text().split()]
        times = [after - before for before, after in zip(stamps, stamps[1:])]
    return statistics.median(times)


def month(draw, interval, start, noticing):
    """Returns the share of a month in steps that count."""
    now = useful = 0.0
    while now < MONTH:
        until = draw.expovariate(FAILURES / (DAYS * 86400.0))
        end = min(now + until, MONTH)
        ran = end - now
        # what was saved counts; the rest is trained again
        useful += ran if end == MONTH else ran - ran % interval
        now = end
        if now < MONTH:
            now += noticing["hang" if draw.random() < HANGS else "crash"] + start
    return useful / MONTH


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--months", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/bench_goodput.json")
    args = parser.parse_args()
    restart = measure_restart(args.build.resolve())
    ways = {"by hand": BY_HAND, "ckptdelta run": {"crash": restart + 5.0, "hang": max(HANG_FLOOR, 10 * STEP) + restart + 5.0}}
    rows = []
    for start in STARTS:
        for interval in INTERVALS:
            row = {"start_s": start, "interval_s": interval}
            for name, noticing in ways.items():
                draw = random.Random(1)
                shares = sorted(month(draw, interval, start, noticing) for _ in range(args.months))
                row[name] = {"mean": statistics.mean(shares), "low": shares[len(shares) // 20], "high": shares[-1 - len(shares) // 20]}
            rows.append(row)
    print(f"{FAILURES} failures in {DAYS} days, {HANGS:.0%} of them hangs. By hand a crash takes {BY_HAND['crash'] / 60:.0f} minutes to be restarted, "
          f"and a hang {BY_HAND['hang'] / 60:.0f}.\nrun: {restart:.3f} s (measured) and a pause of 5 s; a hang {HANG_FLOOR / 60:.0f} minutes more.\n")
    print("| starting the job | a save every | by hand | ckptdelta run |\n|---|---|---|---|")
    for row in rows:
        cells = [f"{100 * row[name]['mean']:.1f} % ({100 * row[name]['low']:.1f} to {100 * row[name]['high']:.1f})" for name in ways]
        print(f"| {row['start_s'] / 60:.0f} min | {row['interval_s'] / 60:.0f} min | {cells[0]} | {cells[1]} |")
    args.out.write_text(json.dumps({"benchmark": "goodput", "date": time.strftime("%Y-%m-%d"), "failures": FAILURES, "days": DAYS, "hangs": HANGS,
                                    "months": args.months, "restart_s": restart, "pause_s": 5.0, "hang_floor_s": HANG_FLOOR, "by_hand_s": BY_HAND,
                                    "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
