"""Checkpoints that other libraries wrote: what comes out of the store is what their own loaders read."""

import collections
import json
import os
import pickle
import subprocess
import sys

import pytest

from support_python import ckptdelta, environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]


def assert_same(a, b, path=""):
    if torch.is_tensor(b):
        assert torch.is_tensor(a) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), path
    elif isinstance(b, dict):
        assert list(a) == list(b), path
        for key in b:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(b, (list, tuple)):
        assert isinstance(a, type(b)) or isinstance(b, tuple), path
        assert len(a) == len(b), path
        for i, value in enumerate(b):
            assert_same(a[i], value, f"{path}.{i}")
    elif type(b).__module__ == "numpy":
        assert a.dtype == b.dtype and (a == b).all(), path
    else:
        assert a == b, path


def trained(model, groups=None, steps=2):
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def by_dimensions(model):
    """Groups as most trainers make them: matrices decay, vectors do not."""
    return [{"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


def two_layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))


def names(store, step=None):
    return {tensor.name for tensor in store.tensors(run="a", step=step)}


# ---------------------------------------------------------------------------------------------------- files of torch.save


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save(tmp_path, zipped):
    model = two_layers()
    for step in (2, 10, 3):
        optimizer = trained(model, by_dimensions(model))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "args": {"lr": 1e-3},
                 "seen": collections.Counter(a=2), "dtype": torch.bfloat16}
        torch.save(state, tmp_path / f"ckpt_{step}.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path, run="a")] == [2, 3, 10]
        for step in (2, 3, 10):
            assert_same(store.state_dict(run="a", step=step), torch.load(tmp_path / f"ckpt_{step}.pt"))
        assert {"optimizer.state.model.0.weight.exp_avg", "optimizer.state.model.1.bias.exp_avg_sq"} <= names(store)
        assert {t.role for t in store.tensors(run="a") if t.name.endswith("exp_avg_sq")} == {"exp_avg_sq"}
        assert store.checkpoints("a")[1].kind == "delta"
        assert store.import_checkpoints(tmp_path, run="a") == []  # goes on where it ended
        torch.save({"w": torch.ones(3)}, tmp_path / "ckpt_11.pt")
        assert [c.step for c in store.import_checkpoints(tmp_path, run="a")] == [11]
        with pytest.raises(ckptdelta.ExistsError):
            store.import_checkpoints(tmp_path / "ckpt_11.pt", run="a")


def test_parameters_are_named_only_without_doubt(tmp_path):
    model = two_layers()
    optimizer = trained(model, list(model[2].parameters()))  # the same shapes as those of the first layer
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "x.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(tmp_path / "x.pt", run="a")
        assert {name for name in names(store) if "exp_avg_sq" in name} == {"optimizer.state.0.exp_avg_sq", "optimizer.state.1.exp_avg_sq"}
        assert_same(store.state_dict(run="a", step=7), torch.load(tmp_path / "x.pt"))


def test_weights_in_the_order_of_their_names_tell_nothing(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16, bias=False), "k": torch.nn.Linear(16, 16, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters())
    (model["q"](torch.ones(1, 16)) + 2 * model["k"](torch.ones(1, 16))).sum().backward()
    optimizer.step()
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(folder, run="a")
        assert {name for name in names(store) if name.endswith("exp_avg")} == {"optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"}


def test_a_tied_weight_is_one_parameter(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [trained(model).state_dict()]}, tmp_path / "5.ckpt")
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(tmp_path / "5.ckpt", run="a")
        assert {n for n in names(store) if n.endswith("exp_avg")} == {f"optimizer_states.0.state.state_dict.{i}.weight.exp_avg" for i in (0, 1)}
        loaded = store.state_dict(run="a")["state_dict"]
        assert loaded["0.weight"] is loaded["2.weight"]


class Unknown:
    def __reduce__(self):
        return os.mkdir, (os.environ["CKD_TEST_RAN"],)


