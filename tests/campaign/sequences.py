"""What campaigns of short random sequences share: playing one seed after the other for some time, and telling what failed.

A sequence has `script`, the commands that it has run, and raises Failure. The exit status is 1 if one failed, or if none was played.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path


class Failure(Exception):
    pass


def outcome(sequence, seed, *args):
    """Plays a sequence. Returns the failure with the commands that led to it, or None."""
    try:
        sequence.play(*args)
        return None
    except Failure as failure:
        return "\n".join([*sequence.script, f"seed {seed}: {failure}"])


def drive(about, name, play):
    """play(command, seed, folder) returns a failure or None."""
    p = argparse.ArgumentParser(description=about.splitlines()[0])
    p.add_argument("command")
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    seed, failed, end = a.seed, 0, time.monotonic() + a.seconds
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    while time.monotonic() < end:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=memory))
        failure = play(Path(a.command).resolve(), seed, folder)
        shutil.rmtree(folder)
        if failure:
            print(failure, flush=True)
            failed += 1
        seed += 1
    print(f"{seed - a.seed - failed} passed, {failed} failed, 0 skipped; seeds {a.seed} to {seed - 1}")
    return 1 if failed or seed == a.seed else 0
