"""ckptdelta run and steps: hangs that it notices and those that it does not, with trainers that write their own slot as ckptdelta_progress.h describes."""

import os
import re
import signal
import sys
import textwrap
import time

import pytest

from support_cli import USAGE, run
from support_run import STOPPED, TRAINER, Job, exists, job, until  # noqa: F401

PROGRESS = """
import ctypes, faulthandler, fcntl
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
START, TRAINING, EVALUATION, SAVING, ENDED = range(5)

class Slot:
    FIELDS = "pid rank phase phase_ns steps step step_ns first_step first_ns apart_ns timed metric unchanged size time replica".split()
    FIELDS += [f"kind_{n}" for n in range(6, 13)] + ["alarms"]

    def __init__(self, rank=(1 << 32) - 1):
        number, token = os.environ["CKPTDELTA_PROGRESS"].split(":")
        base = libc.shmat(int(number), None, 0)
        magic, found, version, size, count = struct.unpack("<QQIII", ctypes.string_at(base, 28))
        assert (magic.to_bytes(8, "little"), found, version) == (b"progress", int(token, 16), 2)
        with open("slots", "w") as lock:  # instead of an atomic exchange
            fcntl.lockf(lock, fcntl.LOCK_EX)
            at = next(a for a in range(base + 64, base + 64 + size * count, size) if not ctypes.c_uint64.from_address(a).value)
            self.__dict__["words"] = (ctypes.c_uint64 * 24).from_address(at)
            self.__dict__["took"] = (ctypes.c_uint32 * 64).from_address(at + 192)
            self.pid = os.getpid()
        self.rank = rank
        self.enter(START)

    def __getattr__(self, name):
        return self.words[self.FIELDS.index(name)]

    def __setattr__(self, name, value):
        self.words[self.FIELDS.index(name)] = value

    def enter(self, phase):
        now = time.monotonic_ns()
        if self.phase in (EVALUATION, SAVING):
            self.apart_ns += now - self.phase_ns
        self.phase, self.phase_ns = phase, now

    def made(self, step):
        now = time.monotonic_ns()
        if self.steps:
            self.took[self.timed % 64] = min((now - self.step_ns - self.apart_ns) // 1000000, 2**32 - 1)
            self.timed += 1
        else:
            self.first_step, self.first_ns, self.phase = step, now, TRAINING
        self.step, self.step_ns, self.steps, self.apart_ns = step, now, self.steps + 1, 0

    def alarmed(self, alarm, step):
        self.words[self.FIELDS.index("metric") + alarm - 1] = step + 1
        self.alarms += 1

def steps(slot, count, seconds=0.01):
    for _ in range(count):
        time.sleep(seconds)
        slot.made(slot.step + 1 if slot.steps else step + 1)
"""


def trainer(job, text):  # noqa: F811
    path = job.folder / "train.py"
    path.write_text(TRAINER + PROGRESS + textwrap.dedent(text))
    return [sys.executable, path]


def check_hang(attempt, pattern):
    """Silences are measured by the supervisor, so a busy machine cannot make them longer."""
    assert attempt["hung"] and attempt["reason"].startswith("hung: ")
    silent, limit = map(int, re.fullmatch(rf"{pattern} for (\d+) s, (\d+) s are allowed.*", attempt["hang"]).groups())
    assert limit <= silent <= 3 * limit


