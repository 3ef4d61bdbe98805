"""Commands and options that users of restic, git, zstd and rclone type by habit."""

import json
import os
import pty
import re
import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401


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


def test_words_that_are_not_misspelt(tmp_path):
    for args in (["frobnicate"], ["x"], ["list", "s", "--frobnicate"], ["list", "s", "--x=1"]):
        err = run(*args, expect=USAGE, cwd=tmp_path).err
        assert "there is no" in err and "did you mean" not in err
    # Values of options, and arguments after --, are no options.
    assert "there is no option" not in run("load", "absent", "--out", "--frobnicate", expect=NOT_FOUND, cwd=tmp_path).err
    assert "there is no option" not in run("list", "--", "--frobnicate", expect=NOT_FOUND, cwd=tmp_path).err
    # Unique beginnings of options still work.
    assert run("list", "--versio").out == run("list", "--version").out


ALL = ["save", "import", "load", "export", "follow", "publish", "list", "show", "diff", "report", "timeline", "verify", "scrub", "parity", "repair", "pin", "tag",
       "rename", "delete", "prune", "compact", "policy", "trash", "copy", "push", "pull", "run", "attempts", "agent", "rebuild"]


@pytest.mark.parametrize("command", ALL)
def test_help_shows_short_and_long_options_together(command):
    text = run(command, "--help").out
    for short, long in (("o", "out"), ("r", "run"), ("n", "dry-run"), ("q", "quiet"), ("v", "verbose")):
        assert not re.search(rf"^ +(-., )?--{long}\b", text, re.MULTILINE) or f"  -{short}, --{long}" in text, long


def test_short_options(store):
    file, out = store.file(state(1)), store.folder / "x"
    run("save", store.path, "-r", "a", "--step", 1, file)
    run("save", store.path, "-r", "b", "--step", 2, file)
    assert run("list", store.path, "-rb", "-q", "--json").json()["checkpoints"][0]["step"] == 2
    run("load", store.path, "-r", "b", "-qo", out)
    assert st.same(st.read(out)[0], state(1))
    run("export", store.path, "-r", "b", "-no", store.folder / "folder")
    assert not (store.folder / "folder").exists()
    run("prune", store.path, "-n", "--keep-last", 1)
    run("copy", store.path, store.folder / "other", "-n")
    assert len(store.checkpoints()) == 2 and not (store.folder / "other").exists()


@pytest.mark.parametrize("command", ["list", "timeline"])
def test_the_run_follows_the_store(store, command, tmp_path):
    file = store.file(state(1))
    for name in ("a", "b"):
        run("save", store.path, "-r", name, "--step", 1, file)
    both, one = run(command, store.path, "--json").json(), run(command, store.path, "b", "--json").json()
    assert one == run(command, store.path, "--run", "b", "--json").json() != both
    assert one == run(command, "b", "--json", env={"CKPTDELTA_STORE": str(store.path)}, cwd=tmp_path).json()
    assert "name one run" in run(command, store.path, "a", "b", expect=USAGE).err
    assert "it has: a, b" in run(command, store.path, "c", expect=NOT_FOUND).err


def test_one_thing_is_not_many(store):
    store.save(1, state(1))
    assert run("verify", store.path).out.startswith("verified 1 checkpoint, 1 file, ")
    assert run("scrub", store.path).out.startswith("read 1 file, ")
    assert "would rewrite 0 of 1 checkpoint: " in run("compact", store.path, "-n").out
    store.save(2, state(1, 2))
    assert run("verify", store.path).out.startswith("verified 2 checkpoints, 2 files, ")
    run("delete", store.path, "a@2")
    assert run("trash", store.path, "--empty", "--all").out.startswith("removed 1 checkpoint, 1 file, ")


# ------------------------------------------------------------------------------------------------------ stores


