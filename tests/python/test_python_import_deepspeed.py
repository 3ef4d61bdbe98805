"""Checkpoints of DeepSpeed, written by the real library on two ranks: the import gives what its own tools make of them, bit for bit."""

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support_python import ckptdelta, environment, needs_package, needs_torch, torch
from support_torch_ranks import run_ranks

pytestmark = [needs_package, needs_torch]

RUNS = ("z1_bf16", "z2_fp32", "z2_aligned", "z3_bf16", "z3_fp32")  # of deepspeed_run.py
STATES = ("fp32", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder = tmp_path_factory.mktemp("deepspeed")
    run_ranks(Path(__file__).with_name("deepspeed_run.py"), folder)
    return folder


@pytest.fixture(scope="module")
def store(made):
    with ckptdelta.open(made / "store") as store:
        yield store


def imported(store, made, name, run=None):
    """The state of the last step, imported once."""
    run = run or name
    if not store.checkpoints(run):
        store.import_checkpoints(made / name, run=run)
    return store.state_dict(run=run)


def copied(made, tmp_path, name, step=4):
    """A checkpoint's folder that may be spoilt."""
    return Path(shutil.copytree(made / name / f"global_step{step}", tmp_path / f"global_step{step}"))


# ------------------------------------------------------------------------------------------------------------ ranks' files


@pytest.mark.parametrize("name", RUNS)
def test_masters_and_moments_are_those_of_deepspeed(made, store, name):
    state = imported(store, made, name)
    assert [c.step for c in store.checkpoints(name)] == [2, 4]
    states = state["optimizer"]["state"]
    masters = torch.load(made / f"{name}.fp32.pt")
    assert set(states) == {n for n in masters if not n.startswith(("frozen", "head")) and n != "scale"}
    for parameter, own in states.items():
        assert torch.equal(own["fp32"], masters[parameter]), parameter
        assert own["step"] == 4
        for slot in STATES:
            found = torch.load(made / f"{name}.universal" / "zero" / parameter / f"{slot}.pt", weights_only=False)
            found = found["param"] if isinstance(found, dict) else found.view(own[slot].shape)  # those of ZeRO 3 are flat
            assert own[slot].dtype == found.dtype and torch.equal(own[slot], found), (parameter, slot)


@pytest.mark.parametrize("name", ["z1_elastic", "z2_round_robin"])
def test_other_orders_of_buffers(made, store, name):
    """ds_to_universal does not convert these, but training them is the same as training z2_fp32."""
    state, other = imported(store, made, name)["optimizer"]["state"], imported(store, made, "z2_fp32")["optimizer"]["state"]
    assert set(state) == set(other)
    for parameter, slots in other.items():
        for slot in STATES:
            assert torch.equal(state[parameter][slot], slots[slot]), (parameter, slot)


@pytest.mark.parametrize("name", RUNS)
def test_weights(made, store, name):
    state = imported(store, made, name)
    module, masters = state["module"], torch.load(made / f"{name}.fp32.pt")
    dtype = torch.float32 if name.endswith("fp32") else torch.bfloat16
    assert set(module) - set(masters) == ({"frozen.weight", "frozen.bias"} if name.startswith("z1") else set())
    for parameter, value in module.items():
        assert value.dtype == (torch.float32 if parameter == "scale" else dtype), parameter
        assert parameter not in masters or torch.equal(value, masters[parameter].to(value.dtype)), parameter
    if not name.startswith("z3"):  # whose files have no weights
        weights = torch.load(made / name / "global_step4" / "mp_rank_00_model_states.pt")["module"]
        assert all(torch.equal(module[parameter], value) for parameter, value in weights.items())
    assert module["head.weight"] is module["embed.weight"]
    assert (module["embed.weight"] is state["optimizer"]["state"]["embed.weight"]["fp32"]) == (dtype == torch.float32)


@pytest.mark.parametrize("name", ["z1_bf16", "z3_bf16"])
def test_roles(made, store, name):
    imported(store, made, name)
    roles = {tensor.name: tensor.role for tensor in store.tensors(run=name)}
    for parameter in ("embed.weight", "layers.1.bias"):
        assert roles[f"module.{parameter}"] == "weight"
        assert [roles[f"optimizer.state.{parameter}.{slot}"] for slot in STATES] == ["master", "exp_avg", "exp_avg_sq"]
    assert roles["module.scale"] == "other"  # a buffer, which stays exact
    assert "module.head.weight" not in roles  # tied


@pytest.mark.parametrize("name", ["z1_bf16", "z3_bf16"])
def test_all_else(made, store, name):
    state = imported(store, made, name)
    groups = state["optimizer"]["param_groups"]
    assert [g["params"] for g in groups] == [["embed.weight", "layers.0.weight", "layers.2.weight", "layers.3.weight"],
                                            ["layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.bias", "layers.3.bias"]]
    file = made / name / "global_step4" / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if name == "z3_bf16" else "mp_rank_00_model_states.pt")
    model = torch.load(file)
    assert 0 < groups[0]["lr"] < 1e-3 and groups[0]["betas"] == (0.9, 0.999) and [g["weight_decay"] for g in groups] == [0.01, 0.0]
    assert state["lr_scheduler"] == model["lr_scheduler"] and state["ds_config"] == model["ds_config"]
    assert state["global_steps"] == 4 and state["epoch"] == 3 and torch.equal(state["rng"], model["rng"])
    assert state["optimizer"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    assert state["optimizer"]["zero_stage"] == (3 if name == "z3_bf16" else 1)
    if name == "z3_bf16":  # each rank has a client state of its own
        other = torch.load(file.with_name(file.name.replace("rank_0_", "rank_1_")))
        assert set(state["ranks"]) == {"1"} and state["ranks"]["1"]["rank"] == 1 and torch.equal(state["ranks"]["1"]["rng"], other["rng"])
    assert not {"param_shapes", "frozen_param_fragments"} & set(state)


def test_deepspeed_need_not_be_installed(made, tmp_path):
    code = ("import sys; sys.modules['deepspeed'] = None; sys.argv[0] = 'ckptdelta'\n"
            "from ckptdelta._import_command import run; sys.exit(run(sys.argv[1:]))")
    for name, more in (("z3_bf16", []), ("z1_bf16", ["--pickle"]), ("z1_bf16.universal", ["--step", "4"])):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store"), str(made / name), "--run", name, "--json", *more],
                              env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr
        assert [c["step"] for c in json.loads(done.stdout)["checkpoints"]][-1] == 4


def test_objects_need_pickle(made, tmp_path):
    folder = copied(made, tmp_path, "z1_bf16")
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file), "args": argparse.Namespace(lr=1)}, file)
    with ckptdelta.open(tmp_path / "store") as store:
        with pytest.raises(ckptdelta.UnsupportedError, match="argparse.Namespace.*pickle=True") as caught:
            store.import_checkpoints(folder, run="a")
        assert caught.value.file == str(file)
        with pytest.raises(ckptdelta.InvalidError, match="args is a argparse.Namespace"):
            store.import_checkpoints(folder, run="a", pickle=True)


