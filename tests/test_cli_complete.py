"""`complete`, which names what is in a store."""

import subprocess

import pytest

from support_cli import COMMAND, CORRUPT, NOT_FOUND, USAGE, run, state, store  # noqa: F401

def commands():
    listed = run("help").out.split("Commands:\n")[1].split("\n\n")[0]
    return [line.split()[0] for line in listed.splitlines() if line.split()[0] != "help"]


@pytest.fixture
def filled(store):  # noqa: F811
    store.save(1, state(1, 1))
    store.save(2, state(1, 2))
    store.save(30, state(2, 1), run_name="tuned~2.x")
    store.call("tag", "best", "a@2")
    return store


# --------------------------------------------------------------------------------------------------------- complete

@pytest.mark.parametrize("args, names", [
    (["runs"], ["a", "tuned~2.x"]),
    (["steps"], ["1", "2", "30"]),
    (["steps", "--run", "a"], ["1", "2"]),
    (["checkpoints"], ["a@1", "a@2", "tuned~2.x@30", "@best"]),
    (["checkpoints", "--run=a"], ["a@1", "a@2", "@best"]),
    (["tags"], ["best"]),
    (["steps", "--run", "nobody"], []),
])
def test_names_of_a_store(filled, args, names):
    assert filled.call("complete", *args).out.splitlines() == names


def test_complete_says_nothing_of_errors(filled, tmp_path):
    def silent(*args):
        done = subprocess.run([COMMAND, "complete", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert (done.stdout, done.stderr) == (b"", b"")
        return done.returncode
    assert silent(tmp_path / "nothing", "runs") == NOT_FOUND
    (tmp_path / "folder").mkdir()
    assert silent(tmp_path / "folder", "tags") == NOT_FOUND
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == []
    (filled.path / "data/store").write_bytes(b"damaged")
    assert silent(filled.path, "runs") == CORRUPT


@pytest.mark.parametrize("args", [[], ["s"], ["s", "everything"], ["s", "runs", "more"]])
def test_complete_is_used_wrongly(args):
    run("complete", *args, expect=USAGE)


def test_complete_is_not_listed():
    assert "complete" not in commands()
    assert run("help", "complete").out.startswith("Usage: ckptdelta complete ")
