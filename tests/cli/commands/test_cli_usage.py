"""What a new user sees: help and its examples, messages for wrong arguments, exit statuses, progress."""

import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import time

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, DOC, FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401

COMMANDS = ["save", "import", "load", "list", "show", "diff", "report", "timeline", "verify", "parity", "repair", "rename", "delete", "prune", "compact", "trash", "run", "attempts", "rebuild"]


def test_general_help():
    text = run("--help").out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines()) <= 80
    for other in (["help"], ["-h"], ["-?"]):
        assert run(*other).out == text
    without = subprocess.run([COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (without.returncode, without.stdout, without.stderr) == (USAGE, "", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command):
    text = run(command, "--help").out
    assert text.startswith(f"Usage: ckptdelta {command} [OPTION...] [STORE]")
    assert "Example" in text and f"\n  ckptdelta {command} " in text
    assert run("help", command).out == text
    # glibc reads a byte too many where a text ends at the margin, and breaks the line if that byte is a blank.
    blanks = {**os.environ, "MALLOC_PERTURB_": str(ord(" ") ^ 0xFF)}
    assert run(command, "--help", env=blanks).out == text
    assert max(len(line) for line in text.splitlines()) <= 80 and text.endswith("\n")
    examples = re.split("Examples?:\n", text)[1].splitlines()
    assert examples and all(line.startswith("  ") for line in examples), "an example was wrapped"
    for option in ("--json", "--quiet", "--verbose", "--help"):
        assert option in text
    assert run(command, "--usage").out.startswith(f"Usage: ckptdelta {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_docs_and_help_name_the_same_options(command):
    """Every long option in the help is in docs/cli.md."""
    doc = DOC.read_text()
    for option in re.findall(r"--[a-z][a-z-]+", run(command, "--help").out):
        if option not in ("--help", "--usage", "--version", "--quiet", "--verbose"):
            assert option in doc, option


def test_version():
    header = (DOC.parent.parent / "include/ckptdelta.h").read_text()
    version = ".".join(re.search(rf"CKD_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    assert run("--version").out == run("-V").out == run("list", "--version").out == f"ckptdelta {version}\n"


def test_the_examples_of_the_help_work(tmp_path):
    """Runs the examples of --help literally, with the names that are in them."""
    for step in (100, 200):
        st.write(tmp_path / f"step{step}.safetensors", state(1, step // 100))
    lines = [line for line in run("--help").out.splitlines() if line.startswith("  ckptdelta ")]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "ckptdelta"
        run(*words[1:], cwd=tmp_path)
    assert st.same(st.read(tmp_path / "restored.safetensors")[0], state(1, 1))


@pytest.mark.parametrize("args", [
    ["frobnicate"], ["help", "frobnicate"], ["list"], ["list", "--frobnicate", "s"], ["list", "s", "a", "b"],
    ["list", "s", "--run"], ["show", "s", "--step", "-1"], ["show", "s", "--step", "newest"], ["show", "s", "extra"],
    ["load", "s"], ["load", "--out", "x"], ["load", "s", "--out", "x", "--step", "1e3"], ["load", "s", "y", "--out", "x"],
    ["load", "s", "--out", "x", "--threads", "0"], ["load", "s", "--out", "x", "--threads", "many"],
    ["load", "s", "--out", "x", "--staging", "0"], ["load", "s", "--out", "x", "--staging", "1MB"],
    ["load", "s", "--out", "x", "--staging", "-1"], ["load", "s", "--out", "x", "--staging", "M"],
    ["load", "s", "--out", "x", "--staging", "99999999999999T"],
    ["save", "s", "--run", "a", "--step", "1", "--staging", "much", "f"],
    ["load", "s", "--out", "x", "--shard", "4/4"], ["load", "s", "--out", "x", "--dim", "1"],
    ["load", "s", "--out", "x", "--explain"],
    ["load", "s", "--out", "x", "--shard", "0/2", "--dim", "16"], ["load", "s", "--out", "x", "--shard", "0/2", "--dim", "-17"], ["load", "s", "--out", "x", "--region", "w=0:1"],
    ["load", "s", "--out", "x", "--region", "w=[0:1]", "--region", "w=[1:2]"],
    ["diff", "s"], ["diff", "s", "1"], ["diff", "s", "1", "2", "3"], ["diff", "s", "1", "x"], ["diff", "s", "1", "a@"],
    ["report"], ["report", "s", "x"], ["verify"], ["rebuild"], ["rebuild", "s", "x"],
    ["rename"], ["rename", "s"], ["rename", "s", "a"], ["rename", "s", "a", "b", "c"],
    ["delete", "s"], ["delete", "s", "1"], ["delete", "s", "a@latest"], ["delete", "s", "a@1", "--undo", "1"],
    ["delete", "s", "a@1", "--undo", "1w"], ["delete", "s", "a@1", "--undo", "99999999999999999999d"],
    ["prune", "s", "--keep-last", "0"], ["prune", "s", "--keep-last", "x"], ["prune", "s", "--highest-is-best"],
    ["prune", "s", "--keep-newer", "d"], ["trash", "s", "a@1"], ["trash", "s", "--restore", "--empty"],
    ["compact"], ["compact", "s", "a", "b"], ["compact", "s", "a", "--run", "b"], ["compact", "s", "--max-depth", "0"],
    ["compact", "s", "--max-load-cost", "0.5"], ["compact", "s", "--rate", "fast"], ["compact", "s", "--plan", "--dry-run"],
    ["compact", "s", "--undo", "1h"], ["compact", "s", "--fold", "--keep-last", "1"], ["compact", "s", "--recode-but", "0"], ["trash", "s", "--give-up"],
    ["trash", "s", "--all"], ["trash", "s", "--restore", "latest"],
    ["save"], ["save", "s"], ["save", "s", "f"], ["save", "s", "--run", "a", "f"], ["save", "s", "--step", "1", "f"],
    ["save", "s", "--run", "a", "--step", "1"], ["save", "s", "--run", "a", "--step", "-1", "f"],
    ["save", "s", "--run", "a", "--step", "9223372036854775808", "f"], ["save", "s", "--run", "a", "--step", "latest", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--fidelity", "good", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--codec", "gzip", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--codec", "z", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--level", "20", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--on-duplicate", "ignore", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--max-load-cost", "0.5", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--newest-load-cost", "nan", "f"],
    ["save", "s", "--run", "a", "--step", "1", "--base", "--parent", "a@0", "f"],
    ["import"], ["import", "s"], ["import", "s", "--layout", "l"], ["import", "s", "f", "--dry-run"],
    ["import", "s", "--layout", "l", "f"], ["import", "s", "--layout", "l", "--run", "a", "f"],
    ["import", "s", "--layout", "l", "--run", "a", "--step", "1"], ["import", "s", "--run", "a", "--step", "1", "f"],
    ["load", "s", "--layout", "l"], ["load", "s", "--layout", "l", "--explain"],
    ["load", "s", "--layout", "l", "--out", "x", "--shard", "0/2", "--dim", "0"],
    ["load", "s", "--layout", "l", "--out", "x", "--region", "w=[0:1]"],
])
def test_wrong_usage(tmp_path, args):
    refused = run(*args, expect=USAGE, cwd=tmp_path)
    assert "help" in refused.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "a@b", "\u00e9", "x" * 129])
def test_bad_run_names(store, name):
    path = store.file({"w": np.ones(1, np.float32)})
    run("save", store.path, f"--run={name}", "--step", 1, path, expect=USAGE)
    assert not store.path.exists() or not store.checkpoints()


def test_good_run_names(store):
    for name in ("a", "A-1.b_c~7", "x" * 128):
        store.save(1, {"w": np.ones(1, np.float32)}, run_name=name)
    assert len(store.checkpoints()) == 3


def test_options_may_be_anywhere(store):
    path = store.file(state(1))
    run("save", "--run=a", path.parent / "store", "--step", "1", path, "-q")
    run("save", "--step=2", "--run", "a", "-q", "--", store.path, path)
    assert [c["step"] for c in store.checkpoints()] == [1, 2]
    assert run("list", "--json", store.path).out == run("list", store.path, "--json").out


def test_paths_that_are_no_store(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    st.write(tmp_path / "in.safetensors", state(1))
    for command in (["list"], ["show"], ["report"], ["verify"], ["rebuild"], ["delete", "a@1"],
                    ["prune", "--keep-last", "1"], ["trash"], ["compact"], ["pin"], ["tag"], ["policy"], ["prune"], ["pin", "a@1"], ["load", "--out", tmp_path / "o"],
                    ["diff", "1", "2"]):
        for name in ("absent", "folder"):
            assert name in run(command[0], tmp_path / name, *command[1:], expect=NOT_FOUND).err
    refused = run("save", tmp_path / "folder", "--run", "a", "--step", 1, tmp_path / "in.safetensors", expect=USAGE)
    assert "not a ckptdelta store" in refused.err
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["precious"]
    # A file where the store should be: whatever the error is, the command reports it and changes nothing.
    done = subprocess.run([COMMAND, "list", tmp_path / "file"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=60)
    assert done.returncode == USAGE and done.stderr and (tmp_path / "file").read_text() == "x"


def soft_limit(files):
    """Sets the soft limit of open files in the child, and leaves the hard one."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_the_soft_limit_of_open_files_is_raised(store):
    store.save(1, state(1))
    run("load", store.path, "-o", store.folder / "out.safetensors", preexec_fn=soft_limit(5))  # the loader takes one at a time
    st.same(st.read(store.folder / "out.safetensors")[0], state(1))


def test_a_command_keeps_its_limit_of_open_files(store):
    """Programs that call select() rely on it."""
    run("run", store.path, "gpt", "-q", "--", "sh", "-c", "test $(ulimit -Sn) = 900", preexec_fn=soft_limit(900))


def test_a_newer_store_is_named(store):
    """It neither crashes nor says `no such store`, and nothing replaces its identity."""
    xxhash = pytest.importorskip("xxhash")
    store.save(1, state(1))
    identity = store.path / "data/store"
    content = bytearray(identity.read_bytes())
    content[8] = 2
    content[-8:] = xxhash.xxh3_64_intdigest(bytes(content[:-8])).to_bytes(8, "little")
    identity.write_bytes(content)
    for command in ("list", "verify", "repair"):
        assert "version 2" in run(command, store.path, expect=4).err
    assert identity.read_bytes() == content


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_identity_is_written_again(store, lost):
    store.save(1, state(1))
    identity = store.path / "data/store"
    content = identity.read_bytes()
    identity.unlink()
    if not lost:
        identity.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    run("list", store.path, expect_message="ckptdelta repair")
    assert "ckptdelta repair writes it again" in run("verify", store.path, expect=4).out
    assert "ckptdelta repair" in run("pin", store.path, "a@1", expect=4).err
    run("repair", store.path, expect_message="ckptdelta repair")
    assert identity.read_bytes()[:40] == content[:40]
    run("verify", store.path)


# -------------------------------------------------------------------------------------------------- terminal

def until(condition, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.005)
    return False


def on_terminal(*args, pause_when):
    """Runs the command with a terminal as standard error, and stops it for more than a second while it is
    busy. Returns (status, output)."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen([COMMAND, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=terminal)
    os.close(terminal)
    assert until(pause_when, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.1)
    process.send_signal(signal.SIGCONT)
    shown = b""
    while select.select([controller], [], [], 300)[0]:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the end of a terminal
            break
        shown += data
    os.close(controller)
    return process.wait(timeout=300), shown.decode()


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.sampled(2)
def test_progress_on_a_terminal(store, quiet):
    """Four blocks at the largest effort take long enough to be stopped in between."""
    path = store.file({"w": np.random.default_rng(1).standard_normal(1 << 20)})
    code, shown = on_terminal("save", store.path, "--run", "a", "--codec", "zstd", "--level", "19", "--threads", "1",
                              "--step", 1, path, *(["-q"] if quiet else []),
                              pause_when=lambda: store.path.exists() and list(store.path.glob("data/c/*")))
    assert code == 0
    if quiet:
        assert shown == ""
        return
    assert re.search(r"saving  [0-9.]+ \w+ of 8.0 MiB  \d+ %  [0-9.]+ \w+/s(  [^\r\x1b]* left)?", shown), shown
    assert shown.endswith("\r\x1b[K"), "the line is cleared at the end"


# --------------------------------------------------------------------------------------------------- signals

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_leaves_nothing(store, number):
    """Four pieces of 16 MiB. The load is stopped at the first byte, gets the signal, and continues."""
    big = np.random.default_rng(1).integers(0, 255, 64 << 20, dtype=np.uint8)
    store.save(1, {"w": big})
    out = store.folder / "out"
    process = subprocess.Popen([COMMAND, "load", store.path, "--out", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert until(store.temporary_files, process)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and b"interrupted" in err
    assert not out.exists() and not store.temporary_files()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_save_leaves_no_checkpoint(store, number):
    store.save(1, state(1))
    before = set(store.files())
    big = store.file({"w": np.random.default_rng(1).standard_normal(12 << 20)})
    process = subprocess.Popen([COMMAND, "save", store.path, "--run", "a", "--step", "2", "--codec", "zstd", "--level", "19",
                                "--threads", "1", big], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert until(lambda: set(store.files()) - before, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and b"interrupted" in err
    assert [c["step"] for c in store.checkpoints()] == [1]
    assert set(store.files()) == before
