"""What it costs to save a real training with PyTorch: ours and what others use, in one run.

    bench_peers.py [--quick] [--repeats N] [--only NAME]... [--out FILE]

Each method trains the same GPT of examples/train_torch.py on the same text with the same seeds, in a process of its own, and
saves the same states: weights and both moments of AdamW, some steps apart, after a warm-up. Counted is what a user pays:

- written: bytes of files after each save, less those before it. The first save is counted by itself, as it is a base.
- waits: how long a save keeps training, in the call and, in the background, in the optimizer's next step.
- slower: by how much the whole loop takes longer than without saves, per save.
- durable: from the call until the bytes are on the disk. Files are synced where the method does not do so.
- load: of the newest checkpoint into a fresh model and optimizer, files in the page cache. What is loaded is compared
  with what was saved.
- memory: peak of the process above that of the process that does not save, in states.

Medians of the repeats. Methods whose package is missing are left out, and said so. The results go to FILE as JSON, by
default bench/results/bench_peers.json.
"""

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"zipnn": ["zipnn"], "safetensors": ["safetensors"], "deepspeed": ["deepspeed"]}


def sync(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def size_of(folder):
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


class Method:
    """One way to save. save() begins a save, and returns when training may go on; done() returns when all are durable."""

    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.folder.mkdir()

    def stepped(self, step):
        """After each step of the optimizer."""

    def save(self, step):
        raise NotImplementedError

    def done(self):
        pass

    def close(self):
        self.done()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def put(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Nothing(Method):
    """Trains, and saves nothing: the yardstick."""

    def save(self, step):
        pass

    def load(self, step):
        return False


class TorchSave(Method):
    def save(self, step):
        import torch
        torch.save(self.state(), self.folder / f"{step}.pt")
        sync(self.folder / f"{step}.pt")

    def load(self, step):
        import torch
        self.put(torch.load(self.folder / f"{step}.pt", weights_only=True))


class TorchSaveZstd(TorchSave):
    """torch.save, then zstd -3 with a thread for each core, as a user might do it."""

    def save(self, step):
        import torch
        path = self.folder / f"{step}.pt"
        torch.save(self.state(), path)
        subprocess.run(["zstd", "-3", "-q", "-T0", "--rm", path], check=True)
        sync(f"{path}.zst")

    def load(self, step):
        import torch
        done = subprocess.run(["zstd", "-d", "-q", "-c", self.folder / f"{step}.pt.zst"], stdout=subprocess.PIPE, check=True)
        self.put(torch.load(io.BytesIO(done.stdout), weights_only=True))


class Safetensors(Method):
    """Weights and moments by name; the groups beside them as JSON."""

    def tensors(self):
        found = dict(self.model.state_dict())
        for i, slots in self.optimizer.state_dict()["state"].items():
            found |= {f"{i}.{slot}": value for slot, value in slots.items()}
        return found

    def save(self, step):
        from safetensors.torch import save_file
        save_file(self.tensors(), self.folder / f"{step}.safetensors")
        sync(self.folder / f"{step}.safetensors")
        (self.folder / f"{step}.json").write_text(json.dumps(self.optimizer.state_dict()["param_groups"]))

    def load(self, step):
        from safetensors.torch import load_file
        self.put(self.from_tensors(load_file(self.folder / f"{step}.safetensors"), json.loads((self.folder / f"{step}.json").read_text())))

    def from_tensors(self, found, groups):
        names = self.model.state_dict().keys()
        state = {}
        for name, value in found.items():
            if name not in names:
                i, slot = name.split(".")
                state.setdefault(int(i), {})[slot] = value
        return {"model": {name: found[name] for name in names}, "optimizer": {"state": state, "param_groups": groups}}


class ZipNN(Safetensors):
    """Each tensor by itself. As a delta: XOR with the save before, the first one whole."""

    delta = False

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        self.before, self.steps = {}, []

    @staticmethod
    def pack(tensor):
        import torch
        import zipnn
        data = bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return zipnn.ZipNN(bytearray_dtype="float32", input_format="byte").compress(data)

    def save(self, step):
        import torch
        with open(self.folder / f"{step}.znn", "wb") as out:
            index = []
            for name, tensor in self.tensors().items():
                if tensor.dim() == 0:
                    index.append([name, tensor.item()])
                    continue
                bits = tensor.detach().view(torch.int32)
                packed = self.pack(bits ^ self.before[name] if self.delta and name in self.before else bits)
                if self.delta:
                    self.before[name] = bits.clone()
                index.append([name, list(tensor.shape), out.tell(), len(packed)])
                out.write(packed)
            out.flush()
            os.fsync(out.fileno())
        text = json.dumps([index, self.optimizer.state_dict()["param_groups"], self.steps[-1:] if self.delta else []])
        (self.folder / f"{step}.json").write_text(text)
        self.steps.append(step)

    def read(self, step):
        import torch
        import zipnn
        index, groups, before = json.loads((self.folder / f"{step}.json").read_text())
        data = (self.folder / f"{step}.znn").read_bytes()
        found = self.read(before[0])[0] if before else {}
        for name, *entry in index:
            if len(entry) == 1:
                found[name] = torch.tensor(entry[0])
                continue
            shape, at, size = entry
            raw = zipnn.ZipNN(bytearray_dtype="float32", input_format="byte").decompress(data[at:at + size])
            bits = torch.frombuffer(bytearray(raw), dtype=torch.int32).reshape(shape)
            found[name] = (bits ^ found[name].view(torch.int32) if before else bits).view(torch.float32)
        return found, groups

    def load(self, step):
        self.put(self.from_tensors(*self.read(step)))


class ZipNNDelta(ZipNN):
    delta = True


class DCP(Method):
    """torch.distributed.checkpoint, which trains on while it writes if asked to: in a thread or in a process."""

    how = None

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        import torch.distributed as dist
        self.pending = None
        if self.how:
            dist.init_process_group("gloo", init_method=f"file://{folder}-group", rank=0, world_size=1)

    def place(self, step):
        """Arguments of DCP that say where a checkpoint is saved."""
        return {"checkpoint_id": str(self.folder / str(step))}

    def source(self, step):
        """The same for a load."""
        return self.place(step)

    def state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        if self.how is None:
            dcp.save(self.state(), **self.place(step))
            return
        self.done()  # one at a time, as DCP asks for
        kind = AsyncCheckpointerType.THREAD if self.how == "thread" else AsyncCheckpointerType.PROCESS
        self.pending = dcp.async_save(self.state(), async_checkpointer_type=kind, **self.place(step))

    def done(self):
        if self.pending is not None:
            self.pending.result()

    def load(self, step):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict
        state = self.state()
        dcp.load(state, **self.source(step))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DCPThread(DCP):
    how = "thread"


class DCPProcess(DCP):
    how = "process"


class DeepSpeed(Method):
    """engine.save_checkpoint of a single process without ZeRO, whose engine has the same model and optimizer. It syncs no files."""

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        import torch.distributed as dist
        os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
        import deepspeed
        dist.init_process_group("gloo", init_method=f"file://{folder}-group", rank=0, world_size=1)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False,
                                               config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}})

    def save(self, step):
        self.engine.save_checkpoint(str(self.folder), tag=str(step))
        for path in (self.folder / str(step)).iterdir():
            sync(path)

    def load(self, step):
        self.engine.load_checkpoint(str(self.folder), tag=str(step))


