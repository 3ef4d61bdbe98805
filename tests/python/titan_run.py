"""Trains a small model with torchtitan's containers and the CheckpointManager of a recipe: titan_run.py RECIPE FOLDER MODE STEPS [INITIAL]

RECIPE is a file that defines StoreCheckpointManager; "-" is torchtitan's own manager. INITIAL is a folder of torchtitan's to begin
with. Each rank appends the losses of its steps to FOLDER/losses-RANK. torchtitan's own Trainer needs a GPU.
"""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

EVERY, KEEP = 4, 2


class Batches(Stateful):
    def __init__(self, rank):
        self.key, self.at = f"dp_rank_{rank}", 0
        self.generator = torch.Generator().manual_seed(rank)

    def __next__(self):
        self.at += 1
        return torch.randn(8, 16, generator=self.generator)

    def state_dict(self):
        return {self.key: {"at": self.at, "random": self.generator.get_state()}, "world_size": dist.get_world_size()}

    def load_state_dict(self, state):
        self.at = state[self.key]["at"]
        self.generator.set_state(state[self.key]["random"])


class Progress(Stateful):
    step, tokens = 0, 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state):
        self.step, self.tokens = state["step"], state["ntokens_seen"]


def main(recipe, folder, mode, steps, initial=None):
    made = {"__name__": "recipe"}
    sys.modules["recipe"] = type(sys)("recipe")  # where slotted dataclasses look for their names
    config = CheckpointManager.Config
    if recipe != "-":
        exec(compile(Path(recipe).read_text(), recipe, "exec"), made)
        config = functools.partial(made["StoreCheckpointManager"].Config, run="llama")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 67), torch.nn.Tanh(), torch.nn.BatchNorm1d(67), torch.nn.Linear(67, 16, bias=False))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = [ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": decay})
              for pattern, decay in ((r"bias$", 0.0), (".*", 0.1))]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=12)
    batches, progress = Batches(rank), Progress()
    settings = config(enable=True, folder="store", interval=EVERY, last_save_model_only=False, keep_latest_k=KEEP, async_mode=mode,
                      initial_load_path=initial, initial_load_model_only=False)
    manager = settings.build(dataloader=batches, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
                             states={"train_state": progress}, sd_adapter=None, base_folder=str(folder))
    resumed = manager.load()
    assert resumed == (progress.step > 0)
    with open(folder / f"losses-{rank}", "a") as losses:
        while progress.step < steps:
            progress.step += 1
            loss = model(next(batches)).square().mean()
            optimizers.zero_grad()
            loss.backward()
            manager.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            progress.tokens += 8 * 16
            print(progress.step, loss.item(), file=losses, flush=True)
            manager.save(progress.step, last_step=progress.step == steps)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder / f"done-{steps}").touch()
    os._exit(0)  # without the threads of torch, which can abort a process that ends


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
