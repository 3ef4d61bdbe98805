"""Lossy chains under valgrind: no error of memory, and the same bits on the processor that valgrind makes of this one."""

import os
import shutil
import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, store  # noqa: F401

VALGRIND = shutil.which("valgrind")
ERROR = 99
ROWS, COLUMNS, STEPS = 96, 72, 4

pytestmark = [
    pytest.mark.skipif(not VALGRIND, reason="there is no valgrind"),
    pytest.mark.skipif(bool(os.environ.get("CKPTDELTA_SAN")), reason="sanitizers and valgrind exclude each other"),
]


def state(step):
    """Weights that move along a few directions, in three dtypes, and their moments."""
    random = np.random.default_rng(1)
    weight = random.standard_normal((ROWS, COLUMNS)) * 0.02
    rows = np.exp(random.standard_normal((ROWS, 1)))
    for _ in range(step):
        weight += random.standard_normal((ROWS, 3)) @ random.standard_normal((3, COLUMNS)) * 3e-4
        weight += random.standard_normal(weight.shape) * 1e-4
    moment = random.standard_normal(weight.shape) * rows * 1e-4
    second = rows ** 2 * random.chisquare(4, weight.shape) * 1e-9
    tensors = {"w": weight, "exp_avg.w": moment, "exp_avg_sq.w": second, "bias": weight[0]}
    tensors = {name: st.tensor(value.astype("<f4")) for name, value in tensors.items()}
    tensors["half"] = st.tensor(weight.astype("<f2"))
    bits = weight.astype("<f4").view("<u4")
    tensors["brain"] = ("BF16", [ROWS, COLUMNS], (bits >> 16).astype("<u2").tobytes())
    return tensors | {"step": st.tensor(np.array(step, np.int64))}


def valgrind(*args):
    command = [VALGRIND, "-q", f"--error-exitcode={ERROR}", "--leak-check=full", "--errors-for-leak-kinds=definite",
               COMMAND, *map(str, args)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout


@pytest.fixture(params=["near", "coarse"])
def chain(request, store):  # noqa: F811
    for step in range(STEPS):
        store.save(step, state(step), "--fidelity", request.param, "--max-load-cost", 16)
    assert [c["kind"] for c in store.checkpoints()] == ["base"] + ["delta"] * (STEPS - 1)
    return request.param, store


@pytest.mark.sampled(2)
def test_a_load_is_clean_and_gives_the_same(chain):
    _, of = chain
    natively, here = of.folder / "natively", of.folder / "here"
    of.call("load", "--out", natively)
    valgrind("load", of.path, "--threads", 2, "--out", here)
    assert here.read_bytes() == natively.read_bytes()


@pytest.mark.sampled(2)
def test_a_save_is_clean_and_loads_to_the_same(chain):
    fidelity, of = chain
    tensors = state(STEPS)
    other = of.folder / "other"
    shutil.copytree(of.path, other)
    of.save(STEPS, tensors, "--fidelity", fidelity, "--max-load-cost", 16)
    valgrind("save", other, "--run", "a", "--step", STEPS, "--fidelity", fidelity, "--max-load-cost", 16, "-q",
             of.file(tensors))
    natively, here = of.folder / "natively", of.folder / "here"
    of.call("load", "--out", natively)
    of.path = other
    of.call("load", "--out", here)
    assert here.read_bytes() == natively.read_bytes()
