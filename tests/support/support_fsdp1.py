"""Processes of a gloo group that share a Session of models in FullyShardedDataParallel (FSDP1)."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import ckptdelta
from support_dcp import launch, open_world, whole
from support_ranked import Loader, Net, fails

STEPS = 5
launch = functools.partial(launch, script=__file__)


class Training:
    """Two wrapped modules in a wrapped model with tied weights. With names, the optimizer has a group of all that is no matrix.

    Args:
        how: a strategy of FSDP1, "fsdp2" or "none".
        names: use_orig_params.
    """

    def __init__(self, how, rank, mesh, *, names=True, seed=1):
        torch.manual_seed(seed)
        self.model = Net()
        parameters = [{"params": [p for p in self.model.parameters() if p.dim() > 1]},
                      {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        if how in ShardingStrategy.__members__:
            options = {"use_orig_params": names, "device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy[how], "device_mesh": mesh}
            self.model.up = FullyShardedDataParallel(self.model.up, **options)
            self.model.down = FullyShardedDataParallel(self.model.down, **options)
            self.model = FullyShardedDataParallel(self.model, **options)
            parameters = parameters if names else self.model.parameters()
        elif how == "fsdp2":
            fully_shard(self.model, mesh=mesh)
            parameters = self.model.parameters()
        torch.manual_seed(100 * seed + rank)
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.loader = Loader(rank)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def step(self):
        loss = self.model(self.loader.batch()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def content(self):
        """Weights and moments by name, whole, on all ranks. torch itself gathers them."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return whole({"model": {k: v for k, v in model.items() if "norm.running" not in k}, "state": optimizer["state"]})


def resume(rank, world, folder, how, names):
    """An uninterrupted run, the same run up to its middle, and a third one that goes on from there."""
    run = f"{how}-{names}"
    straight, first = Training(how, rank, None, names=names), Training(how, rank, None, names=names)
    kept, expected = [None], []  # torch gathers no states before the first step without making one
    for _ in range(STEPS):
        expected.append(straight.step())
        kept.append(straight.content())
    torch.manual_seed(100 + rank)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, run, **first.parts(), every=1) as session:
        assert session.restore() == 0
        for step in range(3):
            assert first.step() == expected[step]
            session.step()
        copies = session._registered._buffers
        assert not any(len(copy) for name, copy in copies.items() if name.startswith(("model.", "optimizer."))), list(copies)
        session.restore(2)  # in place, in the middle of a training
        assert first.content() == kept[2]
    second = Training(how, rank, None, names=names, seed=2)
    with ckptdelta.open(folder / "store") as store, ckptdelta.Session(store, run, **second.parts(), every=2) as session:
        memory = [p.data_ptr() for p in second.model.parameters()]
        assert session.restore() == 3 and second.loader.from_rank == rank
        assert second.content() == kept[3] and [p.data_ptr() for p in second.model.parameters()] == memory
        for step in range(3, STEPS):
            assert second.step() == expected[step], (run, step)
            session.step()
        session.save()
        session.wait()
    assert second.content() == kept[STEPS]
    dist.barrier()
    with ckptdelta.open(folder / "store") as store:
        tensors = {t.name: t for t in store.tensors(run=run, step=STEPS)}
        assert tensors["model.up.weight"].shape == (67, 32) and tensors["optimizer.state.model.up.bias.exp_avg"].role == "exp_avg"
        assert not [name for name in tensors if "wrapped" in name or "flat" in name] and "model.head.weight" not in tensors
        assert "step" in {t.method for t in store.tensors(run=run, step=3)}  # one step after the other is predicted
        alone = Training("none", 0, None, seed=3)
        store.load({"model": alone.model}, run=run)
        assert whole({k: v for k, v in alone.model.state_dict().items() if "norm.running" not in k}) == kept[STEPS]["model"]
        if rank == 0:
            assert store.verify()
            torch.save(kept[STEPS], folder / f"{run}.pt")
    dist.barrier()


def resumes(rank, world, folder):
    open_world(rank, world)
    for how, names in (("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", True)):
        resume(rank, world, folder, how, names)