class OurSave(Method):
    """Store.save: training waits until the checkpoint is durable."""

    fidelity = "exact"

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        import ckptdelta
        self.store = ckptdelta.open(self.folder / "store")

    def save(self, step):
        self.store.save({"model": self.model, "optimizer": self.optimizer}, run="gpt", step=step, fidelity=self.fidelity)

    def load(self, step):
        self.store.load({"model": self.model, "optimizer": self.optimizer}, run="gpt", step=step)

    def close(self):
        self.store.close()


class OurDCP(DCPThread):
    """torch.distributed.checkpoint with our writer, in a thread."""

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        from ckptdelta.dcp import StorageWriter
        self.writer = StorageWriter(self.folder / "store", "gpt")

    def place(self, step):
        return {"checkpoint_id": str(step), "storage_writer": self.writer}

    def source(self, step):
        from ckptdelta.dcp import StorageReader
        return {"checkpoint_id": str(step), "storage_reader": StorageReader(self.folder / "store", "gpt")}


class OurSession(Method):
    """Session: saves in the background."""

    fidelity = "exact"

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        import ckptdelta
        self.store = ckptdelta.open(self.folder / "store")
        self.session = ckptdelta.Session(self.store, "gpt", model=model, optimizer=optimizer, rng=False, every=1 << 40, fidelity=self.fidelity)

    def stepped(self, step):
        self.session.step(step)

    def save(self, step):
        self.session.save()

    def done(self):
        self.session.wait()

    def load(self, step):
        self.store.load({"model": self.model, "optimizer": self.optimizer}, run="gpt", step=step)

    def close(self):
        self.session.close()
        self.store.close()


