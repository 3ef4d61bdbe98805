"""Breaks the code in one place at a time, and sees whether the tests of its area notice.

    mutants.py [--seed N] [--count N] [--area NAME]... [--campaign SECONDS] [--jobs N] [--check] [--out FILE]

Mutants are drawn by the seed, kind after kind: a sync that is gone, two steps in the other order, a check or a call that is dropped, a bound that is one
off, a condition that is turned round. Each is built in a copy of the tracked files, and the tests that areas.json names for its file run until one fails; then,
if asked for, the campaign. What does not compile is drawn anew. The last line reads `N mutants, N caught, N survived`; survivors are listed before it.
"""

import argparse
import glob
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"\b(dir_sync|file_sync)\(")
STATEMENT = re.compile(r"^( +)(?!return|break|continue|goto|else|case|default|do\b|while|if|for|switch)"
                       r"[A-Za-z_*(][\w>.\[\]*&-]*(\(| [-+|]?= |\+\+).*;$")
DECLARATION = re.compile(r"^ +(const |static |unsigned |struct )?[a-z_]\w*( \*| )\**[a-z_]\w*(\[\w*\])?( =|;|,)")
STEP = re.compile(r"^( +)if \(status == CKD_OK.*\) \{$")
REMOVED = re.compile(r"^ +(\(void\))?(\w+ = )?(file_remove|file_publish|file_replace|lock_release|remove_\w+|\w*_remove\w*)\(.*;$")


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
        return f"{self.path}:{self.line + 1}: {self.kind}: {was[:160]}  ->  {now[:160] or 'nothing'}"


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


def all_mutants(areas, wanted):
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
                        yield Mutant(area, path, i, kind, count, replaced)


class Workshop:
    def __init__(self, args, areas):
        self.args, self.areas = args, areas
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.build = self.command(["make", "-s", "print-build-dir"]).stdout.split("\n")[0]
        self.usual = {}  # seconds that a test takes on unbroken code

    def command(self, command, timeout=None):
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS")}
        env.update(CKPTDELTA_BUILD=str(self.root / getattr(self, "build", "")), CKD_POWER_SITES="0", CKD_POWER_STATES="40")
        process = subprocess.Popen(command, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        try:
            process.communicate_out = process.communicate(timeout=timeout)[0]
            return subprocess.CompletedProcess(command, process.returncode, process.communicate_out)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return subprocess.CompletedProcess(command, -9, "takes too long")

    def make(self, *targets):
        return self.command(["make", f"-j{self.args.jobs}", "LINT=", *targets])

    def run_test(self, name):
        made = self.make(f"{self.build}/tests/{name}")
        if made.returncode != 0:
            return made
        return self.command([f"{self.build}/tests/{name}"], timeout=max(60, 8 * self.usual.get(name, 75)))

    def prepare(self, names):
        for name in names:
            begun = time.monotonic()
            result = self.run_test(name)
            self.usual[name] = time.monotonic() - begun
            if result.returncode not in (0, 77):
                sys.exit(f"{name} fails on unbroken code: {result.stdout[-2000:]}")

    def campaign(self, seed):
        self.make("programs", f"{self.build}/tests/libcampaign_faults.so")
        return self.command([sys.executable, "tests/campaign/campaign.py", "--seconds", str(self.args.campaign), "--seed", str(seed),
                             "--stop", "--shrink", "0"], timeout=self.args.campaign + 120)

    def try_mutant(self, mutant, seed):
        """None: it does not compile. Else who caught it, or ''."""
        path = self.root / mutant.path
        source = path.read_text()
        path.write_text(mutant.text(source))
        try:
            if self.make(f"{self.build}/obj/internal.a").returncode != 0:
                return None
            for name in self.areas[mutant.area]["tests"]:
                if self.run_test(name).returncode not in (0, 77):
                    return name
            if self.args.campaign and self.campaign(seed).returncode != 0:
                return "campaign"
            return ""
        finally:
            path.write_text(source)


def draw(mutants, seed):
    """Kind after kind, so that rare kinds come as often as common ones."""
    chance = random.Random(seed)
    kinds = {}
    for m in mutants:
        kinds.setdefault(m.kind, []).append(m)
    for of_kind in kinds.values():
        chance.shuffle(of_kind)
    while any(kinds.values()):
        for kind in sorted(kinds):
            if kinds[kind]:
                yield kinds[kind].pop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--area", action="append", default=[])
    parser.add_argument("--campaign", type=int, default=0, help="seconds of it for what the tests do not catch")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0, help="begin no other mutant after so long")
    parser.add_argument("--check", action="store_true", help="run the tests on unbroken code first, which also says how long they may take")
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
    workshop = Workshop(args, areas)
    results, begun = [], time.monotonic()
    try:
        chosen = args.area or list(areas)
        if args.check:
            workshop.prepare(sorted({t for a in chosen for t in areas[a]["tests"]}))
        begun = time.monotonic()
        for m in drawn:
            if len(results) == args.count or (args.seconds and time.monotonic() - begun > args.seconds):
                break
            caught = workshop.try_mutant(m, args.seed)
            if caught is not None:
                what = m.describe((ROOT / m.path).read_text())
                results.append({"mutant": what, "kind": m.kind, "area": m.area, "caught": caught})
                print(f"{'caught by ' + caught if caught else 'SURVIVED'}: {what}", flush=True)
    finally:
        shutil.rmtree(workshop.root, ignore_errors=True)
    survived = [r for r in results if not r["caught"]]
    for r in survived:
        print(f"survived: {r['mutant']}")
    if args.out:
        Path(args.out).write_text(json.dumps({"seed": args.seed, "results": results}, indent=1))
    print(f"{len(results)} mutants, {len(results) - len(survived)} caught, {len(survived)} survived")


if __name__ == "__main__":
    main()