def test_pickle_runs_only_if_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("CKD_TEST_RAN", str(tmp_path / "ran"))
    torch.save({"w": torch.ones(3), "x": Unknown()}, tmp_path / "1.pt")
    torch.save({"w": torch.ones(3), "namespace": __import__("argparse").Namespace(lr=1)}, tmp_path / "2.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        for name in ("1.pt", "2.pt"):
            with pytest.raises(ckptdelta.UnsupportedError, match="pickle=True") as caught:
                store.import_checkpoints(tmp_path / name, run="a")
            assert caught.value.file == str(tmp_path / name)
        assert not (tmp_path / "ran").exists()
        with pytest.raises(ckptdelta.InvalidError, match="namespace is a argparse.Namespace"):
            store.import_checkpoints(tmp_path / "2.pt", run="a", pickle=True)
        assert store.checkpoints() == []


def test_steps(tmp_path):
    torch.save({"w": torch.ones(3), "step": torch.tensor(40)}, tmp_path / "a_7.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "epoch=3-step=1200.ckpt")
    torch.save({"w": torch.ones(3)}, tmp_path / "last.pt")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "a_7.pt", run="a")] == [40]
        assert [c.step for c in store.import_checkpoints(tmp_path / "epoch=3-step=1200.ckpt", run="a")] == [1200]
        with pytest.raises(ckptdelta.InvalidError, match="--step"):
            store.import_checkpoints(tmp_path / "last.pt", run="a")
        assert [c.step for c in store.import_checkpoints(tmp_path / "last.pt", run="a", step=3)] == [3]
        with pytest.raises(ckptdelta.InvalidError, match="a single one"):
            store.import_checkpoints(tmp_path, run="b", step=3)


