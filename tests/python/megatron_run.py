"""Saves tensors and objects with Megatron's dist_checkpointing as torch_dist, and the whole tensors, for the tests of imports. Run on each rank.

Layers are stacked, and two tensor parallel ranks share the rows of each, as those of a model do.
"""

import argparse
import io
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None  # it is called on machines without GPUs as well
torch.cuda.current_device = lambda: "cpu"

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402

LAYERS = 2
STACKED = "decoder.layers.self_attention.linear_qkv.weight"


def main(folder):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    whole = {f"{prefix}model.{STACKED}": torch.randn(LAYERS, 4 * world, 6)
             for prefix in ("", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")}
    whole["model.embedding.word_embeddings.weight"] = torch.randn(5 * world, 4).bfloat16()
    whole["model.decoder.final_layernorm.weight"] = torch.randn(4)
    state = {}
    for name, tensor in whole.items():
        for layer in range(LAYERS) if STACKED in name else ():
            part = tensor[layer, 4 * rank:4 * rank + 4].clone()
            state[f"{name} {layer}"] = ShardedTensor.from_rank_offsets(name, part, (0, layer, LAYERS), (1, rank, world), prepend_axis_num=1)
    name = "model.embedding.word_embeddings.weight"
    state[name] = ShardedTensor.from_rank_offsets(name, whole[name][5 * rank:5 * rank + 5].clone(), (0, rank, world))
    name = "model.decoder.final_layernorm.weight"
    state[name] = ShardedTensor.from_rank_offsets(name, whole[name], replica_id=rank)
    state["extra"] = ShardedObject("model.decoder.layers._extra_state", io.BytesIO(b"fp8"), (1,), (0,), replica_id=rank)
    state["rng"] = ShardedObject("rng_state", [{"torch_rng_state": torch.get_rng_state(), "rank": rank}], (world,), (rank,))
    state["args"] = argparse.Namespace(lr=0.5, exit_signal=signal.SIGTERM, params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    state["iteration"] = 7
    state["optimizer"] = {"param_groups": [{"lr": 0.25, "step": 7}]}
    (folder / "iter_0000007").mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder / "iter_0000007"))
    if rank == 0:
        torch.save({"whole": whole, "rng": torch.get_rng_state(), "auto": AttnBackend.auto.value}, folder / "expected")
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
