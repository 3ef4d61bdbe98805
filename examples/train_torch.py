"""Trains a small GPT on text with PyTorch, on one process or many, and saves it in the background.

    python3 examples/train_torch.py --store runs
    torchrun --nproc-per-node 2 examples/train_torch.py --store runs                     # FSDP2
    torchrun --nproc-per-node 2 examples/train_torch.py --store runs --parallel ddp

Kill it at any time and start the same command again: it resumes from the newest checkpoint, with the same losses as without
the kill. Any number of processes may resume. The model reads bytes; without --text it learns the source code of
Python's standard library.
"""

import argparse
import logging
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import ckptdelta


class Block(torch.nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(torch.nn.Module):
    def __init__(self, width, heads, layers, context, dropout):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, x):
        y = self.embed(x) + self.place.weight[:x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class Windows:
    """Random windows of a text. It has a state, so a checkpoint restores it with the rest."""

    def __init__(self, text, context, batch, seed):
        self.text, self.context, self.batch = text, context, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self):
        starts = torch.randint(0, len(self.text) - self.context - 1, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[s:s + self.context + 1] for s in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def read_text(path):
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def parallel(model, how, device):
    """The model on all processes that torchrun has started; how: fsdp or ddp."""
    if not dist.is_initialized():
        return model
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--store", default="runs", help="where checkpoints go [default: runs]")
    add("--name", default="gpt", help="of the run [default: gpt]")  # torchrun takes --run for an option of its own
    add("--text", help="a file to learn [default: Python's standard library]")
    add("--steps", type=int, default=200)
    add("--every", type=int, default=10, help="steps between checkpoints [default: 10]")
    add("--fidelity", default="exact", choices=["exact", "near", "coarse"])
    add("--parallel", default="fsdp", choices=["fsdp", "ddp"], help="with torchrun [default: fsdp]")
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--layers", type=int, default=4)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=8)
    add("--dropout", type=float, default=0.1)
    add("--losses", help="append 'STEP LOSS' to this file")
    return parser.parse_args()


def main():
    o = options()
    rank = 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank = dist.get_rank()
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(1)
    model = parallel(GPT(o.width, o.heads, o.layers, o.context, o.dropout).to(device), o.parallel, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    windows = Windows(read_text(o.text), o.context, o.batch, seed=rank)
    torch.manual_seed(100 + rank)  # each process drops other units

    with ckptdelta.open(o.store) as store, \
            ckptdelta.Session(store, o.name, model=model, optimizer=optimizer, scheduler=scheduler, loader=windows,
                              every=o.every, fidelity=o.fidelity) as session:
        first = session.restore() + 1
        if first > 1:
            logging.info("goes on from step %d", first - 1)
        for step in range(first, o.steps + 1):
            x, y = (t.to(device) for t in next(windows))
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.step()
            if rank == 0 and o.losses:
                with open(o.losses, "a") as out:
                    print(step, loss.item().hex(), file=out)
            if step % 20 == 0:
                logging.info("step %d: loss %.4f", step, loss.item())
        session.save()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