@pytest.mark.parametrize("hang", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_no_step(job, hang):  # noqa: F811
    out, err = job.run(*trainer(job, f"""
        if attempt == 1:
            train(1)
        slot = Slot()
        steps(slot, 30)
        if attempt == 1:
            {hang}
    """), options=["--hang-floor", "1s"])
    first, second = job.attempts()
    check_hang(first, rf"process {first['pid']} has made no step after step 31")
    assert f"attempt 1 is hung: {first['hang']}" in err
    assert not second["hung"] and second["hang"] is None
    assert [(a["first_trained"], a["last_trained"]) for a in (first, second)] == [(2, 31), (2, 31)]
    # From the checkpoint of step 1 it makes 30 steps again.
    assert (first["steps_lost"], second["steps_lost"]) == (None, 30)
    assert all(0 < a["resume_s"] < a["seconds"] for a in (first, second))
    table = run("attempts", job.store, "-v").out.splitlines()
    assert {"FIRST MADE", "LAST MADE", "RESUMED"} <= set(re.split(r"  +", table[0])) and "31" in table[1].split()


def test_evaluations_and_slow_saves_do_not_hang(job):  # noqa: F811
    out, err = job.run(*trainer(job, """
        slot = Slot()
        for phase in (EVALUATION, SAVING):
            steps(slot, 20)
            slot.enter(phase)
            time.sleep(4)
            slot.enter(TRAINING)
        steps(slot, 20)
        slot.enter(ENDED)
        time.sleep(4)
    """), options=["--hang-floor", "2s"])
    attempt, = job.attempts()
    assert not attempt["hung"] and attempt["last_trained"] == 60 and "hung" not in err


def test_a_command_without_steps_is_left_alone(job):  # noqa: F811
    job.run("sleep", "3", options=["--hang-floor", "1s"])
    attempt, = job.attempts()
    assert attempt["exit"] == 0 and attempt["last_trained"] is None


@pytest.mark.parametrize("options", [["--hang", "off"], ["--hang", "1h"]])
def test_steps_may_be_ignored(job, options):  # noqa: F811
    process = job.begin(*trainer(job, "slot = Slot(); steps(slot, 30); open('ready', 'w').close(); time.sleep(600)"), options=[*options, "--hang-floor", "1s"])
    assert until(exists(job.folder / "ready"))
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    attempt, = job.attempts()
    assert not attempt["hung"] and attempt["last_trained"] == 30


RANKS = """
    import subprocess
    if len(sys.argv) < 2:
        ranks = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in range(3)]
        sys.exit(max(rank.wait() for rank in ranks))
    rank = int(sys.argv[1])
    slot = Slot(rank)
"""


@pytest.mark.parametrize("begun, state", [(30, "after step 30"), (0, "yet")])
def test_a_rank_that_stands_still_is_named(job, begun, state):  # noqa: F811
    job.run(*trainer(job, RANKS + f"""
    steps(slot, {begun})
    while attempt == 1:
        time.sleep(1) if rank == 1 else steps(slot, 1)
    """), options=["--hang-floor", "1s", "--max-futile", "1"], expect=93)
    attempt, = job.attempts()
    check_hang(attempt, rf"rank 1 \(process \d+\) has made no step {state}")
    assert re.search(r"; others are at step \d+$", attempt["hang"]) and attempt["last_trained"] > 30 and attempt["first_trained"] == 1


def test_ranks_that_wait_for_another_one_do_not_hang(job):  # noqa: F811
    """Only rank 0 evaluates. A process that ends is no rank any more."""
    job.run(*trainer(job, RANKS + """
    steps(slot, 30)
    if rank == 0:
        slot.enter(EVALUATION)
        time.sleep(4)
        slot.enter(TRAINING)
        open("evaluated", "w").close()
    while not os.path.exists("evaluated"):
        time.sleep(0.01)
    steps(slot, 30 if rank else 430)
    """), options=["--hang-floor", "2s"])
    attempt, = job.attempts()
    assert (attempt["hung"], attempt["exit"], attempt["last_trained"]) == (False, 0, 460)


def test_a_job_that_is_stopped_together_does_not_hang(job):  # noqa: F811
    """As a batch system or a laptop does it. The steps go on when everything goes on."""
    process = job.begin(*trainer(job, """
        slot = Slot()
        steps(slot, 30)
        open("ready", "w").close()
        while not os.path.exists("enough"):
            steps(slot, 1)
    """), options=["--hang-floor", "2s"])
    assert until(exists(job.folder / "ready"))
    command = job.lines()[0]["pid"]
    os.kill(command, signal.SIGSTOP)
    time.sleep(0.3)  # the supervisor has seen the last step
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # it looks before the next step is made
    os.kill(command, signal.SIGCONT)
    time.sleep(1)
    (job.folder / "enough").touch()
    job.finish(process)
    assert not job.attempts()[0]["hung"]


# ------------------------------------------------------------------------------------------------ stack traces


def test_traces_by_sigquit(job):  # noqa: F811
    """It goes to processes that handle it. It would kill the others, and keep SIGTERM from saving anything."""
    out, err = job.run(*trainer(job, RANKS + """
    def stop(*_):
        time.sleep(0.2)
        open(f"stopped{rank}", "w").close()
        sys.exit(5)
    signal.signal(signal.SIGTERM, stop)
    if rank != 1:
        faulthandler.register(signal.SIGQUIT)
    def stands_still():
        while attempt == 1:
            time.sleep(1)
    steps(slot, 30)
    stands_still()
    """), options=["--hang-floor", "1s", "--max-futile", "1"], expect=93)
    assert err.count("stands_still") == 2  # lines may mix on a busy machine
    assert all((job.folder / f"stopped{rank}").exists() for rank in range(3))
    assert re.match("each of 3 processes has made no step after step 30 ", job.attempts()[0]["hang"])


def test_traces_by_a_command(job):  # noqa: F811
    """It runs while the command still stands there. The command is ended when it is done, or late."""
    out, err = job.run(*trainer(job, """
        def stop(*_):
            os.rename("traces", "before")
            sys.exit(5)
        signal.signal(signal.SIGTERM, stop)
        faulthandler.register(signal.SIGQUIT)
        slot = Slot()
        steps(slot, 30)
        while attempt == 1:
            time.sleep(1)
    """), options=["--hang-floor", "1s", "--max-futile", "1", "--grace", "2s", "--on-hang",
                   "kill -0 $CKPTDELTA_HANG_PIDS && echo $CKPTDELTA_HANG_PIDS $CKPTDELTA_RUN >traces; exec sleep 600"], expect=93)
    attempt, = job.attempts()
    assert (job.folder / "before").read_text() == f"{attempt['pid']} gpt\n" and "stands_still" not in err
    assert attempt["reason"] == "hung: exit status 5"


def test_traces_of_a_command_without_steps(job):  # noqa: F811
    job.run("sleep", "600", options=["--hang", "1s", "--max-futile", "1", "--on-hang", "echo $CKPTDELTA_HANG_PIDS >traces"], expect=93)
    attempt, = job.attempts()
    assert (job.folder / "traces").read_text() == f"{attempt['pid']}\n"
    assert attempt["hang"] == "it has made no checkpoint for 1 s"


# --------------------------------------------------------------------------------------------------- restarts


def test_steps_after_the_supervisor_was_killed(job):  # noqa: F811
    """Its attempt has no steps in the journal. The next one is watched as usual."""
    command = trainer(job, """
        train(1)
        slot = Slot()
        steps(slot, 30)
        open(f"ready{attempt}", "w").close()
        while attempt < 3:
            time.sleep(1)
    """)
    process = job.begin(*command)
    assert until(exists(job.folder / "ready1"))
    process.kill()
    process.communicate(timeout=60)
    job.run(*command, options=["--hang-floor", "1s"])
    attempts = job.attempts()
    assert [(a["reason"], a["hung"], a["last_trained"]) for a in attempts] == \
        [("supervisor died", False, None), ("hung: killed by SIGTERM", True, 32), ("exit status 0", False, 33)]
    assert [a["steps_lost"] for a in attempts] == [None, 0, 30]


def test_an_attempt_without_a_step_has_made_nothing_good(job):  # noqa: F811
    job.run(*trainer(job, """
        if attempt == 1:
            train(1)
        if attempt != 2:
            steps(Slot(), 10)
        sys.exit(attempt < 3 and 10 + attempt)
    """))
    attempts = job.attempts()
    assert [(a["first_trained"], a["last_trained"], a["steps_lost"]) for a in attempts] == [(2, 11, None), (None, None, 10), (2, 11, 10)]


@pytest.mark.parametrize("options", [["--hang", "soon"], ["--hang-floor", "0s"], ["--hang-floor", "auto"]])
def test_wrong_options(job, options):  # noqa: F811
    run("run", job.store, "--run", "gpt", *options, "--", "true", expect=USAGE)


def test_steps_made_after_the_keeper_was_killed_count(job):  # noqa: F811
    """The command goes on until the supervisor has killed it."""
    command = trainer(job, """
        import mmap
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if attempt > 1:
            sys.exit(0)
        with open("count", "w+b") as file:
            file.truncate(4096)
            count = ctypes.c_uint64.from_buffer(mmap.mmap(file.fileno(), 4096))
        slot = Slot()
        open("ready", "w").close()
        while True:
            count.value += 1
            slot.made(count.value)
    """)
    process = job.begin(*command)
    assert until(exists(job.folder / "ready"))
    keeper, = map(int, open(f"/proc/{process.pid}/task/{process.pid}/children").read().split())
    os.kill(keeper, signal.SIGKILL)
    job.finish(process)
    made = int.from_bytes((job.folder / "count").read_bytes()[:8], "little")
    assert made - 1 <= job.attempts()[0]["last_trained"] <= made


def test_a_run_that_was_renamed_meanwhile(job):  # noqa: F811
    """It begins again from nothing, which the supervisor says."""
    out, err = job.run(*trainer(job, """
        if attempt == 1:
            train(2)
            subprocess.run([command, "rename", store, run, "old"], check=True)
            steps(Slot(), 5)
            sys.exit(1)
    """))
    assert "ckptdelta: attempt 1 starts without a checkpoint\n" in err
    assert "ckptdelta: attempt 2 starts without a checkpoint: training had reached step 7, but the store has none of run 'gpt'\n" in err
