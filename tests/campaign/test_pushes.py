"""Pushes of several stores into one at the same time, a few cases: another seed in each commit."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pushes  # noqa: E402

COMMAND = os.environ.get("CKPTDELTA") or str(Path(__file__).resolve().parents[2] / "build/current/ckptdelta")
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.sampled(2)
def test_the_target_is_whole(tmp_path, number):
    failure = pushes.play(COMMAND, 100 * SEED + number, tmp_path)
    assert failure is None, failure


def test_a_push_that_leaves_out_a_checkpoint_is_found(tmp_path):
    command = tmp_path / "wrong"
    command.write_text(f'#!/bin/sh\n[ "$1 $3" != "push t" ] || [ "$4" = --run ] || set -- "$@" --run r\nexec "{COMMAND}" "$@"\n')
    command.chmod(0o755)
    failures = [pushes.play(command, seed, tmp_path / str(seed)) for seed in range(2) if not (tmp_path / str(seed)).mkdir()]
    assert all(failures) and "are not there" in failures[0]
