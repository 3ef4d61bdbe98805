"""What exact saves of every step take with PyTorch, by what the gradients were.

    bench_gradients.py [--width N] [--seeds N] [--steps N] [--out FILE]

Each case trains the GPT of examples/train_torch.py with AdamW, clipped at 1.0, and saves each of the last steps exactly,
with the numbers of the optimizer (ckptdelta.Updates):

- float32: gradients are f32.
- autocast: torch.autocast in bfloat16. Gradients are bf16 numbers times the factor of clipping.
- masters: bf16 weights with f32 masters in the optimizer.
- accumulated: as autocast, with gradients accumulated over 4 batches.

Printed are stored bits of all files for each parameter and step: of the saves, of weights (with masters), second and first
moments. A parameter has 96 bits raw, with masters 112. One save in --chain begins new chains and is left out there, but
counts under `with bases`. Each step is loaded and compared bit for bit. The results go to FILE as JSON, by default
bench/results/bench_gradients.json.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

import ckptdelta

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import train_torch  # noqa: E402

CASES = ("float32", "autocast", "masters", "accumulated")


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose parameters are bf16. It keeps an f32 master of each beside the moments."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["fp32"] = p.float()
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(state["fp32"]) for _ in range(2))
                    beta1, beta2 = group["betas"]
                    adamw(
                        [state["fp32"]], [p.grad.float()], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                        maximize=False, foreach=False)
                    p.copy_(state["fp32"])


def train_step(case, model, optimizer, windows):
    optimizer.zero_grad()
    parts = 4 if case == "accumulated" else 1
    for _ in range(parts):
        x, y = next(windows)
        with torch.autocast("cpu", torch.bfloat16, enabled=case in ("autocast", "accumulated")):
            loss = functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()) / parts
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def same(state, loaded):
    """Are all tensors of two nested states the same, bit for bit?"""
    if isinstance(state, dict):
        return state.keys() == loaded.keys() and all(same(v, loaded[k]) for k, v in state.items())
    if isinstance(state, torch.Tensor):
        return state.dtype == loaded.dtype and torch.equal(state.contiguous().view(torch.uint8) if state.dim() else state,
                                                           loaded.contiguous().view(torch.uint8) if state.dim() else loaded)
    return True


def measure(case, seed, o, folder):
    torch.manual_seed(seed)
    model = train_torch.GPT(o.width, max(1, o.width // 64), 4, 64, 0.0)
    if case == "masters":
        model.bfloat16()
    kind = MasterAdamW if case == "masters" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    windows = train_torch.Windows(train_torch.read_text(None), 64, 8, seed)
    count = sum(p.numel() for p in model.parameters())
    store = ckptdelta.open(folder / f"{case}-{seed}")
    updates = ckptdelta.Updates(optimizer)
    bits, parts, exact = [], [], True
    for step in range(1, o.warm + o.steps + 1):
        train_step(case, model, optimizer, windows)
        if step < o.warm:
            continue
        state = {"model": model, "optimizer": optimizer}
        done = store.save(state, run="gpt", step=step, updates=updates, max_load_cost=o.max_load_cost)
        bits.append(8 * done.stored_bytes / count)
        roles = dict.fromkeys(("weight", "master", "exp_avg_sq", "exp_avg", "other"), 0.0)
        for t in store.tensors(run="gpt", step=step):
            roles[t.role] += 8 * t.stored_bytes / count
        parts.append(roles)
        if step % 5 == 0 or step == o.warm + o.steps:
            loaded = store.state_dict(run="gpt", step=step)
            exact = exact and same(model.state_dict(), loaded["model"])
            kept = [optimizer.state[p] for p in model.parameters()]
            exact = exact and all(same(own, loaded["optimizer"]["state"][i]) for i, own in enumerate(kept))
    store.close()
    updates.close()
    chained = [b < statistics.median(bits) * 1.5 for b in bits]  # not the bases
    middle = {role: statistics.median(p[role] for p, c in zip(parts, chained) if c) for role in parts[0]}
    return {"case": case, "seed": seed, "parameters": count, "raw_bits": 112 if case == "masters" else 96,
            "step_bits": statistics.median(b for b, c in zip(bits, chained) if c), "mean_bits": statistics.mean(bits[1:]),
            "bits": middle, "all_bits": bits, "exact": exact}


def show(runs):
    print(f"{'':12} {'seed':>4} {'bits a step':>11} {'ratio':>6} {'with bases':>10} {'weights':>8} {'v':>6} {'m':>6}  exact")
    for r in runs:
        b = r["bits"]
        print(f"{r['case']:12} {r['seed']:>4} {r['step_bits']:>11.2f} {r['raw_bits'] / r['step_bits']:>5.2f}x {r['mean_bits']:>10.2f} "
              f"{b['weight'] + b['master']:>8.2f} {b['exp_avg_sq']:>6.2f} {b['exp_avg']:>6.2f}  {'yes' if r['exact'] else 'NO'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=200, help="steps before the first save")
    parser.add_argument("--steps", type=int, default=20, help="steps saved after it")
    parser.add_argument("--max-load-cost", type=float, default=16)
    parser.add_argument("--only", action="append", default=[], choices=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/bench_gradients.json")
    o = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="bench-gradients-") as folder:
        for case in o.only or CASES:
            for seed in range(1, o.seeds + 1):
                runs.append(measure(case, seed, o, Path(folder)))
                show(runs[-1:])
    print()
    show(runs)
    if not all(r["exact"] for r in runs):
        sys.exit("a loaded state is not the one that was saved")
    described = {"benchmark": "gradients", "torch": torch.__version__, "ckptdelta": ckptdelta.__version__,
                 "machine": platform.machine(), "width": o.width, "warm": o.warm, "steps": o.steps,
                 "max_load_cost": o.max_load_cost, "runs": runs}
    o.out.write_text(json.dumps(described, indent=1) + "\n")
    print(f"wrote {o.out}")


if __name__ == "__main__":
    main()
