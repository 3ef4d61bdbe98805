"""Checkpoints of Megatron (torch_dist): folders of torch.distributed.checkpoint without a mapping of names, and common.pt."""

import argparse
import importlib.util
import os
import signal
from pathlib import Path

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch
from support_torch_ranks import run_ranks

pytestmark = [needs_package, needs_torch]


def test_what_megatron_writes(tmp_path):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    run_ranks(Path(__file__).with_name("megatron_run.py"), tmp_path)
    expected = torch.load(tmp_path / "expected")
    (tmp_path / "expected").unlink()
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path, run="a")] == [7]
        state = store.state_dict(run="a")
        for name, tensor in expected["whole"].items():
            assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
        assert state["args"] == {"lr": 0.5, "exit_signal": signal.SIGTERM.value, "params_dtype": torch.bfloat16, "attention_backend": expected["auto"]}
        assert state["iteration"] == 7 and state["optimizer"] == {"param_groups": [{"lr": 0.25, "step": 7}]}
        random = [value for name, value in sorted(state.items()) if name.startswith("rng_state/")]
        assert len(random) == 2 and "rank" in str(random[0]) and "'rank': 1" in str(random[1])
        assert [value for name, value in state.items() if "_extra_state" in name][0][0].getvalue() == b"fp8"
        roles = {tensor.name: tensor.role for tensor in store.tensors(run="a")}
        names = [name for name in expected["whole"] if "linear_qkv" in name]
        assert [roles[name] for name in names] == ["weight", "master", "exp_avg", "exp_avg_sq"]


def test_without_megatron(tmp_path):
    """The same form, made with torch alone."""
    import torch.distributed.checkpoint as dcp
    folder = tmp_path / "iter_0000012"
    tensors = {"model.w": torch.randn(4, 3), "optimizer.state.exp_avg.model.w": torch.randn(4, 3)}
    dcp.save(dict(tensors), checkpoint_id=folder, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    torch.save({"iteration": 11, "args": argparse.Namespace(lr=1.0, exit_signal=signal.SIGTERM)}, folder / "common.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path, run="a")] == [11]
        state = store.state_dict(run="a")
        assert state["args"] == {"lr": 1.0, "exit_signal": 15} and all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
        os.truncate(folder / "common.pt", 100)
        with pytest.raises(ckptdelta.CorruptError, match="common.pt"):
            store.import_checkpoints(folder, run="b")
        torch.save({"iteration": 11, "model.w": 1}, folder / "common.pt")
        with pytest.raises(ckptdelta.CorruptError, match="what other files do not have"):
            store.import_checkpoints(folder, run="b")
        torch.save({"iteration": 11, "args": os.stat_result(range(10))}, folder / "common.pt")
        with pytest.raises(ckptdelta.UnsupportedError, match="common.pt.*pickle=True"):
            store.import_checkpoints(folder, run="b")
        assert store.checkpoints("b") == []
