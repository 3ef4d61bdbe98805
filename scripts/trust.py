"""Runs what docs/trust.md tells of, and writes it: `make trust` calls it.

    trust.py --build FOLDER [--rows 'kills power ...'] [--length N]

Rows that are not asked for stay as they were, with their dates; those that were never run say so. --length: 1 takes minutes for each, and N
about N times as long where that can be chosen. The campaigns and the mutants add up over runs; 0 writes what is recorded of them. A row that
fails says so, and so does the exit status.
"""

import argparse
import datetime
import glob
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/campaign"))
import agents  # noqa: E402
import jobs_record  # noqa: E402
import record  # noqa: E402

PAGE = ROOT / "docs" / "trust.md"
COVERED = ("commit", "recovery", "compaction", "deletion")

HEAD = """# Test record and limits

`make trust` generates this page. Each row says when it was measured, on which commit, and by which command.
`make trust ROWS='flips mutants' LENGTH=10` measures only these rows again, ten times as long, and leaves the others
alone.

| what | outcome | by | when |
|---|---|---|---|
"""

TAIL = """
- **Kills**: a process is killed at every step that touches a file. The store must then open, list and load everything
  that was reported committed.
- **Power cuts**: every disk state that the recorded writes, names and syncs allow, by the model of ALICE
  (`tests/support/crash_disk.h`). Then the same with one sync left out at a time.
- **Faults**: every step on a file fails once, or permanently.
- **Flips**: bits of metadata and payloads.
- **Harmed**: one file of the store at a time is flipped, cut, swapped with another, lost, or replaced by a directory,
  or gets a page of zeros or older content. The files are chunk files, manifests, metadata files, parity, tombstones,
  the identity and the catalog. `verify` must find all damage that matters, and `repair` must restore what parity and
  manifests promise.
- **Campaign**: random commands of several processes, kills, faults and damage, beside a model of what must be readable
  (`tests/README.md`). The hours are those played on the sources of the product as they were then, by any number of runs.
  A script that failed stays listed for these sources, whatever passes later; `tests/README.md` says what was found.
- **Pushes, and lost manifests**: several stores, some of them damaged, are pushed into one at the same time; manifests
  are lost, and repaired later. All checkpoints must load afterwards.
- **Training jobs that fail**: trainers below `ckptdelta run` are killed, stopped, starved and disturbed in other ways
  (`docs/run.md`). Each case must end as the journal says, with the losses of a training without failures. The sum is over
  all sources.
- **Agents and nodes that fail**: the same with states in memory (`docs/agent.md`); nodes are lost with what they hold.
- **Mutants**: the code is broken in one place, and the tests of its area must notice (`tests/mutants/`).
- **Coverage**: branches that the tests of an area take; `tests/mutants/areas.json` names the areas.

## What is not promised

- *Disks that lie.* A disk or file system that reports a sync as done and then loses the data can lose committed
  checkpoints. So can a disk that loses old data. Only parity or another store brings these back.
- *More damage than parity covers.* Without parity, a damaged chunk file costs every checkpoint that reads it; `verify`
  names them. With parity, a group restores as many files as it has parity files.
- *Damage that nobody has looked for.* A delta does not read everything that it builds on, and a block with known values
  is not stored again. So a save on a checkpoint that is already damaged may be damaged, too. `scrub` finds damage early,
  and parity brings it back.
- *A lost manifest together with its row in the catalog.* `repair` needs one of them for run, step and lineage. Without
  both, `verify` at most names a chunk file. Remove a damaged catalog instead of restoring an older copy, and `pull` the
  checkpoint from another store. A deleted checkpoint whose manifest is lost cannot be restored either.
- *Deliberate forgery.* Checksums and content hashes find accidents. They are not signatures: anyone who can write to a
  store can replace a checkpoint by another valid one.
- *The catalog.* Only timings and caches are in the catalog alone, and they can be lost at any time. Everything else can
  be rebuilt from manifests and chunk files.
- *Unacknowledged saves.* An interrupted save exists as a whole or not at all; which of the two is not promised.
- *Values before they were handed over.* If the trainer computed a wrong value, or memory changed before a save, the
  store holds it as it came.
- *Lossy checkpoints* are as accurate as their recorded errors say, and no more. From the first load on, their bits do
  not change.
- *Network file systems* without atomic renames, locks or coherent directory listings.
- *Sampling.* The rows above are samples unless they say otherwise. No row proves that no bug is left.
"""


class Failed(Exception):
    pass