def test_a_dynamic_scale_of_the_loss(made, tmp_path):
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    folder = copied(made, tmp_path, "z1_bf16")
    for file in folder.glob("*optim_states.pt"):
        state = torch.load(file, weights_only=False)
        state["optimizer_state_dict"]["loss_scaler"] = scalers.DynamicLossScaler(init_scale=1024, scale_window=7, min_scale=1, delayed_shift=1,
                                                                                consecutive_hysteresis=False)
        torch.save(state, file)
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(folder, run="a")
        found = store.state_dict(run="a")["optimizer"]["loss_scaler"]
        assert found["cur_scale"] == 1024 and found["scale_window"] == 7 and found["dynamic"] is True
        store.export_checkpoint(tmp_path / "out", run="a", form="deepspeed")
    scaler = torch.load(tmp_path / "out" / "zero" / "optimizer_state.pt", weights_only=False)["loss_scaler"]
    assert type(scaler) is scalers.DynamicLossScaler and vars(scaler) == vars(state["optimizer_state_dict"]["loss_scaler"])


def test_without_zero(tmp_path):
    """Stage 0: one file has everything."""
    folder = tmp_path / "global_step7"
    folder.mkdir()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"module": model.state_dict(), "optimizer": optimizer.state_dict(), "param_shapes": None, "global_steps": 7, "buffer_names": []},
               folder / "mp_rank_00_model_states.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(folder, run="a")] == [7]
        state = store.state_dict(run="a")
        assert torch.equal(state["module"]["weight"], model.weight) and state["optimizer"] == optimizer.state_dict()