def test_parents_of_a_new_store_are_made(tmp_path):
    file = st.write(tmp_path / "in.safetensors", state(1))
    for path in (tmp_path / "some/where/deep/store", "runs/of/gpt/"):
        run("save", path, "--run", "a", "--step", 1, file, cwd=tmp_path)
        assert [c["step"] for c in run("list", "--json", path, cwd=tmp_path).json()["checkpoints"]] == [1]
    refused = run("save", tmp_path / "in.safetensors/below/store", "--run", "a", "--step", 1, file, expect=USAGE)
    assert "a part of its path, is a file" in refused.err
    # Only commands that create a store create its parents.
    run("list", tmp_path / "no/such/store", expect=NOT_FOUND)
    run("prune", tmp_path / "no/such/store", "--keep-last", 3, expect=NOT_FOUND)
    assert not (tmp_path / "no").exists()


def test_parents_are_not_made_for_a_path_that_is_too_long(tmp_path):
    file = st.write(tmp_path / "in.safetensors", state(1))
    long = tmp_path / "long" / "/".join(["x" * 100] * 6)
    assert "choose a shorter one" in run("save", long, "--run", "a", "--step", 1, file, expect=USAGE).err
    relative = "/".join(["x" * 100] * 4) + "/" + "y" * (509 - 4 * 101 - len(str(tmp_path)) - len("/long/"))
    (tmp_path / "long").mkdir(exist_ok=True)
    assert "choose a shorter one" in run("save", relative, "--run", "a", "--step", 1, file, cwd=tmp_path / "long", expect=USAGE).err
    assert not list((tmp_path / "long").iterdir())


