"""ckptdelta run --on-anomaly: checkpoints whose values become NaN while an attempt runs, or just before it ends."""

import signal

import pytest

from support_cli import USAGE, check_documented, run
from support_run import GAVE_UP, STOPPED, exists, job, until  # noqa: F401
from test_cli_run_nan import trainer

# Three healthy steps, then suspect ones.
BAD = """
bad = 0x7fc00000
train(max(0, 3 - step))
if attempt == 1:
    bits = bad
    train(1)
"""
WAITS = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    open("waits", "w").close()
    time.sleep(600)
"""
SUSPECT = "gpt@4 is suspect: values became NaN or infinite"


def anomalies(job):  # noqa: F811
    return [(a["anomaly"], a["unhealthy"]) for a in job.attempts()]


@pytest.mark.parametrize("options", [[], ["--on-anomaly", "mark"]])
def test_by_default_it_is_only_told(job, options):  # noqa: F811
    out, err = job.run(*trainer(job, BAD + "sys.exit(attempt == 1)"), options=options)
    assert err.count(SUSPECT) == 1 and job.starts() == ["1 None", "2 gpt@3"]
    assert anomalies(job) == [("gpt@4", False), (None, False)] and job.attempts()[0]["reason"] == "exit status 1"
    check_documented(job.attempts()[0], "`attempt`")


@pytest.mark.parametrize("back, start", [(None, "gpt@3"), (2, "gpt@2")])
def test_rewind(job, back, start):  # noqa: F811
    """The command goes on, and would go on with NaN."""
    options = ["--on-anomaly", "rewind", *(["--rewind-on-nan", str(back)] if back else [])]
    out, err = job.run(*trainer(job, BAD + WAITS + "train(6 - step)"), options=options)
    assert err.count(SUSPECT) == 1 and "attempt 1 is ended, as gpt@4 is suspect" in err
    assert job.starts() == ["1 None", f"2 {start}"] and anomalies(job) == [("gpt@4", True), (None, False)]
    first, second = job.attempts()
    assert (first["reason"], first["hung"], second["suspect"]) == ("gpt@4 is suspect: exit status 5", False, "gpt@4")


def test_rewind_if_it_was_seen_only_at_the_end(job):  # noqa: F811
    """A success that was made from NaN is none, and when it is seen makes no difference."""
    out, err = job.run(*trainer(job, BAD + "train(5 - step)"), options=["--on-anomaly", "rewind"])
    assert job.starts() == ["1 None", "2 gpt@3"] and "is ended" not in err
    assert [(a["reason"], a["unhealthy"]) for a in job.attempts()] == [("gpt@4 is suspect: exit status 0", True), ("exit status 0", False)]


HEALED = BAD + """
if attempt == 1:
    bits = 0
    train(1)
sys.exit((11, 12, 0)[attempt - 1])
"""


@pytest.mark.parametrize("mode, starts", [("rewind", ["1 None", "2 gpt@3", "3 gpt@3"]), ("mark", ["1 None", "2 gpt@5", "3 gpt@5"])])
def test_what_was_made_after_it_is_not_trusted(job, mode, starts):  # noqa: F811
    """The second attempt makes no checkpoint, so the third one finds what the second found."""
    job.run(*trainer(job, HEALED), options=["--on-anomaly", mode])
    assert job.starts() == starts


def test_without_anything_older_it_takes_what_there_is(job):  # noqa: F811
    options = ["--on-anomaly", "rewind", "--max-restarts", "0"]
    job.run(*trainer(job, "train(1); bits = 0x7fc00000; train(1); bits = 0; train(1)"), options=options, expect=1)
    assert anomalies(job) == [("gpt@2", True)]
    job.damage(1)
    out, err = job.run("true", options=options)
    assert job.attempts()[-1]["checkpoint"] == "gpt@3" and "gpt@1 is damaged and passed over" in err


def test_training_that_always_meets_nan_ends(job):  # noqa: F811
    job.run(*trainer(job, BAD.replace("attempt == 1", "True")), options=["--on-anomaly", "rewind"], expect=GAVE_UP)
    assert "no newer checkpoint in 3 attempts" in job.attempts()[-1]["verdict"] and len(job.attempts()) == 4
    assert all(unhealthy for _, unhealthy in anomalies(job))


@pytest.mark.parametrize("end, reason", [(WAITS, "exit status 5"), ("", "exit status 0"), ("sys.exit(7)", "exit status 7")])
def test_stop(job, end, reason):  # noqa: F811
    out, err = job.run(*trainer(job, BAD + end), options=["--on-anomaly", "stop"], expect=GAVE_UP)
    assert "gave up: gpt@4 is suspect" in err and len(job.attempts()) == 1
    assert job.attempts()[0]["reason"] == f"gpt@4 is suspect: {reason}"
    # What was there before is no news.
    out, err = job.run("true", options=["--on-anomaly", "stop"])
    assert SUSPECT not in err


def test_a_command(job):  # noqa: F811
    """It runs once for each checkpoint, while the training goes on, and decides nothing."""
    out, err = job.run(*trainer(job, BAD + """
train(1)
while not os.path.exists("told"):
    time.sleep(0.05)
train(1)
"""), options=["--on-anomaly", 'echo $CKPTDELTA_SUSPECT_STEP $CKPTDELTA_SUSPECT_ID $CKPTDELTA_RUN >>lines; touch told; exit 9'])
    listed = {c["step"]: c["id"] for c in run("list", job.store, "--json").json()["checkpoints"]}
    assert (job.folder / "lines").read_text().splitlines() == [f"{step} {listed[step]} gpt" for step in (4, 5, 6)]
    assert [(a["exit"], a["status"]) for a in job.attempts()] == [(0, 0)] and anomalies(job) == [("gpt@4", False)]


def test_a_command_that_takes_too_long(job):  # noqa: F811
    job.run(*trainer(job, BAD), options=["--on-anomaly", "echo >>lines; exec sleep 600", "--grace", "1s"])
    assert (job.folder / "lines").read_text() == "\n"


def test_a_hang_beside_it(job):  # noqa: F811
    """--hang TIME looks at the same list."""
    out, err = job.run(*trainer(job, BAD + "\nif attempt == 1: time.sleep(600)"), options=["--hang", "2s"])
    assert err.index(SUSPECT) < err.index("attempt 1 is hung: it has made no checkpoint for 2 s")


@pytest.mark.parametrize("mode", ["rewind", "stop"])
def test_a_signal_is_stronger(job, mode):  # noqa: F811
    process = job.begin(*trainer(job, BAD + WAITS), options=["--on-anomaly", mode])
    assert until(exists(job.folder / "waits"))
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert anomalies(job) == [("gpt@4", False)]


def test_wrong_options(job):  # noqa: F811
    run("run", job.store, "--run", "gpt", "--on-anomaly", "", "--", "true", expect=USAGE)


@pytest.mark.parametrize("word", ["", "Rewind", "STOP"])
def test_words_in_capitals_are_no_commands(job, word):  # noqa: F811
    out, err = job.run("true", options=["--on-anomaly", word], expect=USAGE)
    assert "--on-anomaly is mark, rewind, stop or a command" in err
