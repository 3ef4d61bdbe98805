"""How many faults of training `ckptdelta run` notices, and how often it is wrong.

    bench_alarms.py [--build DIR] [--seeds N] [--steps N] [--out FILE]

Runs the example trainers below `ckptdelta run`, with each seed once in good health and once with each fault at two thirds
of the steps, and reads the journal. A fault is noticed if the attempt has an alarm of the expected kind from that step on,
or a suspect checkpoint for NaN. Any other alarm that is not about the time of a save is false. Alarms about time are
counted by themselves: whether a save was slow is up to the machine.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--width", "64", "--layers", "4", "--heads", "4", "--context", "32", "--batch", "8", "--threads", "1", "--save-every", "5"]
SINGLE = ["train_gpt"]
PIPELINE = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", "train_pipeline"]
# name, trainer, fault, what notices it
ROWS = (("healthy", SINGLE, None, None), ("healthy, 4 stages", PIPELINE, None, None), ("loss spike", SINGLE, "spike", "a metric"),
        ("frozen optimizer", SINGLE, "freeze", "weights no longer change"), ("NaN in a weight", SINGLE, "nan", "suspect"),
        ("a matrix becomes zeros", SINGLE, "zero", "a tensor changes"), ("one stage of 4 stuck", PIPELINE, "stuck", "weights no longer change"))


def train(args, trainer, fault, seed):
    """Returns the messages of `run` about alarms, and the last attempt."""
    with tempfile.TemporaryDirectory() as folder:
        store, command = f"{folder}/store", [args.build / word if word.startswith("train_") else word for word in trainer]
        text = Path(folder, "text")  # the same on every machine
        text.write_bytes(b"".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md"))))
        command += [*MODEL, "--text", text, "--seed", seed, "--steps", args.steps, "--store", store, "--background", "copy"]
        command += ["--fault", f"{fault}@{args.at}"] if fault else []
        command += ["--micro-batches", 4] if trainer is PIPELINE else []
        environment = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
        done = subprocess.run(list(map(str, [args.build / "ckptdelta", "run", store, "--run", "gpt", "--max-restarts", 0, "--", *command])),
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
        found = subprocess.run([args.build / "ckptdelta", "attempts", store, "--json"], check=True, stdout=subprocess.PIPE, text=True)
        attempt = json.loads(found.stdout)["attempts"][-1]
        assert fault == "nan" or attempt["exit"] == 0, done.stderr
        return [line.split("alarm: ")[1] for line in done.stderr.splitlines() if "alarm: " in line], attempt


def step_of(alarm):
    return int(alarm.split("step ")[1].split(":")[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, help="also as JSON")
    args = parser.parse_args()
    args.build, args.at = args.build.resolve(), args.steps * 2 // 3
    rows = []
    for name, trainer, fault, sign in ROWS:
        if trainer is PIPELINE and not (shutil.which("mpirun") and (args.build / "train_pipeline").exists()):
            continue
        row = {"what": name, "runs": 0, "noticed": 0, "false": 0, "time": 0, "after_steps": []}
        for seed in range(1, args.seeds + 1):
            alarms, attempt = train(args, trainer, fault, seed)
            slow = [a for a in alarms if "a save took" in a]
            right = [a for a in alarms if sign and sign in a and step_of(a) >= args.at]
            # a frozen optimizer makes deltas small and a spike makes them large: these follow from the fault
            others = [a for a in alarms if a not in slow and a not in right and not (fault and step_of(a) >= args.at)]
            noticed = bool(attempt["anomaly"]) if sign == "suspect" else bool(right)
            row["runs"] += 1
            row["noticed"] += noticed
            row["false"] += len(others)
            row["time"] += len(slow)
            if right:
                row["after_steps"].append(step_of(right[0]) - args.at)
        rows.append(row)
    print(f"{args.seeds} seeds, {args.steps} steps, a save every 5; faults at step {args.at}\n")
    print("| training | runs | noticed | steps until then, at most | false alarms | slow saves |\n|---|---|---|---|---|---|")
    for (name, _, fault, _), row in zip([r for r in ROWS if any(r[0] == x["what"] for x in rows)], rows):
        late = max(row["after_steps"], default="-")
        print(f"| {name} | {row['runs']} | {row['noticed'] if fault else '-'} | {late} | {row['false']} | {row['time']} |")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "alarms", "date": time.strftime("%Y-%m-%d"), "seeds": args.seeds, "steps": args.steps,
                                        "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
