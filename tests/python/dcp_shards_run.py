"""Saves tensors that ranks share in several ways as safetensors shards, and whole, for the tests of imports. Run on each rank."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SPLIT = {"rows": [Shard(0)], "columns": [Shard(1)], "uneven": [Shard(0)], "fewer_than_ranks": [Shard(0)], "copies": [Replicate()], "bf16": [Shard(1)]}


def main(folder):
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)
    shapes = {"rows": (6, 4), "columns": (5, 6), "uneven": (7, 3), "fewer_than_ranks": (1, 3), "copies": (4,), "bf16": (3, 8)}
    whole = {name: torch.randn(shape, dtype=torch.bfloat16 if name == "bf16" else torch.float32) for name, shape in shapes.items()}
    line = init_device_mesh("cpu", (world,))
    state = {name: distribute_tensor(tensor, line, SPLIT[name]) for name, tensor in whole.items()}
    whole["plain"] = state["plain"] = torch.arange(5)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "step-8"), save_distributed=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
