"""torch.distributed.checkpoint on a store. Skipped where torch is not installed, or was built without distributed."""

import copy
import io
import json
import pickle
import threading
import warnings

import numpy as np
import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import torch.distributed.checkpoint as dcp
    from ckptdelta import _dcp_write
    from ckptdelta.dcp import StorageReader, StorageWriter
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    import support_dcp


@pytest.fixture(autouse=True)
def quiet():
    """Without a process group DCP warns that it saves in a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def save(state, path, step, **options):
    planner = options.pop("planner", None)
    writer = StorageWriter(path, "gpt", **options)
    dcp.save(state, storage_writer=writer, checkpoint_id=str(step), planner=planner)
    return writer.checkpoint


def load(state, path, step=None, **options):
    reader = StorageReader(path, "gpt", step=step, **options)
    dcp.load(state, storage_reader=reader)
    return reader.checkpoint


def failure(call, *arguments, **options):
    """What a call fails with on rank 0."""
    with pytest.raises(dcp.CheckpointException) as found:
        call(*arguments, **options)
    return found.value.failures[0][0]


class Opaque:
    """Something that only pickle restores."""

    def __eq__(self, other):
        return isinstance(other, Opaque)

    __hash__ = None


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


# --------------------------------------------------------------------------------------------------------- one process


def test_everything_comes_back_bit_for_bit(path):
    state, back = support_dcp.extras(3, None), support_dcp.extras(9, None)
    checkpoint = save(state, path, 1)
    assert (str(checkpoint), checkpoint.world, checkpoint.kind) == ("gpt@1", 1, "base")
    expected = support_dcp.whole(state)
    assert support_dcp.whole(back) != expected
    assert str(load(back, path)) == "gpt@1"
    assert support_dcp.whole(back) == expected
    assert type(back["seen"]) is set and type(back["nested"][1]["pair"]) is tuple


def test_a_model_and_its_optimizer(tmp_path):
    model, optimizer = support_dcp.make(support_dcp.SEED, None)
    support_dcp.train(model, optimizer, 1)
    state = support_dcp.state_of(model, optimizer, 5, None)
    save(state, tmp_path / "store1", 1)
    support_dcp.train(model, optimizer, 2)
    checkpoint = save(support_dcp.state_of(model, optimizer, 5, None), tmp_path / "store1", 2)
    with ckptdelta.open(tmp_path / "store1") as store:
        tensors = {t.name: t for t in store.tensors(run="gpt", step=2)}
        assert store.verify()
    assert tensors["optim.state.up.weight.exp_avg"].role == "exp_avg"
    assert tensors["optim.state.up.weight.exp_avg_sq"].role == "exp_avg_sq"
    assert tensors["model.up.weight"].role == "weight"
    assert not any(name.endswith(".step") for name in tensors)  # they are in the record
    assert tensors["model.head.weight"].stored_bytes < tensors["model.head.weight"].raw_bytes / 10  # tied
    assert checkpoint.kind == "delta"


def test_the_second_save_is_a_delta(path):
    torch.manual_seed(1)
    state = {"w": torch.randn(500, 400), "b": torch.randn(1000)}
    first = save(state, path, 1)
    state["w"][7] += 1
    second = save(state, path, 2)
    assert second.kind == "delta" and second.parent == first.id
    assert second.stored_bytes < first.stored_bytes / 20
    back = {"w": torch.zeros(500, 400), "b": torch.zeros(1000)}
    load(back, path, 2)
    assert torch.equal(back["w"], state["w"]) and torch.equal(back["b"], state["b"])


def test_lossy_saves_keep_within_their_roles(path):
    model, optimizer = support_dcp.make(3, None)
    support_dcp.train(model, optimizer, 1)
    state = support_dcp.state_of(model, optimizer, 5, None)
    checkpoint = save(state, path, 1, fidelity="near", role_fidelity={"weight": "exact"})
    assert checkpoint.fidelity == "near"
    back = copy.deepcopy(state)
    for tensor in back["model"].values():
        tensor.zero_()
    load(back, path)
    assert all(torch.equal(back["model"][k], v) for k, v in state["model"].items())
    near, exact = back["optim"]["state"]["up.weight"], state["optim"]["state"]["up.weight"]
    error = (near["exp_avg"] - exact["exp_avg"]).norm() / exact["exp_avg"].norm()
    assert 0 < error < 0.5 and near["step"] == exact["step"]
    with ckptdelta.open(path) as store:
        assert {t.name: t for t in store.tensors()}["optim.state.up.weight.exp_avg"].rel_l2 == pytest.approx(float(error), rel=0.05)


def test_where_a_save_goes(path):
    state = {"w": torch.ones(3)}
    writer = StorageWriter(path)
    assert writer.checkpoint_id is None
    dcp.save(state, storage_writer=writer, checkpoint_id="a@1")
    assert writer.checkpoint_id == "a@1"
    writer.step = 2
    dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=StorageWriter(path, "b", step=7))
    with ckptdelta.open(path) as store:
        assert [str(c) for c in store.checkpoints()] == ["a@1", "a@2", "b@7"]
        dcp.save(state, storage_writer=StorageWriter(store, "b", step=8))  # a store that is open
        dcp.load(state, storage_reader=StorageReader(store, "b"))
    assert isinstance(failure(dcp.save, state, storage_writer=StorageWriter(path)), ckptdelta.InvalidError)
    assert isinstance(failure(dcp.save, state, storage_writer=StorageWriter(path, "a", step=2)), ckptdelta.ExistsError)
    for wrong in ("a@", "@3", "a@x", "checkpoints/step-3", "a@-1", str(2**64)):
        assert not StorageWriter.validate_checkpoint_id(wrong) and not StorageReader.validate_checkpoint_id(wrong), wrong
        with pytest.raises(ckptdelta.InvalidError):
            dcp.save(state, storage_writer=writer, checkpoint_id=wrong)
    assert StorageWriter.validate_checkpoint_id("a@3") and StorageReader.validate_checkpoint_id("17")


def test_a_wrong_option_is_told_at_once(path):
    with pytest.raises(ckptdelta.InvalidError, match="fidelity"):
        StorageWriter(path, fidelity="exactly")


@pytest.fixture
def group():
    """Asynchronous saves need one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_async_saves_go_on_while_the_state_changes(path, group):
    state = {"w": torch.zeros(200, 200), "n": 0}
    writer = StorageWriter(path, "gpt")
    futures = []
    for step in (1, 2, 3):
        state["w"] += step
        state["n"] = step
        for future in futures:
            future.result()
        futures.append(dcp.async_save(state, storage_writer=writer, checkpoint_id=str(step)))
        state["w"] += 0.25
    futures[-1].result()
    for step, value in ((1, 1.0), (2, 3.25), (3, 6.5)):
        back = {"w": torch.ones(200, 200), "n": -1}
        load(back, path, step)
        assert bool((back["w"] == value).all()) and back["n"] == step


