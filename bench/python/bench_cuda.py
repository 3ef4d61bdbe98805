"""How long a training on a GPU stands still for a save: sessions, and copies of the state into pinned host memory.

    bench_cuda.py [--millions N] [--steps N]

A model of N million parameters is trained with AdamW. Each way of saving is measured by itself, after warm-up saves:

- host: how long the call keeps the thread, in ms. The GPU has work queued meanwhile, as in training.
- GPU: how much longer the GPU takes for the iteration of a save than for others, in ms.

The ways: a Session with snapshots in pinned host memory (the default) and in GPU memory; each tensor copied with .to("cpu");
all copied into pinned memory that is kept, and waited for. Medians. PYTHONPATH names the package's folder.
"""

import argparse
import statistics
import tempfile
import time

import torch

import ckptdelta


class Training:
    def __init__(self, millions):
        side, layers = 2048, max(1, millions * 1_000_000 // (2048 * 2048))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(layers))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4096, side, device="cuda")

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def tensors(self):
        return [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values() if v.is_cuda)]


class Sessions:
    def __init__(self, training, folder, room):
        self.store = ckptdelta.open(folder)
        self.session = ckptdelta.Session(self.store, "a", model=training.model, optimizer=training.optimizer, every=1, device_bytes=room)

    def save(self):
        self.session.step()

    def done(self):
        self.session.fence()
        self.session.wait()

    def close(self):
        self.session.close()
        self.store.close()


class Copies:
    """Only the copies: what is done with them later is left out."""

    def __init__(self, training, pinned):
        self.training = training
        self.kept = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in training.tensors()] if pinned else None

    def save(self):
        if self.kept is None:
            self.copied = [t.detach().to("cpu") for t in self.training.tensors()]
            return
        for to, tensor in zip(self.kept, self.training.tensors()):
            to.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def done(self):
        pass

    def close(self):
        pass


def iteration(training, save):
    """(seconds that the call took, seconds on the GPU) of a step, a save and the step after it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    training.step()
    at = time.perf_counter()
    save()
    took = time.perf_counter() - at
    training.step()
    end.record()
    torch.cuda.synchronize()
    return took, begin.elapsed_time(end) / 1e3


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--millions", type=int, default=100)
    arguments.add_argument("--steps", type=int, default=5)
    args = arguments.parse_args()
    training = Training(args.millions)
    for _ in range(3):
        training.step()
    state = sum(t.numel() * t.element_size() for t in training.tensors())
    plain = statistics.median(iteration(training, lambda: None)[1] for _ in range(args.steps))
    print(f"{torch.cuda.get_device_name()}: {state / 1e9:.2f} GB of state, two steps take {plain * 1e3:.1f} ms")
    with tempfile.TemporaryDirectory() as folder:
        ways = {"Session, pinned host memory": lambda: Sessions(training, f"{folder}/a", None),
                "Session, GPU memory": lambda: Sessions(training, f"{folder}/b", 0),
                '.to("cpu")': lambda: Copies(training, False), "into pinned memory": lambda: Copies(training, True)}
        for name, make in ways.items():
            way, found = make(), []
            for number in range(args.steps + 2):
                measured = iteration(training, way.save)
                way.done()
                found += [measured] if number >= 2 else []
            way.close()
            host, gpu = (statistics.median(column) for column in zip(*found))
            print(f"{name:28} host {host * 1e3:8.1f} ms   GPU {(gpu - plain) * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
