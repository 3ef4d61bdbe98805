"""ckptdelta run and alarms that the processes of its command raise, with trainers that write their own slot."""

import pytest

from support_cli import check_documented
from support_run import GAVE_UP, STOPPED, exists, job, until  # noqa: F401
from test_cli_run_hang import PROGRESS, trainer
from test_cli_run_nan import trainer as trainer_of_values

METRIC, UNCHANGED, SIZE, TIME, REPLICA, CHANGE = range(1, 7)
TEXTS = {METRIC: "a metric is unlike those of the steps before", UNCHANGED: "weights no longer change",
         SIZE: "a delta is much larger than those before", TIME: "a save took much longer than those before",
         REPLICA: "ranks no longer have the same values, but should",
         CHANGE: "a tensor changes much more than it used to, compared with the others"}

# Two saves before the alarm at step 3, and two from then on. The first attempt then waits to be ended.
RAISES = """
slot = Slot(rank=2)
slot.made(step + 1)
if attempt == 1:
    train(2)
    slot.alarmed(%d, 3)
    train(2)
    %s
train(6 - step)
"""
WAITS = """signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); time.sleep(600)"""


def told(alarm):
    """Who raised it; all ranks notice together that they do not have the same values."""
    return "" if alarm == REPLICA else "rank 2, "


def alarms(job):  # noqa: F811
    return [(a["alarms"], a["alarm"], a["alarm_step"], a["unhealthy"]) for a in job.attempts()]


@pytest.mark.parametrize("options", [[], ["--hang", "off"], ["--on-anomaly", "mark"]])
@pytest.mark.parametrize("alarm", TEXTS)
def test_by_default_it_is_only_told(job, alarm, options):  # noqa: F811
    text = f"{told(alarm)}step 3: {TEXTS[alarm]}"
    out, err = job.run(*trainer(job, RAISES % (alarm, "")), options=options)
    assert err.count(f"alarm: {text}") == 1 and job.starts() == ["1 None"]
    assert alarms(job) == [(1, text, 3, False)] and job.attempts()[0]["reason"] == "exit status 0"
    check_documented(job.attempts()[0], "`attempt`")


def test_without_any(job):  # noqa: F811
    job.run("true")
    assert alarms(job) == [(0, None, None, False)]


@pytest.mark.parametrize("alarm", [METRIC, UNCHANGED, REPLICA, CHANGE])
@pytest.mark.parametrize("back, start", [(None, "gpt@2"), (2, "gpt@1"), (9, "gpt@1")])
def test_rewind(job, alarm, back, start):  # noqa: F811
    """Checkpoints that were made at the step of the alarm or later are passed over."""
    options = ["--on-anomaly", "rewind", *(["--rewind-on-nan", str(back)] if back else [])]
    out, err = job.run(*trainer(job, RAISES % (alarm, WAITS)), options=options)
    assert f"attempt 1 is ended, as {told(alarm)}step 3: {TEXTS[alarm]}" in err
    assert job.starts() == ["1 None", f"2 {start}"] and [a[3] for a in alarms(job)] == [True, False]
    assert job.attempts()[0]["reason"].startswith(f"{told(alarm)}step 3: {TEXTS[alarm]}: ") and not job.attempts()[0]["hung"]


def test_rewind_if_it_was_seen_only_at_the_end(job):  # noqa: F811
    out, err = job.run(*trainer(job, RAISES % (METRIC, "os._exit(0)")), options=["--on-anomaly", "rewind"])
    assert job.starts() == ["1 None", "2 gpt@2"]
    assert "gpt@3 is passed over: it was made after an alarm at step 3" in err
    assert [a["unhealthy"] for a in job.attempts()] == [True, False]


@pytest.mark.parametrize("alarm, start", [(METRIC, "gpt@2"), (SIZE, "gpt@4")])
def test_a_suspect_checkpoint_after_an_alarm(job, alarm, start):  # noqa: F811
    """What was made between the two is passed over, too, unless the alarm is none that acts."""
    out, err = job.run(*trainer_of_values(job, PROGRESS + RAISES % (alarm, "bits = 0x7fc00000; train(1); os._exit(0)")),
                       options=["--on-anomaly", "rewind"])
    assert job.starts() == ["1 None", f"2 {start}"] and [a["anomaly"] for a in job.attempts()] == ["gpt@5", None]
    assert "gpt@5 is suspect and passed over" in err and ("gpt@4 is passed over" in err) == (alarm == METRIC)


def test_stop(job):  # noqa: F811
    out, err = job.run(*trainer(job, RAISES % (UNCHANGED, WAITS)), options=["--on-anomaly", "stop"], expect=GAVE_UP)
    assert f"gave up: rank 2, step 3: {TEXTS[UNCHANGED]}" in err and len(job.attempts()) == 1


@pytest.mark.parametrize("mode", ["rewind", "stop"])
@pytest.mark.parametrize("alarm", [SIZE, TIME])
def test_saves_that_are_slow_or_large_end_nothing(job, alarm, mode):  # noqa: F811
    job.run(*trainer(job, RAISES % (alarm, "")), options=["--on-anomaly", mode])
    assert job.starts() == ["1 None"] and alarms(job) == [(1, f"rank 2, step 3: {TEXTS[alarm]}", 3, False)]


def test_a_slow_save_hides_no_metric(job):  # noqa: F811
    """Of what is raised between two looks, each kind is heard. The lowest step of those that act decides."""
    out, err = job.run(*trainer(job, RAISES % (METRIC, "slot.alarmed(2, 5); slot.alarmed(3, 5); slot.alarmed(4, 6); os._exit(0)")),
                       options=["--on-anomaly", "rewind"])
    assert err.count("alarm: ") == 4 and job.starts() == ["1 None", "2 gpt@2"]
    assert alarms(job)[0] == (4, f"rank 2, step 3: {TEXTS[METRIC]}", 3, True)


def test_an_alarm_of_an_earlier_step_that_is_heard_later(job):  # noqa: F811
    out, err = job.run(*trainer(job, """
        slots = [Slot(rank) for rank in range(2)]
        slots[0].alarmed(1, 9), slots[1].alarmed(2, 8)
    """))
    assert alarms(job) == [(2, f"rank 1, step 8: {TEXTS[UNCHANGED]}", 8, False)]


def test_what_several_ranks_notice_is_one_alarm(job):  # noqa: F811
    """The journal has the first alarm that --on-anomaly acts on."""
    out, err = job.run(*trainer(job, """
        slots = [Slot(rank) for rank in range(3)]
        for alarm, at in ((4, 7), (1, 8), (2, 9)):
            for slot in slots:
                slot.alarmed(alarm, at)
            time.sleep(2.5)
    """))
    assert err.count("alarm: ") == 3
    assert alarms(job) == [(3, f"rank 0, step 8: {TEXTS[METRIC]}", 8, False)]


def test_a_command(job):  # noqa: F811
    job.run(*trainer(job, RAISES % (TIME, "")),
            options=["--on-anomaly", "echo $CKPTDELTA_ANOMALY $CKPTDELTA_SUSPECT_STEP ${CKPTDELTA_SUSPECT_ID-none} >>lines"])
    assert (job.folder / "lines").read_text() == "time 3 none\n"


def test_what_is_no_alarm(job):  # noqa: F811
    """The slot belongs to the command, which may write anything to it."""
    out, err = job.run(*trainer(job, "slot = Slot(); slot.alarms = 77"), options=["--on-anomaly", "stop"])
    assert "alarm" not in err and alarms(job) == [(0, None, None, False)]
