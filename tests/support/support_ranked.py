"""Processes of a gloo group that share a Session: support_ranked.py WHAT RANK WORLD FOLDER"""

import functools
import json
import os
import random

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptdelta
from support_dcp import launch, main, open_world, whole

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
        assert ("ranks/1/loader.seen" in tensors) and ("step" in {t.coding for t in tensors.values()}) == (every == 1)
        assert len([name for name in tensors if name.endswith("up.weight")]) == 1
        assert rank or store.verify()


def resumes(rank, world, folder):
    """One start of the processes for all: it takes longer than the rest."""
    mesh = open_world(rank, world)
    for how in ("ddp", "fsdp"):
        for every in (2, 1):
            resume(rank, world, folder / f"{how}{every}", how, every, mesh)


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


if __name__ == "__main__":
    main(globals())
