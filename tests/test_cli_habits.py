"""What users of restic, git, zstd and rclone type by habit."""

import os

import numpy as np
import pytest

import support_safetensors as st
from support_cli import CORRUPT, FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401


# ---------------------------------------------------------------------------------------- commands and options


def test_aliases(store):
    store.save(1, state(1))
    store.save(2, state(2))
    assert run("ls", store.path).out == run("list", store.path).out
    assert run("check", "--json", store.path).json()["ok"] is True
    assert run("gc", "--json", store.path).json() == run("compact", "--json", store.path).json()
    run("rm", store.path, "a@1")
    assert [c["step"] for c in store.checkpoints()] == [2]
    for alias, command in (("ls", "list"), ("rm", "delete"), ("check", "verify"), ("gc", "compact")):
        assert run("help", alias).out == run("help", command).out
        assert f"{alias} for {command}" in run("--help").out


@pytest.mark.parametrize("typed, meant", [("lst", "list"), ("isave", "save"), ("laod", "load"), ("comapct", "compact"), ("chek", "check")])
def test_a_misspelt_command(typed, meant):
    assert f"there is no command '{typed}'; did you mean '{meant}'?" in run(typed, "s", expect=USAGE).err
    assert f"did you mean '{meant}'?" in run("help", typed, expect=USAGE).err


@pytest.mark.parametrize("args, meant", [
    (["list", "s", "--jsn"], "--json"), (["save", "s", "--fidelty=near"], "--fidelity"), (["load", "--treads", "2"], "--threads"),
    (["prune", "--keep-lst", "3"], "--keep-last"), (["load", "-v", "--otu", "x"], "--out"), (["compact", "--kepe-every", "3"], "--keep-every")])
def test_a_misspelt_option(args, meant):
    err = run(*args, expect=USAGE).err
    assert f"did you mean '{meant}'?" in err and err.count("there is no option") == 1
    assert f"ckptdelta {args[0]} --help" in err


def test_words_that_are_no_near_misses(tmp_path):
    for args in (["frobnicate"], ["x"], ["list", "s", "--frobnicate"], ["list", "s", "--x=1"]):
        err = run(*args, expect=USAGE, cwd=tmp_path).err
        assert "there is no" in err and "did you mean" not in err
    # Values of options, and what stands behind --, are no options.
    assert "there is no option" not in run("load", "absent", "--out", "--frobnicate", expect=NOT_FOUND, cwd=tmp_path).err
    assert "there is no option" not in run("list", "--", "--frobnicate", expect=NOT_FOUND, cwd=tmp_path).err
    # Beginnings of options still do.
    assert run("list", "--versio").out == run("list", "--version").out