class Runner:
    def __init__(self, args):
        self.args, self.build = args, args.build
        # What make was asked for, so that it makes in the same folder.
        self.options = re.findall(r"\b(?:WERROR|CC|CUDA|OPT|DEPS_PREFIX)=\S+", os.environ.get("MAKEFLAGS", ""))

    def run(self, command, env=None, limit=None, may_fail=False):
        usual = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS")}
        usual.update(CKPTDELTA_BUILD=str(Path(self.build).resolve()), CKPTDELTA=str(Path(self.build).resolve() / "ckptdelta"), **(env or {}))
        done = subprocess.run(command, cwd=ROOT, env=usual, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=limit, check=False)
        if done.returncode not in (0, 77) and not may_fail:
            raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-300:]}")
        return done.stdout

    def program(self, name, env=None):
        self.run(["make", *self.options, f"{self.build}/tests/{name}"])
        return self.run([f"{self.build}/tests/{name}"], env)

    def make_words(self, out):
        return self.run(["make", "-s", *out, "print-build-dir"]).split("\n")[0]


def total(pattern, text):
    return sum(int(n) for n in re.findall(pattern, text))


def kills(r):
    text = "".join(r.program(name, {"CKD_TEST_LEVEL": "big"}) for name in ("test_crash", "test_parity_crash", "test_ranks_killed"))
    files = total(r"killed at (\d+) steps", text)
    return f"{files} kills at steps on files; 0 lost, 0 wrong"


def interleavings(r):
    count = 60 * r.args.length
    r.program("test_compact_campaign", {"CKD_TEST_INTERLEAVINGS": str(count)})
    return f"{count} compactions and savers killed side by side; 0 lost, 0 wrong"


def power(r):
    text = r.program("test_power_cut", {"CKD_POWER_STATES": str(100 * r.args.length)})
    disks, sites = total(r"(\d+) checked", text), re.search(r"(\d+) places sync, (\d+) of them", text)
    scenarios = text.count(" checked")
    return (f"{disks} disks of {scenarios} scenarios, 0 wrong; of {sites[1]} places that sync {int(sites[1]) - int(sites[2])} "
            f"are each found when left out, {sites[2]} are spared with a reason")


def faults(r):
    text = r.program("test_faults", {"CKD_TEST_LEVEL": "big"} if r.args.length > 1 else None)
    steps, count = total(r": (\d+) steps", text), total(r", (\d+) faults", text)
    return f"{count} faults at {steps} steps on files; 0 lost, 0 wrong"


def flips(r):
    text = r.program("test_flips", {"CKD_FLIPS": f"0/{max(1, 100 // r.args.length)}"} if r.args.length > 1 else None)
    rows = re.findall(r"^(.*): (\d+) flips, all found by verify; .*?: (\d+) refused, (\d+) right", text, re.M)
    return "; ".join(f"{what}: {n}, all found, {refused} loads refused, {right} right, 0 wrong" for what, n, refused, right in rows)


def harms(r):
    text = r.program("test_flips", {"CKD_HARMS": str(50 * r.args.length)})
    rows = re.findall(r"^([a-z ]+): (\d+) times; .*?: (\d+) refused, (\d+) right", text, re.M)
    return "; ".join(f"{how}: {n}, {refused} loads refused, {right} right, 0 wrong" for how, n, refused, right in rows)


def fuzz(r):
    seconds = 60 * r.args.length
    text = r.run(["make", "fuzz", f"FUZZ_SECONDS={seconds}"])
    runs, fuzzers = total(r"number_of_executed_units: (\d+)", text), len(re.findall("^== ", text, re.M))
    return f"{runs} executions of {fuzzers} fuzzers in {seconds} s, checksums off; no findings"


def campaign(r):
    seconds = 60 * r.args.length
    if not seconds and not record.summary():
        raise Failed("no campaign was recorded on these sources")
    if seconds:
        r.run(["make", "campaign", f"SECONDS={seconds}", f"SEED={int(time.time()) % 100000}", "CAMPAIGN_ARGS=--record"])
    return record.summary()


def sequences(r):
    """The small campaigns beside the large one, each with seeds of its own."""
    seed, said = int(time.time()) % 100000, []
    for name, what in (("pushes", "pushes at the same time"), ("lost_manifests", "lost manifests")):
        text = r.run([sys.executable, f"tests/campaign/{name}.py", str(Path(r.build) / "ckptdelta"), "--seconds", str(60 * r.args.length), "--seed", str(seed)])
        said.append(f"{what}: {total(r'([0-9]+) passed, 0 failed', text)} cases, 0 failed")
    return "; ".join(said)


def recorded(summary, name):
    if not summary:
        raise Failed(f"no campaign of {name} was recorded")
    return summary


def jobs(r):
    if r.args.length:
        r.run(["make", "jobs-campaign", f"COUNT={10 * r.args.length}", f"SEED={int(time.time()) % 100000}", "CAMPAIGN_ARGS=--record"], may_fail=True)
    return recorded(jobs_record.summary(), "jobs")


def nodes(r):
    if r.args.length:
        for name in ("agents", "nodes", "gpt_nodes"):
            r.run([sys.executable, f"tests/campaign/{name}.py", "--seconds", str(100 * r.args.length), "--seed", str(int(time.time()) % 100000), "--record"],
                  may_fail=True)
    return recorded(agents.summary(), "agents")


