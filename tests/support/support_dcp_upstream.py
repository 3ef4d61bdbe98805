"""Ranks for test_python_dcp_upstream.py.

Each function follows cases of PyTorch's own tests of torch.distributed.checkpoint, which its first lines name. Those run on
the writer of files; here the same is done with a store.
"""

import functools
import io
import itertools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckptdelta
from ckptdelta.dcp import StorageReader, StorageWriter
from support_dcp import launch, open_world, whole

launch = functools.partial(launch, script=__file__)


def save(state, folder, name, **options):
    """Saves the next step of a run."""
    with ckptdelta.open(folder / "store") as store:
        there = store.checkpoints(name)
    dist.barrier()  # before a rank commits the step that others still look for
    writer = StorageWriter(folder / "store", name)
    dcp.save(state, storage_writer=writer, checkpoint_id=str(len(there) + 1), **options)
    return writer


def load(state, folder, name, **options):
    dcp.load(state, storage_reader=StorageReader(folder / "store", name), **options)
    return state


# ----------------------------------------------------------------------------------------------------- ShardedTensor


def line(*ranks, dim=0):
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


def rows(*parts, rest=()):
    """Pieces along dimension 0: (rows, rank) of each."""
    starts = itertools.accumulate((count for count, _ in parts), initial=0)
    return EnumerableShardingSpec([ShardMetadata([start] + [0] * len(rest), [count, *rest], f"rank:{rank}/cpu")
                                   for start, (count, rank) in zip(starts, parts)])


def place_of(shard):
    return tuple(slice(start, start + size) for start, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes))


def sharded(spec, full):
    """A ShardedTensor with the values of a tensor; of zeros if it is a size."""
    size = full if isinstance(full, torch.Size) else full.shape
    made = sharded_tensor.zeros(spec, tuple(size), dtype=torch.float32)
    for shard in made.local_shards() if isinstance(full, torch.Tensor) else ():
        shard.tensor.copy_(full[place_of(shard)])
    return made


def has(tensor, full):
    """Are all pieces of this rank those of the whole?"""
    return all(torch.equal(shard.tensor, full[place_of(shard)]) for shard in tensor.local_shards())


class Holder(torch.nn.Module):
    """A module with a sharded tensor, a parameter that all ranks have, and another such module."""

    def __init__(self, spec, full, inner=True):
        super().__init__()
        self.sharded = sharded(spec, full)
        self.plain = torch.nn.Parameter(torch.full((2, 2), float(isinstance(full, torch.Tensor))))
        self.inner = Holder(spec, full, inner=False) if inner else None
        self._register_state_dict_hook(sharded_tensor.state_dict_hook)


def sharded_tensors(rank, world, folder):
    """test_file_system_checkpoint.py, test_file_system_checkpoint_cpu.py: test_read_write_shard_tensor,
    test_load_with_different_shard_plan, test_load_rowwise_to_colwise, test_save_load_bytes.
    """
    open_world(rank, world)
    full = torch.rand(10, 20, generator=torch.Generator().manual_seed(1))

    state = Holder(line(0, 1), full).state_dict()
    assert {"sharded", "inner.sharded"} <= set(state), set(state)
    save(state, folder, "modules")
    back = load(Holder(line(0, 1), full.shape).state_dict(), folder, "modules")
    assert has(back["sharded"], full) and has(back["inner.sharded"], full)
    assert back["plain"].tolist() == back["inner.plain"].tolist() == [[1.0, 1.0], [1.0, 1.0]]

    plans = [line(0, 1), line(0, 1, 1, 0), rows((2, 0), (1, 1), (3, 0), (3, 1), (1, 0), rest=(20,)), rows((8, 1), (2, 0), rest=(20,)), line(0, 1, dim=1)]
    for number, spec in enumerate(plans):
        values = full + number
        save({"t": sharded(spec, values)}, folder, "plans")
        for other in plans:
            assert has(load({"t": sharded(other, full.shape)}, folder, "plans")["t"], values), (spec, other)

    save({"bytes0": [1], "bytes1": "string"}, folder, "bytes")
    assert load({"bytes0": [2], "bytes1": "other"}, folder, "bytes") == {"bytes0": [1], "bytes1": "string"}
    sharded_and_whole(folder)