def elsewhere(rank, world, folder):
    """Another number of ranks goes on from these checkpoints, whatever wrote them, and FSDP2 does."""
    mesh = open_world(rank, world)
    with ckptdelta.open(folder / "store") as store:
        for run in (f"FULL_SHARD-{True}", f"FULL_SHARD-{False}"):
            content = torch.load(folder / f"{run}.pt", weights_only=False)
            for how, names in (("FULL_SHARD", run.endswith("True")), *([] if run.endswith("True") else [("fsdp2", False), ("SHARD_GRAD_OP", False)])):
                training = Training(how, rank, mesh if how == "fsdp2" else None, names=names, seed=4)
                with ckptdelta.Session(store, run, **training.parts(), every=1, on_duplicate="branch") as session:
                    assert session.restore(STEPS) == STEPS
                    assert training.content() == content, (run, how)
                    training.step()
                    session.step()
                    session.wait()
                    assert session.last.world == world and session.last.kind == "delta"
        assert rank or store.verify()


def hybrid(rank, world, folder):
    """Two replicas of two shards each. Each part is saved once."""
    open_world(rank, world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with ckptdelta.open(folder / "store") as store:
        for names in (True, False):
            straight, other = Training("HYBRID_SHARD", rank, mesh, names=names), Training("HYBRID_SHARD", rank, mesh, names=names, seed=2)
            torch.manual_seed(100 + rank)
            with ckptdelta.Session(store, f"hybrid-{names}", **straight.parts(), every=1) as session:
                for _ in range(2):
                    straight.step()
                    session.step()
                session.wait()
                content, expected = straight.content(), straight.step()
            with ckptdelta.Session(store, f"hybrid-{names}", **other.parts(), every=1) as session:
                assert session.restore() == 2 and other.content() == content and other.step() == expected
            tensors = {t.name: t.raw_bytes for t in store.tensors(run=f"hybrid-{names}")}
            assert tensors["model.up.weight"] == tensors["optimizer.state.model.up.weight.exp_avg"] == 67 * 32 * 4
        assert rank or store.verify()


def lossy(rank, world, folder):
    """Ranks restore what a process without a group loads. Moments are lossy, too."""
    open_world(rank, world)
    with ckptdelta.open(folder / "store") as store:
        for names in (True, False):
            run = f"near-{names}"
            training, other = Training("FULL_SHARD", rank, None, names=names), Training("SHARD_GRAD_OP", rank, None, names=names, seed=2)
            with ckptdelta.Session(store, run, **training.parts(), every=2, fidelity="near") as session:
                for _ in range(4):
                    training.step()
                    session.step()
            with ckptdelta.Session(store, run, **other.parts(), every=2, fidelity="near") as session:
                assert session.restore() == 4
            found, alone = other.content(), Training("none", 0, None, seed=3)
            store.load({"model": alone.model, "optimizer": alone.optimizer} if names else {"model": alone.model}, run=run)
            expected = alone.content()
            assert found["model"] == expected["model"] and found != training.content()
            assert not names or found == expected
            lost = {t.name for t in store.tensors(run=run) if t.rel_l2}
            assert {"model.embed.weight", "optimizer.state.model.up.weight.exp_avg"} < lost
            assert rank or store.verify()


def refused(rank, world, folder):
    """Parts without the wrapper that knows where they belong, and a save by one process of several."""
    open_world(rank, world)
    with ckptdelta.open(folder / "store") as store:
        for names in (True, False):
            training = Training("FULL_SHARD", rank, None, names=names)
            training.step()
            inner = {"model": training.model.module}, {"optimizer": training.optimizer}, {"model": torch.nn.Linear(2, 2), "optimizer": training.optimizer}
            for what in inner:
                with ckptdelta.Session(store, "fsdp1", **what, every=1) as session:
                    fails(ckptdelta.InvalidError, "pass the wrapped model, together with its optimizer", session.step)
            fails(ckptdelta.InvalidError, "save it with ckptdelta.Session", lambda: store.save({"model": training.model}, run="fsdp1", step=1))
        model = torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with ckptdelta.Session(store, "fsdp1", model=model, every=1) as session:
            fails(ckptdelta.InvalidError, "not contiguous", session.step)
        assert not store.runs()
