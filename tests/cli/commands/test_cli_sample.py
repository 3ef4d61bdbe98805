"""verify --sample: it reads about the requested share of the blocks, the same ones for the same seed, and all
stored bytes."""

import numpy as np
import pytest

from support_cli import CORRUPT, USAGE, check_documented, state, store  # noqa: F401


@pytest.fixture
def many(store):
    """Two checkpoints of 400 blocks."""
    rng = np.random.default_rng(1)
    for step in (1, 2):
        store.save(step, {f"t{i}": rng.standard_normal(50).astype(np.float32) for i in range(400)})
    return store


def test_size_of_the_sample(many):
    whole = many.json("verify")
    assert whole["blocks"] == whole["all_blocks"] == 800 and whole["sample"] is None and whole["seed"] is None
    quick = many.json("verify", "--quick")
    assert quick["blocks"] == 0 and quick["all_blocks"] == 800
    some = many.json("verify", "--sample", 20, "--seed", 1)
    check_documented(some, "`verify`")
    assert 100 < some["blocks"] < 230 and some["all_blocks"] == 800 and some["sample"] == 20 and some["seed"] == 1
    assert some["bytes"] == 200 * some["blocks"] and some["files"] == 2 and some["ok"]
    assert many.json("verify", "--sample", 20, "--seed", 1) == some
    assert len({many.json("verify", "--sample", 20, "--seed", s)["blocks"] for s in range(5)}) > 1
    # The sample also depends on the random names of files. 4 and 776 blocks are expected, plus or minus 2 and
    # 5.
    assert many.json("verify", "--sample", 0.5, "--seed", 1)["blocks"] < 20
    assert 740 < many.json("verify", "--sample", 97, "--seed", 1)["blocks"] < 800
    out = many.call("verify", "--sample", 20, "--seed", 1).out
    assert f"decoded {some['blocks']} of 800 blocks" in out and "--seed 1;" in out


def test_another_seed_each_time(many):
    seeds = [many.json("verify", "--sample", 5)["seed"] for _ in range(3)]
    assert len(set(seeds)) > 1 and all(0 < s < 1 << 53 for s in seeds)


def test_stored_damage_is_always_found(many):
    path = next(p for name, p in many.files().items() if "data/c" in str(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    quick = many.json("verify", "--quick", expect=CORRUPT)
    some = many.json("verify", "--sample", 1, "--seed", 1, expect=CORRUPT)
    assert some["damage"] == quick["damage"] and some["newest_intact"] == quick["newest_intact"]


@pytest.mark.parametrize("args", [["--sample", "0"], ["--sample", "100"], ["--sample", "x"], ["--sample", "-1"], ["--sample", "nan"], ["--seed", "1"],
                                  ["--sample", "5", "--quick"], ["--sample", "5", "--seed", "x"], ["--sample", "5", "--seed", "18446744073709551615"]])
def test_usage(many, args):
    many.call("verify", *args, expect=USAGE)
