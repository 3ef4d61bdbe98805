"""Damaged stores: verify names the file, the tensor and the checkpoints; a load never succeeds with wrong
values, and leaves no files behind."""

import ctypes
import os
import shutil
import sqlite3

import numpy as np
import pytest

import support_safetensors as st
from support_cli import CORRUPT, DONE, FAILED, check_documented, run, state, store  # noqa: F401


@pytest.fixture
def chain(store):
    """Three deltas on a base, and another run."""
    for step in range(4):
        store.save(step, state(1, step), "--max-load-cost", 100, "--newest-load-cost", 100)
    store.save(0, state(5), run_name="b")
    assert [c["depth"] for c in store.checkpoints()] == [0, 1, 2, 3, 0]
    return store


def chunk_of(store, action):
    """The chunk file that `action` adds."""
    before = set(store.files())
    action()
    chunk, = [p for name, p in store.files().items() if name not in before and name.parts[:2] == ("data", "c")]
    return chunk


def flip(path, at, mask=0x10):
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def fails_to_load(store, *args):
    """Expects status 4, a message, and neither a file nor a temporary file."""
    out = store.folder / "broken-out"
    failed = store.call("load", *args, "--out", out, expect=CORRUPT)
    assert not out.exists() and not store.temporary_files()
    assert "verify" in failed.err
    return failed


def verified(store, *args, expect=CORRUPT):
    result = store.call("verify", "--json", *args, expect=expect).json()
    check_documented(result, "`verify`")
    assert result["ok"] == (expect == DONE) == (not result["damage"])
    return result


def test_errors_and_parents_that_cannot_be_read_are_not_made_up(store):
    """The figures of a lossy checkpoint stand in its chunk files. Without these they are unknown, not 0."""
    first = chunk_of(store, lambda: store.save(1, state(1, 1), "--fidelity", "near"))
    store.save(2, state(1, 2), "--fidelity", "near")
    errors = store.json("list")["errors"]
    assert [e["checkpoint"] for e in errors] == ["a@1", "a@2"]
    assert store.json("show", "a@2")["without_parent"] == []
    os.truncate(first, 1000)
    unread = "a@1 is listed without its tensors"
    assert store.call("list", "--json", expect_message=unread).json()["errors"] == errors[1:]
    assert store.call("show", "a@2", "--json", expect_message=unread).json()["without_parent"] is None
    assert "that the parent lacks" not in store.call("show", "a@2", expect_message=unread).out


def test_same_ok_reads_what_is_stored(store):
    """Whoever saves again may delete the source after it. The hash in a record says nothing about its blob's bytes."""
    content = np.random.default_rng(1).bytes(50_000)
    blob = store.folder / "blob"
    blob.write_bytes(content)
    again = (1, state(1), "--blob", f"loader={blob}", "--on-duplicate", "same-ok")
    chunk = chunk_of(store, lambda: store.save(*again))
    assert "already" in store.save(*again).out
    flip(chunk, chunk.read_bytes().index(content[1000:1100]))
    assert "loader" in store.save(*again, expect=CORRUPT).err
    fails_to_load(store, "--blob", f"loader={store.folder / 'out-blob'}")


