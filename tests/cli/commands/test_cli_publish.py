"""publish: versions of weights for those that follow them."""

import json

import numpy as np
import pytest

import support_safetensors as st
from support_cli import FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401


def weights(version):
    """Three tensors, the first as large as several blocks. Each version changes one value in a hundred."""
    values = np.random.default_rng(1).standard_normal(900 * 1024).astype(np.float16)
    for v in range(1, version + 1):
        values.view(np.uint16)[np.random.default_rng(v).integers(0, values.size, values.size // 100)] ^= 1
    return {"embed.weight": values.reshape(900, 1024), "norm.bias": np.arange(8, dtype=np.float32) + version,
            "positions": np.arange(16, dtype=np.int64)}


def publish(store, version, *args, tensors=None, **options):
    return store.call("publish", f"policy@{version}", store.file(tensors or weights(version)), *args, **options)


def follow(store, into, *args):
    return store.call("follow", "--run", "policy", "--into", into, "--once", "--json", *args).json()


def same_as_published(into, version):
    assert st.same(st.read(into / "model.safetensors")[0], weights(version))


def policies(store):
    return store.json("policy")["policies"]


def test_a_follower_reads_what_is_new(store, tmp_path):
    said = publish(store, 1).out
    assert said.startswith("saved policy@1: base, ")
    first = follow(store, tmp_path / "model")
    same_as_published(tmp_path / "model", 1)
    for version in range(2, 6):
        saved = json.loads(publish(store, version, "--json").out)["checkpoints"][0]
        assert saved["kind"] == "delta" and saved["fidelity"] == "exact"
        applied = follow(store, tmp_path / "model")
        assert applied["checkpoint"] == f"policy@{version}"
        assert 0 < applied["read_bytes"] <= saved["stored_bytes"] < first["read_bytes"] / 5
        same_as_published(tmp_path / "model", version)
    late = follow(store, tmp_path / "late")
    assert late["read_bytes"] <= 2 * first["read_bytes"]
    same_as_published(tmp_path / "late", 5)


def test_old_versions_are_deleted_and_followers_go_on(store, tmp_path):
    publish(store, 1, "--keep-last", 2)
    follow(store, tmp_path / "model")
    for version in range(2, 8):
        publish(store, version, *([] if version < 3 else ["-q"]))
    assert [c["step"] for c in store.checkpoints()] == [6, 7]
    assert store.json("trash")["checkpoints"] == []
    lagged = follow(store, tmp_path / "model")
    same_as_published(tmp_path / "model", 7)
    assert lagged["read_bytes"] < follow(store, tmp_path / "late")["read_bytes"]
    same_as_published(tmp_path / "late", 7)
    store.call("verify")


def test_anchors_cost_followers_nothing(store, tmp_path):
    """With a low bound there are anchors, which late followers read, and others do not."""
    kept = ["--max-load-cost", "1.3", "--keep-last", "3", "-q"]
    for version in range(1, 12):
        publish(store, version, *kept)
        listed = {(c["run"], c["step"]): c for c in store.checkpoints()}
        applied = follow(store, tmp_path / "model")
        if version > 1:
            assert applied["read_bytes"] <= listed["policy", version]["stored_bytes"] < listed["policy", version]["raw_bytes"] / 20
        same_as_published(tmp_path / "model", version)
    anchors = [step for run_name, step in listed if run_name == "policy.anchors"]
    assert len(anchors) == 2 and max(anchors) > 4
    assert all(c["load_cost"] < 1.8 and c["kind"] == "delta" for (name, _), c in listed.items() if name == "policy")
    late = follow(store, tmp_path / "late")
    assert late["read_bytes"] < 1.3 * listed["policy.anchors", max(anchors)]["stored_bytes"]
    same_as_published(tmp_path / "late", 11)
    assert {(p["run"], p["keep_last"]) for p in policies(store)} == {("policy", 3), ("policy.anchors", 1)}
    store.call("verify")
    for _ in range(2):  # again, and with an anchor of the same step
        publish(store, 11, *kept)
    assert {(c["run"], c["step"]) for c in store.checkpoints()} == set(listed)


def test_the_first_version_makes_the_policy(store):
    publish(store, 1)
    assert [(p["run"], p["keep_last"], p["keep_within_s"], p["automatic"], p["undo_s"]) for p in policies(store)] == [("policy", 20, 0, 1, 0)]
    store.call("policy", "--run", "policy", "--keep-last", 3)
    publish(store, 2)
    assert policies(store)[0]["keep_last"] == 3
    publish(store, 3, "--keep-last", 7, "--keep-within", "6h")
    assert (policies(store)[0]["keep_last"], policies(store)[0]["keep_within_s"]) == (7, 6 * 3600)
    since = policies(store)[0]["since"]
    settings = sorted(store.path.glob("data/**/*"))
    publish(store, 3, "--keep-within", "6h")  # as it was: nothing is written
    assert policies(store)[0]["since"] == since and sorted(store.path.glob("data/**/*")) == settings
    publish(store, 4, "--keep-last", 9)
    assert (policies(store)[0]["keep_last"], policies(store)[0]["keep_within_s"]) == (9, 6 * 3600)


def test_other_rules_of_a_policy_stay(store):
    publish(store, 1)
    store.call("policy", "--run", "policy", "--keep-last", 3, "--keep-every", 2, "--keep-weekly", 4)
    before = policies(store)[0]
    publish(store, 2, "--keep-last", 5, "-q")
    after = policies(store)[0]
    assert after | {"since": 0} == before | {"keep_last": 5, "since": 0} and (after["automatic"], after["undo_s"]) == (0, 24 * 3600)


def test_a_step_before_the_newest_is_refused(store):
    for version in (1, 3):
        publish(store, version)
    assert "before the newest version, policy@3" in publish(store, 2, "--tag", "old", expect=USAGE).err
    assert [c["step"] for c in store.checkpoints()] == [1, 3]
    publish(store, 1)  # it is there


@pytest.mark.parametrize("steps", [1, 2])
def test_a_trainers_run_gets_no_policy_by_itself(store, steps):
    for step in range(3 - steps, 3):
        store.save(step, state(step), run_name="policy")
    publish(store, 3, "-q")
    assert policies(store) == [] and len(store.checkpoints()) == steps + 1
    refused = publish(store, 4, "--keep-last", 2, expect=USAGE)
    assert "has checkpoints and no policy" in refused.err and len(store.checkpoints()) == steps + 1


def test_a_version_that_was_published_before_is_no_first_one(store):
    store.save(1, weights(1), run_name="policy")
    publish(store, 1)
    assert policies(store) == []


def test_only_weights_are_published(store, tmp_path):
    tensors = weights(1) | {"exp_avg.norm.bias": np.ones(8, np.float32), "exp_avg_sq.norm.bias": np.ones(8, np.float32),
                            "lm_head.weight": np.ones((4, 4), np.float32)}
    publish(store, 1, "--exclude", "lm_*", tensors=tensors, expect_message="3 tensors are left out")
    follow(store, tmp_path / "model")
    same_as_published(tmp_path / "model", 1)
    assert {t["role"] for t in store.json("show", "policy@1")["tensors"]} == {"weight"}
    nothing = publish(store, 2, "--exclude", "*", expect=USAGE)
    assert "nothing is left to publish" in nothing.err and len(store.checkpoints()) == 1


def test_a_tag_moves(store, tmp_path):
    for version in (1, 2):
        publish(store, version, "--tag", "rollout")
        store.call("follow", "--tag", "rollout", "--into", tmp_path / "model", "--once")
        same_as_published(tmp_path / "model", version)
    assert [(t["tag"], t["checkpoint"]) for t in store.json("tag")["tags"]] == [("rollout", "policy@2")]


def test_the_same_version_again(store):
    publish(store, 1)
    assert "exists already, with the same content" in publish(store, 1).out
    other = publish(store, 1, tensors=weights(2), expect=FAILED)
    assert "a different checkpoint at step 1: tensor 'embed.weight' differs" in other.err and "--on-duplicate" not in other.err


@pytest.mark.parametrize("args, said", [
    ((), "name the safetensors FILEs"), (("policy@1",), "name the safetensors FILEs"), (("policy@1", "-"), "standard input"),
    (("x" * 121 + "@1", "FILE"), "at most 120 bytes"), (("FILE",), "RUN@STEP, or --run and --step"),
    (("policy@1", "FILE", "--keep-last", "0"), "--keep-last is a number from 1"), (("policy@1", "FILE", "--keep-within", "soon"), "--keep-within"),
    (("policy@1", "FILE", "--max-load-cost", ".5"), "--max-load-cost is a number of at least 1"), (("policy@latest", "FILE"), "latest"),
    (("policy@1", "FILE", "--step", "2"), "named twice")])
def test_what_is_refused(store, args, said):
    file = store.file(weights(1))
    assert said in store.call("publish", *[file if a == "FILE" else a for a in args], expect=USAGE).err
    assert not store.path.exists()


def test_a_missing_file(store, tmp_path):
    store.call("publish", "policy@1", tmp_path / "absent.safetensors", expect=NOT_FOUND)
    assert not store.path.exists()
