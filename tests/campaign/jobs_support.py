"""What campaigns of jobs share: checks, waits, signals, processes found by a mark in their environment."""

import collections
import os
import signal
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Failure(Exception):
    """A case did not end as it must."""


class Skip(Exception):
    """A case cannot be played here."""


def check(condition, message):
    if not condition:
        raise Failure(message)


def wait_for(condition, what, seconds=300):
    """Returns the first value of the condition that is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        check(time.monotonic() < end, f"waited {seconds} s for {what}")
        time.sleep(0.005)
    return value


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def losses_of(path):
    """Step and loss, as hex floats, of each line that was written whole."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line.split()[:2] for line in lines]


# ------------------------------------------------------------------------------------------------------ processes


def read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def stat_of(pid):
    """State and parent. Both follow the name, which may contain anything."""
    words = read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    return (words[0], int(words[1])) if words else ("X", 0)


def words_of(pid):
    return read(pid, "cmdline").decode(errors="replace").split("\0")[:-1]


def marked(*words):
    """The living processes that have a variable in their environment whose name begins with these words."""
    mark, found = "\0" + "_".join(map(str, words)), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if mark.encode() in b"\0" + read(pid, "environ") and stat_of(pid)[0] not in "ZX":
            found.append(pid)
    return found


def tree_below(top, pids):
    """The process itself and those below it, parents first."""
    children = collections.defaultdict(list)
    for pid in pids:
        children[stat_of(pid)[1]].append(pid)
    tree = [top]
    for pid in tree:
        tree += children[pid]
    return tree