class OurSessionNear(OurSession):
    fidelity = "near"


class OurSessionCoarse(OurSession):
    fidelity = "coarse"


METHODS = {"none": Nothing, "torch.save": TorchSave, "torch.save, zstd": TorchSaveZstd, "safetensors": Safetensors, "zipnn": ZipNN, "zipnn delta": ZipNNDelta, "dcp": DCP,
           "dcp async thread": DCPThread, "dcp async process": DCPProcess, "deepspeed": DeepSpeed, "ours, Store.save": OurSave, "ours, dcp async": OurDCP,
           "ours, Session": OurSession, "ours, Session near": OurSessionNear, "ours, Session coarse": OurSessionCoarse}


# ------------------------------------------------------------------------------------------------------------ one method


def make(shape):
    import torch
    sys.path.insert(0, str(ROOT / "examples"))
    trainer = importlib.import_module("train_torch")
    torch.manual_seed(1)
    model = trainer.GPT(shape["width"], shape["width"] // 64, shape["layers"], shape["context"], 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    windows = trainer.Windows(trainer.read_text(None), shape["context"], shape["batch"], seed=0)
    torch.manual_seed(2)
    return model, optimizer, windows


def snapshot(model, optimizer):
    found = [t.detach().clone() for t in model.state_dict().values()]
    for _, slots in sorted(optimizer.state_dict()["state"].items()):
        found += [slots[name].clone() for name in sorted(slots)]  # a load may leave another order
    return found


def run_one(name, shape, folder):
    """Trains and saves with one method. Returns its figures."""
    import torch
    from torch.nn import functional
    torch.set_num_threads(shape["threads"])
    model, optimizer, windows = make(shape)
    method = METHODS[name](folder / "files", model, optimizer)
    first = shape["warm"]
    steps = [first + i * shape["apart"] for i in range(shape["saves"])]
    last = steps[-1] + shape["apart"]  # training goes on after the last save, as it always does
    written, waits, usual = [], [], []  # bytes before each save; seconds; the optimizer's steps without a save before them
    for step in range(1, last + 1):
        if step == first:
            begun_loop = time.perf_counter()
        x, y = next(windows)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        after = time.perf_counter()
        if waits and step == steps[len(waits) - 1] + 1:
            waits[-1] += max(0.0, after - before - statistics.median(usual))
        else:
            usual.append(after - before)
        method.stepped(step)
        if step in steps:
            method.done()
            size = size_of(folder)
            begun = time.perf_counter()
            method.save(step)
            waits.append(time.perf_counter() - begun)
            written.append(size)
    looped = time.perf_counter() - begun_loop
    method.done()
    # Another save, waited for: how long until it is durable?
    begun = time.perf_counter()
    method.save(last)
    if isinstance(method, OurSession):
        method.session.fence()
    method.done()
    durable = time.perf_counter() - begun
    total = size_of(folder)
    written = [b - a for a, b in zip(written, written[1:])]
    expected = snapshot(model, optimizer)
    exact = None
    loads = []
    if name != "none":
        for _ in range(3):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.zero_()
            begun = time.perf_counter()
            method.load(last)
            loads.append(time.perf_counter() - begun)
        exact = all(torch.equal(a, b) for a, b in zip(expected, snapshot(model, optimizer)))
    method.close()
    state = sum(t.numel() * t.element_size() for t in expected)
    return {"state": state, "first": written[0], "written": written[1:], "total": total, "waits": waits[1:], "loop": looped,
            "durable": durable, "load": statistics.median(loads) if loads else None, "exact": exact,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


# ------------------------------------------------------------------------------------------------------------------ all


def missing(name):
    if "zstd" in name and not shutil.which("zstd"):
        return "zstd"
    for package in PACKAGES.get(name.split()[0], []):
        try:
            importlib.import_module(package)
        except ImportError:
            return package
    return None


def versions():
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "safetensors", "zipnn", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    import ckptdelta
    found["ckptdelta"] = ckptdelta.__version__
    return found


def summarise(runs, names, shape):
    """One row for each method, medians of its repeats."""
    def middle(name, key):
        return statistics.median(r[key] for r in runs[name])

    rows = {}
    for name in names:
        rs = runs[name]
        if name == "none":
            continue
        rows[name] = {
            "first_bytes": middle(name, "first"), "save_bytes": statistics.median(statistics.mean(r["written"]) for r in rs),
            "all_bytes": middle(name, "total"), "waits_s": statistics.median(statistics.median(r["waits"]) for r in rs),
            "slower_s": (middle(name, "loop") - middle("none", "loop")) / shape["saves"],
            "durable_s": middle(name, "durable"), "load_s": middle(name, "load"), "exact": all(r["exact"] for r in rs),
            "memory_states": (middle(name, "peak") - middle("none", "peak")) / rs[0]["state"]}
    return rows


def show(rows, state):
    print(f"state of {state / 1e6:.1f} MB")
    print(f"{'':22}{'a save':>10}{'ratio':>8}{'all files':>11}{'waits':>9}{'slower':>9}{'durable':>9}{'load':>9}{'memory':>8}  exact")
    for name, r in rows.items():
        print(f"{name:22}{r['save_bytes'] / 1e6:>8.2f}MB{state / r['save_bytes']:>7.2f}x{r['all_bytes'] / 1e6:>9.1f}MB{r['waits_s'] * 1e3:>7.0f}ms"
              f"{r['slower_s'] * 1e3:>7.0f}ms{r['durable_s'] * 1e3:>7.0f}ms{r['load_s'] * 1e3:>7.0f}ms{r['memory_states']:>7.2f}x  "
              f"{'yes' if r['exact'] else 'lossy'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--apart", type=int, default=25, help="steps between saves")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--only", action="append", default=[], choices=list(METHODS))
    parser.add_argument("--out", default=str(ROOT / "bench/results/bench_peers.json"))
    parser.add_argument("--child", nargs=3, metavar=("NAME", "SHAPE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, shape, folder = args.child
        print(json.dumps(run_one(name, json.loads(shape), Path(folder))))
        sys.stdout.flush()
        os._exit(0)  # threads of torch may abort the process at its end
    shape = {"width": args.width, "layers": 6, "context": 64, "batch": 8, "warm": 40, "apart": args.apart, "saves": 6, "threads": args.threads}
    if args.quick:
        shape |= {"width": 128, "layers": 2, "warm": 5, "apart": min(args.apart, 5), "saves": 3}
        args.repeats = 1
    names = ["none", *(args.only or [n for n in METHODS if n != "none"])]
    for name in list(names):
        if missing(name):
            print(f"{name} is left out: the package {missing(name)} is not installed", file=sys.stderr)
            names.remove(name)
    runs = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{repeat + 1}/{args.repeats} {name}", file=sys.stderr, flush=True)
                done = subprocess.run([sys.executable, "-W", "ignore", __file__, "--child", name, json.dumps(shape), folder],
                                      stdout=subprocess.PIPE, text=True, timeout=900)
                if done.returncode != 0:
                    sys.exit(f"{name} failed")
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = summarise(runs, names, shape)
    show(rows, runs["none"][0]["state"])
    result = {"benchmark": "bench_peers", "shape": shape, "versions": versions(), "cores": os.cpu_count(), "state_bytes": runs["none"][0]["state"],
              "methods": rows, "runs": runs}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