def sharded_and_whole(folder):
    """test_file_system_checkpoint_cpu.py: test_switch_between_sharded_tensor_to_tensor."""
    plans = [line(0, 1), line(0, 1, 1, 0), rows((8, 1), (24, 0)), rows((10, 0), (22, 1))]
    for number, spec in enumerate(plans):
        whole_one, cut = torch.arange(32.0) + number, torch.arange(32.0) * (number + 1)
        save({"cut": sharded(spec, cut), "whole": whole_one}, folder, "switched")
        for other in plans:
            back = load({"cut": torch.zeros(32), "whole": sharded(other, whole_one.shape)}, folder, "switched")
            assert torch.equal(back["cut"], cut) and has(back["whole"], whole_one), (spec, other)


COUNTED = 120


def counted(rank, world, folder):
    """test_planner.py: test_load_with_resharding, test_load_with_world_size_diff_by_one, with several pieces on a rank and ranks without one.

    Four and two ranks save; three load what these have saved.
    """
    open_world(rank, world)
    full = torch.arange(float(COUNTED))
    even = rows(*((COUNTED // world, r) for r in range(world)))
    if world != 3:
        many = rows(*((COUNTED // world // 2, r) for r in range(world) for _ in range(2)))
        few = rows((COUNTED - 1, world - 1), (1, 0))
        save({"even": sharded(even, full), "many": sharded(many, full), "few": sharded(few, full)}, folder, f"of{world}")
        return
    for saved_by in (4, 2):
        plans = {"even": even, "many": line(*range(world)), "few": rows((1, 0), (COUNTED - 1, world - 1))}
        back = load({name: sharded(spec, full.shape) for name, spec in plans.items()}, folder, f"of{saved_by}")
        assert all(has(t, full) for t in back.values())
        assert torch.equal(load({"many": torch.zeros(COUNTED)}, folder, f"of{saved_by}")["many"], full)


# ----------------------------------------------------------------------------------------------------------- DTensor


def places(dims):
    return list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=dims))


def dtensors(rank, world, folder):
    """test_dtensor_resharding.py: changes of placements and meshes, of one and two dimensions; here with sizes that no mesh divides, too."""
    meshes = [open_world(rank, world), init_device_mesh("cpu", (2, world // 2))]
    fulls = {"even": torch.arange(16.0).view(4, 4), "odd": torch.arange(15.0).view(3, 5), "row": torch.arange(7.0).view(1, 7)}
    for mesh in meshes:
        for put in places(mesh.ndim):
            save({name: distribute_tensor(t, mesh, put) for name, t in fulls.items()}, folder, "gpt")
            for other, to in ((other, to) for other in meshes for to in places(other.ndim)):
                back = load({name: zeros(t.shape, device_mesh=other, placements=to) for name, t in fulls.items()}, folder, "gpt")
                for name, t in back.items():
                    assert torch.equal(t.full_tensor(), fulls[name]), (mesh, put, other, to, name)
    extra_state(meshes[0], folder)


class Extra(torch.nn.Module):
    """With one parameter that is sharded, one that is not, and an extra state with a tensor."""

    def __init__(self, mesh, factor):
        super().__init__()
        self.cut = torch.nn.Parameter(distribute_tensor(torch.arange(4.0) * factor, mesh, [Shard(0)]))
        self.copied = torch.nn.Parameter(distribute_tensor(torch.arange(4.0, 8.0) * factor, mesh, [Replicate()]))
        self.extra = {"number": factor, "tensor": torch.full((1,), float(factor))}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def extra_state(mesh, folder):
    """test_dtensor_checkpoint.py: test_distributed_tensor_planner."""
    save(Extra(mesh, 1).state_dict(), folder, "extra")
    other = Extra(mesh, 10)
    other.load_state_dict(load(other.state_dict(), folder, "extra"))
    assert other.cut.full_tensor().tolist() == [0, 1, 2, 3] and other.copied.full_tensor().tolist() == [4, 5, 6, 7]
    assert other.extra["number"] == 1 and other.extra["tensor"].tolist() == [1.0]


class Net(torch.nn.Module):
    """Its sizes are divided by no mesh here, unless it is made for tensor parallelism."""

    def __init__(self, seed, even=False):
        super().__init__()
        torch.manual_seed(seed)
        width = 16 if even else 15
        self.first, self.second, self.third = torch.nn.Linear(8, width), torch.nn.Linear(width, 8), torch.nn.Linear(8, 5)

    def forward(self, x):
        return self.third(self.second(torch.relu(self.first(x))))


def parallel(how, seed, device="cpu"):
    """A model that is sharded ("fsdp"), sharded and copied ("hsdp"), cut by tensor parallelism ("tp"), that and sharded ("2d"), or not at all."""
    with torch.device(device):
        model = Net(seed, even=how in ("tp", "2d", "even"))
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "model"))
    if how in ("tp", "2d"):
        cut = init_device_mesh("cpu", (world,)) if how == "tp" else mesh["model"]
        parallelize_module(model, cut, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if how in ("fsdp", "hsdp", "2d"):
        fully_shard(model, mesh={"fsdp": init_device_mesh("cpu", (world,)), "hsdp": mesh, "2d": mesh["data"]}[how])
    return model


def models(rank, world, folder):
    """test_hsdp_checkpoint.py, test_tp_checkpoint.py, test_fsdp_tp_checkpoint_conversion.py, test_fsdp_model_state.py: each kind of model is
    restored after a step, and its checkpoint goes into each other kind. test_tp_checkpoint.py: a load to tensors on the meta device.
    """
    open_world(rank, world)
    for family in (("fsdp", "hsdp", "none"), ("tp", "2d", "even")):
        for how in family:
            model = parallel(how, seed=1)
            weights = get_model_state_dict(model)
            before = whole(weights)
            save({"model": weights}, folder, how)
            model(torch.ones(4, 8)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            assert whole(get_model_state_dict(model)) != before
            for kind in family:
                other = model if kind == how else parallel(kind, seed=2)
                state = load({"model": get_model_state_dict(other)}, folder, how)
                set_model_state_dict(other, state["model"])
                assert whole(get_model_state_dict(other)) == before, (how, kind)
    empty = parallel("tp", seed=3, device="meta")
    state = load({"model": dict(empty.state_dict())}, folder, "tp")
    empty.load_state_dict(state["model"], assign=True)
    assert isinstance(empty.first.weight, DTensor) and not empty.first.weight.is_meta
    assert torch.equal(empty.first.weight.full_tensor(), Net(1, even=True).first.weight)


# ---------------------------------------------------------------------------------------------------------- trainings


class Application:
    """A model and an optimizer as one object with a state."""

    def __init__(self, how, seed=1):
        if how == "ddp":
            self.model = DistributedDataParallel(Net(seed))
        else:
            self.model = parallel(how, seed) if how != "alone" else Net(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train(self, seed):
        loss = self.model(torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Progress:
    """Numbers as tensors without dimensions, and a BytesIO that torch.save() wrote."""

    def __init__(self, step=0, losses=()):
        self.step, self.losses = step, list(losses)

    def state_dict(self):
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "loss": torch.tensor(float(sum(self.losses))), "losses": losses}

    def load_state_dict(self, state):
        state["losses"].seek(0)
        self.step, self.losses = state["step"].item(), torch.load(state["losses"])
        assert state["loss"].item() == torch.tensor(float(sum(self.losses))).item()


def trainings(rank, world, folder):
    """e2e/test_e2e_save_and_load.py: test_e2e, test_e2e_async_cached (in a thread), test_partial_load.

    The thread has a group of its own: on the training's, its collectives would meet those of the training in any order.
    """
    open_world(rank, world)
    own = dist.new_group()
    for how, in_background in itertools.product(("fsdp", "hsdp", "ddp"), (False, True)):
        straight, first = Application(how), Application(how)
        losses = [straight.train(step) for step in range(4)]
        progress = Progress(2, [first.train(step) for step in range(2)])
        state = {"app": first, "progress": progress}
        name = f"{how}-{in_background}"
        if in_background:
            writer = StorageWriter(folder / "store", name)
            future = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", process_group=own)
            first.train(7)  # what is saved is what there was at the call
            progress.losses.append(0.0)
            future.result()
        else:
            save(state, folder, name)
        second, other = Application(how, seed=2), Progress()
        load({"app": second, "progress": other}, folder, name)
        assert (other.step, other.losses) == (2, losses[:2])
        assert [second.train(step) for step in range(2, 4)] == losses[2:]
        assert whole(second.state_dict()) == whole(straight.state_dict())
        part = Application(how, seed=3)
        weights = get_model_state_dict(part.model)
        load({"app": {"model": weights}}, folder, name)
        saved = Application(how)
        [saved.train(step) for step in range(2)]
        assert whole(weights) == whole(get_model_state_dict(saved.model))


def orders(rank, world, folder):
    """e2e/test_e2e_save_and_load.py: test_different_ordered_state_dict_keys. e2e/test_pipeline.py: ranks with other keys. test_optimizer.py: FSDP1."""
    open_world(rank, world)

    class Collective:
        """Its load would hang if ranks loaded objects in different orders."""

        def __init__(self, call):
            self.call = call

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.call(torch.ones(2))

    pair = [("a", Collective(lambda t: dist.all_gather([torch.ones(2) for _ in range(world)], t))), ("b", Collective(dist.all_reduce))]
    state = dict(pair if rank == 0 else reversed(pair))
    save(state, folder, "orders")
    load(state, folder, "orders")

    stage = {f"stage{rank}": {"weight": torch.full((3, rank + 1), float(rank)), "bias": torch.full((2,), rank + 0.5)}, "shared": torch.ones(2)}
    save(stage, folder, "stages")
    back = load({f"stage{rank}": {"weight": torch.zeros(3, rank + 1), "bias": torch.zeros(2)}, "shared": torch.zeros(2)}, folder, "stages")
    assert whole(back) == whole(stage)
    everything = load({f"stage{r}": {"weight": torch.zeros(3, r + 1)} for r in range(world)}, folder, "stages")
    assert all(bool((everything[f"stage{r}"]["weight"] == r).all()) for r in range(world))
    old_fsdp(rank, folder)


def old_fsdp(rank, folder):
    """test_fsdp_optim_state.py: test_load_sharded_optimizer_state_dict. FSDP1 gives its states as ShardedTensors."""
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

    def made(seed):
        model = FSDP(Net(seed), device_id=torch.device("cpu"))
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def pieces(state):
        """This rank's part of a state, comparable."""
        if hasattr(state, "local_shards"):
            return [(place_of(s), whole(s.tensor)) for s in state.local_shards()]
        return {k: pieces(v) for k, v in state.items()} if isinstance(state, dict) else whole(state)

    model, optimizer = made(1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, folder, "fsdp1")
    other, other_optimizer = made(2)
    state = load({"model": other.state_dict()}, folder, "fsdp1")
    other.load_state_dict(state["model"])
    found = load_sharded_optimizer_state_dict(model_state_dict=state["model"], optimizer_key="optim",
                                              storage_reader=StorageReader(folder / "store", "fsdp1"))
    other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, found["optim"]))
    assert pieces(other.state_dict()) == pieces(weights)
    again = FSDP.optim_state_dict(other, other_optimizer)
    assert pieces(again["state"]) == pieces(states["state"]) and again["state"]


# ----------------------------------------------------------------------------------------------------------- failures


class Fails:
    """Fails on one rank in one call, or in the future that the call returns."""

    def __init__(self, call, rank, *arguments, **options):
        super().__init__(*arguments, **options)
        self.call, self.rank = call, rank

    def fail(self, call):
        if self.call == call and dist.get_rank() == self.rank:
            raise ValueError(f"{call} fails")

    def result(self, call, future):
        if self.call == call + "_async" and dist.get_rank() == self.rank:
            future.wait()
            future = torch.futures.Future()
            future.set_exception(ValueError(f"{call} fails late"))
        return future


class FailingWriter(Fails, StorageWriter):
    def set_up_storage_writer(self, *arguments, **options):
        self.fail("set_up")
        super().set_up_storage_writer(*arguments, **options)

    def prepare_local_plan(self, plan):
        self.fail("local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans):
        self.fail("global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        self.fail("write")
        return self.result("write", super().write_data(plan, planner))

    def finish(self, metadata, results):
        self.fail("finish")
        super().finish(metadata, results)


class FailingReader(Fails, StorageReader):
    def read_metadata(self, *arguments, **options):
        self.fail("metadata")
        return super().read_metadata(*arguments, **options)

    def set_up_storage_reader(self, *arguments, **options):
        self.fail("set_up")
        super().set_up_storage_reader(*arguments, **options)

    def prepare_local_plan(self, plan):
        self.fail("local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans):
        self.fail("global_plan")
        return super().prepare_global_plan(plans)

    def read_data(self, plan, planner):
        self.fail("read")
        return self.result("read", super().read_data(plan, planner))


def check_failure(function, failing):
    try:
        function()
    except dcp.CheckpointException as error:
        assert list(error.failures) == [failing], error
        return error.failures[failing][0]
    raise AssertionError("no failure")


def mixed(factor=1.0):
    return {"cut": sharded(line(0, 1), torch.arange(400.0).view(20, 20) * factor), "whole": torch.full((10, 10), factor), "bytes": [1, 2, 3, 4]}


def failures(rank, world, folder):
    """test_checkpoint.py: test_save_error_handling, test_load_error_handling, with the first and with another rank as the coordinator."""
    open_world(rank, world)
    path = folder / "store"
    step = 0
    for coordinator in (0, 1):
        for call, failing in [("set_up", coordinator), ("local_plan", 0), ("local_plan", 1), ("global_plan", coordinator), ("write", 0), ("write", 1),
                              ("write_async", 0), ("write_async", 1), ("finish", coordinator)]:
            step += 1
            writer = FailingWriter(call, failing, path, "gpt", step=step)
            error = check_failure(lambda: dcp.save_state_dict(mixed(step), writer, coordinator_rank=coordinator), failing)
            assert isinstance(error, ValueError) and "fails" in str(error)
            with ckptdelta.open(path) as store:
                assert len(store.checkpoints()) == step - 1, call
            writer.call = None
            dcp.save_state_dict(mixed(step), writer, coordinator_rank=coordinator)
            assert (writer.checkpoint is not None) == (rank == coordinator)
            writer.close()
            dist.barrier()
            back = mixed(0.0)
            dcp.load_state_dict(back, StorageReader(path, "gpt"), coordinator_rank=1 - coordinator)
            assert has(back["cut"], torch.arange(400.0).view(20, 20) * step) and bool((back["whole"] == step).all())
            dist.barrier()
    for coordinator in (0, 1):
        for call, failing in [("metadata", coordinator), ("set_up", coordinator), ("local_plan", 0), ("local_plan", 1), ("global_plan", coordinator),
                              ("read", 0), ("read", 1), ("read_async", 0), ("read_async", 1)]:
            reader = FailingReader(call, failing, path, "gpt")
            error = check_failure(lambda: dcp.load_state_dict(mixed(), reader, coordinator_rank=coordinator), failing)
            assert call == "metadata" or (isinstance(error, ValueError) and "fails" in str(error))  # of metadata, DCP has an error of its own
            reader.call = None
            back = mixed(0.0)
            dcp.load_state_dict(back, reader, coordinator_rank=coordinator)
            assert bool((back["whole"] == step).all())
    groups(rank, folder)
    dist.barrier()
    if rank == 0:
        with ckptdelta.open(path) as store:
            assert store.verify()
        assert not [p for p in path.rglob("*") if "tmp" in p.name]


def groups(rank, folder):
    """Some of the ranks save by themselves: each alone, without the others, and a group of one."""
    path = folder / "store"
    dcp.save({"w": torch.full((3,), float(rank))}, storage_writer=StorageWriter(path, f"alone{rank}", step=1), no_dist=True)
    group = dist.new_group([1])
    if rank == 1:
        dcp.save({"w": torch.full((3,), 5.0)}, storage_writer=StorageWriter(path, "group", step=1), process_group=group)
    dist.barrier()
    with ckptdelta.open(path) as store:
        assert [store.find(run=run).world for run in ("alone0", "alone1", "group")] == [1, 1, 1]
    assert load({"w": torch.zeros(3)}, folder, "group")["w"].tolist() == [5.0] * 3
    assert load({"w": torch.zeros(3)}, folder, f"alone{rank}", no_dist=True)["w"].tolist() == [float(rank)] * 3


class FailsOnce(StorageWriter):
    """In the process that saves, it fails at its first save."""

    def write_data(self, plan, planner):
        if self.step == 1 and dist.get_rank() == 1:
            raise RuntimeError("the first one fails")
        return super().write_data(plan, planner)


def other_process(rank, world, folder):
    """e2e/test_e2e_save_and_load.py: test_e2e_async_cached (in a process). test_async_process_executor.py: saves go on after one that failed."""
    open_world(rank, world)
    kind = state_dict_saver.AsyncCheckpointerType.PROCESS
    app = Application("fsdp")
    app.train(0)
    writer = FailsOnce(folder / "store", "gpt")
    failed = dcp.async_save({"app": app}, storage_writer=writer, checkpoint_id="1", async_checkpointer_type=kind)
    assert "the first one fails" in str(failed.exception())
    for step in (2, 3):
        expected = whole(app.state_dict())
        future = dcp.async_save({"app": app}, storage_writer=writer, checkpoint_id=str(step), async_checkpointer_type=kind)
        app.train(step)
        future.result()
        dist.barrier()
        back = Application("fsdp", seed=2)
        load({"app": back}, folder, "gpt")
        assert whole(back.state_dict()) == expected
    with ckptdelta.open(folder / "store", readonly=True) as store:
        assert [(c.step, c.kind, c.world) for c in store.checkpoints()] == [(2, "base", world), (3, "delta", world)]
