"""Plays random commands, and compares the stores with a model of what must be readable.

`make campaign` starts it, and tests/README.md explains it.

    campaign.py [--seconds N] [--seed N] [--mode NAME] [--jobs N] [--ops N]    plays scripts until a time limit
    campaign.py --replay FILE                                                  plays a failed script again

Each script has a seed, which determines its mode and its commands. A script that fails is shrunk and saved,
as commands for people and as a file for --replay. The last line reads `N passed, N failed, N skipped`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from crowd import Crowd  # noqa: E402
from model import Failure  # noqa: E402
from plans import MODES, Plan  # noqa: E402
from play import Player  # noqa: E402
import record  # noqa: E402
import shrink  # noqa: E402


class Settings:
    def __init__(self, args):
        build = os.environ.get("CKPTDELTA_BUILD") or str(Path(__file__).resolve().parents[2] / "build/current")
        self.command = args.command or os.environ.get("CKPTDELTA") or f"{build}/ckptdelta"
        shim = Path(args.shim or f"{build}/tests/libcampaign_faults.so").resolve()
        self.shim = shim if shim.exists() and not os.environ.get("CKPTDELTA_SAN") else None
        ranks = Path(args.ranks or f"{build}/tests/campaign_ranks").resolve()
        self.ranks = ranks if ranks.exists() else None
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=args.folder or fast_folder()))
        self.out = Path(args.out)


def fast_folder():
    """A folder in memory if possible: the campaign does not test power cuts."""
    if os.environ.get("TMPDIR"):
        return os.environ["TMPDIR"]
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def play(settings, seed, ops, plan=None, length=0, deadline=None):
    """Returns (Failure or None, the commands played, the player). With a plan, commands are drawn; otherwise
    `ops` are played."""
    folder = settings.folder / f"{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    player = Player(settings, folder, seed)
    played = []
    try:
        for i in range(length if plan else len(ops)):
            op = plan.draw(player.world) if plan else ops[i]
            played.append(op)
            player.play(op)
            if deadline and time.monotonic() > deadline:
                break
        player.finish()
        return None, played, player
    except Failure as failure:
        return failure, played, player
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell_failure(settings, seed, mode, failure, ops, shrink_seconds):
    print(f"\nFAILED seed {seed} mode {mode} after {len(ops)} commands: {failure}", flush=True)

    def again(some):
        return play(settings, seed, some)

    shrunk, failure, player = shrink.shrink(ops, failure, again, shrink_seconds)
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / f"{mode}-{seed}.json"
    path.write_text(json.dumps({"seed": seed, "mode": mode, "kind": failure.kind, "ops": shrunk}, indent=1))
    text = "\n".join(player.script + [f"# {line}" for line in str(failure).splitlines()]) + "\n"
    path.with_suffix(".sh").write_text(text)
    print(f"--- {len(shrunk)} commands are enough; campaign.py --replay {path}\n{text}", flush=True)


def play_crowd(settings, seed, seconds, shrink_seconds):
    """Plays a crowd. If it fails, its commands are played again, one after the other."""
    crowd = Crowd(settings, seed, seconds)
    failure = crowd.play()
    if failure:
        print(f"\nFAILED seed {seed} mode crowd after {len(crowd.log)} commands: {failure}", flush=True)
        settings.out.mkdir(parents=True, exist_ok=True)
        path = settings.out / f"crowd-{seed}.jsonl"
        crowd.save_log(path)
        path.with_suffix(".txt").write_text(f"{failure}\n")  # the command that failed may not be in the log
        kept = settings.out / f"crowd-{seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(crowd.folder, kept, ignore=shutil.ignore_patterns("*.safetensors"))
        print(f"--- what each did: {path}; the stores: {kept}", flush=True)
        again, ops, _ = play(settings, seed, crowd.serialised())
        if again:
            tell_failure(settings, seed, "crowd", again, ops, shrink_seconds)
        else:
            print("--- one after the other, these commands do not fail", flush=True)
    shutil.rmtree(crowd.folder, ignore_errors=True)
    return failure, crowd.log, crowd


CROWD = "crowd"


def mode_of(seed, wanted):
    modes = sorted(MODES) + [CROWD]
    return wanted or modes[seed % len(modes)]


def campaign(settings, args):
    end, seed = time.monotonic() + args.seconds, args.seed
    passed = failed = 0
    totals = {}
    recorded = record.Run(args.record, args.seed) if args.record else None
    while time.monotonic() < end and (not args.scripts or passed + failed < args.scripts):
        mode = mode_of(seed, args.mode)
        if mode == CROWD:
            seconds = min(args.crowd_seconds, max(end - time.monotonic(), 2))
            failure, ops, player = play_crowd(settings, seed, seconds, args.shrink)
        else:
            failure, ops, player = play(settings, seed, [], Plan(seed, mode), args.ops, end)
        for name, count in player.counts().items():
            totals[name] = totals.get(name, 0) + count
        if recorded:
            recorded.add(seed, mode, player.counts(), failure is not None)
        if failure:
            failed += 1
            if mode != CROWD:
                tell_failure(settings, seed, mode, failure, ops, args.shrink)
            if args.stop:
                break
        else:
            passed += 1
        if args.verbose:
            print(f"seed {seed} {mode}: {len(ops)} commands, {'FAILED' if failure else 'ok'}", flush=True)
        seed += args.stride
    print(", ".join(f"{count} {name}" for name, count in totals.items()) + f"; seeds {args.seed} to {seed - args.stride}")
    return passed, failed


def campaign_side_by_side(args):
    """Runs several campaigns at a time. Each takes every n-th seed."""
    own = [a for a in sys.argv[1:]]
    children = [subprocess.Popen([sys.executable, __file__, *own, "--jobs", "1", "--seed", str(args.seed + i), "--stride", str(args.jobs)],
                                 stdout=subprocess.PIPE, text=True) for i in range(args.jobs)]
    passed = failed = 0
    for child in children:
        out = child.communicate()[0]
        print(out, end="", flush=True)
        counts = re.search(r"^(\d+) passed, (\d+) failed, \d+ skipped$", out, re.MULTILINE)
        passed += int(counts[1]) if counts else 0
        failed += int(counts[2]) if counts else 1
    return passed, failed


def replay(settings, path):
    saved = json.loads(Path(path).read_text())
    failure, _, player = play(settings, saved["seed"], saved["ops"])
    print("\n".join(player.script))
    print(f"FAILED: {failure}" if failure else "nothing failed")
    return (0, 1) if failure else (1, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1, help="from one seed to the next")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--mode", choices=sorted(MODES) + [CROWD])
    parser.add_argument("--crowd-seconds", type=float, default=20, help="how long many commands at a time go on")
    parser.add_argument("--ops", type=int, default=60, help="commands of a script")
    parser.add_argument("--scripts", type=int, default=0, help="end after so many scripts")
    parser.add_argument("--shrink", type=float, default=120, help="seconds to shrink a failing script for")
    parser.add_argument("--stop", action="store_true", help="end with the first failure")
    parser.add_argument("--replay", help="play a script that was saved")
    parser.add_argument("--command", help="the command; default: CKPTDELTA, or that of build/current")
    parser.add_argument("--shim", help="the library that is preloaded")
    parser.add_argument("--ranks", help="the program of one rank")
    parser.add_argument("--record", nargs="?", const=record.FILE, help="a file to add the run to; default: record.json beside this program")
    parser.add_argument("--folder", help="where stores are made")
    parser.add_argument("--out", default="build/campaign", help="where scripts that fail are saved")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    if args.jobs > 1:
        passed, failed = campaign_side_by_side(args)
    else:
        settings = Settings(args)
        try:
            passed, failed = replay(settings, args.replay) if args.replay else campaign(settings, args)
        finally:
            shutil.rmtree(settings.folder, ignore_errors=True)
    print(f"\n{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
