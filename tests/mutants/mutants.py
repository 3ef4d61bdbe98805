"""Breaks the code in one place at a time, and sees whether the tests of its area notice.

    mutants.py [--seed N] [--count N] [--area NAME]... [--campaign SECONDS] [--jobs N] [--out FILE]

Mutants are drawn by the seed, kind after kind: a sync that is gone, two steps in the other order, a check or a call that is dropped, a bound that is
one off, a condition that is turned round. The draw depends on the text of a line and not on its number, so most of it stays when code changes
elsewhere. Mutants that cannot matter are left out: `equivalent` has the rules, and equivalent.json those that somebody has proved, with the reasons.
Each is built in a copy of the tracked files. The tests that areas.json names for its file run, the fastest first, until one fails; then, if a bound
is one off, those with sanitizers; then the campaign, if asked for. A mutant that does not compile, or that compiles to the same code, is replaced by
another one. A test that fails is run on unbroken code, too, once for all mutants: there it must pass. Several are tried side by side, each in a copy
of its own. Results are written to FILE one by one, and a run with the same FILE goes on from there. The last line reads `N mutants, N caught, N
survived`; survivors are listed before it.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"\b(dir_sync|file_sync)\(")
STATEMENT = re.compile(r"^( +)(?!return|break|continue|goto|else|case|default|do\b|while|if|for|switch)"
                       r"[A-Za-z_*(][\w>.\[\]*&-]*(\(| [-+|]?= |\+\+).*;$")
DECLARATION = re.compile(r"^ +(const |static |unsigned |struct )?[a-z_]\w*( \*| )\**[a-z_]\w*(\[\w*\])?( =|;|,)")
STEP = re.compile(r"^( +)if \(status == CKD_OK.*\) \{$")
RELEASE = re.compile(r"^ +(free|\w+_(free|close|leave|release))\([^()]*\);$")
EXTREME = re.compile(r"([\w.>-]+) (<|>|<=|>=) ([\w.>-]+) \? (\1 : \3|\3 : \1)(?![\w.>-])")
ASSIGNMENT = re.compile(r"^ +([\w.>-]+) = ([^()]|sizeof\()*;$")
SPARE = re.compile(r"(alloc|bytes_scratch|bytes_extend)\(.* \+ 1\b")  # an element more than needed, as nothing may be NULL
REMOVED = re.compile(r"^ +(\(void\))?(\w+ = )?(file_remove|file_rename_noreplace|file_rename|lock_release|remove_\w+|\w*_remove\w*)\(.*;$")


class Mutant:
    def __init__(self, area, path, line, kind, lines, replaced):
        self.area, self.path, self.line, self.kind = area, path, line, kind
        self.lines, self.replaced = lines, replaced  # so many lines from `line` on, and what takes their place

    def text(self, source):
        lines = source.split("\n")
        return "\n".join(lines[:self.line] + self.replaced + lines[self.line + self.lines:])

    def describe(self, source):
        lines = source.split("\n")
        was = " / ".join(x.strip() for x in lines[self.line:self.line + self.lines])
        now = " / ".join(x.strip() for x in self.replaced)
        return f"{self.path}: {self.kind}: {was[:160]}  ->  {now[:160] or 'nothing'}"


def closing(text, at):
    """Behind the parenthesis that closes the one at `at`; None if it is on another line."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return None


def end_of_block(lines, at):
    """The line of the brace that closes the block which line `at` opens."""
    indent = re.match(" *", lines[at]).group()
    for i in range(at + 1, len(lines)):
        if lines[i] == indent + "}":
            return i
        if lines[i].startswith(indent + "}"):
            return None  # an else
    return None


