"""Adds up what campaigns have played, over many runs: record.json beside this file.

A run counts for the sources it was played on. So long as they stay the same, hours played on several days or machines add up.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import resource
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("record.json")
SAME_CODE = Path(__file__).with_name("same_code.json")
# supervise is not among them: it starts programs, and leaves stores to the library.
PRODUCT = ("base", "catalog", "cli", "codec", "engine", "include", "kernels", "mpi")
# No script has an accelerator, a session, an agent, a follower or a supervisor: it would never run these.
UNPLAYED = ("cli/commands/agent", "cli/commands/attempts.c", "cli/commands/follow.c", "cli/commands/run.c", "engine/device/",
            "engine/follow/", "engine/session/", "engine/slots/", "include/ckptdelta_agent.h", "include/ckptdelta_follow.h",
            "include/ckptdelta_progress.h", "include/ckptdelta_session.h", "kernels/cuda/")


COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|/\*.*?\*/""", re.DOTALL)


def hash_of(paths, root=ROOT):
    """A hash of the names and the code of sources. Comments and white space do not count."""
    hashed = hashlib.sha256()
    for path in paths:
        code = COMMENT.sub(lambda m: m[1] or " ", path.read_text())
        hashed.update(f"{path.relative_to(root).as_posix()}\n{' '.join(code.split())}\n".encode())
    return hashed.hexdigest()[:12]


def sources_below(places, root=ROOT):
    """The C files in these folders, or at these paths, of the project."""
    paths = (p for place in places for p in ((root / place).rglob("*") if (root / place).is_dir() else [root / place]))
    return sorted(p for p in paths if p.suffix in (".c", ".h", ".cu", ".cuh", ".sql"))


def hash_of_tree(root=ROOT):
    """Of all sources that scripts run."""
    return hash_of((p for p in sources_below(PRODUCT, root) if not p.relative_to(root).as_posix().startswith(UNPLAYED)), root)


def source():
    """The same, or the hash of older sources that compile to the same code: same_code.py has shown it."""
    same, found = json.loads(SAME_CODE.read_text()), hash_of_tree()
    while found in same:
        found = same[found]
    return found


def processor_seconds():
    """Of this process and of all that it waited for. Processes that were killed count, too."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


@contextlib.contextmanager
def locked(path):
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def runs(path=FILE):
    return json.loads(Path(path).read_text()) if Path(path).exists() else []


class Recorded:
    """One process that plays something. It is recorded again after each piece, so that a run that is cut off counts."""

    def __init__(self, path, seed, played_source):
        self.path = Path(path)
        self.entry = {"begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "source": played_source, "seed": seed,
                      "process": os.getpid()}

    def write(self, what):
        with locked(self.path):
            others = [r for r in runs(self.path) if any(r[k] != self.entry[k] for k in self.entry)]
            self.path.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*others, {**self.entry, **what}]) + "\n]\n")


class Run(Recorded):
    def __init__(self, path, seed):
        super().__init__(path, seed, source())
        self.modes, self.counts, self.failed = {}, {}, []

    def add(self, seed, mode, counts, failed):
        self.modes[mode] = self.modes.get(mode, 0) + 1
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        if failed:
            self.failed.append(seed)
        self.write({"last_seed": seed, "processor_seconds": round(processor_seconds(), 1), "scripts": self.modes, "counts": self.counts,
                    "failed": self.failed})


def summary(path=FILE):
    """One sentence on the runs that were played on the sources as they are, or None."""
    mine = [r for r in runs(path) if r["source"] == source()]
    if not mine:
        return None
    modes = {}
    for r in mine:
        for mode, count in r["scripts"].items():
            modes[mode] = modes.get(mode, 0) + count
    failed = [seed for r in mine for seed in r["failed"]]
    text = (f"{sum(r['processor_seconds'] for r in mine) / 3600:.1f} processor hours on sources {source()}: "
            f"{sum(r['counts']['commands'] for r in mine)} commands in {sum(modes.values())} scripts "
            f"({', '.join(f'{count} {mode}' for mode, count in sorted(modes.items()))}); ")
    # a failure stays, whatever passes later: not all scripts do the same again
    return text + (f"**failed: seeds {', '.join(map(str, failed))}**" if failed else "0 lost, 0 wrong, 0 hung, no file left over")
