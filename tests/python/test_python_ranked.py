"""Sessions of several ranks. Skipped where torch is not installed, or was built without distributed."""

import json
import os
import subprocess
import sys

import pytest

from support_python import BUILD, ROOT, ckptdelta, environment, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import support_ranked


def test_the_losses_after_a_restore_are_those_of_an_uninterrupted_run(tmp_path):
    """DDP and FSDP2, saved every second step and every step."""
    support_ranked.launch("resumes", 2, tmp_path)


def test_meshes_of_two_dimensions(tmp_path):
    """Replicas of shards, and shards of the parts of tensor parallelism; then on fewer ranks."""
    support_ranked.launch("meshes", 4, tmp_path)
    support_ranked.launch("fewer_ranks", 2, tmp_path)


def test_lossy_saves_restore_on_all_ranks_what_one_process_loads(tmp_path):
    """Near and coarse: errors as measured and as promised, and training goes on. Three ranks load the same, and save deltas on it."""
    support_ranked.launch("lossy", 2, tmp_path)
    support_ranked.launch("lossy_elsewhere", 3, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert store.verify()


def test_other_numbers_of_ranks_go_on(tmp_path):
    """FSDP2 on 1, 4, 2 and 3 ranks; at last into a process without a group."""
    for world in (1, 4, 2, 3):
        support_ranked.launch("reshard", world, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [(c.step, c.world) for c in store.checkpoints("gpt")] == [(2, 1), (4, 1), (6, 4), (8, 4), (10, 2), (12, 2), (14, 3), (16, 3)]
        assert store.verify()
        content = torch.load(tmp_path / "content.pt", weights_only=False)
        for state in (store.state_dict(run="gpt")["model"],):
            for name, (dtype, shape, data) in content["model"].items():
                assert (str(state[name].dtype), tuple(state[name].shape), state[name].reshape(-1).view(torch.uint8).numpy().tobytes()) \
                    == (dtype, tuple(shape), data), name


def test_a_checkpoint_of_ranks_is_one_like_any_other(tmp_path):
    """Parts can be loaded without a session, and a single process loads the whole."""
    support_ranked.launch("on_device", 2, tmp_path)
    content = torch.load(tmp_path / "content.pt", weights_only=False)
    training = support_ranked.Training("none", 0, None, seed=4)
    with ckptdelta.open(tmp_path / "store") as store:
        store.load({"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}, run="gpt")
    assert training.content() == content


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path):
    support_ranked.launch("trouble", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert store.verify()


def test_a_write_before_the_copy_is_complete_fails_the_save_of_all_ranks(tmp_path):
    support_ranked.launch("written", 2, tmp_path)


def test_a_rank_that_raises_does_not_wait_for_the_others(tmp_path):
    support_ranked.launch("left", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.checkpoints("gpt")] == [1] and store.verify()


def test_a_process_that_leaves_its_session_open_does_not_wait_for_the_others(tmp_path):
    support_ranked.launch("unclosed", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.checkpoints("gpt")] in ([], [1]) and store.verify()


def test_a_rank_that_dies_costs_no_checkpoint(tmp_path):
    support_ranked.launch("death_of_one", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.checkpoints("gpt")][:3] == [1, 2, 3] and store.verify()


def test_rank_0_does_not_wait_for_others_that_wait_for_it(tmp_path):
    support_ranked.launch("exception_on_rank_0", 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.checkpoints("gpt")] in ([1], [1, 2]) and store.verify()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["fsdp", "ddp", "fsdp1"])
def test_killed_jobs_of_torchrun_lose_nothing_that_was_committed(tmp_path, how):
    """kill_ranks_run.py says what is checked after each kill. A quick run spares the imports of each job."""
    kills, more = (3, ["--fork"]) if os.environ.get("CKD_TEST_LEVEL") == "quick" else (12, [])
    script = ROOT / "tests/python/kill_ranks_run.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script, tmp_path / "jobs", "--kills", str(kills), "--how", how,
                           "--seed", os.environ.get("CKD_SWEEP_SEED") or "1", *more],
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
                          env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}{os.pathsep}{ROOT / 'tests/support'}"))
    assert done.returncode == 0, done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == figures[f"kills of {how}"] == kills and figures["losses compared"] > 100 and figures["checkpoints"] > 10


def test_the_demo(tmp_path):
    """examples/train_torch.py on two processes of torchrun, killed, resumed, and gone on with by one; the script compares losses."""
    done = subprocess.run(["sh", ROOT / "examples/demo_torch.sh", BUILD], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
                          env={**os.environ, "PYTHON": sys.executable, "DEMO_STEPS": "20", "TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and "not one bit differs" in done.stdout, done.stdout
