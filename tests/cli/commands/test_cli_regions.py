"""load --shard and --region: parts of tensors, however they were saved."""

import numpy as np
import pytest

import support_safetensors as st
from support_cli import NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401


def arrays():
    noise = np.random.default_rng(5)
    return {
        "matrix": noise.standard_normal((10, 7)).astype(np.float32),
        "cube": noise.integers(-99, 99, (5, 3, 4)).astype(np.int16),
        "line": noise.standard_normal(9),
        "scalar": np.array(4, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }


def chunk(array, i, n, dim):
    """As docs/cli.md defines it."""
    if not -array.ndim <= dim < array.ndim:
        return array
    each = -(-array.shape[dim] // n)
    return np.ascontiguousarray(np.take(array, range(min(i * each, array.shape[dim]), min((i + 1) * each, array.shape[dim])), dim))


def chain(store, tensors, steps=3, *args):
    """Saves a chain of deltas. Tensors are changed in place."""
    for step in range(steps):
        for array in tensors.values():
            if array.dtype == np.float32 and array.size:
                array += np.float32(1e-6)
        store.save(step, tensors, *args)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.sampled(3)
def test_shards(store, n, dim):
    tensors = arrays()
    chain(store, tensors)
    parts = [store.load("--shard", f"{i}/{n}", "--dim", dim)[0] for i in range(n)]
    for i, part in enumerate(parts):
        assert st.same(part, {name: chunk(array, i, n, dim) for name, array in tensors.items()})
    sizes = [part["line"][1][0] for part in parts]
    assert sum(sizes) == (9 if dim in (0, -1) else 9 * n)


def test_the_default_dimension_is_0(store):
    chain(store, arrays())
    assert st.same(store.load("--shard", "1/2")[0], store.load("--shard", "1/2", "--dim", 0)[0])


def test_regions(store):
    tensors = arrays()
    chain(store, tensors)
    matrix, cube = tensors["matrix"], tensors["cube"]
    for text, want in (("[2:5,1:]", matrix[2:5, 1:]), ("[:3]", matrix[:3]), ("[:,6:7]", matrix[:, 6:7]), ("[]", matrix),
                       ("[4:4,:]", matrix[4:4]), ("[10:]", matrix[10:]), ("[:,:]", matrix)):
        assert st.same(store.load("--region", f"matrix={text}")[0], {"matrix": np.ascontiguousarray(want)}), text
    both = store.load("--region", "matrix=[9:]", "--region", "cube=[1:3,2:,1:2]")[0]
    assert st.same(both, {"matrix": matrix[9:], "cube": np.ascontiguousarray(cube[1:3, 2:, 1:2])})


def test_regions_and_other_choices(store):
    """--region selects its tensors as --tensor does. With --shard all tensors are selected, and --region is
    applied first."""
    tensors = arrays()
    chain(store, tensors)
    got = store.load("--region", "line=[2:4]", "--tensor", "s*")[0]
    assert st.same(got, {"line": tensors["line"][2:4], "scalar": tensors["scalar"]})
    got = store.load("--region", "line=[2:4]", "--shard", "0/2")[0]
    want = {name: chunk(array, 0, 2, 0) for name, array in tensors.items()}
    assert st.same(got, want | {"line": tensors["line"][2:4]})


def test_loads_that_are_refused(store):
    store.save(1, arrays())
    out = store.folder / "out"
    for text in ("matrix=[0:11]", "matrix=[:,:,:]", "matrix=[11:]", "scalar=[:]"):
        refused = store.call("load", "--out", out, "--region", text, expect=USAGE)
        assert text.split("=")[0] in refused.err and "inside" in refused.err
    refused = store.call("load", "--out", out, "--region", "matrix=[1:2]", "--region", "nix=[1:2]", expect=NOT_FOUND)
    assert "nix" in refused.err
    assert not out.exists()


def test_parts_larger_than_a_piece(store):
    """Columns of a matrix of several blocks, more than one piece; from a delta."""
    tensors = {"big": np.random.default_rng(1).standard_normal((6000, 1100)).astype(np.float32)}
    store.save(1, tensors)
    tensors["big"] += np.float32(1e-7)
    store.save(2, tensors)
    assert store.json("show")["tensors"][0]["depth"] == 1
    for i in range(2):
        got = store.load("--shard", f"{i}/2", "--dim", 1)[0]
        assert st.same(got, {"big": np.ascontiguousarray(tensors["big"][:, 550 * i:550 * (i + 1)])})


@pytest.mark.parametrize("fidelity", ["exact", "near"])
def test_little_memory(store, fidelity):
    """--staging changes how much memory is used, not the loaded values. Near saves differ only where matrices
    exceed it."""
    tensors = {"w": np.random.default_rng(2).standard_normal((3000, 1000)).astype(np.float32)}
    for step in range(2):
        tensors["w"] += np.float32(1e-4) * np.random.default_rng(step).standard_normal((3000, 1000)).astype(np.float32)
        store.save(step, tensors, "--fidelity", fidelity, "--staging", "16M")
    parts = [store.load("--shard", "1/3", "--dim", 1, "--staging", size)[0] for size in ("1", "100K", "2M", "1G", "1T")]
    assert all(st.same(part, parts[0]) for part in parts)
    values = np.frombuffer(parts[0]["w"][2], np.float32).reshape(3000, 334)
    assert np.abs(values - tensors["w"][:, 334:668]).max() <= (0 if fidelity == "exact" else 1e-2)


def test_parts_of_a_lossy_checkpoint_equal_the_whole(store):
    tensors = state(1)
    for step in range(4):
        store.save(step, state(1, step), "--fidelity", "coarse")
    whole, _ = store.load()
    assert any(whole[name][2] != st.tensor(array)[2] for name, array in state(1, 3).items())
    for i in range(3):
        got = store.load("--shard", f"{i}/3", "--dim", 1)[0]
        for name, array in tensors.items():
            values = np.frombuffer(whole[name][2], array.dtype).reshape(array.shape)
            assert st.same({name: got[name]}, {name: chunk(values, i, 3, 1)})


def test_explain(store):
    tensors = arrays() | {"large": np.random.default_rng(2).standard_normal((3000, 200)).astype(np.float32)}
    chain(store, tensors, 3, "--newest-load-cost", 100, "--max-load-cost", 100)
    before = store.files()
    whole = store.json("load", "--explain")
    check_documented(whole, "`load --explain`")
    assert whole["raw_bytes"] == sum(array.nbytes for array in tensors.values())
    assert whole["read_bytes"] == whole["needed_bytes"] == sum(t["read_bytes"] for t in whole["tensors"])
    assert whole["depth"] == 2 and whole["checkpoint_count"] == 3 and whole["left_out"] == []
    assert {t["name"] for t in whole["tensors"]} == tensors.keys()
    part = store.json("load", "--explain", "--region", "large=[0:300]")
    check_documented(part, "`load --explain`")
    assert part["raw_bytes"] == 300 * 200 * 4 and set(part["left_out"]) == tensors.keys() - {"large"}
    assert 0 < part["needed_bytes"] <= part["read_bytes"] < whole["read_bytes"]
    assert part["over_read"] == pytest.approx(part["read_bytes"] / part["needed_bytes"])
    text = store.call("load", "--explain", "--region", "large=[0:300]").out
    assert "chain depth   2" in text and "nothing was loaded" in text and "left out      5 tensors" in text
    text = store.call("load", "--explain", "--tensor", "l*", "-v").out
    assert "large" in text and "matrix" in text and "TO BE READ" in text
    assert store.call("load", "--explain", "-q").out == ""
    assert store.files() == before and not (store.folder / "out.safetensors").exists()