def test_nothing_ends_a_save_that_a_thread_is_writing(path, group):
    state, writer, planner = {"w": torch.ones(300), "v": torch.ones(3)}, StorageWriter(path, "gpt"), support_dcp.Waiting()
    future = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", planner=planner)
    assert planner.entered.wait(60)
    try:
        with pytest.raises(ckptdelta.StateError, match="wait for it"):
            writer.close()
        assert isinstance(failure(dcp.save, state, storage_writer=writer, checkpoint_id="2"), ckptdelta.StateError)
        _dcp_write._end_all(writer._held, writer._busy)  # as at the end of the process
    finally:
        planner.going_on.set()
    future.result()
    assert writer.checkpoint.step == 1
    dcp.save(state, storage_writer=writer, checkpoint_id="3")
    with ckptdelta.open(path) as store:
        assert [c.step for c in store.checkpoints()] == [1, 3] and store.verify()


def test_a_save_that_was_ended_before_its_commit_fails(path):
    class Closed(StorageWriter):
        def write_data(self, plan, planner):
            result = super().write_data(plan, planner)
            self.close()
            return result

    class Crossed(StorageWriter):
        """Another save begins, and is written but not complete when this one is to be committed."""
        saves = 1

        def write_data(self, plan, planner):
            result = super().write_data(plan, planner)
            if self.saves == 1:
                self.saves = 2
                dcp.save({"v": torch.ones(2)}, storage_writer=self, checkpoint_id="gpt@2")
            return result

        def finish(self, metadata, results):
            if self.saves == 1:
                super().finish(metadata, results)
            self.saves = 1

    for kind in (Closed, Crossed):
        error = failure(dcp.save, {"w": torch.ones(3)}, storage_writer=kind(path), checkpoint_id="gpt@1")
        assert isinstance(error, ckptdelta.StateError) and "wait for each save" in str(error)
    with ckptdelta.open(path) as store:
        assert store.checkpoints() == []


