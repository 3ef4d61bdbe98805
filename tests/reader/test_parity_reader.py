"""Parity as codec/FORMAT.md has it: an independent reader finds every byte of it right, and rebuilds files by itself."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support_cli import COMMAND, run, state, store  # noqa: F401

READER = Path(__file__).resolve().parent / "ckd_parity.py"


def read(store, *args):
    return subprocess.run([sys.executable, READER, store.path, *args], capture_output=True, timeout=120)


@pytest.mark.parametrize("group", ["4+1", "3+2", "16+3"])
def test_every_byte(store, group):
    rng = np.random.default_rng(7)
    for step in range(1, 6):
        store.save(step, {"w": rng.standard_normal((step % 2 + 1, 20000)).astype(np.float32)}, "--base")
    made = subprocess.run([COMMAND, "parity", store.path, "--group", group], capture_output=True, text=True, timeout=60)
    if "libisal2" in made.stderr:
        pytest.skip("ISA-L is not installed")
    assert made.returncode == 0, made.stderr
    done = read(store)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(list((store.path / "data/p").glob("*.ckp"))) >= int(group[-1])
    for path in (store.path / "data/c").iterdir():
        content = path.read_bytes()
        path.unlink()
        assert read(store, "--rebuild", path.stem).stdout == content
        path.write_bytes(content)


def test_it_finds_differences(store):
    for step in (1, 2):
        store.save(step, state(1, step), "--base")
    store.call("parity", "--group", "2+1")
    for path in [*(store.path / "data/c").iterdir(), *(store.path / "data/p").glob("*.ckp")]:
        content = bytearray(path.read_bytes())
        for at in (0, len(content) // 3, len(content) - 1):
            content[at] ^= 1
            path.write_bytes(content)
            assert read(store).returncode == 1, (path, at)
            content[at] ^= 1
        path.write_bytes(content)
    assert read(store).returncode == 0