@pytest.fixture
def ambient(store, monkeypatch, tmp_path):
    """A store that the environment names, and a current folder. Another store is there, too."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("CKPTDELTA_STORE", str(store.path))
    return store


def steps_of(*where):
    return [c["step"] for c in run("list", "--json", *where).json()["checkpoints"]]


def test_the_environment_names_the_store(ambient, tmp_path):
    first, second = ambient.file(state(1)), ambient.file(state(2))
    run("save", "--run", "a", "--step", 1, first)
    run("save", first, "--run", "b", "--step", 1)
    run("save", "--run", "a", "--step", 2, second)
    assert steps_of() == steps_of(ambient.path) == [1, 2, 1]
    assert run("diff", "a@1", "a@2").out == run("diff", ambient.path, "a@1", "a@2").out
    assert run("show", "--run", "b").out == run("show", ambient.path, "--run", "b").out
    run("tag", "best", "a@1")
    run("pin", "b@1")
    run("tag", "best", "--delete")
    run("compact", "a", "--max-depth", 1)
    run("delete", "a@1")
    assert steps_of() == [2, 1]
    run("trash", "--restore", "a@1")
    run("load", "--out", "x", "--run", "a", "--step", 1)
    assert st.same(st.read(tmp_path / "cwd/x")[0], state(1))
    assert run("verify").out == run("verify", ambient.path).out
    assert run("prune", "--keep-last", 1, "--dry-run").out == run("prune", ambient.path, "--keep-last", 1, "--dry-run").out


def test_a_named_store_takes_precedence(ambient, tmp_path):
    file = ambient.file(state(1))
    other = tmp_path / "cwd" / "other"
    run("save", "other/", "--run", "a", "--step", 7, file)  # the name of a new store ends with a slash
    assert not ambient.path.exists() and steps_of("other") == [7]
    run("save", "other", "--run", "a", "--step", 8, file)
    assert steps_of(other) == [7, 8]
    run("delete", "other", "a@7")
    assert steps_of("other") == [8]
    run("save", "--run", "a", "--step", 1, file)
    assert steps_of() == [1]


def test_a_new_store_needs_its_slash(ambient, tmp_path):
    file = ambient.file(state(1))
    layout = tmp_path / "layout"
    for command in (["save"], ["import", "--layout", layout]):
        err = run(*command, "fresh", "a@1", file, expect=USAGE).err
        assert "there is no file 'fresh'; the name of a new STORE ends with a slash, as in fresh/" in err
    assert "say which checkpoint this is" in run("save", file, "a@1", expect=USAGE).err
    assert "name 'a@1' before the FILEs" in run("save", "fresh/", "-", "a@1", expect=USAGE).err
    assert not (tmp_path / "cwd/fresh").exists() and not ambient.path.exists()


def test_copies_name_one_store_or_two(ambient, tmp_path):
    run("save", "--run", "a", "--step", 1, ambient.file(state(1)))
    run("push", "other")
    assert steps_of("other") == [1]
    run("push", "other", "third")
    run("save", "third", "--run", "a", "--step", 2, ambient.file(state(2)))
    run("pull", "third")
    assert steps_of() == [1, 2]
    run("push", "third", "other")
    assert steps_of("other") == [1, 2]
    for command in ("copy", "push", "pull"):
        assert "CKPTDELTA_STORE" in run(command, expect=USAGE).err


def test_no_store_at_all(store, monkeypatch):
    monkeypatch.delenv("CKPTDELTA_STORE", raising=False)
    for command in (["list"], ["report"], ["push"], ["show", "--step", 1]):
        assert "CKPTDELTA_STORE" in run(*command, expect=USAGE).err
    monkeypatch.setenv("CKPTDELTA_STORE", "")  # the same as unset
    assert "CKPTDELTA_STORE" in run("list", expect=USAGE).err
    monkeypatch.setenv("CKPTDELTA_STORE", str(store.folder / "absent"))
    assert "absent" in run("list", expect=NOT_FOUND).err


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def named(store):
    """Steps 1 to 3 of a, and step 5 of b. a@2 has the tag best."""
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    store.save(5, state(2), run_name="b")
    store.call("tag", "best", "a@2")
    return store


@pytest.mark.parametrize("place, options", [
    ("a@2", ["--run", "a", "--step", 2]), ("@best", ["--tag", "best"]), ("a@latest", ["--run", "a", "--step", "latest"]), ("b@5", ["--run", "b"])])
def test_a_checkpoint_is_named_as_an_argument(named, place, options):
    out = named.folder / "x"
    for command in (["show", "--json"], ["verify", "--json"], ["load", "--explain", "--json"], ["export", "-o", out, "-n"]):
        assert named.call(*command, place).out == named.call(*command, *options).out
    named.call("load", place, "-qo", out)
    assert st.same(st.read(out)[0], named.load(*options)[0])


def test_a_step_alone_is_of_the_given_run(named):
    assert named.call("show", 2, "--run", "a").out == named.call("show", "a@2").out
    assert named.call("show", "latest", "-r", "a").out == named.call("show", "a@3").out
    assert "several runs" in named.call("show", 2, expect=USAGE).err


@pytest.mark.parametrize("command", [["show"], ["verify"], ["load", "--explain"], ["export", "-o", "x"]])
def test_arguments_that_name_no_checkpoint(named, command):
    for args in (["a"], ["a@x"], ["@"], ["a@-1"], ["a@1", "--step", 1], ["a@1", "--run", "a"], ["@best", "--tag", "best"], ["a@1", "a@2"]):
        assert named.call(*command, *args, expect=USAGE).err
    assert "twice" in named.call(*command, "a@1", "--tag", "best", expect=USAGE).err
    for args in (["a@9"], ["c@1"], ["@worst"]):
        named.call(*command, *args, expect=NOT_FOUND)


def test_save_names_its_checkpoint_as_an_argument(named, monkeypatch):
    named.call("save", "c@7", named.file(state(1)))
    assert [c["step"] for c in named.checkpoints() if c["run"] == "c"] == [7]
    monkeypatch.setenv("CKPTDELTA_STORE", str(named.path))
    run("save", "c@8", named.file(state(2)))
    assert [c["step"] for c in named.checkpoints() if c["run"] == "c"] == [7, 8]
    # An existing file counts as a file, whatever its name is.
    monkeypatch.chdir(named.folder)
    st.write(named.folder / "c@9", state(3))
    named.call("save", "c@9", "--run", "d", "--step", 1)
    assert [c["step"] for c in named.checkpoints() if c["run"] == "d"] == [1]
    for args in (["c@10", "--step", 10], ["c@10", "--run", "c"], ["c@latest"], ["c@x"], ["@best"]):
        named.call("save", *args, named.file(state(1)), expect=USAGE)
    assert "'latest' is not one; name it as in c@100" in named.call("save", "c@latest", named.file(state(1)), expect=USAGE).err
    assert "RUN@STEP" in named.call("save", named.file(state(1)), expect=USAGE).err


def test_delete_takes_tags_but_not_latest(named):
    assert "name the step" in named.call("delete", "a@latest", expect=USAGE).err
    assert [c["step"] for c in named.checkpoints() if c["run"] == "a"] == [1, 2, 3]
    assert "tag" in named.call("delete", "@best", expect=FAILED).err
    named.call("tag", "best", "--delete")
    named.call("delete", "@best", expect=NOT_FOUND)


def test_copies_name_checkpoints(named, monkeypatch):
    other, third = named.folder / "other", named.folder / "third"
    named.call("push", other, "a@1", "@best")
    assert [c["step"] for c in run("list", "--json", other).json()["checkpoints"]] == [1, 2]
    named.call("push", other, "a@1", "--tag", "best", "b@latest")
    assert [c["step"] for c in run("list", "--json", other).json()["checkpoints"]] == [1, 2, 5]
    monkeypatch.setenv("CKPTDELTA_STORE", str(named.path))
    run("push", third, "a@3")
    assert [c["step"] for c in run("list", "--json", third).json()["checkpoints"]] == [3]
    run("push", third, "a@9", expect=NOT_FOUND)
    run("push", third, "@", expect=USAGE)


# ------------------------------------------------------------------------------------------------ JSON messages


def test_errors_are_json_with_json(named):
    err = named.call("show", "--json", "a@9", expect=NOT_FOUND).messages
    assert [(m["level"], m["status"], m["exit_status"]) for m in err] == [("error", "NOT_FOUND", 3)] and "9" in err[0]["message"]
    chunk = max((p for p in named.files().values() if "data/c/" in str(p)), key=lambda p: p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.chmod(0o600)
    chunk.write_bytes(content)
    damaged = [c for c in ("a@1", "b@5") if not json.loads(subprocess.run([COMMAND, "verify", named.path, c, "--json"], capture_output=True, timeout=60).stdout)["ok"]]
    assert damaged
    err = named.call("load", "--json", damaged[0], "-o", named.folder / "y", expect=CORRUPT).messages
    assert err[0]["status"] == "CORRUPT" and err[0]["exit_status"] == 4 and err[0]["file"]
    assert err[1]["level"] == "note" and "verify" in err[1]["message"] and err[1]["status"] is None


@pytest.mark.parametrize("args", [["list", "s", "--jsn", "--json"], ["list", "--json"], ["save", "s", "--json", "--step"],
                                  ["load", "s", "--json"], ["prune", "--json", "s", "--keep-last", "x"], ["show", "s", "x", "--json"],
                                  ["lits", "s", "--json"], ["--json"], ["frobnicate", "--json"]])
def test_wrong_usage_is_json_too(args):
    messages = run(*args, expect=USAGE).messages
    assert len(messages) == 1 and messages[0]["status"] == "INVALID"
    assert not messages[0]["message"].startswith("ckptdelta") and "Try" not in messages[0]["message"]


def test_notes_are_json_and_names_are_escaped(store):
    file = store.file({"w\x1b[31m\u00e9\"": np.ones(70, np.float32)})
    store.call("save", "a@1", file, "--role", "x*=other", "--json", expect_message="x*")
    err = store.call("list", "--json", "-r", "\x1b[2J\u202e\"", expect=NOT_FOUND)
    assert "\x1b[2J\u202e\"" in err.messages[0]["message"]
    raw = subprocess.run([COMMAND, "list", store.path, "--json", "-r", "\x1b[2J\u202e"], capture_output=True, timeout=60).stderr
    assert b"\x1b" not in raw and raw.isascii() and raw.count(b"\n") == 1


# ------------------------------------------------------------------------------------------------------- pipes


def piped(args, data, expect=0, **options):
    done = subprocess.run([COMMAND, *map(str, args)], input=data, capture_output=True, timeout=60, **options)
    assert done.returncode == expect, done.stderr
    return done


def test_a_file_comes_from_a_pipe_and_goes_to_one(store, tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    env = dict(os.environ, TMPDIR=str(spool))
    content = store.file(state(1, width=300), {"a": "b"}).read_bytes()
    piped(["save", store.path, "a@1", "-"], content, env=env)
    with open(store.file(state(1, width=300), {"a": "b"}), "rb") as regular:  # standard input is a file
        done = subprocess.run([COMMAND, "save", store.path, "a@2", "-"], stdin=regular, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    shell = f'"{COMMAND}" save "{store.path}" a@3 <(sleep 0.2; cat "{store.file(state(1, width=300))}"; sleep 0.2)'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    for step in (1, 2, 3):
        assert st.same(store.load("--step", step)[0], state(1, width=300))
    assert not list(spool.iterdir())
    written = piped(["load", store.path, "a@1", "-o", "-", "-v"], b"")
    store.load("a@1")
    assert written.stdout == (store.folder / "out.safetensors").read_bytes() and written.stderr == b""
    assert b'"step"' in piped(["load", store.path, "a@1", "--tensor", "step", "-o", "-"], b"").stdout
    # From one store into another.
    piped(["save", tmp_path / "other", "b@1", "-"], written.stdout, env=env)
    assert not (tmp_path / "-").exists()


def test_uses_of_a_pipe_that_are_refused(named, tmp_path):
    for data in (b"", b"1234567", b"\x08" + bytes(7) + b"notjson!", named.file(state(1)).read_bytes()[:-1]):
        piped(["save", named.path, "p@1", "-"], data, expect=CORRUPT)
    done = piped(["save", named.path, "p@1", "-"], b"x", expect=NOT_FOUND, env=dict(os.environ, TMPDIR=str(tmp_path / "absent")))
    assert b"absent" in done.stderr
    assert not [c for c in named.checkpoints() if c["run"] == "p"]
    for args in (["--json"], ["--or-older"]):
        piped(["load", named.path, "a@1", "-o", "-", *args], b"", expect=USAGE)
    assert "load -o -" in named.call("export", "a@1", "-o", "-", expect=USAGE).err
    # A full disk behind standard output is reported as a failure.
    with open("/dev/full", "wb") as full:
        done = subprocess.run([COMMAND, "load", named.path, "a@1", "-o", "-"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == FAILED and b"standard output" in done.stderr


def test_no_file_is_written_to_a_terminal(named):
    main, other = pty.openpty()
    done = subprocess.run([COMMAND, "load", named.path, "a@1", "-o", "-"], stdout=other, stderr=subprocess.PIPE, timeout=60)
    os.close(main)
    os.close(other)
    assert done.returncode == USAGE and b"terminal" in done.stderr


# ------------------------------------------------------------------------------------------------------- blobs


def test_blobs_are_saved_and_loaded(store, tmp_path):
    contents = {"config": b"lr: 1", "position": bytes(range(256)) * 1000, "empty": b"", "a/b": b"\n"}
    args = []
    for i, (name, content) in enumerate(contents.items()):
        (tmp_path / f"in{i}=x").write_bytes(content)
        args += ["--blob", f"{name}={tmp_path}/in{i}=x"]
    store.save(1, state(1), *args)
    store.save(2, state(1))
    store.call("load", "a@1", *[f"--blob={name}={tmp_path}/out{i}" for i, name in enumerate(contents)])
    for i, content in enumerate(contents.values()):
        assert (tmp_path / f"out{i}").read_bytes() == content
    done = store.call("load", "a@1", "-o", tmp_path / "x", "--blob", f"config={tmp_path}/c")
    assert "1 blob" in done.out and (tmp_path / "c").read_bytes() == b"lr: 1" and st.same(st.read(tmp_path / "x")[0], state(1))
    assert store.json("load", "a@1", "--blob", f"config={tmp_path}/d")["out"] is None
    # Existing files are replaced only with --force.
    assert "exists" in store.call("load", "a@1", "--blob", f"config={tmp_path}/c", "-o", tmp_path / "y", expect=FAILED).err
    assert not (tmp_path / "y").exists()
    store.call("load", "a@1", "--force", "--blob", f"position={tmp_path}/c", "-q")
    assert (tmp_path / "c").read_bytes() == contents["position"]
    # If a blob is missing, nothing is written.
    for place, name in (("a@2", "config"), ("a@1", "confi")):
        store.call("load", place, "-o", tmp_path / "y", "--blob", f"empty={tmp_path}/e", "--blob", f"{name}={tmp_path}/f", expect=NOT_FOUND)
        assert not [n for n in "yef" if (tmp_path / n).exists()]


def test_invalid_blob_options(store, tmp_path):
    file = store.file(state(1))
    for blob in ("config", "=x", "config=", "safetensors.metadata=x"):
        assert store.call("save", "a@1", file, "--blob", blob, expect=USAGE).err
    assert "taken" in store.call("save", "a@1", file, "--blob", "a=x", "--blob", "a=y", expect=USAGE).err
    store.call("save", "a@1", file, "--blob", f"a={tmp_path}/absent", expect=NOT_FOUND)
    store.call("save", "a@1", file, "--blob", f"a={tmp_path}", expect=FAILED)
    assert not store.checkpoints()
    store.save(1, state(1), "--blob", f"a={file}")
    for args in (["--explain"], ["--tensor", "step"], ["--shard", "0/2"], ["--region", "step=[]"]):
        store.call("load", "a@1", "--blob", f"a={tmp_path}/x", *args, expect=USAGE)


def test_a_blob_comes_from_standard_input_and_goes_to_standard_output(store, tmp_path):
    file, content = store.file(state(1, width=300)), bytes(range(256)) * 1000
    piped(["save", store.path, "a@1", file, "--blob", "position=-"], content)
    piped(["save", store.path, "a@1", file, "--blob", "position=-", "--on-duplicate", "same-ok"], content)
    piped(["save", store.path, "a@1", file, "--blob", "position=-", "--on-duplicate", "same-ok"], content + b"x", expect=FAILED)
    piped(["save", store.path, "a@2", "-", "--blob", f"position={file}"], file.read_bytes())
    piped(["save", store.path, "a@3", file, "--blob", "position=-"], b"")
    for args in ((), ("-o", tmp_path / "out"), ("-v", "--or-older"), ("-o", tmp_path / "x", "--blob", f"position={tmp_path}/y")):
        words = ["load", store.path, "a@1", *args]
        done = piped(words + ["--blob", "position=-"], b"", expect=USAGE if args[-1:] == (f"position={tmp_path}/y",) else 0)
        assert done.stdout == (content if done.returncode == 0 else b"") and bool(done.stderr) == bool(done.returncode)
    assert st.same(st.read(tmp_path / "out")[0], state(1, width=300))
    assert piped(["load", store.path, "a@2", "--blob", "position=-", "-q"], b"").stdout == file.read_bytes()
    assert piped(["load", store.path, "a@3", "--blob", "position=-"], b"").stdout == b""
    assert not (tmp_path / "-").exists() and not [p for p in os.listdir() if p == "-"]


def test_standard_input_and_output_are_used_once(store, tmp_path):
    file = store.file(state(1))
    content = file.read_bytes()
    for args in (["-", "--blob", "a=-"], [file, "--blob", "a=-", "--blob", "b=-"], ["-", "-"]):
        assert b"standard input can be read only once" in piped(["save", store.path, "a@1", *args], content, expect=USAGE).stderr
    assert not store.path.exists() or not store.checkpoints()
    piped(["save", store.path, "a@1", file, "--blob", "a=-", "--blob", f"b={file}"], b"text")
    for args in (["-o", "-", "--blob", "a=-"], ["--blob", "a=-", "--blob", "b=-"]):
        done = piped(["load", store.path, "a@1", *args], b"", expect=USAGE)
        assert b"standard output takes one file" in done.stderr and not done.stdout
    assert b"--json" in piped(["load", store.path, "a@1", "--blob", "a=-", "--json"], b"", expect=USAGE).stderr
    assert piped(["load", store.path, "a@1", "-o", "-", "--blob", f"a={tmp_path}/a"], b"").stdout and (tmp_path / "a").read_bytes() == b"text"
    assert piped(["load", store.path, "a@1", "-o", tmp_path / "o", "--blob", "a=-", "--blob", f"b={tmp_path}/b"], b"").stdout == b"text"
    # What fails after standard output was written to is still a failure, and no file is left.
    with open("/dev/full", "wb") as full:
        done = subprocess.run([COMMAND, "load", store.path, "a@1", "-o", tmp_path / "p", "--blob", "a=-"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == FAILED and b"standard output" in done.stderr and not (tmp_path / "p").exists()
    closed = subprocess.run(["bash", "-c", f'"{COMMAND}" save "{store.path}" a@2 "{file}" --blob a=- <&-'], capture_output=True, timeout=60)
    assert closed.returncode == FAILED and b"standard input" in closed.stderr and len(store.checkpoints()) == 1


def test_no_blob_is_written_to_a_terminal(store):
    store.save(1, state(1), "--blob", f"a={store.file(state(1))}")
    main, other = pty.openpty()
    done = subprocess.run([COMMAND, "load", store.path, "a@1", "--blob", "a=-"], stdout=other, stderr=subprocess.PIPE, timeout=60)
    os.close(main)
    os.close(other)
    assert done.returncode == USAGE and b"terminal" in done.stderr


# ---------------------------------------------------------------------------------------------- missing tensors


def test_a_save_that_lacks_tensors_says_so(store):
    whole = state(1)
    store.save(1, whole)
    for step, left_out in ((2, ["layers.0.bias"]), (3, [])):
        part = {name: values for name, values in whole.items() if name not in left_out}
        store.save(step, part, **({"expect_message": "a@2 lacks 1 tensor that a@1 has:\nckptdelta:   layers.0.bias\n"} if left_out else {}))
    less = {"step": whole["step"]}
    err = store.save(4, less, expect_message="a@4 lacks 4 tensors that a@3 has").err
    assert "and 1 more (-v names them all)" in err and err.count("\n") == 5
    store.call("delete", "a@4")
    assert store.save(4, less, "-v", expect_message="lacks 4").err.count("\n") == 5
    store.call("delete", "a@4")
    store.save(4, less, "-q")
    told = store.save(5, {"other": whole["step"]}, "--json", expect_message="a@5 lacks 1 tensor that a@4 has")
    assert told.json()["missing"] == ["step"]
    # New tensors, and a run's first checkpoint, lack nothing. Bases are compared, too.
    assert store.save(6, {**less, "other": whole["step"], "new": whole["step"]}, "--json").json()["missing"] == []
    store.save(7, {"x": whole["step"]}, "--base", expect_message="a@7 lacks 3 tensors that a@6 has")
    store.save(1, {"x": whole["step"]}, run_name="b")


# ---------------------------------------------------------------------------------------------------- defaults


@pytest.mark.parametrize("command", ALL)
def test_help_shows_defaults_in_one_form(command):
    options = re.split(r"\n\n", run(command, "--help").out)[0]
    text = re.sub(r"\s+", " ", options)
    assert not re.search(r"\((default|\d+[KMGhd]?|one per core|no limit|the only one[^)]*)\)", text), text
    assert "[default: one per core]" in text or "--threads" not in text


@pytest.mark.parametrize("command, option, default", [
    ("save", "--max-load-cost", "4"), ("save", "--newest-load-cost", "as --max-load-cost"), ("save", "--effort", "5"), ("save", "--codec", "auto"), ("save", "--staging", "256M"),
    ("load", "--dim", "0"), ("show", "--run", "the only one of the store"), ("export", "--max-shard-size", "5G"), ("delete", "--undo", "24h"),
    ("policy", "--auto", "1"), ("policy", "--compact", "25"), ("compact", "--max-depth", "16"), ("compact", "--pack-below", "256K"), ("scrub", "--rate", "50M")])
def test_help_shows_the_default_of(command, option, default):
    text = re.sub(r"\s+", " ", run(command, "--help").out)
    assert re.search(rf"{option}\b[^\[]*(\[=[^\[]*)?\[default: {default}\]", text), text
