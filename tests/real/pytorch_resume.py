#!/usr/bin/env python3
"""Resumes PyTorch training from lossy checkpoints. Needs torch and safetensors, which `make test` does not
install.

    CKPTDELTA=build/.../ckptdelta python3 tests/real/pytorch_resume.py

A model with an embedding of rare tokens is trained with AdamW. Its state is saved with the names that
PyTorch, DCP, DeepSpeed's universal format and Lightning write, with fidelities near and coarse, and with
exact first moments. Training continues for five steps from the loaded state, and from the exact state with
the same batches. The test fails if a value is not finite, if a second moment is negative, if |m| / (sqrt(v) +
eps) of a tensor is larger than twice the exact one's, or if one of the five steps is larger than 2.1 times
the exact one's. (PyTorch divides m and v by 1 - beta^t, so that eps counts for less early in a training; see
engine/lossy/DECISIONS.md.)
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COMMAND = os.environ["CKPTDELTA"]
TOKENS, WIDTH, STEPS, MORE, LR = 4000, 96, 60, 5, 1e-3
FIDELITIES = ["near", "coarse", "near,exp_avg=exact"]
SLOTS = ["exp_avg", "exp_avg_sq", "step"]

# The names of the weight X, of its slot S, and of metadata. {x}: the name, {n}: the number, {s}: the slot.
FORMS = {
    "pytorch": ("{x}", "state.{n}.{s}", "param_groups"),
    "dcp": ("model.{x}", "optimizer.state.{x}.{s}", None),
    "deepspeed": ("{x}", "{x}/{s}.pt", None),
    "lightning": ("state_dict.{x}", "optimizer_states.0.state.{n}.{s}", "optimizer_states.0.param_groups"),
}


def new_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(),
                               torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, TOKENS))


def new_optimizer(model):
    return torch.optim.AdamW(model.named_parameters(), lr=LR)


def batch(step):
    """Tokens by Zipf's law: most of them are in few batches."""
    random = torch.Generator().manual_seed(1000 + step)
    weights = 1 / torch.arange(1, TOKENS + 1) ** 1.2
    return torch.multinomial(weights, 512, replacement=True, generator=random)


def train(model, optimizer, step):
    """Makes a step. Returns the largest change of an element, in learning rates."""
    before = [p.detach().clone() for p in model.parameters()]
    tokens = batch(step)
    loss = torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    moved = max((p.detach() - b * (1 - LR * 0.01)).abs().max().item() / LR for p, b in zip(model.parameters(), before))
    return moved, loss.item()


def state_of(form, model, optimizer):
    weight, slot, groups = FORMS[form]
    tensors, state = {}, optimizer.state_dict()["state"]
    for n, (x, p) in enumerate(model.named_parameters()):
        tensors[weight.format(x=x)] = p.detach().contiguous()
        for s in SLOTS:
            tensors[slot.format(x=x, n=n, s=s)] = state[n][s]
    metadata = {groups: json.dumps(optimizer.state_dict()["param_groups"])} if groups else None
    return tensors, metadata


def resume(form, tensors, optimizer_state):
    weight, slot, _ = FORMS[form]
    model = new_model()
    model.load_state_dict({x: tensors[weight.format(x=x)] for x, _ in model.named_parameters()})
    state = copy.deepcopy(optimizer_state)
    for n, (x, _) in enumerate(model.named_parameters()):
        state["state"][n] = {s: tensors[slot.format(x=x, n=n, s=s)].clone() for s in SLOTS}
    optimizer = new_optimizer(model)
    optimizer.load_state_dict(state)
    return model, optimizer


def largest_updates(tensors, form, names):
    slot = FORMS[form][1]
    updates = []
    for n, x in enumerate(names):
        m, v, _ = (tensors[slot.format(x=x, n=n, s=s)].double() for s in SLOTS)
        assert torch.isfinite(m).all() and torch.isfinite(v).all() and (v >= 0).all(), x
        updates.append((m.abs() / (v.sqrt() + 1e-8)).max().item())
    return updates


def through_a_store(folder, form, fidelity, tensors, metadata):
    given, got, store = folder / "in.safetensors", folder / "out.safetensors", folder / "store"
    save_file(tensors, given, metadata)
    said = subprocess.run([COMMAND, "save", store, "--run", "a", "--step", "1", "--fidelity", fidelity, "--json", given],
                          check=True, capture_output=True, text=True).stdout
    subprocess.run([COMMAND, "load", store, "--out", got, "-q"], check=True)
    assert json.loads(said)["in_doubt"] == [], f"{form}: every moment belongs to a weight"
    return load_file(got), sum(f.stat().st_size for f in (store / "data/c").iterdir())


def main():
    model = new_model()
    optimizer = new_optimizer(model)
    for step in range(STEPS):
        train(model, optimizer, step)
    names = [x for x, _ in model.named_parameters()]
    exact_state = optimizer.state_dict()
    exact_model = copy.deepcopy(model)
    exact_optimizer = new_optimizer(exact_model)
    exact_optimizer.load_state_dict(copy.deepcopy(exact_state))
    exact = [train(exact_model, exact_optimizer, STEPS + i) for i in range(MORE)]
    failed = 0
    print(f"torch {torch.__version__}, {sum(p.numel() for p in model.parameters())} parameters, {STEPS} steps, then {MORE}")
    print("form       fidelity            bytes     update on load / exact   largest step / exact    last loss (exact)")
    for form in FORMS:
        tensors, metadata = state_of(form, model, optimizer)
        was = largest_updates(tensors, form, names)
        for fidelity in FIDELITIES:
            with tempfile.TemporaryDirectory() as folder:
                loaded, size = through_a_store(Path(folder), form, fidelity, tensors, metadata)
            ratio = max(now / before for now, before in zip(largest_updates(loaded, form, names), was))
            resumed, its_optimizer = resume(form, loaded, exact_state)
            steps = [train(resumed, its_optimizer, STEPS + i) for i in range(MORE)]
            finite = all(torch.isfinite(p).all() for p in resumed.parameters())
            moved = max(a / b for (a, _), (b, _) in zip(steps, exact))
            failed += not (finite and ratio <= 2 and moved <= 2.1)
            print(f"{form:10} {fidelity:19} {size:9} {ratio:16.3f} {moved:23.3f} {steps[-1][1]:18.4f} ({exact[-1][1]:.4f})")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
