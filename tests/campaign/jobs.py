"""Random failures of training jobs below `ckptdelta run`: kills, hangs, damage, NaN, full disks, supervisors that die.

    jobs.py [--count N] [--seconds N] [--seed N] [--jobs N] [--trainers gpt,mpi,torch] [--cause NAME] [--torch PYTHON]
            [--out FILE] [--record]

The trainers are the examples: train_gpt, train_mpi on four ranks if there is an mpirun, and with --torch train_torch.py on
two processes of torchrun. A seed draws trainer, cause, moments and options. Each case ends as docs/run.md promises: exit
status, journal, no process left, every step trained, each loss and each final value bit for bit that of a training without
failures. It prints a line for each case, then how many of each cause and trainer have passed. A failed case can be repeated by
its seed, trainer and cause. The last line reads `N passed, N failed, N skipped`.
"""

import argparse
import concurrent.futures
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jobs_case
import jobs_causes
import jobs_record
import jobs_states
from jobs_support import ROOT, Failure, Skip, kill, marked
from jobs_trainers import Gpt, Mpi, Torch, has_mpi

STOPPED = threading.Event()
CAUSES = {f.__name__: f for f in (*jobs_causes.CAUSES, *jobs_states.CAUSES)}


def play(trainer, cause, seed, top):
    """Plays one case in a folder of its own. Returns what is recorded of it."""
    began, result, why, job = time.monotonic(), "passed", None, None
    try:
        job = jobs_case.make(trainer, Path(top), cause, seed)
        CAUSES[cause](job)
        job.check_end()
    except Skip as reason:
        result, why = "skipped", str(reason)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        result, why = "failed", str(error)
    if job:
        job.clean_up()
        if result == "failed":
            why += "\n" + (job.output.read_text(errors="replace")[-4000:] if job.output.exists() else "")
        shutil.rmtree(job.folder, ignore_errors=True)
    return {"seed": seed, "trainer": trainer.name, "cause": cause, "result": result, "why": why, "seconds": round(time.monotonic() - began, 1),
            "attempts": job.seen if job else 0, "figures": job.figures if job else {}}


def draw(seed, trainers, causes):
    """Trainer and cause of a seed. All causes take turns before one comes again."""
    turn, place = divmod(seed, len(causes))
    order = random.Random(turn).sample(causes, len(causes))
    return random.Random(seed).choice(trainers), order[place]


def trainers_of(args, build, top):
    made = {"gpt": lambda: Gpt(build, top / "reference-gpt")}
    if has_mpi(build):
        made["mpi"] = lambda: Mpi(build, top / "reference-mpi")
    if args.torch:
        made["torch"] = lambda: Torch(args.torch, build, top / "reference-torch")
    wanted = args.trainers.split(",") if args.trainers else list(made)
    missing = [name for name in wanted if name not in made]
    if missing:
        raise SystemExit(f"jobs.py: no trainer {', '.join(missing)} here (mpi needs mpirun, torch needs --torch PYTHON)")
    return [made[name]() for name in wanted]


def line_of(case):
    figures = " ".join(f"{k}={json.dumps(v)}" for k, v in case["figures"].items())
    text = f"{case['result']:7} {case['seed']:6} {case['trainer']:5} {case['cause']:24} {case['seconds']:6.1f} s {case['attempts']:2} attempts  {figures}"
    return text.rstrip() + (f"\n  {case['why']}" if case["why"] else "")


def stop_all(top):
    """Ends what the cases have started, and this program."""
    def handler(number, _frame):
        STOPPED.set()
        while left := marked(jobs_case.MARKER, os.getpid(), ""):
            for pid in left:
                kill(pid)
        for disk in top.glob("*/disk"):
            subprocess.run(["umount", disk], stderr=subprocess.DEVNULL)
        shutil.rmtree(top, ignore_errors=True)
        os._exit(128 + number)
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: supervisors would ignore it, too
        signal.signal(signal.SIGHUP, handler)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--count", type=int, default=10**9, help="of cases")
    add("--seconds", type=float, default=10**9, help="no case begins later [default: 60 without --count]")
    add("--seed", type=int, default=1)
    add("--jobs", type=int, default=1, help="cases at a time")
    add("--trainers", help="comma-separated [default: all]")
    add("--cause", choices=CAUSES)
    add("--torch", metavar="PYTHON", help="one that has torch")
    add("--build", type=Path, default=Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current"))
    add("--out", type=Path, help="write all cases to this file as JSON")
    add("--record", action="store_true", help="add the cases to jobs.json beside this program")
    args = parser.parse_args()
    if args.count == 10**9 and args.seconds == 10**9:
        args.seconds = 60
    return args


def main():
    args = options()
    build, cases, end = args.build.resolve(), [], time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="jobs-") as name, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        top = Path(name)
        stop_all(top)
        trainers = trainers_of(args, build, top)
        run = jobs_record.Run(args.seed) if args.record else None

        def one(seed):
            if time.monotonic() > end:
                return
            trainer, cause = draw(seed, trainers, [args.cause] if args.cause else list(CAUSES))
            case = play(trainer, cause, seed, top)
            if STOPPED.is_set():  # its processes were killed
                return
            cases.append(case)
            print(line_of(case), flush=True)
            if run:
                run.add(case)

        futures = set()
        for seed in range(args.seed, args.seed + args.count):
            if time.monotonic() > end:
                break
            futures.add(pool.submit(one, seed))
            if len(futures) >= args.jobs:
                done, futures = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
        for future in futures:
            future.result()
    print(jobs_record.table(cases))
    if args.out:
        args.out.write_text(json.dumps(cases, indent=1) + "\n")
    counts = {result: sum(c["result"] == result for c in cases) for result in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
