"""Trains a small model with DeepSpeed on the ranks of one machine and writes checkpoints of all stages of ZeRO, for the tests of imports.

Run on each rank with the variables that torch.distributed wants, and the folder to write to; or with --load, a folder, and names of
universal checkpoints in it, which are loaded and saved again. Rank 0 also writes what DeepSpeed's own
tools make of the checkpoints: NAME.fp32.pt by zero_to_fp32, and NAME.universal by ds_to_universal.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

# Stage, dtype, and settings of ZeRO.
RUNS = {"z1_bf16": (1, "bf16", {}), "z2_fp32": (2, "fp32", {}), "z2_aligned": (2, "bf16", {"parameter_alignment": True}),
        "z3_bf16": (3, "bf16", {"sub_group_size": 500}), "z3_fp32": (3, "fp32", {}), "z1_elastic": (1, "fp32", {"elastic_checkpoint": True}),
        "z2_round_robin": (2, "fp32", {"round_robin_gradients": True})}
NOT_UNIVERSAL = ("z1_elastic", "z2_round_robin")  # ds_to_universal fails on the first and puts the second together in a wrong order
WIDTH = 12


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(31, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 7), torch.nn.Linear(7, WIDTH)])
        self.head = torch.nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens):
        x = self.frozen(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x * self.scale.to(x.dtype)), tokens)


def engine_of(name, **more):
    stage, dtype, zero = RUNS.get(name, (2, "bf16", {}))
    torch.manual_seed(3)
    model = Model()
    groups = [{"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
              {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": dtype == "bf16"},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "zero_allow_untested_optimizer": True,
              "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, **more}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def step(engine):
    loss = engine(torch.randint(31, (4,)))
    engine.backward(loss)
    engine.step()


def main(folder):
    rank = int(os.environ["RANK"])
    for name in RUNS:
        engine = engine_of(name)
        torch.manual_seed(10 + rank)
        for _ in range(2):
            for _ in range(2):
                step(engine)
            engine.save_checkpoint(folder / name, client_state={"epoch": 3, "rng": torch.get_rng_state(), "rank": rank})
        torch.distributed.barrier()
        engine.destroy()
        if rank == 0:
            torch.save(get_fp32_state_dict_from_zero_checkpoint(folder / name), folder / f"{name}.fp32.pt")
            if name in NOT_UNIVERSAL:
                continue
            ds_to_universal.main(argparse.Namespace(input_folder=str(folder / name / "global_step4"), output_folder=str(folder / f"{name}.universal"),
                                                    num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                                                    inject_missing_state=True))


def go_on(folder, *tags):
    """Loads universal checkpoints with ZeRO 2 and 3, and saves what came of them."""
    for tag, name in itertools.product(tags, ("z2_bf16", "z3_bf16")):
        engine = engine_of(name, checkpoint={"load_universal": True})
        path, client = engine.load_checkpoint(folder, tag=tag)
        assert path and client["epoch"] == 3
        engine.save_checkpoint(folder / f"{tag}.{name}")
        step(engine)
        engine.destroy()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    if sys.argv[1] == "--load":
        go_on(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main(Path(sys.argv[1]))
