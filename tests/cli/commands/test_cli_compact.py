"""compact: what it announces, does, and reports."""

import numpy as np
import pytest

import ckd_reader
from support_cli import CORRUPT, NOT_FOUND, run, state, store  # noqa: F401


@pytest.fixture
def chain(store):
    """Twelve deltas, each on the previous one."""
    for step in range(1, 14):
        store.save(step, state(1, step), "--max-load-cost", 1000, "--newest-load-cost", 1000)
    assert max(c["depth"] for c in store.checkpoints()) > 3
    return store

def values(store):
    found = {}
    for c in store.checkpoints():
        out = store.path.parent / "loaded.safetensors"
        run("load", store.path, "--run", c["run"], "--step", c["step"], "--out", out)
        found[(c["run"], c["step"])] = out.read_bytes()
        out.unlink()
    return found

def depth(store):
    return max(c["depth"] for c in store.checkpoints())

def test_chains_are_shortened(chain):
    before = values(chain)
    plan = chain.json("compact", "--max-depth", 2, "--pack-below", 0, "--plan")
    would = chain.json("compact", "--max-depth", 2, "--pack-below", 0, "--dry-run")
    assert plan["estimated"] and plan["dry_run"] and would["dry_run"] and not would["estimated"]
    assert depth(chain) > 2
    done = chain.json("compact", "--max-depth", 2, "--pack-below", 0)
    sizes = {"bytes_after": 0, "dry_run": False}  # except the lists of files in manifests
    assert abs(would["bytes_after"] - done["bytes_after"]) <= 2048 * len(done["checkpoints"])
    assert [{**c, **sizes} for c in would["checkpoints"]] == [{**c, **sizes} for c in done["checkpoints"]]
    assert done["left"] == 0 and done["checkpoints"]
    assert [c["checkpoint"] for c in plan["checkpoints"]] == [c["checkpoint"] for c in done["checkpoints"]]
    assert all(c["done"] and c["why"] and c["depth_after"] <= 2 for c in done["checkpoints"])
    assert depth(chain) <= 2 and values(chain) == before
    assert chain.json("verify")["ok"]
    assert chain.json("compact", "--max-depth", 2, "--pack-below", 0)["checkpoints"] == []
    packs = chain.json("compact", "--max-depth", 2, "--plan")["checkpoints"]
    packed = chain.json("compact", "--max-depth", 2)["checkpoints"]
    assert packed and all(set(c["why"]) == {"pack"} and c["done"] and not c["recoded"] for c in packed)
    assert [c["checkpoint"] for c in packs] == [c["checkpoint"] for c in packed]
    assert values(chain) == before and chain.json("verify")["ok"]
    assert chain.json("compact", "--max-depth", 2)["checkpoints"] == []

def test_deleted_checkpoints_are_folded(chain):
    before = values(chain)
    text = run("compact", chain.path, "--keep-every", 4, "--undo", "0s").out
    assert "builds on deleted checkpoints" in text and "deleted" in text and "chunk files: " in text
    left = values(chain)
    assert {s for _, s in left} == {4, 8, 12, 13} and all(before[k] == v for k, v in left.items())
    assert chain.json("trash")["checkpoints"] == [] and chain.json("verify")["ok"]

def test_stored_policies_and_undo(chain):
    run("policy", chain.path, "--keep-last", 2)
    before = values(chain)
    done = chain.json("compact", "--fold")
    assert len(done["deleted"]) == 11 and len(chain.checkpoints()) == 2
    run("trash", chain.path, "--restore")
    assert values(chain) == before

def test_stored_policies_of_one_run(chain):
    for step in range(1, 8):
        chain.save(step, state(2, step), run_name="b")
    run("policy", chain.path, "--keep-last", 2)
    done = chain.json("compact", "b", "--fold")
    assert {c.split("@")[0] for c in done["deleted"]} == {"b"} and len(done["deleted"]) == 5
    assert sum(c["run"] == "a" for c in chain.checkpoints()) == 13
    run("compact", chain.path, "c", "--fold", expect=NOT_FOUND)
    assert len(chain.checkpoints()) == 15

def test_one_run(chain):
    for step in range(1, 8):
        chain.save(step, state(2, step), "--max-load-cost", 1000, "--newest-load-cost", 1000, run_name="b")
    run("compact", chain.path, "b", "--max-depth", 1)
    depths = {r: max(c["depth"] for c in chain.checkpoints() if c["run"] == r) for r in "ab"}
    assert depths["b"] <= 1 < depths["a"]

