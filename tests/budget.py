"""Which tests run when there is no time for all: `run.py --budget SECONDS`.

The budget is processor time. Tests that take little always run. Then come those of what was changed, then the others, in
an order drawn by the seed of the sweeps, as long as there is budget. Another commit draws others.
"""

import importlib.util
import random
import re
import subprocess
from pathlib import Path

ALWAYS = 1.5  # seconds of processor time up to which a test always runs
SANITIZED = 2.1  # times the processor time without sanitizers, summed over all tests
# A test of the package skips most of its cases without torch, and all under sanitizers.
SKIPPED = 1.0


def git(root, *words):
    try:
        done = subprocess.run(["git", "-C", str(root), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:
        return None
    return done.stdout.split() if done.returncode == 0 else None


def changed(root):
    """Paths that differ from what the branch was pushed to; if nothing does, or nothing is known of that, what the last commit changed."""
    new = git(root, "ls-files", "--others", "--exclude-standard") or []
    base = git(root, "merge-base", "HEAD", "@{upstream}") or ["HEAD"]
    paths = (git(root, "diff", "--name-only", base[0]) or []) + new
    return [Path(p) for p in paths or git(root, "diff", "--name-only", "HEAD~1") or []]


def words(name):
    return re.sub("^(test|fuzz|check)_", "", Path(name).stem).split("_")


def concerns(path, test):
    """Whether a change of the file at `path` is what the test at `test` is for: its own source, its folder's counterpart, or its name."""
    if path.parts[0] == "tests":
        return path == test
    folder = path.parent.parts
    if not folder or not path.suffix:
        return False
    names = {folder[0], path.stem}
    return test.parent.parts == ("tests", *folder) or any(w == n or len(n) > 3 and w.startswith(n) for n in names for w in words(test.name))


def choose(jobs, budget, seed, root, cost):
    """Divides jobs, which have a `name` and a `source`, into those that run and those left out. `cost` is processor time by name."""
    paths = changed(root)
    slow = sorted((j for j in jobs if cost(j.name) > ALWAYS), key=lambda j: j.name)
    random.Random(seed).shuffle(slow)
    slow.sort(key=lambda j: not any(concerns(p, j.source.relative_to(root)) for p in paths))
    left = budget - sum(cost(j.name) for j in jobs if cost(j.name) <= ALWAYS)
    out = set()
    for job in slow:
        if cost(job.name) <= left:
            left -= cost(job.name)
        else:
            out.add(job.name)
    return [j for j in jobs if j.name not in out], [j for j in jobs if j.name in out]


def costs(lines, sanitized):
    """Processor time by name, from lines `SECONDS PROCESSOR-SECONDS NAME [waits] [torch]`."""
    without = importlib.util.find_spec("torch") is None
    found = {}
    for line in lines:
        _, processor, name, *about = line.split()
        skips = name.startswith("test_python_") if sanitized else without and "torch" in about
        found[name] = SKIPPED if skips else float(processor) * (SANITIZED if sanitized else 1)
    return lambda name: found.get(name, ALWAYS)