def mutants_of_line(lines, i):
    line = lines[i]
    code = re.sub(r'"(\\.|[^"\\])*"', lambda m: '"' + "_" * (len(m.group()) - 2) + '"', line)
    code = re.sub(r"/\*.*?\*/", lambda m: " " * len(m.group()), code)
    for m in CALL.finditer(code):
        end = closing(code, m.end() - 1)
        if end:
            yield "sync removed", 1, [line[:m.start()] + "CKD_OK" + line[end:]]
    if STATEMENT.match(line) and i + 1 < len(lines) and STATEMENT.match(lines[i + 1]):
        same = re.match(" *", line).group() == re.match(" *", lines[i + 1]).group()
        if same and not DECLARATION.match(line) and not DECLARATION.match(lines[i + 1]):
            yield "steps swapped", 2, [lines[i + 1], line]
    if STEP.match(line):
        end = end_of_block(lines, i)
        after = end_of_block(lines, end + 1) if end and end + 1 < len(lines) and STEP.match(lines[end + 1]) else None
        if after:
            yield "steps swapped", after + 1 - i, lines[end + 1:after + 1] + lines[i:end + 1]
    if re.match(r"^ +if \(.*\) \{$", line) and i + 2 < len(lines) and lines[i + 2].strip() == "}" and \
            re.match(r"^ +(return .*|status = .*);$", lines[i + 1]):
        yield "check dropped", 3, []
    if re.match(r"^ +THEN\(.*\);$", line):
        yield "check dropped", 1, []
    if REMOVED.match(line):
        yield "call dropped", 1, [re.match(" *", line).group() + ";"]
    for m in re.finditer(r" (<|>|<=|>=) | ([-+]) 1\b", code):
        other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}.get(m.group(1))
        yield "one off", 1, [line[:m.start()] + (f" {other} " if other else "") + line[m.end():]]
    for m in re.finditer(r"^ +(?:\} else )?if (\()", code):
        end = closing(code, m.start(1))
        if end:
            yield "condition turned round", 1, [line[:m.start(1)] + "(!" + line[m.start(1):end] + ")" + line[end:]]
    for m in re.finditer(r" (&&|\|\|) ", code):
        yield "condition turned round", 1, [line[:m.start()] + (" || " if m.group(1) == "&&" else " && ") + line[m.end():]]
    for m in re.finditer(r"= (true|false);", code):
        yield "condition turned round", 1, [line[:m.start()] + ("= false;" if m.group(1) == "true" else "= true;") + line[m.end():]]


def function_at(lines, at):
    while at > 0 and not re.match(r"[a-z].*\(", lines[at]):
        at -= 1
    found = re.search(r"(\w+)\(", lines[at])
    return found.group(1) if found else ""


def spared_syncs():
    """Syncs that may be left out, as FILE:FUNCTION; the test of power cuts has the reasons."""
    text = (ROOT / "tests/faults/test_power_cut.c").read_text()
    return re.findall(r'"([^" ]+) ', text[text.index("spared[] = {"):text.index("NULL};")])


def equivalent(mutant, lines, spared):
    """The code does the same: things are released or set in another order, a minimum of equal values, memory for an element more or less that is never
    used, a sync that no power cut needs."""
    if mutant.kind == "steps swapped" and mutant.lines == 2:
        sets = [ASSIGNMENT.match(x) for x in mutant.replaced]
        independent = all(sets) and not any(re.search(rf"(?<![\w>.]){re.escape(a[1])}(?!\w)", b[0]) for a, b in (sets, sets[::-1]))
        return independent or all(RELEASE.match(x) for x in mutant.replaced)
    if mutant.kind == "one off":
        line = lines[mutant.line]
        return EXTREME.search(line) is not None or (SPARE.search(line) is not None and " + 1" not in mutant.replaced[0])
    if mutant.kind == "sync removed":
        place = f"{mutant.path}:{function_at(lines, mutant.line)}"
        return any(place == s.partition("#")[0] or (s.endswith("*") and place.startswith(s[:-1])) for s in spared)
    return False


def all_mutants(areas, wanted):
    spared = spared_syncs()
    proved = {p["mutant"] for p in json.loads((Path(__file__).parent / "equivalent.json").read_text())}
    for area, what in areas.items():
        if wanted and area not in wanted:
            continue
        for pattern in what["files"]:
            for path in sorted(glob.glob(pattern, root_dir=ROOT)):
                lines = (ROOT / path).read_text().split("\n")
                for i in range(len(lines)):
                    if not lines[i].startswith(" ") or lines[i].lstrip().startswith(("*", "/*")):
                        continue
                    for kind, count, replaced in mutants_of_line(lines, i):
                        mutant = Mutant(area, path, i, kind, count, replaced)
                        if not equivalent(mutant, lines, spared) and mutant.describe("\n".join(lines)) not in proved:
                            yield mutant


def usual_times():
    """Seconds that a test takes at the quick level; here it runs at the full one."""
    lines = (ROOT / "tests/times.txt").read_text().splitlines()
    return {words[2].removesuffix(".c"): float(words[0]) for words in map(str.split, lines)}


