"""Standard output that cannot be written, or what it would tell cannot be looked up: finished changes count, with exit
status 0; commands that only print have failed."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess

import pytest

from support_cli import COMMAND, CORRUPT, DONE, FAILED, failures_downwards, fault_library, state, store  # noqa: F401

FULL = "/dev/full"
CLOSED = None
PIPE = "a pipe that nobody reads"


def call(out, *args):
    arguments = [COMMAND, *map(str, args)]
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "timeout": 60}
    if out not in (CLOSED, PIPE):
        with open(out, "w") as file:
            return subprocess.run(arguments, stdout=file, **options)
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
    """The results that are successes although no file could be reached from some call on, late ones first."""
    found = list(itertools.takewhile(lambda done: done.returncode == DONE, failures_downwards(begin)))
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
    (["scrub"], "the scrub is done"),
    (["run", "a", "-q", "--", "true"], "COMMAND has succeeded"),
]


@pytest.mark.parametrize("command, what", CHANGES, ids=[c[0][0] for c in CHANGES])
def test_changes_are_done(two, command, what):
    check_done(call(FULL, command[0], two.path, "--json", *command[1:]), what)


def test_long_names_are_not_cut(two):
    first, second = "b" * 128, "c" * 128
    check_done(call(FULL, "rename", two.path, "a", first), f"a is renamed to {first}")
    check_done(call(FULL, "rename", two.path, first, second), f"{first} is renamed to {second}\n")


def test_copies_and_exports_are_done(two, tmp_path):
    check_done(call(FULL, "push", two.path, tmp_path / "copy"), "the checkpoints are copied")
    check_done(call(FULL, "export", two.path, "--out", tmp_path / "export"), "a@2 is exported")
    two.call("delete", "a@1")
    check_done(call(FULL, "trash", two.path, "--restore"), "the checkpoints are restored")
    assert len(two.checkpoints()) == 2


@pytest.mark.parametrize("out", [FULL, PIPE])
def test_the_exit_status_of_run_is_not_that_of_its_output(two, out):
    done = call(out, "run", two.path, "a", "--json", "--max-futile", "1", "--", "false")
    assert done.returncode == 93, done.stderr


@pytest.mark.parametrize("out", [FULL, PIPE])
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_follow_runs_exec_whatever_becomes_of_its_output(two, tmp_path, out, json):
    into, ran = tmp_path / "model", tmp_path / "ran"
    follow = ["follow", two.path, "--into", into, *json, "--exec", f"echo $CKPTDELTA_STEP >> {ran}; kill -PIPE $$"]
    done = call(out, *follow, "--once")
    check_done(done, f"{into} has a@2")
    assert ran.read_text() == "2\n" and f"signal {signal.SIGPIPE:d}" in done.stderr
    two.save(3, state(1, 3))
    done = call(out, *follow, "--once", "--exec-fails", "stop")
    assert done.returncode == FAILED and "stopped, as --exec failed" in done.stderr
    two.save(4, state(1, 4))
    done = call(out, *follow)
    assert done.returncode == FAILED and "cannot write to standard output" in done.stderr
    assert ran.read_text() == "2\n3\n4\n"


def damage(folder, pattern):
    path = max(folder.glob(pattern), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


@pytest.mark.parametrize("command", [["repair"], ["parity", "--group", "2+1"]], ids=lambda c: c[0])
def test_damage_is_the_status_even_if_the_rest_fails(two, command):
    """The exit status says that damage is left, also if what is printed beside it cannot be looked up."""
    damage(two.path, "data/c/*")
    whole = two.folder / "whole"
    shutil.copytree(two.path, whole)

    def begin():
        shutil.rmtree(two.path)
        shutil.copytree(whole, two.path)
        return [command[0], two.path, *command[1:], "--json"]
    assert subprocess.run([COMMAND, *map(str, begin())], capture_output=True, timeout=60).returncode == CORRUPT
    for done in failures_downwards(begin):
        assert done.returncode != DONE, done.stdout + done.stderr
        if not done.stdout and done.returncode not in (DONE, CORRUPT):
            break  # the fault came before the work was done


DRY = [["compact", "--max-depth", "2", "--dry-run"], ["prune", "--keep-last", "1", "--dry-run"], ["repair", "--dry-run"],
       ["verify"], ["show"], ["report"], ["timeline"], ["diff", "a@1", "a@2"], ["report", "--csv"]]


@pytest.mark.parametrize("command", DRY, ids=[" ".join(c) for c in DRY])
def test_output_that_cannot_be_printed_is_a_failure(two, command):
    for json in ([], ["--json"]) if "--csv" not in command else ([],):
        done = call(FULL, command[0], two.path, *command[1:], *json)
        assert done.returncode == FAILED and done.stderr.count("cannot write to standard output") == 1
        assert "nevertheless" not in done.stderr


def test_an_error_that_only_close_reports(two, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", fault_library())
    monkeypatch.setenv("CAMPAIGN_CLOSE", "1")
    done = call(tmp_path / "out", "list", two.path)
    assert done.returncode == FAILED and f"cannot write to standard output: {os.strerror(errno.EIO)}" in done.stderr
    check_done(call(tmp_path / "out", "pin", two.path, "a@1"), "the pins are changed")


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
