"""Processes of a gloo group that share a Session."""

import contextlib
import functools
import json
import os
import random
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckptdelta
from support_dcp import launch, open_world, whole

STEPS = 9
launch = functools.partial(launch, script=__file__)


class Net(torch.nn.Module):
    """With dropout, tied weights, buffers that each rank changes by itself, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.up, self.down = torch.nn.Linear(32, 67), torch.nn.Linear(67, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.one = torch.nn.Linear(32, 1)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.embed(x)
        y = y + self.down(torch.nn.functional.dropout(torch.tanh(self.up(y)), 0.2))
        y = self.norm(y.flatten(0, 1))
        return self.head(y) * self.one(y)


class Loader:
    """Batches of one rank, with a position."""

    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def batch(self):
        self.at += 1
        return torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1000 * self.rank + self.at))

    def state_dict(self):
        return {"rank": self.rank, "at": self.at, "seen": torch.full((5,), self.at + 100 * self.rank)}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.from_rank = state["rank"]
        assert state["seen"].tolist() == [self.at + 100 * state["rank"]] * 5


class Training:
    def __init__(self, how, rank, mesh, seed=1):
        torch.manual_seed(seed)
        self.model = Net()
        if how == "fsdp":
            fully_shard(self.model, mesh=mesh)
        elif how == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif how == "fsdp1":
            self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"))
        torch.manual_seed(100 * seed + rank)  # other masks of dropout on each rank
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.loader = Loader(rank)
        self.progress = {"loss": 0.0}

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader,
                "more": {"progress": self.progress}}

    def step(self):
        loss = self.model(self.loader.batch()).square().mean() + torch.rand(())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["loss"] = loss.item()
        return loss.item()

    def content(self):
        """All that is the same on all ranks, and full."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return whole({"model": {k: v for k, v in model.items() if "norm.running" not in k}, "optimizer": optimizer,
                      "scheduler": self.scheduler.state_dict()})


def resume(rank, world, folder, how, every, mesh):
    """An uninterrupted run, the same run up to its middle, and a third one that goes on from there."""
    straight = Training(how, rank, mesh)
    expected = [straight.step() for _ in range(STEPS)]
    first = Training(how, rank, mesh)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, "gpt", **first.parts(), every=every) as session:
        assert session.restore() == 0
        for step in range(1, 6):
            assert first.step() == expected[step - 1]
            assert session.step() == (step % every == 0)
    random.seed(rank + 50)
    second = Training(how, rank, mesh, seed=2)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, "gpt", **second.parts(), every=every) as session:
        at = session.restore()
        assert at == 5 // every * every and second.loader.from_rank == rank
        for step in range(at + 1, STEPS + 1):
            assert second.step() == expected[step - 1], (step, rank)
            session.step()
        session.save()
        session.wait()
        assert session.last.step == STEPS and session.last.world == world
    assert second.content() == straight.content()
    dist.barrier()
    with ckptdelta.open(folder / "store") as store:
        tensors = {t.name: t for t in store.tensors(run="gpt", step=STEPS)}
        assert tensors["model.up.weight"].shape == (67, 32) and tensors["optimizer.state.model.up.weight.exp_avg"].role == "exp_avg"
        assert ("ranks/1/loader.seen" in tensors) and ("step" in {t.method for t in tensors.values()}) == (every == 1)
        assert len([name for name in tensors if name.endswith("up.weight")]) == 1
        assert rank or store.verify()


def resumes(rank, world, folder):
    """One start of the processes for all: it takes longer than the rest."""
    mesh = open_world(rank, world)
    for how in ("ddp", "fsdp"):
        for every in (2, 1):
            resume(rank, world, folder / f"{how}{every}", how, every, mesh)