# ------------------------------------------------------------------------------------------------------------------ errors


def expect(store, folder, kind, *texts):
    with pytest.raises(kind) as caught:
        store.import_checkpoints(folder, run="spoilt")
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.file and store.checkpoints("spoilt") == []


def test_a_missing_rank(made, store, tmp_path):
    folder = copied(made, tmp_path, "z2_fp32")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing", "2 ranks")
    folder = copied(made, tmp_path / "z3", "z3_bf16")
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing")
    folder = copied(made, tmp_path / "model", "z3_bf16")
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "zero_pp_rank_1_mp_rank_00_model_states.pt is missing")
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "mp_rank_00_model_states.pt", "tells what is in the others")
    folder = copied(made, tmp_path / "optimizer", "z1_bf16")
    for file in folder.glob("*optim_states.pt"):
        file.unlink()
    expect(store, folder, ckptdelta.CorruptError, "no file zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_files_of_different_checkpoints(made, store, tmp_path):
    folder = copied(made, tmp_path, "z2_fp32")
    first, second = sorted(folder.glob("*optim_states.pt"))
    shutil.copy(second, folder / second.name.replace("rank_1", "rank_2"))
    expect(store, folder, ckptdelta.CorruptError, "files of 3 ranks", "says that there are 2")
    folder = copied(made, tmp_path / "step", "z2_fp32")
    shutil.copy(made / "z2_fp32" / "global_step2" / second.name, folder / second.name)
    expect(store, folder, ckptdelta.CorruptError, "different checkpoints", "step", second.name)
    folder = copied(made, tmp_path / "stage", "z2_fp32")
    shutil.copy(made / "z3_fp32" / "global_step4" / second.name, folder / second.name)
    expect(store, folder, ckptdelta.CorruptError, "different checkpoints", "stage")
    folder = copied(made, tmp_path / "both", "z2_fp32")
    shutil.copy(second, folder / f"bf16_{second.name}")
    expect(store, folder, ckptdelta.CorruptError, "two files of one rank")
    folder = copied(made, tmp_path / "shapes", "z2_fp32")
    model = torch.load(folder / "mp_rank_00_model_states.pt")
    model["param_shapes"][0]["layers.0.weight"] = torch.Size([12, 11])
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    expect(store, folder, ckptdelta.CorruptError, "fp32 of buffer 0", "elements")


def test_files_that_were_cut_off(made, store, tmp_path):
    for number, pattern in enumerate(("*_1_*optim_states.pt", "*_1_*model_states.pt")):
        folder = copied(made, tmp_path / str(number), "z3_bf16")
        file, = folder.glob(pattern)
        os.truncate(file, file.stat().st_size - 1000)
        expect(store, folder, ckptdelta.CorruptError, str(file), "torch.load")


def test_what_cannot_be_merged(made, store, tmp_path):
    folder = copied(made, tmp_path, "z1_bf16")
    for name in ("mp_rank_01_model_states.pt", "layer_0_expert_3_mp_rank_00_model_states.pt"):
        (folder / name).write_bytes(b"")
        expect(store, folder, ckptdelta.UnsupportedError, name, "ds_to_universal")
        (folder / name).unlink()


# ------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_of_a_trainer(made, store, tmp_path):
    """As transformers and Lightning leave it: the checkpoint is in a folder inside, which the file `latest` names."""
    for step in (2, 4):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        shutil.copytree(made / "z3_bf16" / f"global_step{step}", folder / f"global_step{step}")
        (folder / "latest").write_text(f"global_step{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"the weights once more")
        torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state_1.pth")
    assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="trainer")] == [2, 4]
    found, other = store.state_dict(run="trainer"), imported(store, made, "z3_bf16")
    assert found["trainer_state"]["epoch"] == 0.5 and bytes(found["files"]["config.json"]) == b"{}" and "cpu" in found["rng_state_1"]
    assert "model.safetensors" not in found["files"] and "model" not in found
    assert all(torch.equal(found["module"][name], value) for name, value in other["module"].items())
    store.import_checkpoints(tmp_path / "out" / "checkpoint-2", run="single")
    assert "trainer_state" in store.state_dict(run="single")  # not the folder inside alone
    (folder / "latest").write_text("global_step9")
    expect(store, folder, ckptdelta.CorruptError, "'global_step9', which is not there")
    (tmp_path / "out" / "latest").write_text("global_step9")  # a folder of checkpoints may tell of one that was deleted
    (folder / "latest").unlink()
    torch.save({"w": torch.ones(1)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="weights")] == [2, 4]
    (folder / "trainer_state.json").unlink()
    shutil.move(folder / "global_step4", tmp_path / "epoch=0-step=4.ckpt" / "checkpoint")
    (tmp_path / "epoch=0-step=4.ckpt" / "latest").write_text("checkpoint\n")
    assert [c.step for c in store.import_checkpoints(tmp_path / "epoch=0-step=4.ckpt", run="lightning")] == [4]


