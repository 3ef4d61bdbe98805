"""Runs every test, in parallel, and counts: `make test` calls it.

Four kinds of tests, all found by name below `tests/` (`tests/README.md` says how to write one):

- `test_*.c`, cmocka programs `<build>/tests/test_*`: each test function counts, from the XML that cmocka writes;
- `fuzz/fuzz_*.c`, programs `<build>/tests/fuzz_*`, which replay `tests/corpus/<name>/`: one test each;
- scripts `check_*.sh`: one test each;
- `test_*.py`, pytest: each test function counts, from the XML that pytest writes.

No two files may have the same name, as programs and results lie in one folder.

A program that dies, runs out of time, or writes no readable XML is a failure, whatever it printed. Exit status 77 is a
skip; its reason is the last line printed that begins with `SKIP:`. With CKD_REQUIRE_GPU=1 a skipped test that has `gpu`
or `cuda` in its name is a failure. Needs the standard library only.

The longest test starts first, by the times of the last run in this build folder, or by `tests/times.txt`. Tests that
mostly wait, as that file says, take no core from others: WAITING of them run besides. With a budget some tests are left
out (`budget.py`), and count as skipped. Tests write to memory (/dev/shm) unless they are in ON_DISK, TMPDIR is set, or
there is too little of it.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import budget

SKIP_STATUS = 77
SHOWN_LINES = 150
LEVELS = ("quick", "full", "big")
MEMORY, MEMORY_BYTES = "/dev/shm", 2 << 30
WAITING = 3
# It tests a file system on a disk: syncs, free space.
ON_DISK = {"test_base_file"}
# They run nothing that a sanitizer looks into.
WITHOUT_PROGRAMS = {"check_layers.sh", "check_layers_selftest.sh", "test_adaptive_reader.py", "test_docs.py", "test_runner.py"}
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Job:
    """One process to run, and what came of it."""

    def __init__(self, kind, source, name, command):
        self.kind, self.source, self.name, self.command = kind, source, name, command
        self.passed = 0
        self.failed = []  # (test, message)
        self.skipped = []  # (test, reason)
        self.output = ""
        self.seconds = self.cpu_seconds = 0.0

    def needs_gpu(self, test):
        return re.search("cuda|gpu", f"{self.name} {test}", re.IGNORECASE) is not None

    def skip(self, test, reason):
        if os.environ.get("CKD_REQUIRE_GPU") == "1" and self.needs_gpu(test):
            self.failed.append((test, f"skipped, but CKD_REQUIRE_GPU=1: {reason}"))
        else:
            self.skipped.append((test, reason))


def find_jobs(args):
    build, root = Path(args.build), args.root
    jobs = []
    for path in sorted(root.glob("tests/**/test_*.py")):
        jobs.append(Job("pytest", path, path.name, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                                              "--rootdir", str(root / "tests")]
                        + shlex.split(args.pytest_args) + [str(path)]))
    for source in sorted(root.glob("tests/**/test_*.c")):
        jobs.append(Job("cmocka", source, source.stem, [str(build / "tests" / source.stem)]))
    for source in sorted(root.glob("tests/fuzz/fuzz_*.c")):
        corpus = root / "tests" / "corpus" / source.stem[len("fuzz_"):]
        jobs.append(Job("replay", source, source.stem, [str(build / "tests" / source.stem)]
                        + ([str(corpus)] if corpus.is_dir() else [])))
    for path in sorted(root.glob("tests/**/check_*.sh")):
        jobs.append(Job("script", path, path.name, ["sh", str(path)]))
    names = collections.Counter(job.name for job in jobs)
    for name in sorted(n for n, count in names.items() if count > 1):
        sys.exit(f"several tests have the name {name}")
    if args.san:
        jobs = [j for j in jobs if j.name not in WITHOUT_PROGRAMS]
    wanted = args.only.split()
    if wanted:
        jobs = [j for j in jobs if any(matches(j.name, pattern) for pattern in wanted)]
    return jobs


def folder_for(job):
    """Where the job's temporary folder goes; None: where the system puts such things."""
    if job.name in ON_DISK or os.environ.get("TMPDIR") or not os.access(MEMORY, os.W_OK | os.X_OK):
        return None
    about = os.statvfs(MEMORY)
    return None if about.f_flag & os.ST_NOEXEC or about.f_bavail * about.f_frsize < MEMORY_BYTES else MEMORY


def known_times(args):
    """Seconds of each job: in tests/times.txt, or better, as this build folder measured them at this level. The jobs that mostly wait. And what
    each is expected to take of the budget, which does not depend on the machine: so one seed draws the same jobs everywhere."""
    times, waiting = {}, set()
    try:
        lines = (args.root / "tests" / "times.txt").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        seconds, _, name, *about = line.split()
        times[name] = float(seconds)
        waiting |= {name} if "waits" in about else set()
    return {**times, **measured_times(args).get(args.level, {})}, waiting, budget.costs(lines, args.san)


