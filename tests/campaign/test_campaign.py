"""A minute of the campaign: a short script of each mode, a crowd of commands at a time, and commands with
mistakes that it must find."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).resolve().parent / "campaign.py"
sys.path.insert(0, str(CAMPAIGN.parent))

from plans import MODES  # noqa: E402

COMMAND = os.environ.get("CKPTDELTA") or str(CAMPAIGN.parents[2] / "build/current/ckptdelta")


def campaign(folder, *args):
    """Runs the campaign. On a slow machine it plays less, which is no failure."""
    done = subprocess.run([sys.executable, CAMPAIGN, "--folder", folder, "--out", folder / "out", *map(str, args)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
    return done.returncode, done.stdout


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.sampled(5)
def test_mode(tmp_path, mode):
    code, out = campaign(tmp_path, "--mode", mode, "--seed", 1, "--ops", 40, "--scripts", 1, "--seconds", 5, "--shrink", 60)
    assert code == 0, out


# Shrunk scripts that once failed. As the code changes, faults hit other calls; the scripts still run these
# commands.
@pytest.mark.parametrize("script", sorted(CAMPAIGN.parent.glob("scripts/*.json")), ids=lambda path: path.stem)
def test_script_that_failed(tmp_path, script):
    code, out = campaign(tmp_path, "--replay", script)
    assert code == 0, out


def test_crowd(tmp_path):
    code, out = campaign(tmp_path, "--mode", "crowd", "--seed", 2, "--scripts", 1, "--seconds", 8, "--crowd-seconds", 8)
    assert code == 0, out


# Commands that make one mistake and report success.
WRONG = {
    "bits": "case $1 in load) printf '\\377\\377' | dd of=out.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null; esac",
    "lost": "case $1 in save) \"$real\" delete A \"$4@$6\" --undo 0s -q; esac",
    "left over": "case $1 in save) : >A/data/m/left.tmp; esac",
}


@pytest.mark.parametrize("kind", sorted(WRONG))
@pytest.mark.sampled(3)
def test_mistakes_are_found(tmp_path, kind):
    command = tmp_path / "wrong"
    command.write_text(f'#!/bin/sh\nreal={COMMAND}\n"$real" "$@"\ncode=$?\n{WRONG[kind]}\nexit $code\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    code, out = campaign(tmp_path, "--command", command, "--mode", "steps", "--ops", 6, "--scripts", 1, "--seconds", 60, "--shrink", 30)
    assert code == 1 and re.search(f"^FAILED seed 1 .*: {kind}: ", out, re.MULTILINE), out
    assert "--- 1 commands are enough" in out, out