def full_tensors(training):
    """Weights, and moments by slot, as whole tensors by the names that the store gives them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found = {f"model.{name}": t for name, t in model.items()}
    found |= {f"optimizer.state.model.{name}.{slot}": t for name, slots in optimizer["state"].items() for slot, t in slots.items() if t.dim()}
    return {name: t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone() for name, t in found.items()}


def norm(t):
    return t.double().norm().item()


def check_lossy(store, run, kept, given):
    """What a load gives against what was saved: the errors are those that the store tells, those of a save by one process, and what `near` promises.

    Args:
        kept: the values at each step, as saved. One process has saved the same to RUN-alone.
        given: the values at the last step, as loaded.
    """
    *_, before, last = kept
    exact, moved, lossy = kept[last], {name: norm(t - kept[before][name]) for name, t in kept[last].items()}, 0
    alone = {t.name: t for t in store.tensors(run=f"{run}-alone", step=last)}
    for t in store.tensors(run=run, step=last):
        if t.name not in given or t.role == "other":
            assert t.rel_l2 == 0 and (t.name not in given or "norm.running" in t.name or torch.equal(given[t.name], exact[t.name])), t
            continue
        error = norm(given[t.name] - exact[t.name])
        assert torch.isfinite(given[t.name]).all()
        assert abs(error / norm(exact[t.name]) - t.rel_l2) <= 0.02 * t.rel_l2 + 1e-9, (t, error)
        assert (given[t.name] - exact[t.name]).abs().max().item() <= 1.01 * t.max_error + 1e-12, t
        lossy += error > 0
        assert t.rel_l2 <= 1.5 * alone[t.name].rel_l2 + 1e-6, (t, alone[t.name])
        if t.role == "weight" and run == "near":
            assert error < moved[t.name], (t.name, error, moved[t.name])
        if t.role == "exp_avg_sq":
            first = t.name.replace("exp_avg_sq", "exp_avg")
            assert (given[t.name] >= 0).all()
            largest = [(tensors[first].abs() / (tensors[t.name].sqrt() + 1e-8)).max().item() for tensors in (given, exact)]
            assert largest[0] <= 2.01 * largest[1], (first, largest)
    assert lossy >= 9  # parts of fewer than 64 elements are exact


def check_roles(store, run, content):
    """Each parameter is a weight with both moments, and nothing else has their roles."""
    roles = {t.name: t.role for t in store.tensors(run=run, step=8)}
    parameters = content["optimizer"]["state"]
    wanted = {f"model.{name}": "weight" for name in parameters}
    wanted |= {f"optimizer.state.model.{name}.{slot}": slot for name in parameters for slot in ("exp_avg", "exp_avg_sq")}
    assert {name: role for name, role in roles.items() if role != "other"} == wanted, roles


def lossy_elsewhere(rank, world, folder):
    """Another number of ranks loads the values that the first load gave, bit for bit, and its next save is a delta on them."""
    mesh = open_world(rank, world)
    with ckptdelta.open(folder / "store") as store:
        for fidelity in ("near", "coarse"):
            training = Training("fsdp", rank, mesh, seed=7)
            with ckptdelta.Session(store, fidelity, **training.parts(), every=1, fidelity=fidelity) as session:
                assert session.restore(8) == 8
                content = training.content()
                assert content == torch.load(folder / f"{fidelity}.pt", weights_only=False)
                training.step()
                session.step()
            saved = store.find(run=f"{fidelity}~2", step=9)
            assert (saved.kind, saved.parent, saved.world, saved.lossy_resumes) == ("delta", store.find(run=fidelity, step=8).id, world, 1)
            dist.barrier()


def lossy(rank, world, folder):
    """Ranks that save near and coarse: each restores what a single process loads, and goes on from there."""
    mesh = open_world(rank, world)
    for fidelity in ("near", "coarse"):
        kept = {}
        training = Training("fsdp", rank, mesh)
        with ckptdelta.open(folder / "store") as store, \
                ckptdelta.Session(store, fidelity, **training.parts(), every=2, fidelity=fidelity) as session:
            for step in range(1, 9):
                training.step()
                session.step()
                if step % 2 == 0:
                    kept[step] = full_tensors(training)
        if rank == 0:
            with ckptdelta.open(folder / "store") as store:
                for step, tensors in kept.items():
                    store.save(tensors, run=f"{fidelity}-alone", step=step, fidelity=fidelity)
        expected = [training.step() for _ in range(4)]  # the other rank cannot be ahead of the saves above
        alone, other = Training("none", 0, None, seed=3), Training("fsdp", rank, mesh, seed=2)  # both set random states
        with ckptdelta.open(folder / "store") as store, \
                ckptdelta.Session(store, fidelity, **other.parts(), every=2, fidelity=fidelity) as session:
            assert session.restore() == 8 and store.find(run=fidelity).fidelity == fidelity
            restored, content = full_tensors(other), other.content()
            check_lossy(store, fidelity, kept, restored)
            store.load({"model": alone.model, "optimizer": alone.optimizer, "scheduler": alone.scheduler}, run=fidelity, step=8)
            assert alone.content() == content
            if rank == 0:
                torch.save(content, folder / f"{fidelity}.pt")
            check_roles(store, fidelity, content)
            assert other.scheduler.state_dict()["last_epoch"] == 8 and other.loader.at == 8
            losses = []
            for _ in range(4):
                losses.append(other.step())
                session.step()
            assert all(abs(a - b) < (0.15 if fidelity == "near" else 0.5) * abs(b) for a, b in zip(losses, expected)), (fidelity, losses, expected)
        with ckptdelta.open(folder / "store") as store:
            found = {c.step: c for c in store.checkpoints(fidelity)}
            assert list(found) == [2, 4, 6, 8, 10, 12] and found[12].lossy_resumes == 1 and found[12].world == world
            assert found[12].stored_bytes < found[12].raw_bytes / 3
            assert rank or store.verify()
        dist.barrier()


def load_export(training, path):
    """What DCP itself reads of an exported checkpoint, in the way of its documentation."""
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model, optimizer = get_state_dict(training.model, training.optimizer)
    state = {"model": model, "optimizer": optimizer}
    load(state, checkpoint_id=path)
    set_state_dict(training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def exported(rank, world, folder):
    """Other programs read what a session of ranks saved: as folders of DCP, on as many ranks, and in one process (the caller's part)."""
    mesh = open_world(rank, world)
    training = Training("fsdp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            for _ in range(3):
                training.step()
                session.step()
        content = training.content()
        if rank == 0:
            store.export_checkpoint(folder / "exported", run="gpt", step=3)
            torch.save(content, folder / "content.pt")
        dist.barrier()
    other = Training("fsdp", rank, mesh, seed=3)
    assert other.content() != content
    load_export(other, folder / "exported")
    assert {k: v for k, v in other.content().items() if k != "scheduler"} == {k: v for k, v in content.items() if k != "scheduler"}
    state = {"scheduler": other.scheduler.state_dict(), "progress": {"loss": 0.0}, "loader": {"at": 0}}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder / "exported")
    assert state["scheduler"] == training.scheduler.state_dict() and state["progress"]["loss"] and state["loader"]["at"] == 3


class Square(torch.nn.Module):
    """Sizes that two by two ranks divide: the layouts of tensor parallelism below need that."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 128)
        self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)
        self.head = torch.nn.Linear(128, 64)

    def forward(self, x):
        y = self.embed(x)
        return self.head(y + self.down(torch.tanh(self.up(y))))


class Meshed:
    """A training on a mesh of 2 x 2 ranks: replicas of shards ("hsdp"), or shards of parts ("tp")."""

    def __init__(self, how, mesh, seed):
        torch.manual_seed(seed)
        self.model = Square()
        if how == "tp":
            parallelize_module(self.model, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how:
            fully_shard(self.model, mesh=mesh["a"] if how == "tp" else mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.generator = torch.Generator().manual_seed(seed)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, step):
        batch = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def content(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return whole({"model": model, "optimizer": optimizer})


def meshes(rank, world, folder):
    """Each way goes on bit for bit, and its checkpoint is what any other way goes on from, a process without a group included."""
    open_world(rank, world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with ckptdelta.open(folder / "store") as store:
        for how in ("hsdp", "tp"):
            straight, first = Meshed(how, mesh, 1), Meshed(how, mesh, 1)
            expected = [straight.step(step) for step in range(6)]
            with ckptdelta.Session(store, how, **first.parts(), every=1) as session:
                for step in range(3):
                    assert first.step(step) == expected[step]
                    session.step()
            at_3 = first.content()
            torch.save(at_3, folder / f"{how}-{rank}.pt")
            second = Meshed(how, mesh, 2)
            with ckptdelta.Session(store, how, **second.parts(), every=1) as session:
                assert session.restore() == 3 and second.content() == at_3
                for step in range(3, 6):
                    assert second.step(step) == expected[step]
                    session.step()
            other = Meshed("tp" if how == "hsdp" else "hsdp", mesh, 3)
            with ckptdelta.Session(store, how, **other.parts(), every=100) as session:
                assert session.restore(3) == 3 and other.content() == at_3
        if rank == 0:
            sizes = {t.name: t.shape for t in store.tensors(run="tp")}
            assert sizes["model.up.weight"] == sizes["optimizer.state.model.up.weight.exp_avg"] == (256, 128)
            alone = Meshed(None, None, 4)
            elements = sum(p.numel() for p in alone.model.parameters())
            for how in ("hsdp", "tp"):  # replicas are saved once
                assert 12 * elements < store.find(run=how, step=6).raw_bytes < 16 * elements
            assert store.verify()
            store.load(alone.parts(), run="tp", step=3)
            assert alone.content() == at_3
            store.export_checkpoint(folder / "exported", run="tp", step=3)
        dist.barrier()
        for how in ("hsdp", "tp"):
            other = Meshed(how, mesh, 5)
            load_export(other, folder / "exported")
            assert other.content() == at_3
    dist.barrier()


def fewer_ranks(rank, world, folder):
    """Goes on from meshes() with another number of ranks: shards without replicas, and parts without shards."""
    line = open_world(rank, world)
    with ckptdelta.open(folder / "store") as store:
        for how, mesh in (("hsdp", line), ("tp", init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b")))):
            for run in ("hsdp", "tp"):
                other = Meshed(how, mesh, 6)
                with ckptdelta.Session(store, run, **other.parts(), every=100) as session:
                    assert session.restore(3) == 3 and other.content() == torch.load(folder / f"{run}-{rank}.pt", weights_only=False)
    dist.barrier()


def reshard(rank, world, folder):
    """Goes on from what another number of ranks has saved, and saves what the next number finds."""
    mesh = open_world(rank, world)
    training = Training("fsdp", rank, mesh, seed=world)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=2) as session:
        before = torch.get_rng_state()
        at = session.restore()
        if at:
            saved_by = store.find(run="gpt", step=at).world
            assert training.loader.from_rank == (rank if rank < saved_by else 0)
            assert torch.equal(before, torch.get_rng_state()) == (rank >= saved_by)
            content = training.content()
            assert rank or content == torch.load(folder / "content.pt", weights_only=False)
        for _ in range(at, at + 4):
            training.step()
            session.step()
    content = training.content()
    if rank == 0:
        torch.save(content, folder / "content.pt")
        (folder / "weights.json").write_text(json.dumps(sorted(content["model"])))


def fails(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return error
    raise AssertionError(f"no failure with {text!r}")


def broken():
    raise KeyError("no state")


def left(rank, world, folder):
    """A rank that raises leaves its session before another one lets the save go on."""
    mesh = open_world(rank, world)
    training, gone = Training("ddp", rank, mesh), folder / "gone"
    ckptdelta._session.LEAVE_S = 0.1
    with ckptdelta.open(folder / "store") as store:
        try:
            with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
                training.step()
                session.step()
                if rank:
                    raise KeyError("forward")
                end = time.monotonic() + 20
                while not gone.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                assert gone.exists(), "rank 1 is still in its session"
        except KeyError:
            gone.touch()
        torch.distributed.barrier()


def unclosed(rank, world, folder):
    """A rank raises, and nobody closes its session. The end of its process does, before another rank lets the save go on."""
    mesh = open_world(rank, world)
    training, gone = Training("ddp", rank, mesh), folder / "gone"
    ckptdelta._session_start.LEAVE_S = 0.1
    store = ckptdelta.open(folder / "store")
    session = ckptdelta.Session(store, "gpt", **training.parts(), every=1)
    training.step()
    session.step()
    if rank:
        weakref.finalize._exitfunc()  # what the module weakref has registered with atexit
        gone.touch()
        os._exit(0)
    end = time.monotonic() + 20
    while not gone.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert gone.exists(), "rank 1 does not end"
    with contextlib.suppress(ckptdelta.Error):  # rank 1 has had no time to complete the save
        session.close()
    os._exit(0)


def written(rank, world, folder):
    """On one rank, something writes to a parameter while it is copied: the save of that step fails on all."""
    mesh = open_world(rank, world)
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            for step in range(1, 4):
                training.step()
                session.step()
                if rank:
                    with torch.no_grad():
                        training.model.module.up.weight.add_(0)
                if step == 1:
                    fails(ckptdelta.StateError, "step 1 is given up", session.wait)
        dist.barrier()
        assert [c.step for c in store.checkpoints("gpt")] == [2, 3] and (rank or store.verify())


def trouble(rank, world, folder):
    """What goes wrong on one rank is an error on all, and the next save works."""
    mesh = open_world(rank, world)
    training = Training("fsdp", rank, mesh)
    session = functools.partial(ckptdelta.Session, run="gpt", **training.parts())
    with ckptdelta.open(folder / "store") as store:
        fails(ckptdelta.InvalidError, "every=N", lambda: session(store))
        fails(ckptdelta.InvalidError, "use every", lambda: session(store, every=2, overhead=0.1))
        fails(ckptdelta.InvalidError, "restore_older", lambda: session(store, every=2, restore_older=True))
        fails(ckptdelta.InvalidError, "Session", lambda: store.save({"model": training.model}, run="other", step=1))
        with session(store, every=1) as one:
            training.step()
            training.progress["what"] = print if rank == 1 else 1
            if rank == 1:
                fails(ckptdelta.InvalidError, "progress.what", one.step)
            else:
                fails(ckptdelta.StateError, "rank 1: ", one.step)
            training.progress["what"] = "x" * 100
            assert one.save()
            assert not one.save()
            states, parameter = training.optimizer.state, training.model.up.weight
            whole_state = states[parameter]["exp_avg"]
            states[parameter]["exp_avg"] = whole_state.to_local()
            training.scheduler.state_dict = broken if rank == 0 else training.scheduler.state_dict
            one._reported += 1
            fails((ckptdelta.Error, KeyError), "", one.save)
            training.scheduler.__dict__.pop("state_dict", None)
            fails(ckptdelta.InvalidError, "each rank has for itself", one.save)
            states[parameter]["exp_avg"] = whole_state
            one._reported -= 1
            # Of one rank the record grows, of another one a tensor moves.
            for step in range(2, 6):
                training.step()
                if rank == step % 2:
                    training.progress["what"] = "y" * 60000 * step
                else:
                    training.optimizer.state = type(training.optimizer.state)(
                        training.optimizer.state.default_factory,
                        {p: {k: v.clone() for k, v in s.items()} for p, s in training.optimizer.state.items()})
                assert one.step()
            assert one.at == 5
        assert [c.step for c in store.checkpoints("gpt")] == [1, 2, 3, 4, 5]
        content = training.content()
        other = Training("fsdp", rank, mesh, seed=5)
        with ckptdelta.Session(store, "gpt", **other.parts(), every=1) as one:
            fails(ckptdelta.NotFoundError, "9", lambda: one.restore(9))
            assert one.restore(5) == 5 and other.content() == content
            if rank == 1:
                other.parts()["more"]["progress"].clear()
            assert one.restore() == 5
            # From an older one the run goes on as a branch, on all ranks.
            assert one.restore(3) == 3
            other.step()
            one.step()
        assert store.find(run="gpt~2").step == 4
        with ckptdelta.Session(store, "gpt", **other.parts(), every=10) as one:
            fails(ckptdelta.ExistsError, "did not resume", one.step)
            assert one.restore() == 4 and not one.save()
        if rank == 1:
            other.model.extra = torch.nn.Parameter(torch.zeros(3))
        with ckptdelta.Session(store, "different", **other.parts(), every=1) as one:
            fails(ckptdelta.InvalidError, "model.extra", one.step)


def on_device(rank, world, folder):
    """A store that can be loaded into parts without a session."""
    mesh = open_world(rank, world)
    training = Training("fsdp", rank, mesh)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        training.step()
        session.step()
    content = training.content()
    other = Training("fsdp", rank, mesh, seed=3)
    with ckptdelta.open(folder / "store", readonly=True) as store:
        store.load({"model": other.model, "optimizer": other.optimizer, "scheduler": other.scheduler}, run="gpt")
    assert other.content() == content
    if rank == 0:
        torch.save(content, folder / "content.pt")


def emulated(rank, world, folder):
    """Replicated parameters in the memory of devices (support_device.py), one for each rank."""
    from support_device import Emulated

    device = Emulated()
    ckptdelta._device.device_of = device.device_of
    mesh = open_world(rank, world)

    def moved(seed):
        training = Training("ddp", rank, mesh, seed)
        training.step()
        device.move(training.model, training.optimizer)
        return training

    training, other = moved(1), moved(2)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1, device_bytes=0) as session:
            training.optimizer.register_step_pre_hook(lambda *_: device.settle())
            for step in range(3):
                device.settle()
                training.step()
                session.step()
            assert session._registered.devices == {(0, 0)}
            content = training.content()
        with ckptdelta.Session(store, "gpt", **other.parts(), every=100) as session:
            assert session.restore() == 3
            device.settle()
        assert other.content() == content != moved(2).content()
        assert rank or store.verify()


def death(rank, world, folder):
    """A rank dies between two saves: what is durable stays, and the others do not hang."""
    mesh = open_world(rank, world)
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            for _ in range(3):
                training.step()
                session.step()
            session.wait()
            dist.barrier()
            if rank == 1:
                os._exit(0)
            try:
                training.step()
                session.step()
            except Exception:  # of gloo, whose peer is gone
                pass
            else:
                raise AssertionError("nobody has noticed")
            raise SystemExit  # as a trainer ends that lost its peer
    raise AssertionError("not reached")


def death_of_one(rank, world, folder):
    try:
        death(rank, world, folder)
    except SystemExit:
        os._exit(0)


def exception_on_rank_0(rank, world, folder):
    """Rank 0 leaves by an exception while the others wait for it in training: it does not wait for them in turn."""
    mesh = open_world(rank, world)
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        try:
            with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
                for _ in range(2):
                    training.step()
                    session.step()
                if rank == 0:
                    raise KeyError("a bug of the trainer")
                training.step()
        except KeyError:
            assert rank == 0
            os._exit(0)
        except Exception:
            assert rank
            os._exit(0)
    raise AssertionError("not reached")
