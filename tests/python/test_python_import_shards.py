"""Shards that torch.distributed.checkpoint writes as safetensors: the import makes whole tensors of them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch
from support_torch_ranks import run_ranks

pytestmark = [needs_package, needs_torch]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("safetensors.torch")
    if not hasattr(__import__("torch.distributed.checkpoint").distributed.checkpoint, "HuggingFaceStorageWriter"):
        pytest.skip("this version of torch does not write such shards")
    folder = tmp_path_factory.mktemp("shards")
    run_ranks(Path(__file__).with_name("dcp_shards_run.py"), folder)
    return folder


def test_whole_tensors(made, tmp_path):
    shards = sorted(made.glob("step-8/shard-*.safetensors"))
    assert len(shards) > 1
    (made / "step-8" / "config.json").write_text("{}")
    whole = torch.load(made / "whole.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(made / "step-8", run="a")] == [8]
        state = store.state_dict(run="a")
        assert set(state) == {"model", "files"} and set(state["files"]) == {"config.json"}
        assert set(state["model"]) == set(whole)
        for name, tensor in whole.items():
            assert state["model"][name].dtype == tensor.dtype and torch.equal(state["model"][name], tensor), name


def test_a_grid_of_ranks(tmp_path):
    """As four ranks write it, with other shapes at the ends."""
    safetensors = pytest.importorskip("safetensors.torch")
    whole = torch.randn(5, 7, 2)
    parts = {(0, 0, 0): whole[:3, :4], (0, 4, 0): whole[:3, 4:], (3, 0, 0): whole[3:, :4], (3, 4, 0): whole[3:, 4:]}
    (tmp_path / "9").mkdir()
    for number, (at, part) in enumerate(parts.items(), 1):
        info = {"w": {"saved_offsets": list(at)}}
        safetensors.save_file({"w": part.contiguous()}, tmp_path / "9" / f"shard-{number:05}-model-00001-of-00001.safetensors",
                              {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"})
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path, run="a")] == [9]
        assert torch.equal(store.state_dict(run="a")["model"]["w"], whole)
        (tmp_path / "9" / "shard-00002-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(ckptdelta.CorruptError, match="do not make up a whole"):
            store.import_checkpoints(tmp_path, run="b")


def test_spoilt_shards(made, tmp_path):
    from safetensors.torch import load_file, save_file

    def expect(text):
        with ckptdelta.open(tmp_path / "store") as store:
            with pytest.raises(ckptdelta.CorruptError, match=text) as caught:
                store.import_checkpoints(folder, run="a")
            assert str(folder) in str(caught.value) and caught.value.file and store.checkpoints() == []

    folder = Path(shutil.copytree(made / "step-8", tmp_path / "step-8"))
    first, second = sorted(folder.glob("shard-*.safetensors"))[:2]
    kept = first.read_bytes()
    first.unlink()
    expect("do not make up a whole.*is a shard missing")
    first.write_bytes(kept)
    os.truncate(first, len(kept) - 3)
    expect("cannot be read")
    tensors = load_file(second)
    save_file({**tensors, "rows": tensors["rows"]}, second, {"DCP_SHARDING_INFO": json.dumps({"rows": {"saved_offsets": [0, 0]}})})
    first.write_bytes(kept)
    expect("does not say where")
    offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    save_file(tensors, second, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    expect("have the same part of")
    save_file({"rows": torch.ones(3)}, second, {"DCP_SHARDING_INFO": json.dumps({"rows": {"saved_offsets": [3]}})})
    expect("does not fit those of other files")
