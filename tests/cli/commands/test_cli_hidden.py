"""Damage that materialized copies hide from a save: no delta is stored that only the copy makes possible. A save is
never blocked by damage to what came before."""

import shutil

import numpy as np
import pytest

import support_safetensors as st
from support_cli import CORRUPT, state, store  # noqa: F401
from test_cli_damage import chunk_of, flip, verified

FROZEN = {"frozen": np.random.default_rng(7).standard_normal(20_000)}


def saved(store, count, *options):
    """Saves, the last with a copy. Returns their chunk files."""
    files = [chunk_of(store, lambda: store.save(step, state(1, step), *options)) for step in range(1, count + 1)]
    assert any((store.path / "data/k").iterdir()), "the test needs a copy"
    return files


def rot(file):
    """Flips a bit of every payload, and none of the index."""
    for at in range(600, file.stat().st_size * 3 // 4, 500):
        flip(file, at)


def intact_afterwards(store, step, *options):
    """One save says what is wrong, the next builds on it, and both load without any copies."""
    store.save(step, state(1, step), *options, expect_message=f"the parent a@{step - 1} are damaged")
    store.save(step + 1, state(1, step + 1), *options)
    shutil.rmtree(store.path / "data/k")
    assert verified(store)["newest_intact"] == [f"a@{step + 1}"]
    for k in (step, step + 1):
        store.call("load", "--step", k, "--out", store.folder / "out", "--force")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("fidelity", ["exact", "near"])
def test_copies_do_not_hide_rot(store, fidelity, count):
    options = ("--newest-load-cost", 1, "--fidelity", fidelity)
    rot(saved(store, count, *options)[0])
    intact_afterwards(store, count + 1, *options)


@pytest.mark.parametrize("at", range(172, 313, 20))
def test_copies_do_not_hide_the_heads_of_a_bundle(store, at):
    options = ("--newest-load-cost", 1, "--fidelity", "near")
    flip(saved(store, 3, *options)[1], at)
    intact_afterwards(store, 4, *options)


def test_a_copy_of_what_has_rotted_is_not_named(store):
    """The values have not changed since the parent, and are at hand for the last time."""
    base = chunk_of(store, lambda: store.save(1, FROZEN))
    store.save(2, FROZEN)
    rot(base)
    store.save(3, FROZEN, expect_message="the parent a@2 are damaged")
    store.save(4, FROZEN)
    assert [c["kind"] for c in store.checkpoints()] == ["base", "delta", "base", "delta"]
    assert verified(store)["newest_intact"] == ["a@4"]


def test_a_lost_file_matters_only_to_what_needs_it(store):
    """The second save has new values of one tensor, which no longer builds on the first."""
    noise = np.random.default_rng(3)
    a, b = ({"weight": noise.standard_normal(30_000)} for _ in range(2))
    b = {"head": b["weight"]}

    def step(of, k):
        name, = of
        values = of[name].copy()
        values[:k] += 1
        return {name: values}

    options = ("--max-load-cost", 100, "--newest-load-cost", 100)
    base = chunk_of(store, lambda: store.save(1, step(a, 0) | {"head": noise.standard_normal(30_000)}, *options))
    for k in (2, 3):
        store.save(k, step(a, k) | step(b, k), *options)
    base.unlink()
    assert st.same(store.load("--step", 3, "--tensor", "head")[0], step(b, 3))
    failed = store.call("load", "--step", 3, "--tensor", "weight", "--out", store.folder / "out", "--force", expect=CORRUPT)
    assert "is missing" in failed.err and str(base) in failed.err
    store.save(4, step(a, 4) | step(b, 4), *options, expect_message="the parent a@3 are damaged")
    assert [(t["name"], t["method"]) for t in store.json("show", "--step", 4)["tensors"]] == [("weight", "standalone"), ("head", "delta")]
    assert verified(store)["newest_intact"] == ["a@4"]