def test_a_save_does_not_take_the_name_of_another_one(path):
    writer = StorageWriter(path, "gpt")

    def elsewhere(*calls):
        thread = threading.Thread(target=lambda: [call() for call in calls])
        thread.start(), thread.join()

    writer.reset("1")
    elsewhere(lambda: writer.reset("2"))
    with pytest.raises(ckptdelta.StateError, match="under way"):
        writer.set_up_storage_writer(True)
    writer.reset("1")
    writer.set_up_storage_writer(True)
    elsewhere(lambda: writer.reset("2"), lambda: writer.set_up_storage_writer(True))
    with pytest.raises(ckptdelta.StateError, match="under way"):
        writer.prepare_global_plan([])


def test_a_save_that_fails_leaves_no_checkpoint(path):
    class Fails(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            raise OSError("no")

    writer = StorageWriter(path, "gpt", step=1)
    assert isinstance(failure(dcp.save, {"w": torch.ones(3)}, storage_writer=writer, planner=Fails()), OSError)
    with ckptdelta.open(path) as store:
        assert store.checkpoints() == []
    assert not [p for p in path.rglob("*") if "tmp" in p.name]
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert writer.checkpoint.step == 1


def test_a_load_into_nothing_and_of_parts(path):
    state = support_dcp.extras(3, None)
    save({"a": state, "b": {"w": torch.ones(2)}}, path, 1)
    found = _load_state_dict_from_keys(storage_reader=StorageReader(path))
    assert support_dcp.whole(found["a"]) == support_dcp.whole(state)
    part = {"b": {"w": torch.zeros(2)}}
    load(part, path)
    assert part["b"]["w"].tolist() == [1.0, 1.0]
    assert "Missing key" in str(failure(load, {"c": torch.zeros(2)}, path))
    load_it = {"c": torch.zeros(2), "b": {"w": torch.zeros(2)}}
    dcp.load(load_it, storage_reader=StorageReader(path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert load_it["c"].tolist() == [0.0, 0.0] and load_it["b"]["w"].tolist() == [1.0, 1.0]


def test_targets_of_other_dtypes_and_layouts(path):
    save({"a": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(5)}, path, 1)
    back = {"a": torch.zeros(4, 3, dtype=torch.float64).t(), "s": torch.tensor(0.0)}
    load(back, path)
    assert torch.equal(back["a"], torch.arange(12.0, dtype=torch.float64).reshape(3, 4)) and back["s"].item() == 5.0
    assert "a" in str(failure(load, {"a": torch.zeros(3, 5)}, path))


def test_checkpoints_of_the_store_itself_load_by_name(path):
    with ckptdelta.open(path) as store:
        store.save({"model": {"w": np.arange(6.0).reshape(2, 3)}}, run="gpt", step=4)
    back = {"model": {"w": torch.zeros(2, 3, dtype=torch.float64)}}
    assert load(back, path).step == 4
    assert back["model"]["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_is_not_there(path):
    with pytest.raises(dcp.CheckpointException, match="no store|No store|not"):
        load({"w": torch.ones(1)}, path)
    save({"w": torch.ones(1)}, path, 1)
    with pytest.raises(dcp.CheckpointException, match="step 9"):
        load({"w": torch.ones(1)}, path, 9)


def test_each_save_has_its_metric_and_parent(path):
    writer = StorageWriter(path, "gpt", metric=("loss", 0.5))
    state = {"w": torch.randn(300, 300)}

    def saved(step, change):
        state["w"][step] += change
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step))
        return writer.checkpoint

    first = saved(1, 0)
    writer.metric = ("loss", 0.25)
    second = saved(2, 1)
    writer.parent, writer.metric = first, None
    third = saved(3, 1)
    writer.parent = ("gpt", 2)
    fourth = saved(4, 1)
    assert [(c.metric_name, c.metric) for c in (first, second, third, fourth)] == [("loss", 0.5), ("loss", 0.25), ("", None), ("", None)]
    assert [c.parent for c in (second, third, fourth)] == [first.id, first.id, second.id]
    writer.parent = ("gpt", 7)
    assert isinstance(failure(saved, 5, 0), ckptdelta.NotFoundError)
    writer.parent, writer.metric = None, ("x" * 40, 1.0)
    assert "metric" in str(failure(saved, 5, 0))
    writer.metric = None
    assert saved(5, 0).parent == fourth.id


def test_a_step_that_is_there(path):
    state, seen = {"w": torch.arange(50.0), "n": {1, 2}}, io.BytesIO(b"x")
    state["bytes"] = seen
    first = save(state, path, 1)
    assert save(state, path, 1, on_duplicate="same") == first
    state["w"][3] = 7
    assert isinstance(failure(save, state, path, 1, on_duplicate="same"), ckptdelta.ExistsError)
    branch = save(state, path, 1, on_duplicate="branch")
    assert str(branch) == "gpt~2@1" and str(save(state, path, 2, on_duplicate="branch")) == "gpt~2@2"
    with pytest.raises(ckptdelta.InvalidError, match="on_duplicate"):
        StorageWriter(path, on_duplicate="replace")


# ------------------------------------------------------------------------------------------------------ without DCP


def test_the_store_gives_the_state_that_dcp_saved(path):
    """Nested as it was, with all values: also those that are no tensors of the library."""
    model, optimizer = support_dcp.make(3, None)
    support_dcp.train(model, optimizer, 1)
    state = support_dcp.state_of(model, optimizer, 5, None)
    state["extra"] |= {"float8": torch.ones(3).to(torch.float8_e8m0fnu), "no numbers": np.zeros((0, 3)), "states": [{"a": torch.ones(2)}, {"b": 1}],
                       "size": torch.Size([2, 3])}
    save(state, path, 1)
    with ckptdelta.open(path) as store:
        found = store.state_dict()
        part = store.state_dict(only=["model.up", "extra.seen"])
    assert set(found) == set(state)
    expected = _load_state_dict_from_keys(storage_reader=StorageReader(path))
    assert support_dcp.whole(found) == support_dcp.whole(expected)
    assert found["extra"]["seen"] == {1, 5} and found["extra"]["bytes"].getvalue() == b"xxx\x05"
    assert found["extra"]["pairs"].dtype == torch.complex64 and found["extra"]["scalar"].shape == ()
    assert found["optim"]["param_groups"][0]["lr"] == 1e-2 and found["optim"]["state"]["up.weight"]["step"].item() == 3.0
    assert sorted(part) == ["extra", "model"] and sorted(part["model"]) == ["up.bias", "up.weight"] and part["extra"] == {"seen": {1, 5}}


def test_the_store_loads_what_dcp_saved_into_modules(path):
    model, optimizer = support_dcp.make(3, None)
    save({"model": model.state_dict(), "epoch": 4}, path, 1)
    other, _ = support_dcp.make(4, None)
    state = {"model": other, "epoch": 0}
    with ckptdelta.open(path) as store:
        store.load(state)
        assert support_dcp.whole(dict(other.state_dict())) == support_dcp.whole(dict(model.state_dict())) and state["epoch"] == 4
        with pytest.raises(ckptdelta.MismatchError, match=r"model\.extra"):
            other.extra = torch.nn.Linear(2, 2)
            store.load(state)
        store.export_checkpoint(path.parent / "exported.pt")
        numbers = store.state_dict(tensors="numpy")
    exported = torch.load(path.parent / "exported.pt", weights_only=True)
    assert exported["epoch"] == 4 and torch.equal(exported["model"]["up.weight"], model.up.weight)
    assert isinstance(numbers["model"]["up.weight"], np.ndarray) and np.array_equal(numbers["model"]["up.weight"], model.up.weight.detach().numpy())


def test_objects_of_pickle_are_left_to_dcp(path):
    save({"model": {"w": torch.ones(2)}, "thing": Opaque()}, path, 1, pickle=True)
    with ckptdelta.open(path) as store:
        assert store.state_dict(only="model")["model"]["w"].tolist() == [1.0, 1.0]
        with pytest.raises(ckptdelta.UnsupportedError, match="StorageReader") as found:
            store.state_dict()
    assert found.value.path == "thing"


def test_planners_that_flatten_nothing(path):
    save({"a.b": torch.ones(2), "n": 3}, path, 1, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    with ckptdelta.open(path) as store:
        found = store.state_dict()
        target = {"a": {"b": torch.zeros(2)}}
        store.load(target)
    assert sorted(found) == ["a.b", "n"] and found["n"] == 3 and target["a"]["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("paths", [{"a": ("a",), "b": ("a",)}, {"a": ("a",), "b": ("a", "b")}, {"a": ("a", "b"), "b": ("a",)}])
def test_paths_that_contradict_each_other_are_damage(paths):
    from ckptdelta._dcp_record import Items, Record, root_of
    items = Items(values={"a": 1, "b": 2})
    with pytest.raises(ckptdelta.CorruptError, match="same path"):
        root_of(Record({}, items, paths))
    for other in ({"a": ("a",)}, {"a": ("a",), "b": ()}, {"a": ("a",), "b": ("b", -1)}, {"a": ("a",), "b": (1,)}, {"a": ("a",), "b": ("b", 1 << 40)}, None, [1]):
        assert root_of(Record({}, items, other)) == ({"map": {"a": 1, "b": 2}}, True)
    assert root_of(Record({}, items, {"a": ("x", 2), "b": ("x", 0, "y")})) == ({"map": {"x": [{"map": {"y": 2}}, None, 1]}}, False)


# -------------------------------------------------------------------------------------------------------------- pickle


def test_objects_are_refused_unless_pickle_is_asked_for(path):
    error = failure(save, {"model": {"thing": Opaque()}}, path, 1)
    assert isinstance(error, ckptdelta.UnsupportedError) and error.path == "model.thing" and "pickle=True" in str(error)
    save({"model": {"thing": Opaque()}}, path, 1, pickle=True)
    error = failure(load, {"model": {"thing": None}}, path)
    assert isinstance(error, ckptdelta.UnsupportedError) and error.path == "model.thing"
    back = {"model": {"thing": None}}
    load(back, path, pickle=True)
    assert isinstance(back["model"]["thing"], Opaque)


def test_a_load_runs_no_code_of_the_store(path, tmp_path):
    class Foreign(dcp.DefaultSavePlanner):
        """Gives bytes that it has made itself."""

        def transform_object(self, item, value):
            return io.BytesIO(pickle.dumps(Trap(tmp_path / "sprung"))) if item.index.fqn == "x" else super().transform_object(item, value)

    assert isinstance(failure(save, {"x": 1}, path, 1, planner=Foreign()), ckptdelta.UnsupportedError)
    save({"x": 1}, path, 1, planner=Foreign(), pickle=True)
    assert isinstance(failure(load, {"x": 0}, path), ckptdelta.UnsupportedError)
    assert not (tmp_path / "sprung").exists()


def test_plain_values_are_json(path):
    """Nothing of a usual state is pickled."""
    state = support_dcp.extras(3, None)
    del state["mixed"]  # a tuple with a tensor
    save(state, path, 1)
    reader = StorageReader(path)
    reader.read_metadata()
    record = json.loads(reader._blob("dcp/state.json"))
    reader.close()
    assert record["format"] == "ckptdelta.dcp" and set(record["streams"]) == {"bytes"}
    assert record["streams"]["bytes"][1] == 0 and record["values"]["nested.1.name"] == "aaa"
    assert set(record["scalars"]) == {"scalar"}


def test_a_bytes_io_keeps_its_position(path):
    value = io.BytesIO(b"hello")
    value.seek(3)
    save({"a": value, "b": io.BytesIO()}, path, 1)
    back = {"a": None, "b": None}
    load(back, path)
    assert (back["a"].tell(), back["a"].getvalue(), back["b"].getvalue()) == (3, b"hello", b"")


@pytest.mark.parametrize("damage", [
    b"{", b"[]", b'{"format": "other"}', b'{"format": "ckptdelta.dcp", "version": 1}',
    b'{"format":"ckptdelta.dcp","version":1,"tensors":{"a":["float32",[-1],false]},"scalars":{},"values":{},"streams":{},"planner":null}',
    b'{"format":"ckptdelta.dcp","version":1,"tensors":{},"scalars":{"a":["float32"]},"values":{},"streams":{},"planner":null}',
    b'{"format":"ckptdelta.dcp","version":1,"tensors":{},"scalars":{},"values":{"a":{"map":{},"list":[]}},"streams":{},"planner":null}'])
def test_damaged_records_are_errors(damage):
    from ckptdelta._dcp_record import parse
    with pytest.raises(ckptdelta.CorruptError, match="malformed"):
        parse(damage)


def test_records_of_newer_versions_are_refused():
    from ckptdelta._dcp_record import parse
    with pytest.raises(ckptdelta.UnsupportedError, match="version 2"):
        parse(b'{"format":"ckptdelta.dcp","version":2}')


def test_writers_and_readers_can_be_sent_to_another_process(path):
    writer = pickle.loads(pickle.dumps(StorageWriter(path, "gpt", step=1, fidelity="near")))
    state = {"w": torch.randn(30, 30)}
    dcp.save(state, storage_writer=writer)
    assert writer.checkpoint.fidelity == "near"
    reader = pickle.loads(pickle.dumps(StorageReader(path, "gpt", step=1)))
    dcp.load(state, storage_reader=reader)
    assert reader.checkpoint.id == pickle.loads(pickle.dumps(writer)).checkpoint.id


# ------------------------------------------------------------------------------------------------------ many processes


def test_ranks_save_and_any_number_of_ranks_load(tmp_path):
    """FSDP2 and DTensors of 1, 2 and 4 ranks, loaded by 1, 2 and 4 ranks, and without a group."""
    for world in (1, 2, 4):
        support_dcp.launch("save", world, tmp_path)
        with ckptdelta.open(tmp_path / f"store{world}") as store:
            first, second = store.checkpoints("gpt")
            assert (first.world, second.world, second.kind) == (world, world, "delta")
            assert second.stored_bytes < first.stored_bytes
            assert store.verify()
    for world in (1, 2, 4):
        support_dcp.launch("load", world, tmp_path)
    for saved_by in (1, 2, 4):
        support_dcp.check_load(1, tmp_path, None, saved_by)


def test_a_rank_that_fails_leaves_no_checkpoint_and_later_saves_work(tmp_path):
    support_dcp.launch("trouble", 2, tmp_path)
    assert not [p for p in (tmp_path / "trouble").rglob("*") if "tmp" in p.name]


def test_writers_that_are_dropped_are_not_taken_for_dead_ones(tmp_path):
    support_dcp.launch("dropped", 2, tmp_path)


def test_a_save_on_all_ranks_does_not_end_one_that_is_under_way(tmp_path):
    support_dcp.launch("overlapping", 2, tmp_path)


@pytest.mark.parametrize("what", ["death", "late_death"])
def test_a_rank_that_dies_leaves_no_checkpoint(tmp_path, what):
    support_dcp.launch(what, 2, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:  # it cleans up
        assert store.checkpoints() == []
    assert not [p for p in (tmp_path / "store").rglob("*") if "tmp" in p.name or p.suffix == ".ckd"]
    assert save({"w": torch.ones(3)}, tmp_path / "store", 1).step == 1
