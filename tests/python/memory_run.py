"""What saves need in memory beside the training: memory_run.py session|store exact|near|coarse MIB SAVES FOLDER

Trains a model whose weights and moments take about MIB MiB, first without saves, then with one after each step. Prints a JSON object:
bytes of the state, and the peak of resident memory in both parts.
"""

import json
import re
import sys
from pathlib import Path

import torch

import ckptdelta

WIDTH = 384  # a matrix takes 0.6 MB, so no tensor is a large part of the state


def peak():
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


class Training:
    def __init__(self, size):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(size / (12 * WIDTH * (WIDTH + 1)))))]
        self.model = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)  # whose steps need little memory
        self.state_bytes = 3 * sum(p.numel() * 4 for p in self.model.parameters())

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()


def save_all(kind, fidelity, saves, folder, training):
    with ckptdelta.open(folder) as store:
        if kind == "store":
            for step in range(1, saves + 1):
                training.step()
                store.save({"model": training.model, "optimizer": training.optimizer}, run="gpt", step=step, fidelity=fidelity)
            return
        with ckptdelta.Session(store, "gpt", model=training.model, optimizer=training.optimizer, every=1, fidelity=fidelity) as session:
            for _ in range(saves):
                training.step()
                session.step()


def main(kind, fidelity, size, saves, folder):
    torch.set_num_threads(1)
    training = Training(size)
    for _ in range(2):
        training.step()
    forget_peak()
    for _ in range(2):
        training.step()
    before = peak()
    forget_peak()
    save_all(kind, fidelity, saves, folder, training)
    print(json.dumps({"state_bytes": training.state_bytes, "without_saves": before, "with_saves": peak()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) * 2**20, int(sys.argv[4]), Path(sys.argv[5]))
