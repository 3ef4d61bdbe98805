"""Adds up the cases that campaigns of jobs have played, over many runs: jobs.json beside this file.

    jobs_record.py          prints the table of the cases that were played on the sources as they are
    jobs_record.py --all    and on earlier ones

A run counts for the sources of the supervisor that it was played on.
"""

import collections
import sys
from pathlib import Path

from record import Recorded, hash_of, runs, sources_below

FILE = Path(__file__).with_name("jobs.json")
SOURCES = ("supervise", "cli/commands/run.c", "cli/commands/attempts.c")


def source():
    """Of the supervisor."""
    return hash_of(p for place in SOURCES for p in sources_below([place]))


class Run(Recorded):
    def __init__(self, seed, path=FILE):
        super().__init__(path, seed, source())
        self.cases = []

    def add(self, case):
        self.cases.append({k: case[k] for k in ("seed", "trainer", "cause", "result", "seconds", "attempts", "figures")})
        self.write({"cases": self.cases})


def summary(path=FILE):
    """One sentence on the cases that were played, on the sources as they are and on earlier ones; None if there are none."""
    cases = [(case, r["source"] == source()) for r in runs(path) for case in r["cases"]]
    if not cases:
        return None
    counts = collections.Counter(case["result"] for case, _ in cases)
    trainers = collections.Counter(case["trainer"] for case, _ in cases if case["result"] == "passed")
    return (f"{counts['passed']} cases passed ({', '.join(f'{n} {t}' for t, n in sorted(trainers.items()))}), {counts['skipped']} skipped, "
            f"{counts['failed']} failed; {sum(now for _, now in cases)} of them on sources {source()}; "
            f"{sum(case['figures'].get('false_alarms', 0) for case, _ in cases)} false alarms in {sum(case['attempts'] for case, _ in cases)} attempts")


def range_of(cases, with_checkpoints):
    """How soon stopped processes were noticed, by their steps or by checkpoints, over the silence that was allowed."""
    ratios = sorted(c["figures"]["ratio"] for c in cases if "ratio" in c["figures"] and (c["cause"] == "hang_without_checkpoints") == with_checkpoints)
    return f"{len(ratios)} hangs noticed after {ratios[0]:.2f} to {ratios[-1]:.2f} times the time allowed, median {ratios[len(ratios) // 2]:.2f}" if ratios else "none"


def hangs(cases):
    """The figures of cases in which processes were stopped, and of false alarms in all others."""
    named = [c["figures"]["named_right"] for c in cases if "named_right" in c["figures"]]
    false = sum(c["figures"].get("false_alarms", 0) for c in cases)
    return (f"by steps: {range_of(cases, False)}\nby checkpoints, the last of which may be made after the stop: {range_of(cases, True)}\n"
            f"{sum(named)} of {len(named)} messages that name ranks name the stopped one; {false} false alarms in {sum(c['attempts'] for c in cases)} attempts")


def table(cases):
    """Cause by trainer: passed cases, and with a plus those that have failed or were skipped."""
    counts = collections.Counter((c["cause"], c["trainer"], c["result"]) for c in cases)
    trainers, causes = sorted({c["trainer"] for c in cases}), sorted({c["cause"] for c in cases})

    def cell(cause, trainer):
        failed, skipped = counts[cause, trainer, "failed"], counts[cause, trainer, "skipped"]
        return str(counts[cause, trainer, "passed"]) + (f" + {failed} failed" if failed else "") + (f" + {skipped} skipped" if skipped else "")

    rows = [["cause", *trainers]] + [[cause, *(cell(cause, t) for t in trainers)] for cause in causes]
    rows.append(["all", *(str(sum(c["trainer"] == t and c["result"] == "passed" for c in cases)) for t in trainers)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, hangs(cases)])


if __name__ == "__main__":
    played = [case for r in runs(FILE) if "--all" in sys.argv or r["source"] == source() for case in r["cases"]]
    print(table(played))
    sys.exit(any(case["result"] == "failed" for case in played))
