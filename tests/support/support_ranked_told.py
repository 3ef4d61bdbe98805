"""Processes of a gloo group that share a Session: what is told, what is refused, where a run begins."""

import functools
import logging

import torch
import torch.distributed as dist

import ckptdelta
from support_dcp import launch, open_world
from support_ranked import Training, fails

launch = functools.partial(launch, script=__file__)


class Heard(logging.Handler):
    """The levels and texts that the package logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("ckptdelta").addHandler(self)
        logging.getLogger("ckptdelta").setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def take(self, phrase):
        """How many lines had the phrase since the last call."""
        found, self.lines = [line for line in self.lines if phrase in line], []
        return len(found)


def notices(rank, world, folder):
    """What all ranks would say alike, rank 0 says."""
    mesh, heard = open_world(rank, world), Heard()
    training = Training("fsdp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            training.step()
            session.step()
            session.wait()
            assert heard.take("saved gpt@1") == (rank == 0)
        with ckptdelta.Session(store, "alone", optimizer=training.optimizer, every=1, fidelity="near") as session:
            training.step()
            session.step()
            session.wait()
            assert {t.rel_l2 for t in store.tensors(run="alone")} == {0.0}
        assert heard.take("and 5 more: kept exact, as it is not known which parameter they belong to") == (rank == 0)
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            assert session.restore() == 1
            dist.barrier()
            if rank == 0:
                for path in (folder / "store/data/c").iterdir():
                    path.rename(folder / path.name)
            dist.barrier()
            training.step()
            session.step()
            session.wait()
            assert heard.take("saving a base instead of a delta on it") == (rank == 0)
            dist.barrier()
            if rank == 0:
                for path in folder.glob("*.ckd"):
                    path.rename(folder / "store/data/c" / path.name)


def unpaired(rank, world, folder):
    """Moments whose weight is not in the state stay exact, and rank 0 says so; those that have one are lossy."""
    mesh, heard = open_world(rank, world), Heard()
    training = Training("fsdp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", model={"up": training.model.up}, optimizer=training.optimizer, every=1, fidelity="near") as session:
            training.step()
            session.step()
        errors = {t.name: t.rel_l2 for t in store.tensors(run="gpt")}
        assert {name for name, error in errors.items() if error} == {"model.up.weight", *(
            f"optimizer.state.model.up.weight.{slot}" for slot in ("exp_avg", "exp_avg_sq"))}, errors
        assert heard.take("kept exact, as it is not known which parameter they belong to") == (rank == 0)


def parts_that_look_whole(rank, world, folder):
    """Models that are not the same on all ranks are saved, and rank 0 warns."""
    mesh, heard = open_world(rank, world), Heard()
    with ckptdelta.open(folder / "store") as store:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
        training = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        for differs in (False, True):
            if differs and rank == 1:
                with torch.no_grad():
                    model[1].weight.add_(1)
            with ckptdelta.Session(store, f"same{differs}", **training, every=1) as session:
                model(torch.ones(2, 8)).sum().backward()
                training["optimizer"].step()
                session.step()
                session.step()
            assert heard.take("tensors are not the same on rank 0 and rank 1") == (differs and rank == 0)
        ddp = Training("ddp", rank, mesh)
        with ckptdelta.Session(store, "ddp", **ddp.parts(), every=1) as session:
            ddp.step()
            session.step()
        assert heard.take("not the same") == 0


def branches(rank, world, folder):
    """A run whose first save is a delta on another run's checkpoint, and a parent that is not there."""
    mesh = open_world(rank, world)
    training = Training("fsdp", rank, mesh)
    with ckptdelta.open(folder / "store") as store:
        with ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
            training.step()
            session.step()
        with ckptdelta.Session(store, "tuned", **training.parts(), every=1, parent=("gpt", 1)) as session:
            assert session.restore() == 0
            for _ in range(2):
                training.step()
                session.step()
        content = training.content()
        first, second = store.checkpoints("tuned")
        assert (first.kind, first.parent, second.parent) == ("delta", store.find(run="gpt").id, first.id)
        fails(ckptdelta.NotFoundError, "gpt", lambda: ckptdelta.Session(store, "other", **training.parts(), every=1, parent=("gpt", 2)))
        other = Training("fsdp", rank, mesh, seed=2)
        with ckptdelta.Session(store, "tuned", **other.parts(), every=1, parent=("gpt", 1)) as session:
            assert session.restore() == 2 and other.content() == content
        assert rank or store.verify()
