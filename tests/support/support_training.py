"""A training to be saved beside, for the tests of sessions."""

import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from support_python import torch


@contextmanager
def no_room(store):
    """Saves fail meanwhile: there is no folder for chunk files."""
    chunks = Path(store.path) / "data/c"
    chunks.rename(chunks.with_name("away"))
    try:
        yield
    finally:
        chunks.with_name("away").rename(chunks)


class Loader:
    """Batches in an order of its own, with a state."""

    def __init__(self, seed):
        self.generator, self.position = torch.Generator().manual_seed(seed), 0

    def batch(self):
        self.position += 1
        return torch.randn(8, 32, generator=self.generator)

    def state_dict(self):
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.position = state["position"]


class Training:
    """Dropout, running statistics, a scheduler, a loader; all generators of random numbers have a part in the loss."""

    def __init__(self, seed, width=64):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = Loader(seed)

    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "loader")}

    def step(self):
        loss = (self.model(self.loader.batch()) * (random.random() + np.random.rand())).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def saved_states(store, session, training, steps, change=lambda: None):
    """Saves each step, and returns the weights and statistics that there were."""
    found = {}
    for _ in range(steps):
        training.step()
        session.step()
        found[session.at] = {k: v.clone() for k, v in training.model.state_dict().items()}
        change()
    return found