def mutants(r):
    """Goes on with the draw that results.json has begun."""
    path = ROOT / "tests/mutants/results.json"
    saved = json.loads(path.read_text())
    if r.args.length:
        r.run([sys.executable, "tests/mutants/mutants.py", "--count", str(len(saved["results"]) + 10 * r.args.length), "--campaign", "180",
               "--seconds", str(600 * r.args.length), "--seed", str(saved["seed"]), "--out", str(path)])
        saved = json.loads(path.read_text())
    tried = [m for m in saved["results"] if m["caught"] is not None]
    survived = [f"{m['mutant'].split(':')[0]} ({m['kind']})" for m in tried if not m["caught"]]
    names = f"; survived, as tests/mutants/results.json says in full: {', '.join(survived)}" if survived else ""
    tried_again = [m for m in tried if m["mutant"] in saved["survived_once"]]
    proved = json.loads((ROOT / "tests/mutants/equivalent.json").read_text())
    return (f"seed {saved['seed']}: {len(tried)} tried, {len(tried) - len(survived)} caught, {len(tried_again)} of them again after tests were written for "
            f"what they survived; {len(proved)} that change nothing left out (tests/mutants/equivalent.json){names}")


def coverage(r):
    areas = json.loads((ROOT / "tests/mutants/areas.json").read_text())
    options = ["CUDA=0", "CFLAGS=--coverage -fprofile-update=atomic", "LDFLAGS=--coverage"]
    build = r.make_words(options)
    for path in glob.glob(f"{ROOT}/{build}/obj/**/*.gcda", recursive=True):
        os.remove(path)
    for name in sorted({t for a in COVERED for t in areas[a]["tests"] if not t.endswith(".py")} - {"test_faults", "test_compact_campaign"}):
        r.run(["make", *options, f"{build}/tests/{name}"])
        r.run([f"{build}/tests/{name}"], {"CKD_POWER_SITES": "0", "CKD_POWER_STATES": "20"})
    said = []
    for area in COVERED:
        taken = count = 0
        for pattern in areas[area]["files"]:
            for source in sorted(glob.glob(pattern, root_dir=ROOT)):
                text = r.run(["gcov", "-b", "-n", "-o", f"{build}/obj/{source[:-2]}.o", source])
                part = re.search(rf"File '[^']*{re.escape(source)}'.*?Taken at least once:([\d.]+)% of (\d+)", text, re.S)
                if part:
                    count += int(part[2])
                    taken += float(part[1]) / 100 * int(part[2])
        said.append(f"{area} {100 * taken / count:.0f} % of {count}" if count else f"{area}: not measured")
    return "branches taken: " + ", ".join(said)


ROWS = {
    "kills": ("Kills", kills),
    "interleavings": ("Kills side by side", interleavings),
    "power": ("Power cuts", power),
    "faults": ("Faults", faults),
    "flips": ("Flips, by kind of file", flips),
    "harms": ("Files of all kinds harmed", harms),
    "fuzz": ("Fuzzing", fuzz),
    "campaign": ("Campaign", campaign),
    "sequences": ("Pushes, and lost manifests", sequences),
    "jobs": ("Training jobs that fail", jobs),
    "agents": ("Agents and nodes that fail", nodes),
    "mutants": ("Mutants", mutants),
    "coverage": ("Branch coverage", coverage),
}


def row_records():
    """Those of the page as it is, by title."""
    rows = {}
    if PAGE.exists():
        for line in PAGE.read_text().split("\n"):
            cells = [c.strip() for c in line.strip("|").split(" | ")]
            if len(cells) == 4:
                rows[cells[0].strip()] = cells[1:]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--rows", default="", help=f"of {' '.join(ROWS)}; default: all")
    parser.add_argument("--length", type=int, default=1)
    args = parser.parse_args()
    wanted = args.rows.split() or list(ROWS)
    if set(wanted) - set(ROWS):
        sys.exit(f"there is no row {' '.join(sorted(set(wanted) - set(ROWS)))}; there are {' '.join(ROWS)}")
    runner, rows, bad = Runner(args), row_records(), False
    commit = runner.run(["git", "rev-parse", "--short=12", "HEAD"], may_fail=True).strip()
    for name in wanted:
        title, measure = ROWS[name]
        begun = time.monotonic()
        try:
            outcome = measure(runner)
        except (Failed, subprocess.TimeoutExpired, TypeError) as e:
            outcome, bad = "**failed**: " + re.sub(r"\s+", " ", str(e)).replace("|", "/"), True
        day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        rows[title] = [outcome, f"`make trust ROWS={name} LENGTH={args.length}`", f"{day}, {commit}, {time.monotonic() - begun:.0f} s"]
        print(f"{title}: {outcome}", flush=True)
        write(rows)
    sys.exit(1 if bad else 0)


def write(rows):
    lines = []
    for name, (title, _) in ROWS.items():
        cells = rows.get(title, ["*not run*", f"`make trust ROWS={name}`", "never"])
        lines.append(f"| {title} | {' | '.join(cells)} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + TAIL)


if __name__ == "__main__":
    main()
