"""Some cases of the campaign of jobs below ckptdelta run, and supervisors with a mistake that must be found."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jobs  # noqa: E402
import jobs_rules  # noqa: E402
from jobs_case import Options  # noqa: E402
from jobs_support import Failure, ROOT  # noqa: E402
from jobs_trainers import Gpt, Mpi, has_mpi  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = {}

    def make(kind):
        return made.setdefault(kind, kind(BUILD, tmp_path_factory.mktemp("reference")))

    return make


def ends_as_documented(trainer, cause, folder):
    case = jobs.play(trainer, cause, SEED, folder)
    if case["result"] == "skipped":
        pytest.skip(case["why"])
    assert case["result"] == "passed", f"seed {SEED}, {case['trainer']}, {cause}: {case['why']}"


@pytest.mark.parametrize("cause", sorted(jobs.CAUSES))
@pytest.mark.sampled(9, full=9)
def test_a_job_ends_as_documented(tmp_path, trainer, cause):
    ends_as_documented(trainer(Gpt), cause, tmp_path)


@pytest.mark.skipif(not has_mpi(BUILD), reason="there is no mpirun here, or the build is without MPI")
@pytest.mark.parametrize("cause", sorted(jobs.CAUSES))
@pytest.mark.sampled(28, full=28)
def test_a_job_of_ranks_ends_as_documented(tmp_path, trainer, cause):
    ends_as_documented(trainer(Mpi), cause, tmp_path)


def wrong_build(folder, script):
    """The build, with a command of which `run` is this script of the shell."""
    folder.mkdir()
    (folder / "train_gpt").symlink_to(BUILD / "train_gpt")
    command = folder / "ckptdelta"
    command.write_text(f'#!/bin/sh\n[ "$1" = run ] || exec "{BUILD}/ckptdelta" "$@"\n{script}\n')
    command.chmod(0o755)
    return Gpt(folder, folder / "reference")


@pytest.mark.parametrize("cause", ["exit_at_the_start", "missing_program"])
def test_a_supervisor_that_only_starts_the_command_is_found(tmp_path, cause):
    wrong = wrong_build(tmp_path / "build", 'while [ "$1" != -- ]; do shift; done\nshift\nexec "$@"')
    assert jobs.play(wrong, cause, 1, tmp_path / "case")["result"] == "failed"


def test_other_values_at_the_end_are_found(tmp_path):
    """The command is started with another seed, so its losses and values are others."""
    wrong = wrong_build(tmp_path / "build", f'exec "{BUILD}/ckptdelta" "$@" --seed 7')
    case = jobs.play(wrong, "healthy", 1, tmp_path / "case")
    assert case["result"] == "failed" and "loss" in case["why"]


def test_one_other_value_at_the_end_is_found(tmp_path, trainer):
    losses, values = trainer(Gpt).reference("")
    other = Gpt(BUILD, tmp_path / "reference")
    other.made[""] = losses, {**values, "wte.weight": (*values["wte.weight"][:2], "0" * 64)}
    case = jobs.play(other, "healthy", 1, tmp_path / "case")
    assert case["result"] == "failed" and "the values of 1 tensors differ" in case["why"]


def attempt(number, **changes):
    made = {"attempt": number, "end": "later", "seconds": 20, "exit": None, "signal": None, "stopped_by": None, "reason": "exit status 1",
            "verdict": "restarts in 0.0 s", "status": None, "checkpoint": None, "first_step": None, "last_step": None, "hung": False, "hang": None,
            "first_trained": None, "last_trained": None, "steps_lost": None, "suspect": None, "unhealthy": False}
    return {**made, **changes}


FAILED, SAVED = {"exit": 1}, {"exit": 1, "last_step": 5}
GAVE_UP = {"verdict": "gave up: exit status 1 twice", "status": 93}
DONE = {"exit": 0, "last_step": 9, "first_step": 5, "checkpoint": "gpt@5", "steps_lost": 0, "verdict": "done", "status": 0}


@pytest.mark.parametrize("what, attempts, status, agrees", [
    ("done", [SAVED, DONE], 0, True),
    ("done, with another exit status", [SAVED, DONE], 1, False),
    ("gave up", [FAILED, FAILED | GAVE_UP], 93, True),
    ("gave up too early", [FAILED | GAVE_UP], 93, False),
    ("went on for too long", [FAILED, FAILED, FAILED | GAVE_UP], 93, False),
    ("killed twice", [{"exit": 137}, {"exit": 137}, {"exit": 137, "verdict": "gave up: no newer checkpoint in 3 attempts", "status": 93}], 93, True),
    ("killed twice, and gave up", [{"exit": 137}, {"exit": 137} | GAVE_UP], 93, False),
    ("not the newest checkpoint", [SAVED, DONE | {"checkpoint": "gpt@4", "steps_lost": 1}], 0, False),
    ("not the next step", [SAVED, DONE | {"first_trained": 7}], 0, False),
    ("steps lost", [SAVED | {"first_trained": 1, "last_trained": 8}, DONE | {"steps_lost": 3}], 0, True),
    ("steps lost, but not told", [SAVED | {"first_trained": 1, "last_trained": 8}, DONE], 0, False),
    ("no end", [SAVED | {"end": None}, DONE], 0, False),
])
def test_rules(what, attempts, status, agrees):
    made = [attempt(number, **changes) for number, changes in enumerate(attempts, 1)]
    try:
        jobs_rules.check_attempts(made, 0, Options(), status)
        found = True
    except Failure:
        found = False
    assert found == agrees, what
