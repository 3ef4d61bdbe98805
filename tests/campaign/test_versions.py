"""Versions that are published and followed while both sides are killed, a few of them: another seed in each commit."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import versions  # noqa: E402

COMMAND = os.environ.get("CKPTDELTA") or str(Path(__file__).resolve().parents[2] / "build/current/ckptdelta")
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


def test_folders_have_what_was_published(tmp_path):
    done, failure = versions.play(COMMAND, SEED, tmp_path, 12)
    assert failure is None, failure
    assert done["versions"] == 12 and done["applied"] > 3


def test_a_follower_that_stays_behind_is_found(tmp_path):
    command = tmp_path / "wrong"
    command.write_text(f'#!/bin/sh\nold=near/model.safetensors\n[ "$1" != follow ] || [ -e kept ] || cp $old kept 2>/dev/null\n'
                       f'"{COMMAND}" "$@"\nstatus=$?\n[ "$1" != follow ] || [ ! -e kept ] || cp kept $old\nexit $status\n')
    command.chmod(0o755)
    (tmp_path / "case").mkdir()
    assert "and should have" in versions.play(command, 1, tmp_path / "case", 12)[1]
