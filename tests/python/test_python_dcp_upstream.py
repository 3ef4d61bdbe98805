"""The cases of PyTorch's own tests of torch.distributed.checkpoint, on a store instead of files.

They follow test/distributed/checkpoint/ of pytorch/pytorch: test_file_system_checkpoint.py, test_file_system_checkpoint_cpu.py,
test_checkpoint.py, test_planner.py, test_dtensor_checkpoint.py, test_dtensor_resharding.py, test_tp_checkpoint.py,
test_hsdp_checkpoint.py, test_fsdp_tp_checkpoint_conversion.py, test_fsdp_model_state.py, test_fsdp_optim_state.py,
test_async_process_executor.py, e2e/test_e2e_save_and_load.py, e2e/test_pipeline.py. Left out is what is about files: extensions
of the writer, which file has which tensor, detection of a writer by a path.
"""

import io
import warnings

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import torch.distributed.checkpoint as dcp
    from ckptdelta.dcp import StorageReader, StorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    import support_dcp_upstream
    from support_dcp import whole
    from support_dcp_upstream import Net, Progress


@pytest.fixture(autouse=True)
def quiet():
    """Without a process group DCP warns that it saves in a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def save(state, path, step=1, **options):
    dcp.save(state, storage_writer=StorageWriter(path, "gpt"), checkpoint_id=str(step), **options)


def load(state, path, **options):
    dcp.load(state, storage_reader=StorageReader(path, "gpt"), **options)
    return state


# --------------------------------------------------------------------------------------------------------- one process


def test_read_write_only_tensor(path):
    state, back = Net(1).state_dict(), Net(2).state_dict()
    assert whole(back) != whole(state)
    save(state, path, no_dist=True)
    assert whole(load(back, path, no_dist=True)) == whole(state)


def test_dtype_mismatch_casting(path):
    narrow, wide = torch.rand(4, 3).to(torch.bfloat16), torch.rand(4, 3)
    save({"narrow": narrow, "wide": wide}, path)
    back = load({"narrow": torch.zeros(4, 3), "wide": torch.zeros(4, 3, dtype=torch.bfloat16)}, path)
    assert torch.equal(back["narrow"], narrow.float()) and torch.equal(back["wide"], wide.to(torch.bfloat16))


class Holder:
    """An object with a state, which holds one value."""

    def __init__(self, value):
        self.value, self.calls = value, 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value, self.calls = state["value"], self.calls + 1


@pytest.mark.parametrize("value, other", [(b"SomeBlob", b""), ([1, 2], [3]), ("text", None)])
def test_read_write_tensor_and_blob(path, value, other):
    save({**Net(1).state_dict(), "blob": Holder(value)}, path)
    holder = Holder(other)
    back = load({**Net(2).state_dict(), "blob": holder}, path)
    assert back["blob"] is holder and holder.value == value
    assert whole({k: v for k, v in back.items() if k != "blob"}) == whole(Net(1).state_dict())


def test_stateful_and_non_stateful_loads(path):
    class Watched(dict):
        """Notes which keys are set."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.set = []

        def __setitem__(self, key, value):
            self.set.append(key)
            super().__setitem__(key, value)

    holder = Holder(1)
    save({"holder": holder, "plain": {"tensor": torch.ones(3), "list": [1, 2]}}, path)
    holder.value = 2
    state = Watched({"holder": holder, "plain": {"tensor": torch.zeros(3), "list": [3, 4]}})
    load(state, path)
    assert (holder.value, holder.calls, state["holder"] is holder, state.set) == (1, 1, True, ["plain"])
    assert state["plain"]["tensor"].tolist() == [1.0] * 3 and state["plain"]["list"] == [1, 2]


def test_nothing_at_all(path):
    save({}, path)
    assert load({}, path) == {}
    with ckptdelta.open(path) as store:
        assert store.find().tensors == 0 and store.verify()


def test_init_state_dict(path):
    """Loads are in place, and options of an optimizer that are no tensors come back."""
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}, path)
    other = Net(2)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.2)
    weights, states = get_model_state_dict(other), get_optimizer_state_dict(other, other_optimizer)
    tensors = {name: tensor.data_ptr() for name, tensor in weights.items()}
    state = load({"model": weights, "optimizer": states}, path)
    assert state["model"] is weights and state["optimizer"] is states
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == tensors
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)
    assert whole(get_model_state_dict(other)) == whole(get_model_state_dict(model))
    assert other_optimizer.param_groups[0]["lr"] == 0.1