def test_same_ok_does_not_trust_copies(store):
    """The copies that keep the newest checkpoint cheap to load are gone after the next save. The chain must be
    intact."""
    saves = [(step, state(1, step), "--newest-load-cost", 1.01) for step in (1, 2, 3)]
    base = chunk_of(store, lambda: store.save(*saves[0]))
    for save in saves[1:]:
        store.save(*save)
    assert any((store.path / "data/k").iterdir()), "the test needs a copy"
    again = (*saves[2], "--on-duplicate", "same-ok")
    assert "already" in store.save(*again).out
    flip(base, base.stat().st_size // 3)
    assert str(base) in store.save(*again, expect=CORRUPT).err
    assert st.same(store.load("--step", 3)[0], state(1, 3))  # a load still uses the copy


LOSSES = pytest.mark.parametrize("damage", [
    lambda chunk: chunk.unlink(), lambda chunk: os.truncate(chunk, chunk.stat().st_size // 2),
    lambda chunk: flip(chunk, chunk.stat().st_size - 20)], ids=["missing", "cut off", "no index"])


@LOSSES
@pytest.mark.parametrize("fidelity", ["exact", "near"])
def test_copies_do_not_hide_a_chain_that_lost_a_file(store, damage, fidelity):
    """No delta on such a parent can be committed, so the next save does without its copies."""
    options = ("--newest-load-cost", 1, "--fidelity", fidelity)
    base = chunk_of(store, lambda: store.save(1, state(1), *options))
    for step in (2, 3):
        store.save(step, state(1, step), *options)
    assert any((store.path / "data/k").iterdir()), "the test needs a copy"
    damage(base)
    store.save(4, state(1, 4), *options, expect_message="the parent a@3 are damaged")
    store.save(5, state(1, 5), *options)
    shutil.rmtree(store.path / "data/k")
    assert verified(store)["newest_intact"] == ["a@5"]


@LOSSES
def test_a_delta_on_what_a_damaged_parent_still_has(store, damage):
    """The parent names a file that is lost, and the next save needs only what the parent has in its own."""
    base = chunk_of(store, lambda: store.save(1, state(1)))
    frozen = {"frozen": np.random.default_rng(7).standard_normal(20_000)}
    store.save(2, state(1, 2) | frozen)
    damage(base)
    for step in (3, 4):
        damaged = "the parent a@2 are damaged" if step == 3 else None
        store.save(step, state(1, step) | frozen, expect_message=damaged)
    assert [c["kind"] for c in store.checkpoints()] == ["base", "delta", "delta", "delta"]
    assert verified(store)["newest_intact"] == ["a@4"]


def test_an_intact_store(chain):
    result = verified(chain, expect=DONE)
    assert result["checkpoints"] == 5 and result["newest_intact"] == [] and result["blocks"] >= 5 * len(state(1))
    one = verified(chain, "--run", "b", "--step", "latest", expect=DONE)
    assert one["checkpoints"] == 1 and one["blocks"] < result["blocks"]
    assert verified(chain, "--run", "a", expect=DONE)["checkpoints"] == 4


def weights(changed):
    """Noise in which a few values change: a delta is the smallest way to store the change."""
    values = np.random.default_rng(2).standard_normal(30_000)
    values[:changed] += 1
    return {"layers.0.weight": values}


def test_a_damaged_base(store):
    base = chunk_of(store, lambda: store.save(0, weights(0)))
    for step in (1, 2):
        store.save(step, weights(step), "--max-load-cost", 100, "--newest-load-cost", 100)
    store.save(7, state(2), "--base")
    store.save(0, state(5), run_name="b")
    flip(base, base.stat().st_size // 2)
    result = verified(store)
    files = {d["file"] for d in result["damage"]}
    assert files == {str(base.relative_to(store.path))}
    affected = {c for d in result["damage"] for c in d["checkpoints"]}
    assert affected == {"a@0", "a@1", "a@2"}
    assert result["newest_intact"] == ["a@7"]
    assert {d["tensor"] for d in result["damage"]} == {"layers.0.weight"}
    failed = fails_to_load(store, "--run", "a", "--step", 0)
    assert base.name in failed.err
    assert st.same(store.load("--run", "a", "--step", 7)[0], state(2))
    assert st.same(store.load("--run", "b")[0], state(5))
    text = store.call("verify", expect=CORRUPT)
    assert "cannot be loaded: a@0, a@1, a@2" in text.out and "--run a --step 7" in text.out and "DAMAGED" in text.out
    assert "3 checkpoints cannot be loaded" in text.err
    assert store.call("verify", "-q", expect=CORRUPT).out == ""


def test_only_what_is_damaged_is_lost(store):
    """If a bit of one tensor is flipped, the other tensors of the checkpoint can still be loaded."""
    noise = np.random.default_rng(1)
    tensors = {name: noise.standard_normal(50_000) for name in ("first", "second")}
    chunk = chunk_of(store, lambda: store.save(1, tensors, "--codec", "raw"))
    content = chunk.read_bytes()
    at = content.index(tensors["second"].tobytes()[:64])
    flip(chunk, at + 1000)
    result = verified(store)
    assert [d["tensor"] for d in result["damage"]] == ["second"]
    assert result["damage"][0]["checkpoints"] == ["a@1"] and result["newest_intact"] == []
    failed = fails_to_load(store)
    assert "second" in failed.err
    assert st.same(store.load("--tensor", "first")[0], {"first": tensors["first"]})


def test_flipped_bits_everywhere(store):
    """Wherever a bit of a chunk file is flipped, a load gives right values or fails, and verify finds what a
    load finds."""
    chunk = chunk_of(store, lambda: store.save(1, state(3, width=16), metadata={"k": "v"}))
    content = chunk.read_bytes()
    expected = st.read(load_with(store, DONE))
    silent = 0
    for at in range(0, len(content), max(1, len(content) // 60)):
        flip(chunk, at)
        code, out = try_load(store)
        verdict = verify_code(store)
        if code == DONE:
            assert st.same(st.read(out)[0], expected[0]) and st.read(out)[1] == expected[1]
            silent += 1
        else:
            assert code == CORRUPT and not out.exists()
            assert verdict == CORRUPT, f"a load fails and verify does not see why: byte {at}"
        assert verdict == CORRUPT, f"byte {at} of the chunk file can change unseen"
        assert not store.temporary_files()
        chunk.write_bytes(content)
    assert st.read(load_with(store, DONE)) == expected
    assert silent < 30


def try_load(store):
    out = store.folder / "try"
    if out.exists():
        out.unlink()
    for code in (DONE, CORRUPT):
        try:
            run("load", store.path, "--out", out, expect=code, **({} if code else {"expect_message": ""}))
            return code, out
        except AssertionError:
            continue
    raise AssertionError("neither loaded nor corrupt")


def load_with(store, code):
    got, out = try_load(store)
    assert got == code
    return out


def verify_code(store):
    for code in (DONE, CORRUPT):
        try:
            run("verify", store.path, "--json", expect=code, **({} if code else {"expect_message": ""}))
            return code
        except AssertionError:
            continue
    raise AssertionError("verify neither passes nor finds damage")


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer"])
def test_chunk_files_of_the_wrong_size(store, how):
    chunk = chunk_of(store, lambda: store.save(1, state(1)))
    store.save(2, state(2), "--base")
    content = chunk.read_bytes()
    if how == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes({"empty": b"", "cut": content[:-1], "longer": content + b"x"}[how])
    result = verified(store)
    assert {c for d in result["damage"] for c in d["checkpoints"]} == {"a@1"}
    assert any(d["file"].endswith(chunk.name) for d in result["damage"])
    assert result["newest_intact"] == ["a@2"]
    fails_to_load(store, "--step", 1)
    assert st.same(store.load("--step", 2)[0], state(2))


def test_quick_finds_damage_of_stored_bytes(store):
    chunk = chunk_of(store, lambda: store.save(1, state(1)))
    flip(chunk, chunk.stat().st_size // 2)
    assert verified(store, "--quick")["damage"]


def test_damage_elsewhere_is_not_reported_for_one_checkpoint(store):
    chunk = chunk_of(store, lambda: store.save(1, state(1)))
    store.save(2, state(2), "--base")
    flip(chunk, chunk.stat().st_size // 2)
    assert verified(store, "--step", 2, "--run", "a", expect=DONE)["ok"]
    assert not verified(store, "--step", 1)["ok"]


def test_a_damaged_manifest(store):
    store.save(1, state(1))
    before = set(store.files())
    store.save(2, state(2), "--base")
    manifests = [p for name, p in store.files().items() if name not in before and "m" in name.parts]
    assert len(manifests) == 1
    flip(manifests[0], manifests[0].stat().st_size // 2)
    result = store.call("rebuild", "--json", expect=CORRUPT)
    assert result.json() == {"schema": 1, "checkpoints": 1, "skipped": 1}
    assert "manifest" in result.err
    assert verified(store)["newest_intact"] == ["a@1"]
    out = store.folder / "o"
    assert "a@2 is newer than a@1 and cannot be read" in run("load", store.path, "--out", out, expect=CORRUPT).err
    run("load", store.path, "--or-older", "--out", out, expect_message="is not used")
    assert st.same(st.read(out)[0], state(1))


@pytest.mark.parametrize("damage", ["missing", "garbage", "flipped"])
def test_a_lost_catalog_costs_nothing(chain, damage):
    catalog = chain.path / "catalog.db"
    if damage == "missing":
        catalog.unlink()
    elif damage == "garbage":
        catalog.write_bytes(b"not a database" * 100)
    else:
        flip(catalog, 10)
    before = {n: p.read_bytes() for n, p in chain.files().items()}
    listed = chain.call("list", "--json", expect_message="").json()["checkpoints"]
    assert [(c["run"], c["step"]) for c in listed] == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0)]
    assert {n: p.read_bytes() for n, p in chain.files().items()} == before, "reading must not write"
    assert chain.call("rebuild", "--json", expect_message="").json()["checkpoints"] == 5
    assert st.same(chain.load("--run", "a")[0], state(1, 3))


def test_a_catalog_of_an_older_version_is_rebuilt(chain):
    catalog = chain.path / "catalog.db"
    before = chain.call("list", "--json").json()
    data = bytearray(catalog.read_bytes())
    data[60:64] = (1).to_bytes(4, "big")  # SQLite's user version
    catalog.write_bytes(data)
    assert chain.call("list", "--json", expect_message="older format").json() == before
    assert chain.call("verify", "--json", expect_message="older format").json()["damage"] == []
    assert catalog.read_bytes() == data, "reading must not write"
    chain.save(9, state(1, 9), "--run", "b", expect_message="older version")
    assert (chain.path / "catalog.db.old").read_bytes() == data
    assert len(chain.call("list", "--json", expect_message="").json()["checkpoints"]) == 6


def test_a_writer_that_died_in_a_commit_is_no_damage(chain):
    before = chain.call("list", "--json").json()
    catalog = sqlite3.connect(chain.path / "catalog.db", isolation_level=None)
    catalog.execute("PRAGMA cache_size = 1")
    catalog.execute("BEGIN IMMEDIATE")
    catalog.execute("CREATE TABLE more AS WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i + 1 FROM n WHERE i < 500)"
                    " SELECT i, randomblob(1000) FROM n")
    copy = shutil.copytree(chain.path, chain.path.parent / "copy")
    catalog.execute("ROLLBACK")
    catalog.close()
    assert (copy / "catalog.db-journal").stat().st_size > 0
    shutil.rmtree(chain.path)
    copy.rename(chain.path)
    assert chain.call("list", "--json", expect_message="catalog is not used").json() == before
    assert chain.call("verify", "--json", expect_message="catalog is not used").json()["damage"] == []
    chain.save(9, state(1, 9), "--run", "b")
    assert not (chain.path / "catalog.db-journal").exists()
    assert chain.call("verify", "--json").json()["damage"] == []


def test_a_failed_load_does_not_overwrite_a_file(store):
    chunk = chunk_of(store, lambda: store.save(1, state(1)))
    flip(chunk, chunk.stat().st_size // 2)
    out = store.folder / "out"
    out.write_text("precious")
    store.call("load", "--out", out, "--force", expect=CORRUPT)
    assert out.read_text() == "precious" and not store.temporary_files()


def without_overrides():
    """Runs between fork and exec. Takes root's right to ignore permissions away."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        if os.geteuid() == 0 and libc.prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
            raise OSError(ctypes.get_errno(), "prctl")


def set_modes(root, file_mode, folder_mode):
    for folder, _, files in os.walk(root):
        os.chmod(folder, folder_mode)
        for name in files:
            os.chmod(os.path.join(folder, name), file_mode)


def test_a_read_only_store(chain):
    """It can be read and verified. A save fails and says why."""
    extra = chain.file(state(1))
    set_modes(chain.path, 0o444, 0o555)
    try:
        out = chain.folder / "o"
        run("load", chain.path, "--run", "a", "--out", out, preexec_fn=without_overrides)
        assert st.same(st.read(out)[0], state(1, 3))
        for command in ("list", "report", "verify"):
            run(command, chain.path, preexec_fn=without_overrides)
        run("save", chain.path, "--run", "a", "--step", 9, extra, expect=FAILED, preexec_fn=without_overrides)
        run("rebuild", chain.path, expect=FAILED, preexec_fn=without_overrides)
    finally:
        set_modes(chain.path, 0o644, 0o755)
    assert len(chain.checkpoints()) == 5


def test_a_copied_store_is_a_store(chain):
    moved = chain.folder / "moved"
    shutil.copytree(chain.path, moved)
    shutil.rmtree(chain.path)
    assert run("verify", moved, "--json").json()["ok"]
    out = chain.folder / "o"
    run("load", moved, "--run", "a", "--out", out)
    assert st.same(st.read(out)[0], state(1, 3))
