"""Standard output that cannot be written, or what it would tell cannot be looked up: finished changes count, with exit
status 0; commands that only print have failed."""

import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support_cli import COMMAND, DONE, FAILED, state, store  # noqa: F401

FULL = "/dev/full"
CLOSED = None
PIPE = "a pipe that nobody reads"


def call(out, *args):
    arguments = [COMMAND, *map(str, args)]
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "timeout": 60}
    if out == FULL:
        with open(FULL, "w") as device:
            return subprocess.run(arguments, stdout=device, **options)
    if out == PIPE:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            return subprocess.run(arguments, stdout=writing, restore_signals=True, **options)
        finally:
            os.close(writing)
    return subprocess.run(["sh", "-c", 'exec "$@" 1>&-', "sh", *arguments], **options)


def check_done(done, what):
    assert done.returncode == DONE, done.stderr
    assert "cannot write to standard output" in done.stderr
    assert f"nevertheless {what}" in done.stderr
    assert done.stderr.count("standard output") == 1


@pytest.fixture
def two(store):
    store.save(1, state(1, 1), "--base")
    store.save(2, state(1, 2), "--base")
    return store


@pytest.mark.parametrize("out", [FULL, CLOSED, PIPE])
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_save_is_committed(two, out, json):
    done = call(out, "save", two.path, "--run", "a", "--step", 3, *json, two.file(state(1, 3)))
    check_done(done, "a@3 is saved")
    assert [c["step"] for c in two.checkpoints()] == [1, 2, 3]


def under_faults(begin):
    """`begin(n)` starts a command that cannot reach any file from its nth call on. Gives the results that are successes,
    from the first n without an effect downwards."""
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("nothing can be preloaded under a sanitizer")
    shim = Path(os.environ.get("CKPTDELTA_BUILD") or "build/current").resolve() / "tests/libcampaign_faults.so"

    def result(n):
        env = dict(os.environ, LD_PRELOAD=str(shim), CAMPAIGN_FAULT=f"EIO+:{n}")
        return subprocess.run([COMMAND, *map(str, begin())], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=60, env=env)
    first = next(n for n in itertools.count(16, 16) if (done := result(n)).returncode == DONE and not done.stderr)
    found = list(itertools.takewhile(lambda done: done.returncode == DONE, (result(n) for n in range(first, 0, -1))))
    assert any(done.stderr for done in found), "no fault came after the work was done"
    return found


def test_a_save_prints_what_it_knows(two):
    whole, changed = two.folder / "whole", two.file(state(1, 3))
    shutil.copytree(two.path, whole)

    def begin():
        shutil.rmtree(two.path)
        shutil.copytree(whole, two.path)
        return ["save", two.path, "--run", "a", "--step", 3, "--json", changed]
    for done in under_faults(begin):
        saved, = json.loads(done.stdout)["checkpoints"]
        assert (saved["run"], saved["step"], saved["tensor_count"]) == ("a", 3, 5)


def test_a_load_prints_what_it_knows(two, tmp_path):
    begin = ["load", two.path, "--json", "--force", "--out", tmp_path / "loaded"]
    for done in under_faults(lambda: begin):
        told = json.loads(done.stdout)
        assert (told["checkpoints"][0]["run"], told["checkpoints"][0]["step"], told["tensor_count"]) == ("a", 2, 5)


@pytest.mark.parametrize("out", [FULL, CLOSED, PIPE])
def test_a_loaded_file_is_there(two, out, tmp_path):
    check_done(call(out, "load", two.path, "--out", tmp_path / "loaded"), "a@2 is loaded")
    assert (tmp_path / "loaded").exists()


CHANGES = [
    (["delete", "a@1"], "the checkpoints are deleted"),
    (["prune", "--keep-last", "1", "--undo", "0s"], "the checkpoints are deleted"),
    (["compact", "--max-depth", "2"], "the store is compacted"),
    (["pin", "a@1"], "the pins are changed"),
    (["tag", "best", "a@1"], "the tag is changed"),
    (["policy", "--keep-last", "5"], "the policy is stored"),
    (["parity", "--group", "2+1"], "parity is made"),
    (["repair"], "the repair is done"),
    (["rebuild"], "the catalog is rebuilt"),
    (["trash", "--empty"], "the trash is emptied"),
    (["rename", "a", "b"], "a is renamed to b"),
]


@pytest.mark.parametrize("command, what", CHANGES, ids=[c[0][0] for c in CHANGES])
def test_changes_are_done(two, command, what):
    check_done(call(FULL, command[0], two.path, *command[1:], "--json"), what)


def test_copies_and_exports_are_done(two, tmp_path):
    check_done(call(FULL, "push", two.path, tmp_path / "copy"), "the checkpoints are copied")
    check_done(call(FULL, "export", two.path, "--out", tmp_path / "export"), "a@2 is exported")
    two.call("delete", "a@1")
    check_done(call(FULL, "trash", two.path, "--restore"), "the checkpoints are restored")
    assert len(two.checkpoints()) == 2


DRY = [["compact", "--max-depth", "2", "--dry-run"], ["prune", "--keep-last", "1", "--dry-run"], ["repair", "--dry-run"],
       ["verify"], ["show"], ["report"], ["timeline"], ["diff", "a@1", "a@2"], ["report", "--csv"]]


@pytest.mark.parametrize("command", DRY, ids=[" ".join(c) for c in DRY])
def test_output_that_cannot_be_printed_is_a_failure(two, command):
    for json in ([], ["--json"]) if "--csv" not in command else ([],):
        done = call(FULL, command[0], two.path, *command[1:], *json)
        assert done.returncode == FAILED and done.stderr.count("cannot write to standard output") == 1
        assert "nevertheless" not in done.stderr


def test_a_pipe_that_is_closed_ends_a_listing_silently(two):
    done = call(PIPE, "list", two.path)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_messages_are_not_written_to_files_of_the_store(two):
    """If standard error is closed, no lock file may get its number."""
    for script in ('exec "$@" 2>&-', 'exec "$@" 0<&- 1>&- 2>&-'):
        for step in (3, 2):
            args = ["save", two.path, "--run", "a", "--step", step, "--parent", "a@77", two.file(state(1, 3))]
            done = subprocess.run(["sh", "-c", script, "sh", COMMAND, *map(str, args)], timeout=60)
            assert done.returncode not in (DONE, -signal.SIGPIPE)
    assert (two.path / "data/lock").read_bytes() == b"" and (two.path / "data/readers").read_bytes() == b""
    two.call("verify", "-q")