def test_what_a_trainer_really_writes(made, tmp_path):
    """ZeRO 3 by transformers: the masters, rounded, are the weights that the Trainer gathered itself."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    run_ranks(Path(__file__).with_name("deepspeed_trainer_run.py"), tmp_path / "out", world=1)
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a")] == [2, 4]
        state = store.state_dict(run="a")
        weights = safetensors.load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
        assert set(state["module"]) - set(weights) == {"lm_head.weight"}  # tied
        assert all(torch.equal(state["module"][name], value) for name, value in weights.items())
        assert state["trainer_state"]["global_step"] == 4 and "config.json" in state["files"] and "rng_state" in state


# ----------------------------------------------------------------------------------------------------------- universal


@pytest.mark.parametrize("name", RUNS)
def test_universal_checkpoints(made, store, name):
    state, other = imported(store, made, f"{name}.universal"), imported(store, made, name)
    assert state["global_steps"] == 4 and state["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    assert state["optimizer"].keys() == other["optimizer"].keys() and state.keys() == other.keys()
    for parameter, slots in other["optimizer"]["state"].items():
        for slot, value in slots.items():
            assert torch.equal(state["optimizer"]["state"][parameter][slot], value), (parameter, slot)
    assert list(state["module"]) == list(other["module"])
    for parameter, value in other["module"].items():
        assert state["module"][parameter].dtype == value.dtype and torch.equal(state["module"][parameter], value), parameter
    roles = {tensor.name: tensor.role for tensor in store.tensors(run=f"{name}.universal")}
    assert roles == {tensor.name: tensor.role for tensor in store.tensors(run=name)}


def test_universal_checkpoints_of_model_parallel_ranks(made, store, tmp_path):
    """Their files have parts of the weights, which then come from the masters; frozen ones are nowhere as a whole."""
    folder = Path(shutil.copytree(made / "z1_bf16.universal", tmp_path / "4"))
    model = torch.load(folder / "mp_rank_00_model_states.pt")
    for file in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        torch.save(model, folder / file)
    expect(store, folder, ckptdelta.UnsupportedError, "frozen.weight")
    for name in ("frozen.weight", "frozen.bias"):
        del model["module"][name]
        shutil.rmtree(folder / "zero" / name)
    model["module"]["layers.0.weight"] = model["module"]["layers.0.weight"][:6]
    for file in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        torch.save(model, folder / file)
    found, other = imported(store, tmp_path, "4", run="parallel")["module"], imported(store, made, "z1_bf16")["module"]
    assert set(found) == set(other) - {"frozen.weight", "frozen.bias"}
    assert all(found[name].dtype == other[name].dtype and torch.equal(found[name], other[name]) for name in found)
    assert found["head.weight"] is found["embed.weight"]


def test_deepspeed_goes_on_from_exported_checkpoints(made, store, tmp_path):
    """With other stages of ZeRO, and another number of ranks."""
    names = ("z1_bf16", "z3_bf16", "z2_aligned.universal")
    for name in names:
        imported(store, made, name)
        assert store.export_checkpoint(tmp_path / name, run=name, form="deepspeed").step == 4
    run_ranks(Path(__file__).with_name("deepspeed_run.py"), "--load", tmp_path, *names, world=1)
    for name, job in itertools.product(names, ("z2_bf16", "z3_bf16")):
        found, other = imported(store, tmp_path, f"{name}.{job}"), imported(store, made, name)
        assert found["global_steps"] == 4 and found["lr_scheduler"] == other["lr_scheduler"]
        assert [g["lr"] for g in found["optimizer"]["param_groups"]] == [g["lr"] for g in other["optimizer"]["param_groups"]]
        assert same_states(found, other)


@pytest.mark.parametrize("name", ["z1_bf16", "z3_bf16", "z3_fp32"])
def test_an_exported_checkpoint_can_be_imported(made, store, tmp_path, name):
    other = imported(store, made, name)
    store.export_checkpoint(tmp_path / "again", run=name, form="deepspeed")
    found = imported(store, tmp_path, "again", run=f"{name}.again")
    assert found["optimizer"]["param_groups"] == other["optimizer"]["param_groups"] and same_states(found, other)
    assert found.keys() - {"universal_checkpoint_info"} == other.keys() - {"universal_checkpoint_info", "ranks"}


def same_states(found, other):
    return found["module"].keys() == other["module"].keys() and found["optimizer"]["state"].keys() == other["optimizer"]["state"].keys() \
        and all(torch.equal(found["module"][parameter], value) for parameter, value in other["module"].items()) \
        and all(torch.equal(found["optimizer"]["state"][parameter][slot], value)
                for parameter, slots in other["optimizer"]["state"].items() for slot, value in slots.items())


def test_what_cannot_be_exported_to_deepspeed(store, tmp_path):
    store.save({"module": {"w": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": []}}, run="plain", step=1)
    state = {"w": {"exp_avg": torch.ones(1)}}
    store.save({"module": {"w": torch.ones(1)}, "optimizer": {"state": state, "param_groups": [{"params": ["w"]}]}, "ds_version": "1"}, run="plain", step=2)
    for step, text in ((1, "ds_version"), (2, "w has none")):
        with pytest.raises(ckptdelta.InvalidError, match=text):
            store.export_checkpoint(tmp_path / "folder", run="plain", step=step, form="deepspeed")
    assert list(tmp_path.iterdir()) == []


def test_spoilt_universal_checkpoints(made, store, tmp_path):
    folder = Path(shutil.copytree(made / "z3_bf16.universal", tmp_path / "z3"))
    (folder / "zero" / "unknown").mkdir()
    expect(store, folder, ckptdelta.CorruptError, "unknown", "no file of a model")
    (folder / "zero" / "unknown").rmdir()
    (folder / "zero" / "embed.weight" / "exp_avg.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "embed.weight", "exp_avg.pt")
    shutil.copy(folder / "zero" / "layers.0.bias" / "fp32.pt", folder / "zero" / "embed.weight" / "exp_avg.pt")
    expect(store, folder, ckptdelta.CorruptError, "12 elements", "(31, 12)")
    shutil.rmtree(folder / "zero" / "embed.weight")
    expect(store, folder, ckptdelta.CorruptError, "fp32.pt is missing")
    (folder / "zero" / "optimizer_state.pt").unlink()
    expect(store, folder, ckptdelta.CorruptError, "optimizer_state.pt is missing")