def test_partial_load(path):
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, path)
    reader = StorageReader(path, "gpt")
    found = _load_state_dict_from_keys("model", storage_reader=reader)
    assert whole(found) == whole({"model": state["model"]})
    found = _load_state_dict_from_keys("optimizer.state", storage_reader=reader)
    assert whole(found) == whole({"optimizer": {"state": state["optimizer"]["state"]}})
    found = _load_state_dict_from_keys({"model.first.weight", "optimizer.param_groups"}, storage_reader=reader)
    assert list(found["model"]) == ["first.weight"] and "state" not in found["optimizer"]


def test_overwrite(path):
    """A step of a run is saved once: a second save of it is an error that changes nothing. Deleted, it can be saved again."""
    first, second = torch.randn(10), torch.randn(10)
    save({"random": first}, path)
    with pytest.raises(dcp.CheckpointException, match="already has a checkpoint at step 1"):
        save({"random": second}, path)
    assert torch.equal(load({"random": torch.zeros(10)}, path)["random"], first)
    with ckptdelta.open(path) as store:
        store.delete(run="gpt", step=1, undo_s=0)
    save({"random": second}, path)
    assert torch.equal(load({"random": torch.zeros(10)}, path)["random"], second)


def test_bytes_and_tensors_without_dimensions(path):
    progress, back = Progress(3, [0.5, 0.25]), Progress()
    save({"progress": progress, "empty": io.BytesIO()}, path)
    state = load({"progress": back, "empty": None}, path)
    assert (back.step, back.losses, state["empty"].getvalue()) == (3, [0.5, 0.25], b"")


def test_empty_tensors(path):
    shapes = [(0,), (0, 3), (3, 0), (2, 0, 4)]
    save({**{str(shape): torch.empty(shape) for shape in shapes}, "full": torch.ones(2)}, path)
    back = load({**{str(shape): torch.empty(shape) for shape in shapes}, "full": torch.zeros(2)}, path)
    assert [tuple(back[str(shape)].shape) for shape in shapes] == shapes and back["full"].tolist() == [1.0, 1.0]
    with pytest.raises(dcp.CheckpointException, match=r"\(0,\)"):
        load({"(0,)": torch.empty(1)}, path)


def test_tied_weights(path):
    """Both names are there, and hold the same values; a load to tensors that are not tied works as well."""
    model, other = Net(1), Net(2)
    model.tied, other.tied = model.first, torch.nn.Linear(8, 15)
    save(model.state_dict(), path)
    load(other.state_dict(), path)
    assert torch.equal(other.tied.weight, model.first.weight) and torch.equal(other.first.weight, model.first.weight)


def test_errors_name_what_is_missing(path):
    with pytest.raises(dcp.CheckpointException, match="store"):
        load({"w": torch.ones(2)}, path)
    save({"model": {"w": torch.ones(2), "n": 1}}, path)
    for state, name in [({"model": {"v": torch.ones(2)}}, "model.v"), ({"model": {"w": torch.ones(2), "m": 1}}, "model.m"),
                        ({"model": {"w": torch.ones(3)}}, "model.w")]:
        with pytest.raises(dcp.CheckpointException, match=name.replace(".", r"\.")):
            load(state, path)
    with pytest.raises(dcp.CheckpointException, match="run 'other'"):
        dcp.load({"w": torch.ones(2)}, storage_reader=StorageReader(path, "other"))
    with pytest.raises(dcp.CheckpointException, match="step 7"):
        dcp.load({"w": torch.ones(2)}, storage_reader=StorageReader(path, "gpt"), checkpoint_id="7")
    chunk, = (path / "data/c").rglob("*.ckd")
    chunk.unlink()
    with pytest.raises(dcp.CheckpointException, match=chunk.name):
        load({"model": {"w": torch.ones(2)}}, path)


# ------------------------------------------------------------------------------------------------------ many processes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what, worlds", [("sharded_tensors", [2]), ("dtensors", [4]), ("models", [4]), ("trainings", [2]), ("orders", [2]),
                                          ("failures", [2]), ("other_process", [2]), ("counted", [4, 2, 3])])
def test_ranks(tmp_path, what, worlds):
    """support_dcp_upstream.py says what each function follows."""
    for world in worlds:
        support_dcp_upstream.launch(what, world, tmp_path)
    with ckptdelta.open(tmp_path / "store") as store:
        assert store.checkpoints() and store.verify()