def test_two_of_the_same_step(tmp_path):
    for name in ("model_5.pt", "optimizer_5.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    with ckptdelta.open(tmp_path / "store") as store:
        with pytest.raises(ckptdelta.InvalidError, match="model_5.pt and .*optimizer_5.pt are both step 5"):
            store.import_checkpoints(tmp_path, run="a")


def test_progress_is_one_figure_over_all_files(tmp_path):
    sizes = []
    for step, rows in ((1, 5000), (2, 1000), (3, 20000)):
        torch.save({"w": torch.randn(rows, 64)}, tmp_path / f"ckpt_{step}.pt")
        sizes.append((tmp_path / f"ckpt_{step}.pt").stat().st_size)
    with ckptdelta.open(tmp_path / "store") as store:
        calls = []
        store.import_checkpoints(tmp_path, run="a", progress=lambda done, total: calls.append((done, total)))
        assert {total for _, total in calls} == {sum(sizes)} and [done for done, _ in calls] == sorted(done for done, _ in calls)
        ends = [sizes[0], sizes[0] + sizes[1], sum(sizes)]
        assert set(ends) <= {done for done, _ in calls} and calls[-1][0] == sum(sizes)
        with pytest.raises(ckptdelta.CancelledError):
            store.import_checkpoints(tmp_path, run="b", progress=lambda done, total: done < ends[1])
        assert [c.step for c in store.checkpoints("b")] == [1]
        calls.clear()
        store.import_checkpoints(tmp_path, run="b", progress=lambda done, total: calls.append((done, total)))  # the first is there
        assert [c.step for c in store.checkpoints("b")] == [1, 2, 3] and calls[0][0] >= sizes[0] and calls[-1] == (sum(sizes), sum(sizes))
        calls.clear()
        store.import_checkpoints(tmp_path, run="b", progress=lambda done, total: calls.append((done, total)))
        assert calls == [(sum(sizes), sum(sizes))]


def test_the_last_model_beside_checkpoints(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    for name, step in (("checkpoint-5", 5), ("checkpoint-10", 10), (".", 10)):
        (tmp_path / "out" / name).mkdir(parents=True, exist_ok=True)
        safetensors.save_file({"w": torch.full((3,), float(step))}, tmp_path / "out" / name / "model.safetensors")
        (tmp_path / "out" / name / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a")] == [5, 10]
        (tmp_path / "out" / "trainer_state.json").write_text(json.dumps({"global_step": 12}))
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a")] == [12]
        (tmp_path / "out" / "trainer_state.json").unlink()
        (tmp_path / "out").rename(tmp_path / "llama-7")
        assert [c.step for c in store.import_checkpoints(tmp_path / "llama-7", run="b")] == [5, 10]


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "random.pt").write_bytes(bytes(range(200)))
    (tmp_path / "__0_0.distcp").write_bytes(b"PK\3\4")
    (tmp_path / "cut.pt").write_bytes(b"PK\3\4" + bytes(100))
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    (tmp_path / "deepspeed" / "global_step5").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with ckptdelta.open(tmp_path / "store") as store:
        for name, kind, text in (("random.pt", ckptdelta.UnsupportedError, "neither a file of torch.save"), ("__0_0.distcp", ckptdelta.UnsupportedError, "import its folder"),
                                 ("cut.pt", ckptdelta.CorruptError, "torch.load"), ("zero", ckptdelta.CorruptError, "has no file mp_rank_00_model_states.pt"),
                                 ("deepspeed", ckptdelta.UnsupportedError, "not a checkpoint of transformers, DeepSpeed"),
                                 ("empty", ckptdelta.UnsupportedError, "not a checkpoint"), ("none", ckptdelta.NotFoundError, "no such"),
                                 ("pipe", ckptdelta.UnsupportedError, "regular")):
            with pytest.raises(kind, match=text) as caught:
                store.import_checkpoints(tmp_path / name, run="a", step=1)
            assert str(tmp_path / name) in str(caught.value)
        assert store.checkpoints() == []


# ------------------------------------------------------------------------------------------------------------- DCP folders


def test_folders_of_dcp(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    model = two_layers()
    for step in (1, 2):
        optimizer = trained(model)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": step, "lists": [1, {"a": torch.arange(3)}], "empty": torch.empty(0, 4)}
        dcp.save(state, checkpoint_id=tmp_path / "out" / f"step-{step}", no_dist=True)
        dcp_to_torch_save(tmp_path / "out" / f"step-{step}", tmp_path / f"{step}.whole")
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a")] == [1, 2]
        for step in (1, 2):
            assert_same(store.state_dict(run="a", step=step), torch.load(tmp_path / f"{step}.whole", weights_only=False))


def test_metadata_of_dcp_runs_no_code(tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp
    monkeypatch.setenv("CKD_TEST_RAN", str(tmp_path / "ran"))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "1", no_dist=True)
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(Unknown()))
    with ckptdelta.open(tmp_path / "store") as store:
        with pytest.raises(ckptdelta.UnsupportedError, match="pickle=True"):
            store.import_checkpoints(tmp_path / "1", run="a")
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- transformers and Lightning


def test_folders_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    args = transformers.TrainingArguments(output_dir=tmp_path / "out", max_steps=6, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True)
    tokens = torch.arange(16) % 50
    data = [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=data)
    trainer.train()
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a")] == [2, 4, 6]
        for step in (2, 4, 6):
            folder, found = tmp_path / "out" / f"checkpoint-{step}", store.state_dict(run="a", step=step)
            assert_same(dict(sorted(found["model"].items())), dict(sorted(safetensors.load_file(folder / "model.safetensors").items())))
            for part, name in (("optimizer", "optimizer.pt"), ("scheduler", "scheduler.pt"), ("rng_state", "rng_state.pth")):
                assert_same(found[part], torch.load(folder / name, weights_only=False))
            assert found["trainer_state"] == json.loads((folder / "trainer_state.json").read_text())
            assert bytes(found["files"]["config.json"]) == (folder / "config.json").read_bytes()
        wanted = {f"optimizer.state.model.{name}.exp_avg_sq" for name in safetensors.load_file(folder / "model.safetensors")}
        assert {t.name for t in store.tensors(run="a") if t.role == "exp_avg_sq"} == wanted
        model, optimizer = trainer.model, trainer.optimizer
        moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        raw = tmp_path / "raw.safetensors"
        command("load", tmp_path / "store", "a@6", "--out", raw)
        loaded = safetensors.load_file(raw)
        for name, value in moments.items():
            assert torch.equal(loaded[f"optimizer.state.model.{name}.exp_avg"], value), name


def test_shards_stay_in_their_folder(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    safetensors.save_file({"a": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    safetensors.save_file({"b": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(folder, run="a")
        assert set(store.state_dict(run="a")["model"]) == {"a", "b"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
        with pytest.raises(ckptdelta.CorruptError, match="outside the folder"):
            store.import_checkpoints(folder, run="b")


def test_checkpoints_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width=16):
            super().__init__()
            self.save_hyperparameters()
            self.layers = two_layers()

        def training_step(self, batch, _):
            return self.layers(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    every = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / "out", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(max_steps=4, callbacks=[every], logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8))
    with ckptdelta.open(tmp_path / "store") as store:
        assert [c.step for c in store.import_checkpoints(tmp_path / "out", run="a", pickle=True)] == [2, 4]
        for step, path in zip((2, 4), sorted((tmp_path / "out").iterdir())):
            assert_same(store.state_dict(run="a", step=step), torch.load(path, weights_only=False))
        assert "optimizer_states.0.state.state_dict.layers.0.weight.exp_avg" in names(store)


# --------------------------------------------------------------------------------------------------------------- export


def test_export_to_torch_and_dcp(tmp_path):
    import torch.distributed.checkpoint as dcp
    model = two_layers()
    optimizer = trained(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    with ckptdelta.open(tmp_path / "store") as store:
        store.save({"model": model, "optimizer": optimizer, "epoch": 3}, run="a", step=1)
        assert store.export_checkpoint(tmp_path / "x.pt", run="a").step == 1
        assert_same(torch.load(tmp_path / "x.pt"), state)
        store.export_checkpoint(tmp_path / "folder", run="a", step=1)
        target = {"model": two_layers().state_dict(), "epoch": 0}
        dcp.load(target, checkpoint_id=tmp_path / "folder", no_dist=True)
        assert_same(target, {"model": state["model"], "epoch": 3})
        names = {key for key in dcp.FileSystemReader(tmp_path / "folder").read_metadata().state_dict_metadata if key.startswith("optimizer.state.")}
        assert names == {f"optimizer.state.{name}.{slot}" for name, _ in model.named_parameters() for slot in ("exp_avg", "exp_avg_sq", "step")}
        store.import_checkpoints(tmp_path / "folder", run="b", step=1)
        assert_same(store.state_dict(run="b")["model"], state["model"])
        for path in ("x.pt", "folder"):
            with pytest.raises(ckptdelta.ExistsError):
                store.export_checkpoint(tmp_path / path, run="a")
        with pytest.raises(ckptdelta.InvalidError, match="form is one of"):
            store.export_checkpoint(tmp_path / "y", run="a", form="zip")
        store.save({"files": {"../evil": b"x"}, "model": {"w": torch.ones(1)}}, run="c", step=1)
        with pytest.raises(ckptdelta.InvalidError, match="outside the folder"):
            store.export_checkpoint(tmp_path / "y", run="c", step=1, form="transformers")
        store.save({"w": torch.ones(1)}, run="c", step=2)
        with pytest.raises(ckptdelta.InvalidError, match="member model"):
            store.export_checkpoint(tmp_path / "y", run="c", step=2, form="transformers")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "store", "x.pt"]


def test_names_of_optimizers_in_exports_to_dcp(tmp_path):
    """Within the model, wherever it is in the state. Of two models the whole path; numbers where the parameters are not known."""
    import torch.distributed.checkpoint as dcp
    one, two = two_layers(), two_layers()
    first, both = trained(one), torch.optim.SGD([*one.parameters(), *two.parameters()], momentum=0.9)
    (one(torch.ones(2, 16)).sum() + two(torch.ones(2, 16)).sum()).backward()
    both.step()
    states = {1: {"nets": [{"one": one}], "opt": [first]}, 2: {"a": one, "b": two, "opt": both}, 3: {"opt": first}}
    wanted = {1: {f"opt.0.state.{n}.exp_avg" for n, _ in one.named_parameters()},
              2: {f"opt.state.{m}.{n}.momentum_buffer" for m in "ab" for n, _ in one.named_parameters()},
              3: {f"opt.state.{i}.exp_avg" for i, _ in enumerate(one.parameters())}}
    with ckptdelta.open(tmp_path / "store") as store:
        for step, state in states.items():
            store.save(state, run="a", step=step)
            store.export_checkpoint(tmp_path / str(step), run="a", step=step)
            found = dcp.FileSystemReader(tmp_path / str(step)).read_metadata().state_dict_metadata
            assert {key for key in found if key.endswith(("exp_avg", "momentum_buffer"))} == wanted[step]


def test_a_trainer_resumes_from_an_exported_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    tokens = torch.arange(16) % 50
    data = [{"input_ids": tokens.roll(i), "labels": tokens.roll(i)} for i in range(64)]

    def train(folder, resume=None):
        args = transformers.TrainingArguments(output_dir=folder, max_steps=6, save_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3)
        transformers.set_seed(3)
        trainer = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train(tmp_path / "whole")
    with ckptdelta.open(tmp_path / "store") as store:
        store.import_checkpoints(tmp_path / "whole" / "checkpoint-3", run="a")
        store.export_checkpoint(tmp_path / "checkpoint-3", run="a")
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    train(tmp_path / "resumed", str(tmp_path / "checkpoint-3"))
    last = [safetensors.load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("whole", "resumed")]
    assert_same(last[1], last[0])
    assert sorted(p.name for p in (tmp_path / "checkpoint-3").iterdir()) == sorted(p.name for p in (tmp_path / "whole" / "checkpoint-3").iterdir())


# -------------------------------------------------------------------------------------------------------------- command


def command(*arguments, code=0, **env):
    done = subprocess.run([sys.executable, "-m", "ckptdelta", *map(str, arguments)], env=environment(**env), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_command(tmp_path):
    for step in (1, 2):
        torch.save({"w": torch.full((1000,), float(step)), "step": step}, tmp_path / f"ckpt_{step}.pt")
    store = tmp_path / "store"
    assert "ckpt_1.pt (torch.save) -> a@1" in command("import", store, tmp_path / "ckpt_1.pt", "-r", "a", "-n")
    assert not store.exists()
    assert "a@1: base" in command("import", store, tmp_path / "ckpt_1.pt", "--run", "a")
    found = json.loads(command("import", tmp_path / "ckpt_2.pt", "--run", "a", "--json", CKPTDELTA_STORE=str(store)))
    assert [c["step"] for c in found["checkpoints"]] == [2] and not found["dry_run"]
    assert "step 2" in command("import", store, tmp_path / "ckpt_2.pt", "--run", "a", code=1)
    assert "all its steps already" in command("import", store, tmp_path, "--run", "a")
    assert "neither a file" in command("import", store, __file__, "--run", "a", "--step", "9", code=4)
    assert "layout" in command("import", store, "--layout", tmp_path / "none", tmp_path / "x.safetensors", "--run", "a", "--step", "3", code=3)
    assert "required" in command("import", store, tmp_path / "ckpt_2.pt", code=2)
