"""Processes of a gloo group that save and load through torch.distributed.checkpoint. launch() starts them."""

import importlib
import io
import multiprocessing
import os
import sys
import threading
import time
import traceback
import unittest.mock
import uuid
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SEED = 7


def launch(what, world, folder, script=__file__):
    """Runs a function of a script, such as this one, in each of `world` processes. They share files in the folder.

    The processes are copies of a server that has imported torch: an import of torch costs more than most of these tests.
    """
    from support_python import environment
    module, group = Path(script).stem, uuid.uuid4().hex
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    path = os.pathsep.join([str(Path(script).parent), environment()["PYTHONPATH"]])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=path, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1"):
        outputs = [Path(folder) / f"output-{group}-{rank}" for rank in range(world)]
        ranks = [context.Process(target=main, args=(module, what, rank, world, Path(folder), f"group-{group}", outputs[rank])) for rank in range(world)]
        for rank in ranks:
            rank.start()
    end = time.monotonic() + 300
    for rank in ranks:
        rank.join(max(0, end - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    for number, (rank, output) in enumerate(zip(ranks, outputs)):
        assert rank.exitcode == 0, f"rank {number} of {world}, {what}:\n{output.read_text()}"


def main(module, what, rank, world, folder, group, output):
    """A process of launch(): the function, and an end without the threads of torch, which can abort the process."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["CKD_TEST_GROUP"] = str(folder / group)
    try:
        getattr(importlib.import_module(module), what)(rank, world, folder)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.up, self.down = torch.nn.Linear(32, 67), torch.nn.Linear(67, 32)
        self.one = torch.nn.Linear(32, 1)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, x):
        y = self.embed(x)
        y = y + self.down(torch.tanh(self.up(y)))
        return self.head(y) * self.one(y)


def make(seed, mesh):
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, seed):
    torch.manual_seed(seed)
    for _ in range(3):
        model(torch.randint(0, 64, (4, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def extras(seed, mesh):
    """Everything that is no module: plain tensors, pieces of all kinds, values."""
    torch.manual_seed(seed)
    full = {"rows": torch.randn(5, 3), "row": torch.randn(1, 3), "columns": torch.randn(4, 6), "pairs": torch.randn(8, 2, dtype=torch.complex64),
            "half": torch.randn(8, 8).to(torch.bfloat16), "whole": torch.randn(7)}
    if mesh is not None:
        places = {"rows": Shard(0), "row": Shard(0), "columns": Shard(1), "pairs": Shard(0), "half": Shard(0), "whole": Replicate()}
        full = {k: distribute_tensor(t, mesh, [places[k]]) for k, t in full.items()}
    return {**full, "plain": torch.randn(30, 30), "turned": torch.randn(3, 4).t(), "none": torch.empty(0, 3), "scalar": torch.tensor(2.5 + seed),
            "bytes": io.BytesIO(b"x" * 3 + bytes([seed])), "seen": {1, seed}, "nested": [1, {"name": "a" * seed, "pair": (1.5, None)}],
            "numpy": np.arange(seed), "mixed": (torch.ones(seed), "b"), "torch_rng": torch.get_rng_state()}


def state_of(model, optimizer, seed, mesh):
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optim": states, "extra": extras(seed, mesh)}


def whole(value):
    """A state with full tensors, as a list of (path, comparable value)."""
    if isinstance(value, DTensor):
        return whole(value.full_tensor())
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, io.BytesIO):
        return ("bytes", value.getvalue(), value.tell())
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return [type(value).__name__, *map(whole, value)] if isinstance(value, (list, tuple)) else value


def open_world(rank, world):
    dist.init_process_group("gloo", init_method=f"file://{os.environ['CKD_TEST_GROUP']}", rank=rank, world_size=world)
    return init_device_mesh("cpu", (world,))


# ------------------------------------------------------------------------------------------------------- the processes


def save(rank, world, folder):
    """Two checkpoints of a training run, and what is in each as a file of pickle."""
    from ckptdelta.dcp import StorageWriter
    mesh = open_world(rank, world)
    model, optimizer = make(SEED, mesh)
    writer = StorageWriter(folder / f"store{world}")
    for step in (1, 2):
        train(model, optimizer, step)
        state = state_of(model, optimizer, SEED + step, mesh)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"gpt@{step}")
        assert (writer.checkpoint is not None) == (rank == 0)
        found = whole(state)
        if rank == 0:
            torch.save(found, folder / f"full{world}-{step}.pt")
    writer.close()


def check_load(world, folder, mesh, saved_by):
    from ckptdelta.dcp import StorageReader
    for step in (1, 2):
        model, optimizer = make(SEED + 100, mesh)
        train(model, optimizer, 50)
        state = state_of(model, optimizer, SEED + 200, mesh)
        state["extra"] |= {"mixed": None, "numpy": None, "nested": [0, {"name": 0, "pair": 0}]}
        reader = StorageReader(folder / f"store{saved_by}", "gpt")
        dcp.load(state, storage_reader=reader, checkpoint_id=str(step), no_dist=mesh is None)
        assert str(reader.checkpoint) == f"gpt@{step}" and reader.checkpoint.world == saved_by
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        again = state_of(model, optimizer, 1, mesh)
        got = whole({"model": again["model"], "optim": again["optim"], "extra": state["extra"]})
        expected = torch.load(folder / f"full{saved_by}-{step}.pt", weights_only=False)
        for part in expected:
            for name in expected[part]:
                assert got[part][name] == expected[part][name], (saved_by, world, step, part, name)


def load(rank, world, folder):
    """Loads what other numbers of ranks have saved."""
    mesh = open_world(rank, world)
    for saved_by in (1, 2, 4):
        if (folder / f"store{saved_by}").exists():
            check_load(world, folder, mesh, saved_by)


class Failing(dcp.DefaultSavePlanner):
    """Fails on one rank while the ranks write."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def resolve_data(self, item):
        if dist.get_rank() == self.rank:
            raise OSError("the planner fails")
        return super().resolve_data(item)


def fails_with(text, **arguments):
    import ckptdelta
    try:
        dcp.save(**arguments)
    except (dcp.CheckpointException, ckptdelta.InvalidError) as error:
        assert text in str(error) + repr(getattr(error, "failures", "")), error
    else:
        raise AssertionError(f"no failure with {text!r}")


def trouble(rank, world, folder):
    """Saves that fail on all ranks and leave nothing, and other ways to save."""
    import ckptdelta
    from ckptdelta.dcp import StorageReader, StorageWriter
    mesh = open_world(rank, world)
    path = folder / "trouble"
    state = extras(3, mesh)
    writer = StorageWriter(path, "gpt")
    for failing in range(world):
        fails_with("the planner fails", state_dict=state, storage_writer=writer, checkpoint_id="1", planner=Failing(failing))
    with ckptdelta.open(path) as store:
        assert store.checkpoints() == []
    dcp.save(state, storage_writer=writer, checkpoint_id="1")
    fails_with("already has a checkpoint at step 1", state_dict=state, storage_writer=writer)
    fails_with("use_collectives=False is not supported", state_dict=state, storage_writer=writer, checkpoint_id="2", use_collectives=False)
    dist.barrier()
    # In a thread, with a planner that caches its plans: the second time no rank sends one.
    for step in (2, 3, 4):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.async_save(state, storage_writer=writer, checkpoint_id=f"gpt@{step}", planner=planner).result()
    # A writer that has not seen the plans cannot know them.
    fails_with("the planner caches plans", state_dict=state, storage_writer=StorageWriter(path), checkpoint_id="gpt@5",
               planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    # All replicated items on one rank.
    dcp.save(state, storage_writer=writer, checkpoint_id="5", planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    writer.close()
    fails_with("only a single process", state_dict=state, storage_writer=StorageWriter(path, "gpt", on_duplicate="same"), checkpoint_id="3")
    # A branch, with the metric and the parent of rank 0.
    branch = StorageWriter(path, on_duplicate="branch", metric=("loss", 1.0 + rank), parent=("gpt", 2 if rank == 0 else 1))
    dcp.save(state, storage_writer=branch, checkpoint_id="gpt@3")
    branch.close()
    dist.barrier()
    with ckptdelta.open(path) as store:
        found = store.find(run="gpt~2")
        assert (found.step, found.metric, found.world, found.parent) == (3, 1.0, world, store.find(run="gpt", step=2).id)
    back = extras(20, mesh)
    dcp.load(back, storage_reader=StorageReader(path), checkpoint_id="gpt~2@3")
    assert whole(back) == whole(state)
    for step in (1, 2, 3, 4, 5):
        back = extras(20, mesh)
        dcp.load(back, storage_reader=StorageReader(path), checkpoint_id=f"gpt@{step}")
        full = whole(back)
        assert full == whole(state), step
    with ckptdelta.open(path) as store:
        assert [c.step for c in store.checkpoints("gpt")] == [1, 2, 3, 4, 5]
        assert rank or store.verify()


def dropped(rank, world, folder):
    """A writer for each save, as many programs have them: nobody says that a writer has died, and no file is left."""
    import gc
    import logging
    import weakref

    import ckptdelta
    from ckptdelta.dcp import StorageWriter

    lines = []

    class Heard(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("ckptdelta").addHandler(Heard(logging.WARNING))
    mesh = open_world(rank, world)
    for step in range(1, 4):
        writer = StorageWriter(folder / "store", "gpt")
        dcp.save(extras(step, mesh), storage_writer=writer, checkpoint_id=str(step))
        gone = weakref.ref(writer)
        del writer
        gc.collect()
        assert gone() is None
        dist.barrier()
        with ckptdelta.open(folder / "store") as store:
            assert len(store.checkpoints("gpt")) == step
        dist.barrier()
    assert lines == [], lines
    assert not list((folder / "store/data/i").iterdir())


class Waiting(dcp.DefaultSavePlanner):
    """A planner whose save stops in the middle, and goes on when it is told to."""

    def __init__(self):
        super().__init__()
        self.entered, self.going_on = threading.Event(), threading.Event()

    def resolve_data(self, item):
        self.entered.set()
        assert self.going_on.wait(120)
        return super().resolve_data(item)


def overlapping(rank, world, folder):
    """All ranks begin a save while another one is under way, for which one rank still writes: the second fails, and the first does not."""
    import ckptdelta
    from ckptdelta.dcp import StorageWriter

    mesh = open_world(rank, world)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    writer, planner, written = StorageWriter(folder / "store", "gpt"), Waiting(), threading.Event()
    if rank == 0:
        planner.going_on.set()
        seal = writer.write_data
        writer.write_data = lambda *arguments: (seal(*arguments), written.set())[0]
    state = {name: value for name, value in extras(3, mesh).items() if name in ("rows", "plain")}
    first = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", planner=planner, process_group=groups[0])
    assert (planner.entered if rank else written).wait(120)
    dist.barrier()
    fails_with("under way", state_dict=state, storage_writer=writer, checkpoint_id="2", process_group=groups[1])
    planner.going_on.set()
    first.result()
    dcp.save(state, storage_writer=writer, checkpoint_id="3")
    writer.close()
    with ckptdelta.open(folder / "store") as store:
        assert [c.step for c in store.checkpoints("gpt")] == [1, 3] and (rank or store.verify())


class Dying(dcp.DefaultSavePlanner):
    """Rank 1 dies before it has written its part, or when it has."""

    def __init__(self, early):
        super().__init__()
        self.early = early

    def resolve_data(self, item):
        if self.early and dist.get_rank() == 1:
            os._exit(0)
        return super().resolve_data(item)


def death(rank, world, folder, early=True):
    """A rank dies during its save: the other one fails, and there is no checkpoint."""
    import ckptdelta
    from ckptdelta.dcp import StorageWriter

    class Writer(StorageWriter):
        def write_data(self, plan, planner):
            result = super().write_data(plan, planner)
            if rank == 1:
                os._exit(0)
            return result

    mesh = open_world(rank, world)
    try:
        dcp.save(extras(3, mesh), storage_writer=Writer(folder / "store", "gpt"), checkpoint_id="1", planner=Dying(early))
    except (RuntimeError, dcp.CheckpointException):
        pass
    else:
        raise AssertionError("the save did not fail")
    with ckptdelta.open(folder / "store") as store:
        assert store.checkpoints() == []
    os._exit(0)


def late_death(rank, world, folder):
    """The same when the rank's part is durable, but not committed."""
    death(rank, world, folder, early=False)
