"""load of a damaged checkpoint fails, unless the user allows an older one. Then the command says which one it
loaded, and why."""

import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, NOT_FOUND, check_documented, run, state, store  # noqa: F401


@pytest.fixture
def bases(store):
    for step in range(1, 6):
        store.save(step, state(1, step), "--base")
    return store


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def chunk_of(store, step):
    """The chunk file of a step, without which the step cannot be loaded."""
    for path in sorted((store.path / "data/c").iterdir()):
        aside = path.with_suffix(".aside")
        path.rename(aside)
        found = store.json("verify", "--quick", expect=CORRUPT)["damage"]
        aside.rename(path)
        if any(f"a@{step}" in d["checkpoints"] for d in found):
            return path
    raise AssertionError(step)


def same(path, tensors):
    found = st.read(path)[0]
    return found.keys() == tensors.keys() and all(found[n][2] == np.ascontiguousarray(tensors[n]).tobytes() for n in tensors)


def test_an_older_one_is_loaded_only_on_request(bases, tmp_path):
    out = tmp_path / "out.safetensors"
    damage(chunk_of(bases, 5))
    chunk_of(bases, 4).unlink()
    failed = run("load", bases.path, "--out", out, expect=CORRUPT)
    assert "verify" in failed.err and not out.exists()
    loaded = run("load", bases.path, "--or-older", "--out", out, "--json", expect_message="a@5 is damaged and skipped: ")
    assert "a@4 is damaged and skipped: " in loaded.err
    result = loaded.json()
    check_documented(result, "`load`")
    assert [s["checkpoint"] for s in result["skipped"]] == ["a@5", "a@4"] and result["checkpoints"][0]["step"] == 3
    assert same(out, state(1, 3))
    fine = bases.json("load", "--step", 2, "--or-older", "--out", tmp_path / "two")
    check_documented(fine, "`load`")
    assert fine["skipped"] == [] and fine["checkpoints"][0]["step"] == 2
    text = run("load", bases.path, "--step", 4, "--or-older", "-q", "--out", tmp_path / "three", expect_message="a@4 is damaged").out
    assert text == "" and same(tmp_path / "three", state(1, 3))


def test_no_older_one_is_intact(bases, tmp_path):
    for path in (bases.path / "data/c").iterdir():
        damage(path)
    out = tmp_path / "out.safetensors"
    failed = run("load", bases.path, "--or-older", "--out", out, expect=CORRUPT)
    assert not out.exists() and all(f"a@{step} is damaged and skipped" in failed.err for step in range(1, 6))


def test_a_damaged_manifest_is_not_ignored(bases, tmp_path):
    """The same if the catalog does not know the checkpoint."""
    damage(bases.path / "data/m/a.5.0")
    out = tmp_path / "out.safetensors"
    run("load", bases.path, "--out", out, expect=CORRUPT)
    run("rebuild", bases.path, "-q", expect=CORRUPT)
    failed = run("load", bases.path, "--out", out, expect=CORRUPT)
    assert "a@5 is newer than a@4 and cannot be read" in failed.err and not out.exists()
    run("load", bases.path, "--step", 5, "--out", out, expect=NOT_FOUND)
    loaded = run("load", bases.path, "--or-older", "--out", out, "--json", expect_message="a@5 is damaged and skipped").json()
    assert [s["checkpoint"] for s in loaded["skipped"]] == ["a@5"] and same(out, state(1, 4))


def test_branches_fall_back_to_their_origin(bases, tmp_path):
    bases.save(3, state(2, 3), "--on-duplicate", "branch", "--base", expect_message="a~2")
    for path in (bases.path / "data/c").iterdir():
        content = path.read_bytes()
        damage(path)
        if subprocess.run([COMMAND, "verify", bases.path, "--run", "a~2", "-q"], capture_output=True, timeout=60).returncode:
            break
        path.write_bytes(content)
    out = tmp_path / "out"
    run("load", bases.path, "--run", "a~2", "--or-older", "--out", out, expect_message="a~2@3 is damaged and skipped")
    assert same(out, state(1, 2))


def test_an_output_that_cannot_be_written_is_no_damage(bases, tmp_path):
    failed = run("load", bases.path, "--or-older", "--out", tmp_path / "absent/out.safetensors", expect=NOT_FOUND)
    assert "absent" in failed.err and "skipped" not in failed.err and "damaged" not in failed.err