class Workshop:
    """A copy of the sources, in which one mutant at a time is built and tried."""

    def __init__(self, args, areas, like=None):
        self.args, self.areas = args, areas
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.sanitized = False
        self.needs_all_states = False  # of the disks after a power cut: without a sync only some of them are wrong
        self.usual = like.usual if like else usual_times()
        self.right = like.right if like else set()  # what has passed on unbroken code
        if like:
            shutil.copytree(like.root, self.root, dirs_exist_ok=True, symlinks=True)
            self.builds = like.builds
            return
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.builds = {}
        for self.sanitized in (True, False):
            self.builds[self.sanitized] = self.make("-s", "print-build-dir").stdout.split("\n")[0]

    @property
    def build(self):
        return self.builds.get(self.sanitized, "")

    def command(self, command, timeout=None):
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS")}
        env.update(CKPTDELTA_BUILD=str(self.root / self.build), CKD_POWER_SITES="0")
        if self.sanitized:
            env.update(ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=0:strict_string_checks=1")
        if not self.needs_all_states:
            env.update(CKD_POWER_STATES="40")
        env.update(CKPTDELTA=f"{env['CKPTDELTA_BUILD']}/ckptdelta", PYTHONDONTWRITEBYTECODE="1")
        env.setdefault("TMPDIR", "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
        process = subprocess.Popen(command, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        try:
            text = process.communicate(timeout=timeout)[0]
            return subprocess.CompletedProcess(command, process.returncode, text)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return subprocess.CompletedProcess(command, -9, "takes too long")

    def make(self, *targets, jobs=1):
        return self.command(["make", f"-j{jobs}", "LINT=", *(["SAN=address,undefined", "OPT=-O1"] if self.sanitized else []), *targets])

    def run_test(self, name):
        program = not name.endswith(".py")
        made = self.make(f"{self.build}/tests/{name}" if program else "programs")
        if made.returncode != 0:
            return made
        command = [f"{self.build}/tests/{name}"] if program else \
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "markers=slow", *map(str, self.root.glob(f"tests/**/{name}"))]
        return self.command(command, timeout=max(300, (100 if self.sanitized else 20) * self.usual.get(name, 1)))

    def prepare(self, names):
        self.make("programs", *(f"{self.build}/tests/{n}" for n in names if not n.endswith(".py")),
                  f"{self.build}/tests/libcampaign_faults.so", jobs=os.cpu_count() or 1)

    def catches(self, path, source, what, run):
        """Whether it fails on the broken code that `path` has now. On `source`, the unbroken code, it must pass."""
        if run().returncode in (0, 77):
            return False
        if what not in self.right:
            broken = path.read_text()
            path.write_text(source)
            result = run()
            path.write_text(broken)
            if result.returncode not in (0, 77):
                sys.exit(f"{what} fails on unbroken code: {result.stdout[-2000:]}")
            self.right.add(what)
        return True

    def campaign(self, seed):
        self.make("programs", f"{self.build}/tests/libcampaign_faults.so")
        return self.command([sys.executable, "tests/campaign/campaign.py", "--seconds", str(self.args.campaign), "--seed", str(seed),
                             "--stop", "--shrink", "0"], timeout=self.args.campaign + 120)

    def code(self, path):
        """What the compiler makes of it, without what serves debuggers."""
        made = f"{self.build}/obj/{path[:-2]}.o"
        self.make(made)
        with tempfile.NamedTemporaryFile() as stripped:
            self.command(["objcopy", "--strip-debug", made, stripped.name])
            return stripped.read()

    def caught_by(self, path, source, area, sanitized):
        """The first test that catches it, the fastest first; or None."""
        self.sanitized = sanitized
        try:
            for name in sorted(self.areas[area]["tests"], key=lambda n: self.usual.get(n, 1)):
                what = f"{name} with sanitizers" if sanitized else name
                if not (sanitized and name.endswith(".py")) and self.catches(path, source, what, lambda n=name: self.run_test(n)):
                    return what
            return None
        finally:
            self.sanitized = False

    def try_mutant(self, mutant, seed):
        """None: it does not compile, or to the same code. Else what caught it, or ''."""
        path = self.root / mutant.path
        source, right = path.read_text(), self.code(mutant.path)
        path.write_text(mutant.text(source))
        self.needs_all_states = mutant.kind == "sync removed"
        try:
            if self.make(f"{self.build}/obj/internal.a").returncode != 0 or self.code(mutant.path) == right:
                return None
            caught = self.caught_by(path, source, mutant.area, False)
            if not caught and mutant.kind == "one off":
                caught = self.caught_by(path, source, mutant.area, True)
            if not caught and self.args.campaign and self.catches(path, source, "campaign", lambda: self.campaign(seed)):
                caught = "campaign"
            return caught or ""
        finally:
            path.write_text(source)


def draw(mutants, seed):
    """Kind after kind, so that rare kinds come as often as common ones."""
    kinds, seen = {}, {}
    for m in mutants:
        text = m.describe((ROOT / m.path).read_text())
        seen[text] = seen.get(text, 0) + 1
        order = hashlib.sha256(f"{seed} {seen[text]} {text}".encode()).digest()
        kinds.setdefault(m.kind, []).append((order, m))
    for kind, found in kinds.items():
        kinds[kind] = [m for _, m in sorted(found, key=lambda pair: pair[0], reverse=True)]
    while any(kinds.values()):
        for kind in sorted(kinds):
            if kinds[kind]:
                yield kinds[kind].pop()


class Results:
    """What is known, on the disk after each mutant."""

    def __init__(self, args):
        self.args, self.lock, self.saved, self.known = args, threading.Lock(), {}, {}
        if args.out and Path(args.out).exists():
            saved = json.loads(Path(args.out).read_text())
            if saved["seed"] == args.seed:
                self.saved, self.known = saved, {r["mutant"]: r for r in saved["results"]}

    def add(self, mutant, caught):
        what = mutant.describe((ROOT / mutant.path).read_text())
        with self.lock:
            self.known[what] = {"mutant": what, "kind": mutant.kind, "area": mutant.area, "caught": caught}
            if caught is not None:
                print(f"{'caught by ' + caught if caught else 'SURVIVED'}: {what}", flush=True)
            if self.args.out:
                Path(self.args.out).write_text(json.dumps({**self.saved, "seed": self.args.seed, "results": list(self.known.values())}, indent=1) + "\n")

    def count(self):
        return sum(r["caught"] is not None for r in self.known.values())


def try_all(workshop, drawn, results, until):
    """A worker: the next mutant, until there are enough. `drawn` is shared, and so is its lock."""
    while time.monotonic() < until:
        with results.lock:
            mutant = next(drawn, None)
            if mutant is None or results.count() + results.busy >= workshop.args.count:
                return
            results.busy += 1
        caught = workshop.try_mutant(mutant, workshop.args.seed)
        with results.lock:
            results.busy -= 1
        results.add(mutant, caught)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--area", action="append", default=[])
    parser.add_argument("--campaign", type=int, default=0, help="seconds of it for what the tests do not catch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=0, help="begin no other mutant after so long")
    parser.add_argument("--list", action="store_true", help="only say what would be tried")
    parser.add_argument("--out", help="a file for the results, as JSON")
    args = parser.parse_args()
    areas = json.loads((Path(__file__).parent / "areas.json").read_text())
    mutants = list(all_mutants(areas, args.area))
    drawn = draw(mutants, args.seed)
    print(f"{len(mutants)} mutants are possible", flush=True)
    if args.list:
        for _, m in zip(range(args.count), drawn):
            print(m.describe((ROOT / m.path).read_text()))
        return
    results = Results(args)
    results.busy = 0
    left = (m for m in drawn if m.describe((ROOT / m.path).read_text()) not in results.known)
    first = Workshop(args, areas)
    workshops = [first]
    try:
        first.prepare(sorted({t for a in args.area or areas for t in areas[a]["tests"]}))
        workshops += [Workshop(args, areas, first) for _ in range(1, args.jobs)]
        until = time.monotonic() + args.seconds if args.seconds else float("inf")
        with concurrent.futures.ThreadPoolExecutor(len(workshops)) as pool:
            for done in [pool.submit(try_all, w, left, results, until) for w in workshops]:
                done.result()
    finally:
        for w in workshops:
            shutil.rmtree(w.root, ignore_errors=True)
    tried = [r for r in results.known.values() if r["caught"] is not None]
    survived = [r for r in tried if not r["caught"]]
    for r in survived:
        print(f"survived: {r['mutant']}")
    print(f"{len(tried)} mutants, {len(tried) - len(survived)} caught, {len(survived)} survived")


if __name__ == "__main__":
    main()