def measured_times(args):
    try:
        return json.loads((Path(args.build) / "results" / "times.json").read_text())
    except (OSError, ValueError):
        return {}


def keep_times(jobs, args):
    times = measured_times(args)
    times.setdefault(args.level, {}).update({j.name: round(j.seconds, 1) for j in jobs})
    path = Path(args.build) / "results" / "times.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(times, indent=1, sort_keys=True))
    path.with_suffix(".new").replace(path)


def sweep_seed(args):
    """Which points the sweeps take that do not take all: others in each commit."""
    given = os.environ.get("CKD_SWEEP_SEED")
    if given:
        return given
    head = subprocess.run(["git", "-C", str(args.root), "rev-parse", "HEAD"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, check=False).stdout if shutil.which("git") else ""
    return str(int(head[:8], 16) if head else 1)


def matches(name, pattern):
    stem = Path(name).stem
    bare = re.sub("^(test|fuzz|check)_", "", stem)
    return any(fnmatch.fnmatch(n, pattern) for n in (name, stem, bare))


def environment(args, temporary):
    env = dict(os.environ)
    build = str(Path(args.build).resolve())
    env.update(CKPTDELTA=f"{build}/ckptdelta", CKPTDELTA_BUILD=build, TMPDIR=temporary, LC_ALL="C.UTF-8",
               CKD_TEST_LEVEL=args.level, CKD_SWEEP_SEED=args.seed, PYTHONDONTWRITEBYTECODE="1", PYTHON=sys.executable, CKPTDELTA_SAN=args.san, CMOCKA_MESSAGE_OUTPUT="XML")
    # make's own variables would make a test that calls make part of this build.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "GNUMAKEFLAGS"):
        env.pop(name, None)
    # The driver's mappings and the address sanitizer's shadow gap exclude each other.
    gap = ":protect_shadow_gap=0" if args.cuda else ""
    env.setdefault("ASAN_OPTIONS", "detect_leaks=1:detect_stack_use_after_return=0:strict_string_checks=1" + gap)
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    # Several jobs share the cores. Threads of torch that wait for each other would spin meanwhile.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TSAN_OPTIONS", "halt_on_error=1:second_deadlock_stack=1")
    return env


def run(job, args):
    results = Path(args.build).resolve() / "results" / re.sub("[^A-Za-z0-9_.-]", "_", job.name)
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    temporary = tempfile.mkdtemp(prefix="ckptdelta-test-", dir=folder_for(job))
    os.chmod(temporary, 0o755)  # for tests that give up root's rights
    command = list(job.command)
    env = environment(args, temporary)
    if job.kind == "cmocka":
        env["CMOCKA_XML_FILE"] = f"{results}/%g.xml"
    elif job.kind == "pytest":
        command += ["--junitxml", f"{results}/pytest.xml", "--basetemp", f"{temporary}/pytest"]
    start = time.monotonic()
    try:
        status = run_process(job, command, env, results, args)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    job.seconds = time.monotonic() - start
    judge(job, status, sorted(results.glob("*.xml")), filtered=bool(args.pytest_args))


def run_process(job, command, env, results, args):
    """The exit status; negative for a signal, None if it ran out of time, a text if it could not be started."""
    try:
        with open(results / "output.txt", "wb") as output:
            process = subprocess.Popen(command, cwd=args.root, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        return f"cannot be started: {error}"
    late = threading.Event()

    def end():
        late.set()
        kill_group(process)

    timer = threading.Timer(args.timeout, end)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    kill_group(process)  # what it may have left running
    process.returncode = os.waitstatus_to_exitcode(status)
    job.cpu_seconds = usage.ru_utime + usage.ru_stime
    job.output = (results / "output.txt").read_text("utf-8", "replace")
    return None if late.is_set() else process.returncode


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def judge(job, status, xml_files, filtered):
    if job.kind in ("cmocka", "pytest"):
        for path in xml_files:
            try:
                read_xml(job, path)
            except (ElementTree.ParseError, OSError) as error:
                job.failed.append(("-", f"unreadable result file {path.name}: {error}"))
    counted = job.passed + len(job.failed) + len(job.skipped)
    if status == SKIP_STATUS and len(job.failed) != SKIP_STATUS:
        job.skip("-", skip_reason(job.output))
    elif isinstance(status, str):
        job.failed.append(("-", status))
    elif status is None:
        job.failed.append(("-", "ran out of time"))
    elif status < 0:
        job.failed.append(("-", f"killed by {signal.Signals(-status).name}"))
    elif job.kind in ("script", "replay"):
        if status == 0:
            job.passed += 1
        else:
            job.failed.append(("-", f"exit status {status}"))
    elif job.kind == "pytest" and status == 5 and filtered and counted == 0:
        pass  # the filter left nothing of this file
    elif job.kind == "pytest" and status == 5 and counted == len(job.skipped) > 0:
        pass  # the file skips itself as a whole
    elif status != 0 and not job.failed:
        job.failed.append(("-", f"exit status {status}, but no failed test in its results"))
    elif counted == 0:
        job.failed.append(("-", "wrote no results"))


def skip_reason(output):
    reasons = re.findall(r"SKIP:\s*(.*)", output)
    return reasons[-1].strip() if reasons else "no reason given"


def read_xml(job, path):
    text = NOT_XML.sub("?", path.read_text(encoding="utf-8", errors="replace"))
    # cmocka writes one document for each group, to the same file if the names are the same.
    text = re.sub(r"<\?xml.*?\?>", "", text)
    for case in ElementTree.fromstring(f"<all>{text}</all>").iter("testcase"):
        name = case.get("name", "?")
        bad = [e for e in case if e.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if bad:
            job.failed.append((name, "\n".join((e.get("message") or e.text or "").strip() for e in bad)))
        elif skipped is not None:
            of_file = skipped.get("message") == "collection skipped"  # the reason is in a tuple that pytest prints
            text = (skipped.text or "").partition("Skipped: ")[2].rstrip("\"')") if of_file else skipped.get("message") or skipped.text
            job.skip(name, text or skip_reason(job.output))
        else:
            job.passed += 1


def show(job):
    parts = [f"{job.passed} passed"]
    parts += [f"{len(job.failed)} FAILED"] if job.failed else []
    parts += [f"{len(job.skipped)} skipped"] if job.skipped else []
    print(f"  {'FAIL' if job.failed else 'ok':5} {job.name:32} {', '.join(parts):28} {job.seconds:7.1f} s, CPU {job.cpu_seconds:.1f} s", flush=True)


def show_failure(job):
    print(f"\n=== {job.name}: {' '.join(job.command)}")
    lines = job.output.splitlines()
    if len(lines) > SHOWN_LINES:
        print(f"... {len(lines) - SHOWN_LINES} lines left out: see output.txt in the results folder")
    print("\n".join(lines[-SHOWN_LINES:]))
    for test, message in job.failed:
        print(f"--- FAILED {job.name} {test}: {message.strip() or 'no message'}")


def main():
    # A shell's background job ignores interrupts, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Below nohup they would ignore hang-ups. A handler, unlike SIG_IGN, is not inherited.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True, help="the build folder")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="where tests/ lies")
    parser.add_argument("--san", default="", help="the sanitizers it was built with")
    parser.add_argument("--cuda", default="", help="not empty: the CUDA backend was built")
    parser.add_argument("--jobs", type=int, default=0, help="processes at a time; 0: one for each core")
    parser.add_argument("--level", default="full", choices=LEVELS, help="how thorough: tests/README.md says more")
    parser.add_argument("--budget", type=float, default=0, help="seconds of processor time for all of them; 0: no limit")
    parser.add_argument("--timeout", type=float, default=900, help="seconds one of them may take")
    parser.add_argument("--only", default="", help="run only what matches one of these patterns")
    parser.add_argument("--pytest-args", default="", help="more arguments for pytest")
    args = parser.parse_args()

    args.seed = sweep_seed(args)
    every = os.environ.get("CKD_FULL_EVERY") if args.level == "full" else None
    sampled = f", but one in {every} of what the quick level samples" if every else ""
    print(f"Level {args.level}{sampled}; sweeps that take a sample take that of CKD_SWEEP_SEED={args.seed}", flush=True)
    jobs = find_jobs(args)
    times, waiting, cost = known_times(args)
    left_out = []
    if args.budget:
        jobs, left_out = budget.choose(jobs, args.budget, args.seed, args.root, cost)
    jobs.sort(key=lambda job: -times.get(job.name, 1))
    workers = args.jobs or len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, concurrent.futures.ThreadPoolExecutor(WAITING) as others:
        running = {(others if job.name in waiting else pool).submit(run, job, args): job for job in jobs}
        for future in concurrent.futures.as_completed(running):
            future.result()
            show(running[future])
    keep_times(jobs, args)
    for job in jobs:
        if job.failed:
            show_failure(job)
    skipped = [(job, test, reason) for job in jobs for test, reason in job.skipped]
    if skipped:
        print("\nSkipped:")
        for job, test, reason in skipped:
            print(f"  {job.name}{'' if test == '-' else ' ' + test}: {reason.strip()}")
    if left_out:
        print(f"\nLeft out, as together they would take more than {args.budget:g} s of processor time (BUDGET=0 sets no limit):")
        for line in textwrap.wrap(" ".join(j.name for j in left_out), 110, break_on_hyphens=False):
            print(f"  {line}")
    passed, failed = sum(j.passed for j in jobs), sum(len(j.failed) for j in jobs)
    if passed + failed + len(skipped) == 0:
        print("\nno test was found or matched")
        failed = 1
    print(f"\n{passed} passed, {failed} failed, {len(skipped) + len(left_out)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