def test_damage_is_reported(chain):
    c = chain.checkpoints()[-1]
    file = max(chain.files().values(), key=lambda p: p.stat().st_mtime_ns if "data/c" in str(p) else 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    refused = run("compact", chain.path, "--max-depth", 1, "--pack-below", 0, expect=CORRUPT)
    assert "left as it is" in refused.out and "verify" in refused.err
    assert [x for x in chain.checkpoints() if x["step"] == c["step"]][0]["generation"] == c["generation"]

def test_nothing_to_do(store):
    store.save(1, {"w": np.ones(4, np.float32)})
    assert "rewrote 0 of 1" in run("compact", store.path).out
    for args in (["x"], ["--run", "x"], ["x", "--dry-run"], ["x", "--keep-last", 1]):
        run("compact", store.path, *args, expect=NOT_FOUND)
    assert "rewrote 0 of 1" in run("compact", store.path, "a").out


def drifting(store, steps, fidelity):
    """A matrix whose deltas are small compared with its lattice, and its second moments."""
    random = np.random.default_rng(1)
    w, left = random.normal(size=(96, 64)).astype(np.float32), random.normal(size=(96, 4)).astype(np.float32)
    for step in range(1, steps + 1):
        w = w + 0.01 * left @ random.normal(size=(4, 64)).astype(np.float32)
        v = np.abs(random.normal(size=(96, 64))).astype(np.float32)
        store.save(step, {"exp_avg_sq.w": v, "w": w}, "--fidelity", fidelity, "--max-load-cost", 1000, "--newest-load-cost", 1000)


@pytest.mark.parametrize("fidelity", ["near", "coarse"])
def test_records_of_deleted_checkpoints_follow_the_format(store, fidelity):
    """Records of deleted checkpoints stay while a remaining checkpoint reads them, and go when that is
    deleted, too. The independent reader agrees."""
    drifting(store, 12, fidelity)
    before = values(store)
    size = sum(p.stat().st_size for n, p in store.files().items() if str(n).startswith("data/c"))
    for every in (2, 4):
        run("compact", store.path, "--keep-every", every, "--undo", "0s")
        run("trash", store.path, "--empty", "--all")
        left = values(store)
        assert {s for _, s in left} >= set(range(every, 13, every)) and len(left) < 12
        assert all(before[k] == v for k, v in left.items())
        assert sum(p.stat().st_size for n, p in store.files().items() if str(n).startswith("data/c")) < size
        other = ckd_reader.Store(store.path)
        assert any(f.id not in {o.id for o in c.own} for c in other.manifests.values() for f in c.files)
        ids = {c.id for c in other.manifests.values()}
        records = [r for c in other.manifests.values() for f in c.files for r in other.chunk(f).records]
        assert any(r.checkpoint not in ids for r in records)
        for (name, step), content in left.items():
            c = ckd_reader.Checkpoint(other, other.manifests[name, step])
            assert c.tensor("w").tobytes() in content and c.tensor("exp_avg_sq.w").tobytes() in content
    assert store.json("verify")["ok"]


def walking(store, first, end):
    """A random walk in which 30 % of the weights change by 1e-3 a step. It is saved with fidelity coarse from
    step `first` on."""
    random = np.random.default_rng(sum(map(ord, "c0")))
    shapes = {"a.weight": (128, 96), "b.weight": (64, 200), "b.bias": (64,)}
    weights = {n: random.standard_normal(s).astype(np.float32) * np.float32(0.02) for n, s in shapes.items()}
    for step in range(1, end):
        for n, w in weights.items():
            moved = random.random(w.shape) < 0.3
            weights[n] = (w + moved * random.standard_normal(w.shape).astype(np.float32) * 1e-3).astype(np.float32)
        if step >= first:
            tensors = {"ids": np.arange(step, step + 64, dtype=np.int64)}
            for n, w in weights.items():
                tensors |= {n: w, f"exp_avg.{n}": w * np.float32(0.1), f"exp_avg_sq.{n}": w * w * np.float32(0.01)}
            store.save(step, tensors, "--fidelity", "coarse", "--threads", 1, *(["--base"] if step == first else []))


@pytest.mark.parametrize("first", [141, 53, 77])
def test_needed_records_survive_a_second_compaction(store, first):
    """Records that a compaction keeps for other checkpoints, listed or in the trash, are kept by a later one,
    too."""
    walking(store, first, first + 8)
    before = values(store)
    for p in (store.path / "data/k").glob("*"):
        p.unlink()
    store.call("compact", "a", "--keep-every", 1000, "--keep-last", 4, "--undo", "1h")
    last = f"a@{first + 7}"
    store.call("delete", last, "--undo", "1h")
    store.call("compact", "--max-depth", 2)
    store.call("trash", "--restore", last)
    store.call("compact", "--max-depth", 2)
    left = values(store)
    assert len(left) == 4 and all(before[k] == v for k, v in left.items())
    assert store.json("verify")["ok"]
