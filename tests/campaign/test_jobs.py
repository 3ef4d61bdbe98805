"""A case or two of each kind of failing job below ckptdelta run, and a supervisor with a mistake that must be found."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jobs  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or jobs.ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = kind(BUILD, tmp_path_factory.mktemp("reference"))
            made[kind].find_reference()
        return made[kind]

    return make


@pytest.mark.parametrize("make", [jobs.Gpt, jobs.Mpi])
@pytest.mark.parametrize("kind", sorted(jobs.KINDS))
@pytest.mark.sampled(6)
def test_a_job_ends_as_documented(tmp_path, trainer, make, kind):
    if make is jobs.Mpi and not jobs.has_mpi(BUILD):
        pytest.skip("there is no mpirun here, or the build is without MPI")
    skipped, failure = jobs.play(BUILD, trainer(make), kind, SEED, tmp_path)
    assert failure is None, failure
    if skipped:
        pytest.skip(skipped)


def test_a_supervisor_that_only_starts_the_command_is_found(tmp_path, trainer):
    wrong = tmp_path / "build"
    wrong.mkdir()
    (wrong / "train_gpt").symlink_to(BUILD / "train_gpt")
    command = wrong / "ckptdelta"
    command.write_text(f'#!/bin/sh\n[ "$1" = run ] || exec "{BUILD}/ckptdelta" "$@"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    command.chmod(0o755)
    for kind in ("exit_at_the_start", "missing_program"):
        folder = tmp_path / kind
        folder.mkdir()
        assert jobs.play(wrong, trainer(jobs.Gpt), kind, 1, folder)[1]
