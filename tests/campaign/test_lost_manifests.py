"""Random commands beside lost manifests, a few short sequences: another seed in each commit."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lost_manifests  # noqa: E402

COMMAND = os.environ.get("CKPTDELTA") or str(Path(__file__).resolve().parents[2] / "build/current/ckptdelta")
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.sampled(4)
def test_every_lost_checkpoint_comes_back(tmp_path, number):
    failure = lost_manifests.play(COMMAND, 100 * SEED + number, tmp_path)
    assert failure is None, failure


def test_a_command_that_repairs_nothing_is_found(tmp_path):
    command = tmp_path / "wrong"
    command.write_text(f'#!/bin/sh\n[ "$1" != repair ] || exit 0\nexec "{COMMAND}" "$@"\n')
    command.chmod(0o755)
    failures = [lost_manifests.play(command, seed, tmp_path / str(seed)) for seed in range(3) if not (tmp_path / str(seed)).mkdir()]
    assert any(failures) and "verify" in next(filter(None, failures))
