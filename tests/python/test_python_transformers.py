"""Trainers of transformers that save into a store. What is compared is compared bit for bit with a plain Trainer that nobody interrupted."""

import contextlib
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support_python import ROOT, ckptdelta, environment, needs_package, needs_torch, torch
from support_training import no_room

pytestmark = [needs_package, needs_torch]
pytest.importorskip("torch", reason="torch cannot be imported here")
transformers = pytest.importorskip("transformers", reason="transformers cannot be imported here")
pytest.importorskip("accelerate", reason="accelerate cannot be imported here")

from support_transformers import Interrupt, arguments, data, gpt2, llama, logs, same_weights  # noqa: E402

if ckptdelta is not None:
    from ckptdelta.transformers import CheckpointCallback, Trainer, with_store


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def make(store, tmp_path, *, run="gpt", model=gpt2, callbacks=(), kind=None, settings=None, **more):
    return (kind or Trainer)(model=model(), args=arguments(tmp_path / "out", **settings or {}), train_dataset=data(40), eval_dataset=data(8),
                             callbacks=list(callbacks), store=store, run=run, **more)


def plain(tmp_path, *, model=gpt2, callbacks=(), settings=None):
    return transformers.Trainer(model=model(), args=arguments(tmp_path / "plain", **settings or {}), train_dataset=data(40),
                                eval_dataset=data(8), callbacks=list(callbacks))


def interrupted(trainer, resume=None):
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(store, run="gpt"):
    return [c.step for c in store.checkpoints(run)]


# --------------------------------------------------------------------------------------------------------------- resume


EXACT = {
    "accumulation": (gpt2, {}),                                                        # 15 steps: 5 for each epoch
    "unlogged losses": (llama, {"logging_steps": 4, "save_steps": 3, "lr_scheduler_type": "cosine"}),
    "end of an epoch": (llama, {"save_strategy": "epoch", "logging_steps": 1}),
    "each step": (gpt2, {"save_steps": 1, "logging_steps": 1}),
    "plateau": (gpt2, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}),
    "sgd": (gpt2, {"optim": "sgd", "max_grad_norm": 0.0}),
}


@pytest.mark.parametrize("case", EXACT)
def test_a_resumed_training_ends_as_one_that_nobody_interrupted(store, tmp_path, case):
    model, settings = EXACT[case]
    whole = plain(tmp_path, model=model, settings={**settings, "save_strategy": "no"})
    whole.train()
    interrupted(make(store, tmp_path, model=model, settings=settings, callbacks=[Interrupt(8)]), resume=True)
    assert steps(store)[-1] < 9 and store.verify()
    resumed = make(store, tmp_path, model=model, settings=settings)
    result = resumed.train(resume_from_checkpoint=True)
    assert same_weights(whole.model, resumed.model)
    assert logs(resumed) == logs(whole)
    assert result.global_step == 15 == store.find(run="gpt").step
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_of_adapters_what_is_trained_is_saved(store, tmp_path):
    peft = pytest.importorskip("peft", reason="peft cannot be imported here")

    def model():
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        return peft.get_peft_model(gpt2(), config)
    whole = plain(tmp_path, model=model, settings={"save_strategy": "no"})
    whole.train()
    interrupted(make(store, tmp_path, model=model, callbacks=[Interrupt(8)]))
    resumed = make(store, tmp_path, model=model)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(resumed.model, whole.model) and logs(resumed) == logs(whole)
    names = {t.name for t in store.tensors(run="gpt")}
    assert all("lora_" in name or name.startswith(("rng_state.", "files.")) for name in names)
    assert "optimizer.state.model.base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight.exp_avg" in names
    assert "files.adapter_config.json" in names


def test_names_roles_and_predicted_steps(store, tmp_path):
    make(store, tmp_path, settings={"save_steps": 1, "max_steps": 4}).train()
    found = {t.name: t for t in store.tensors(run="gpt")}
    assert found["optimizer.state.model.transformer.wte.weight.exp_avg"].role == "exp_avg"
    assert found["model.transformer.wte.weight"].role == "weight" and "model.lm_head.weight" not in found
    by_role = {role: {n for n, t in found.items() if t.role == role} for role in ("weight", "exp_avg", "exp_avg_sq", "other")}
    assert len(by_role["weight"]) == len(by_role["exp_avg"]) == len(by_role["exp_avg_sq"]) == len(list(gpt2().parameters()))
    assert all(n.startswith(("rng_state.", "files.")) for n in by_role["other"])
    assert "step" in {t.method for t in found.values()}
    state = store.state_dict(run="gpt", only=["trainer_state", "training_args", "scheduler"])
    assert state["trainer_state"]["global_step"] == 4 and state["training_args"]["learning_rate"] == 1e-2
    assert state["scheduler"]["last_epoch"] == 4


def test_lossy_saves_and_other_options(store, tmp_path):
    trainer = make(store, tmp_path, fidelity="near", save_options={"effort": 1, "max_lag": 0, "role_fidelity": {"weight": "exact"}},
                   settings={"max_steps": 6})
    trainer.train()
    assert store.find(run="gpt").fidelity == "near"
    again = make(store, tmp_path, fidelity="near", settings={"max_steps": 9})
    again.train(resume_from_checkpoint=True)
    assert [(c.step, c.lossy_resumes) for c in store.checkpoints("gpt")] == [(3, 0), (6, 0), (9, 1)]
    with pytest.raises(ckptdelta.InvalidError, match="save_options has every: it may have device_bytes, device_reference_bytes, effort"):
        make(store, tmp_path, save_options={"every": 3})


def test_saves_record_the_metric(store, tmp_path):
    trainer = make(store, tmp_path, settings={"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"})
    trainer.train()
    logged = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert {c.step: (c.metric_name, c.metric) for c in store.checkpoints("gpt")} == {step: ("loss", loss) for step, loss in logged.items()}


def test_callbacks_get_their_state_back(store, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "greater_is_better": True}  # the loss gets smaller
    stopping = transformers.EarlyStoppingCallback
    whole = plain(tmp_path, settings={**settings, "save_strategy": "no"}, callbacks=[stopping(3)])
    whole.train()
    assert 6 < whole.state.global_step < 15
    settings["load_best_model_at_end"] = False
    interrupted(make(store, tmp_path, settings=settings, callbacks=[stopping(3), Interrupt(8)]))
    resumed = make(store, tmp_path, settings={**settings, "restore_callback_states_from_checkpoint": True}, callbacks=[stopping(3)])
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step and same_weights(resumed.model, whole.model)


# ---------------------------------------------------------------------------------------------- what is resumed from


def test_the_same_command_starts_and_restarts(store, tmp_path):
    make(store, tmp_path, settings={"max_steps": 4}).train(resume_from_checkpoint=True)
    assert steps(store) == [3, 4]
    make(store, tmp_path, settings={"max_steps": 6}).train(resume_from_checkpoint=True)
    assert steps(store) == [3, 4, 6]


def test_a_training_does_not_start_over_in_a_run_that_has_gone_farther(store, tmp_path):
    make(store, tmp_path, settings={"max_steps": 3}).train()
    other = make(store, tmp_path, settings={"max_steps": 6})
    with pytest.raises(ckptdelta.ExistsError, match=r"up to step 3, and training begins at step 0: resume \(resume_from_checkpoint=True\)"):
        other.train()
    assert other.state.global_step == 0 and steps(store) == [3]


@pytest.mark.parametrize("wanted", ["3", "gpt@3"])
def test_an_older_step_goes_on_in_a_branch(store, tmp_path, wanted):
    first = make(store, tmp_path, settings={"max_steps": 9})
    first.train()
    again = make(store, tmp_path, settings={"max_steps": 9})
    again.train(resume_from_checkpoint=wanted)
    assert same_weights(first.model, again.model) and steps(store) == [3, 6, 9] and steps(store, "gpt~2") == [6, 9]
    make(store, tmp_path, settings={"max_steps": 12}).train(resume_from_checkpoint=True)   # from the branch
    assert steps(store, "gpt~2") == [6, 9, 12]
    make(store, tmp_path, settings={"max_steps": 12}).train(resume_from_checkpoint="gpt@9")
    assert steps(store) == [3, 6, 9, 12] and steps(store, "gpt~3") == []


def test_a_checkpoint_of_another_run_begins_a_new_one(store, tmp_path):
    first = make(store, tmp_path, settings={"max_steps": 6})
    first.train()
    again = make(store, tmp_path, run="other", settings={"max_steps": 6})
    again.train(resume_from_checkpoint="gpt@3")
    assert same_weights(first.model, again.model) and steps(store, "other") == [6]
    with pytest.raises(ckptdelta.ExistsError, match="run other in the store .* has checkpoints up to step 6"):
        make(store, tmp_path, run="other", settings={"max_steps": 6}).train(resume_from_checkpoint="gpt@3")


def test_a_training_changes_over_from_folders_and_back(store, tmp_path):
    settings = {"max_steps": 12, "logging_steps": 3}
    whole = plain(tmp_path, settings={**settings, "save_strategy": "no"})
    whole.train()
    interrupted(transformers.Trainer(model=gpt2(), args=arguments(tmp_path / "out", **settings), train_dataset=data(40),
                                     callbacks=[Interrupt(4)]))
    interrupted(make(store, tmp_path, settings=settings, callbacks=[Interrupt(8)]), resume=True)   # the run has nothing: from the folder
    assert steps(store) == [6] and (tmp_path / "out/checkpoint-3").is_dir()
    store.export_checkpoint(tmp_path / "folder", run="gpt")
    back = plain(tmp_path, settings={**settings, "save_strategy": "no"})
    back.train(resume_from_checkpoint=str(tmp_path / "folder"))
    assert same_weights(back.model, whole.model) and logs(back) == logs(whole)
    by_path = make(store, tmp_path, run="by-path", settings=settings)
    by_path.train(resume_from_checkpoint=str(tmp_path / "folder"))
    assert same_weights(by_path.model, whole.model) and steps(store, "by-path") == [9, 12]


def test_an_imported_folder_is_resumed_from(store, tmp_path):
    settings = {"max_steps": 6, "logging_steps": 3}
    whole = plain(tmp_path, model=llama, settings=settings)
    whole.train()
    store.import_checkpoints(tmp_path / "plain/checkpoint-3", run="gpt")
    resumed = make(store, tmp_path, model=llama, settings=settings)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(resumed.model, whole.model) and logs(resumed) == logs(whole) and steps(store) == [3, 6]


def test_without_optimizer_states(store, tmp_path, caplog):
    make(store, tmp_path, settings={"max_steps": 3, "save_only_model": True}).train()
    assert not [t.name for t in store.tensors(run="gpt") if t.name.startswith(("optimizer", "rng"))]
    make(store, tmp_path, settings={"max_steps": 6}).train(resume_from_checkpoint=True)
    assert "gpt@3 has no optimizer and no scheduler: training goes on with new ones" in caplog.text
    assert "no random state of rank 0 of 1" in caplog.text and steps(store) == [3, 6]


def test_what_cannot_be_resumed_from(store, tmp_path):
    make(store, tmp_path, settings={"max_steps": 4}).train()
    trainer = make(store, tmp_path, settings={"max_steps": 6})
    for wanted, kind, text in ((5, ckptdelta.NotFoundError, "run gpt has no checkpoint at step 5: it has 3, 4"),
                               ("nothing@3", ckptdelta.NotFoundError, "nothing"),
                               ("no/such/folder", ckptdelta.NotFoundError, "neither a folder nor a checkpoint of a store, such as gpt@100"),
                               (str(tmp_path), ValueError, "Can't find a valid checkpoint")):
        with pytest.raises(kind, match=text):
            trainer.train(resume_from_checkpoint=wanted)
    store.save({"model": gpt2()}, run="own", step=1)
    with pytest.raises(ckptdelta.InvalidError, match="own@1 has no member trainer_state, so no Trainer saved it"):
        trainer.train(resume_from_checkpoint="own@1")
    with pytest.raises(ckptdelta.MismatchError, match="the checkpoint does not have it"):
        make(store, tmp_path, model=llama).train(resume_from_checkpoint=True)
    assert steps(store) == [3, 4]


def test_a_damaged_checkpoint_is_an_error_and_an_older_one_is_not(store, tmp_path):
    first = make(store, tmp_path, settings={"max_steps": 6})
    first.train()
    newest = max((p for p in Path(store.path).rglob("*") if p.is_file() and "data" in p.parts), key=lambda p: (p.stat().st_mtime_ns, p.stat().st_size))
    data_of_it = bytearray(newest.read_bytes())
    middle = len(data_of_it) // 2
    data_of_it[middle:middle + 64] = bytes(64)
    newest.chmod(0o600)
    newest.write_bytes(data_of_it)
    assert not store.verify(run="gpt", step=6) and store.verify(run="gpt", step=3)
    with pytest.raises(ckptdelta.CorruptError):
        make(store, tmp_path, settings={"max_steps": 6}).train(resume_from_checkpoint=True)
    again = make(store, tmp_path, settings={"max_steps": 6})
    again.train(resume_from_checkpoint=3)
    assert same_weights(first.model, again.model)


# ------------------------------------------------------------------------------------------------ retention, best model


@pytest.mark.parametrize("limit, kept", [(1, [12, 15]), (2, [12, 15]), (3, [9, 12, 15])])
def test_save_total_limit(store, tmp_path, caplog, limit, kept):
    class Look(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            there[state.global_step] = steps(store)
    there = {}
    make(store, tmp_path, callbacks=[Look()], settings={"save_total_limit": limit}).train()
    assert steps(store) == kept and store.verify()
    assert 3 not in there[15]                          # while it trains, too
    assert "not deleted" not in caplog.text  # no deletion has waited for the lock of a save in vain


def test_suspect_checkpoints_do_not_push_out_healthy_ones(store, tmp_path):
    class Poison(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model, **_):
            if state.global_step == 7:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
    make(store, tmp_path, callbacks=[Poison()], settings={"save_total_limit": 2}).train()
    assert [(c.step, c.suspect) for c in store.checkpoints("gpt")] == [(3, False), (6, False), (15, True)]
    make(store, tmp_path, settings={"save_total_limit": 1}).train(resume_from_checkpoint=True)
    assert steps(store) == [3, 6, 15] and steps(store, "gpt~2") == [12, 15]


class Scores(transformers.TrainerCallback):
    """Makes a step the best one."""

    def __init__(self, scores):
        self.scores = scores

    def on_evaluate(self, args, state, control, metrics, **_):
        metrics["eval_score"] = self.scores[state.global_step]


BEST = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}


@pytest.mark.parametrize("limit, kept", [(1, [6, 12, 15]), (4, [6, 9, 12, 15])])
def test_the_best_model_is_kept_and_loaded(store, tmp_path, limit, kept):
    scores = Scores({3: 1.0, 6: 3.0, 9: 2.0, 12: 0.0, 15: 2.5})
    trainer = make(store, tmp_path, callbacks=[scores], settings={**BEST, "save_total_limit": limit})
    trainer.train()
    assert steps(store) == kept and trainer.state.best_model_checkpoint == "gpt@6" and trainer.state.best_metric == 3.0
    best = store.state_dict(run="gpt", step=6, only="model")["model"]
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())


def committed_when_the_best_is_loaded(monkeypatch, saves):
    """The last save may commit when everything is copied, and so must do so here, before other values are written. Returns its steps."""
    found, load = [], transformers.Trainer._load_best_model

    def loads(self):
        deadline = time.monotonic() + 20
        while saves().last.step < self.state.global_step and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(saves().last.step)
        return load(self)
    monkeypatch.setattr(transformers.Trainer, "_load_best_model", loads)
    return found


def test_the_last_save_is_copied_before_the_best_model_is_loaded_from_a_folder(store, tmp_path, monkeypatch):
    settings, scores = {**BEST, "save_steps": 1, "eval_steps": 1}, {1: 9.0, 2: 1.0, 3: 2.0, 4: 3.0}
    before = transformers.Trainer(model=gpt2(), args=arguments(tmp_path / "out", **settings, max_steps=2), train_dataset=data(40),
                                  eval_dataset=data(8), callbacks=[Scores(scores)])
    before.train()
    trainer = make(store, tmp_path, callbacks=[Scores(scores)], settings={**settings, "max_steps": 4})
    found = committed_when_the_best_is_loaded(monkeypatch, lambda: trainer._saves)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert found == [4] and trainer.state.best_model_checkpoint.endswith("checkpoint-1")


def test_the_last_save_of_a_callback_is_copied_before_the_best_model_is_loaded(store, tmp_path, monkeypatch):
    callback = CheckpointCallback(store, "gpt")
    trainer = plain(tmp_path, callbacks=[Scores({1: 9.0, 2: 1.0, 3: 2.0}), callback],
                    settings={**BEST, "save_steps": 1, "eval_steps": 1, "max_steps": 3})
    found = committed_when_the_best_is_loaded(monkeypatch, lambda: callback._saves)
    trainer.train()
    assert found == [3] and trainer.state.best_model_checkpoint.endswith("checkpoint-1")


def test_the_best_model_is_one_that_was_saved(store, tmp_path):
    """Evaluated at every step and saved at every second one. Step 5 is the best, and was not saved."""
    scores = Scores({step: {4: 5.0, 5: 9.0}.get(step, 1.0) for step in range(1, 16)})
    trainer = make(store, tmp_path, callbacks=[scores], settings={**BEST, "eval_steps": 1, "save_steps": 2, "save_total_limit": 2})
    trainer.train()
    assert trainer.state.best_global_step == 5 and trainer.state.best_model_checkpoint == "gpt@4"
    assert steps(store)[0] == 4 and len(steps(store)) == 3
    best = store.state_dict(run="gpt", step=4, only="model")["model"]
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())


def test_what_is_resumed_from_stays_until_there_is_a_newer_one(store, tmp_path):
    make(store, tmp_path, callbacks=[Scores({3: 0.0, 6: 1.0, 9: 0.0, 12: 0.0, 15: 0.0})], settings=BEST).train()
    settings = {**BEST, "save_total_limit": 2}
    scores = Scores({9: 7.0, 12: 1.0, 15: 2.0})
    resumed = make(store, tmp_path, callbacks=[scores], settings=settings)
    resumed.train(resume_from_checkpoint=6)
    assert steps(store) == [3, 6, 9, 12, 15] and steps(store, "gpt~2") == [9, 12, 15]
    assert resumed.state.best_model_checkpoint == "gpt~2@9"
    best = store.state_dict(run="gpt~2", step=9, only="model")["model"]
    assert all(torch.equal(best[name], value) for name, value in resumed.model.state_dict().items())
    assert store.verify()


def test_the_best_model_is_known_after_a_resume(store, tmp_path):
    scores = Scores({3: 1.0, 6: 3.0, 9: 2.0, 12: 0.0, 15: 2.5})
    interrupted(make(store, tmp_path, callbacks=[scores, Interrupt(13)], settings={**BEST, "save_total_limit": 1}))
    assert steps(store) == [6, 9, 12]
    trainer = make(store, tmp_path, callbacks=[scores], settings={**BEST, "save_total_limit": 1})
    (tmp_path / "out/checkpoint-1").mkdir(parents=True)     # an old folder is no checkpoint of this training
    trainer.train(resume_from_checkpoint=True)
    best = store.state_dict(run="gpt", step=6, only="model")["model"]
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())
    assert steps(store) == [6, 12, 15] and (tmp_path / "out/checkpoint-1").is_dir()
    done = make(store, tmp_path, callbacks=[scores], settings={**BEST, "save_total_limit": 1})
    done.train(resume_from_checkpoint=True)                 # from the end: no further save tells which is the best
    assert same_weights(done.model, trainer.model) and done.state.best_model_checkpoint == "gpt@6"


def test_a_pinned_checkpoint_stays(store, tmp_path):
    class Pin(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 5:
                trainer._saves.wait()
                subprocess.run([sys.executable, "-m", "ckptdelta", "pin", store.path, "gpt@3"], env=environment(), check=True)
    trainer = make(store, tmp_path, callbacks=[Pin()], settings={"save_total_limit": 2})
    trainer.train()
    assert steps(store) == [3, 12, 15]


def test_only_the_best_is_saved(store, tmp_path):
    scores = Scores({3: 1.0, 6: 3.0, 9: 2.0, 12: 4.0, 15: 2.5})
    trainer = make(store, tmp_path, callbacks=[scores], settings={**BEST, "save_strategy": "best"})
    trainer.train()
    assert steps(store) == [3, 6, 12] and trainer.state.best_model_checkpoint == "gpt@12"


# ------------------------------------------------------------------------------------------------------------- errors


class NoRoom(transformers.TrainerCallback):
    """From the second step on."""

    def __init__(self, store, room):
        self.store, self.room = store, room

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1:
            self.room.enter_context(no_room(self.store))


def test_the_failure_of_a_save_ends_the_training(store, tmp_path):
    with contextlib.ExitStack() as room, pytest.raises(ckptdelta.Error):
        make(store, tmp_path, callbacks=[NoRoom(store, room)], settings={"max_steps": 6}).train()
    assert steps(store) == []
    trainer = make(store, tmp_path, settings={"max_steps": 6})
    trainer.train(resume_from_checkpoint=True)
    assert steps(store) == [3, 6]


def test_another_exception_goes_before_the_failure_of_a_save(store, tmp_path, caplog):
    with contextlib.ExitStack() as room:
        interrupted(make(store, tmp_path, callbacks=[NoRoom(store, room), Interrupt(3)], settings={"save_steps": 2}))
    assert steps(store) == [] and "No such file or directory" in caplog.text


def test_sharded_models_are_refused(store, tmp_path):
    class Sharded(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = True
    with pytest.raises(ckptdelta.UnsupportedError, match="uses FSDP: save with ckptdelta.dcp"):
        make(store, tmp_path, kind=with_store(Sharded))


def test_the_store_may_be_a_path_and_must_be_writable(store, tmp_path):
    make(str(tmp_path / "new/store"), tmp_path, settings={"max_steps": 3}).train(resume_from_checkpoint=True)
    with ckptdelta.open(tmp_path / "new/store", readonly=True) as found:
        assert steps(found) == [3]
        with pytest.raises(ckptdelta.ReadOnlyError):
            make(found, tmp_path, settings={"max_steps": 6}).train(resume_from_checkpoint=True)


def test_without_transformers_the_error_says_what_is_needed():
    code = "import sys; sys.modules['transformers'] = None\nimport ckptdelta\ntry:\n    import ckptdelta.transformers\n" \
           "except ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)
    assert "needs the packages transformers, accelerate and torch" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------- other trainers, the callback


def test_other_trainers(store, tmp_path):
    kind = with_store(transformers.Seq2SeqTrainer)
    assert issubclass(kind, transformers.Seq2SeqTrainer) and kind.__name__ == "Seq2SeqTrainer" and with_store(kind) is kind

    @with_store
    class Mine(transformers.Trainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
            return self.optimizer

    for run, trainer in (("seq", kind), ("mine", Mine)):
        of_kind = transformers.Seq2SeqTrainingArguments if run == "seq" else transformers.TrainingArguments
        trainer(model=gpt2(), args=arguments(tmp_path / "out", kind=of_kind, max_steps=6), train_dataset=data(40), store=store, run=run).train()
        assert steps(store, run) == [3, 6]
    assert "optimizer.state.model.transformer.wte.weight.momentum_buffer" in {t.name for t in store.tensors(run="mine")}
    with pytest.raises(ckptdelta.InvalidError, match="takes a subclass of transformers.Trainer"):
        with_store(torch.nn.Module)


@pytest.mark.parametrize("instead", [False, True])
def test_the_callback(store, tmp_path, instead):
    whole = plain(tmp_path, settings={"save_strategy": "no", "logging_steps": 3})
    whole.train()
    settings = {"logging_steps": 3, "save_total_limit": 2}
    callback = CheckpointCallback(store, "gpt", instead=instead)
    first = plain(tmp_path, settings=settings, callbacks=[callback, Interrupt(11)])
    assert callback.restore(first) is None
    interrupted(first)
    callback._saves.end()
    folders = sorted(p.name for p in (tmp_path / "plain").glob("checkpoint-*"))
    assert folders == ([] if instead else ["checkpoint-6", "checkpoint-9"])
    for folder in folders:
        os.rename(tmp_path / "plain" / folder, tmp_path / folder)
    callback = CheckpointCallback(store, "gpt", instead=instead)
    resumed = plain(tmp_path, settings=settings, callbacks=[callback])
    path = callback.restore(resumed)
    assert path.endswith("/checkpoint-9") and path == callback.restore(resumed)
    resumed.train(resume_from_checkpoint=path)
    assert same_weights(resumed.model, whole.model) and steps(store) == [12, 15]
    assert [e for e in logs(resumed) if e["step"] > 9] == [e for e in logs(whole) if e["step"] > 9]
    # An older step goes on in a branch, whose checkpoints are others than those of the same step before.
    callback = CheckpointCallback(store, "gpt", instead=True)
    branch = plain(tmp_path, settings={**settings, "max_steps": 15}, callbacks=[callback])
    branch.train(resume_from_checkpoint=callback.restore(branch, 12))
    assert steps(store) == [12, 15] and steps(store, "gpt~2") == [15] and store.find(run="gpt~2").resumed_from == store.find(run="gpt", step=12).id
    newest = CheckpointCallback(store, "gpt")
    assert store.find(run="gpt~2").id in newest.restore(branch)
    with pytest.raises(ckptdelta.ExistsError, match=r"resume from callback.restore\(trainer\)"):
        plain(tmp_path, settings=settings, callbacks=[CheckpointCallback(store, "gpt")]).train()


# ------------------------------------------------------------------------------------------------------------- export


class Words:
    """Stands for a tokenizer."""

    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text('{"words": 100}')


@pytest.mark.parametrize("model", [gpt2, llama])
def test_export_of_a_trainers_checkpoint(store, tmp_path, model):
    trainer = make(store, tmp_path, model=model, settings={"max_steps": 3}, processing_class=Words(), data_collator=transformers.default_data_collator)
    trainer.train()
    assert str(store.export_hf(tmp_path / "hf", run="gpt")) == "gpt@3"
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded) is type(trainer.model) and same_weights(loaded, trainer.model)
    trainer.model.save_pretrained(tmp_path / "own")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()
    assert (tmp_path / "hf/config.json").read_text() == (tmp_path / "own/config.json").read_text()


@pytest.mark.parametrize("form", ["model", "config", "folder", "dict"])
def test_export_of_a_saved_module(store, tmp_path, form):
    model = gpt2().to(torch.bfloat16)
    store.save({"net": {"lm": model}, "step": 3}, run="a", step=3)
    model.save_pretrained(tmp_path / "own")
    like = {"model": model, "config": model.config, "folder": tmp_path / "own", "dict": model.config.to_dict()}[form]
    store.export_hf(tmp_path / "hf", member="net.lm", like=like, max_shard_size=5000)
    assert (tmp_path / "hf/model.safetensors.index.json").is_file() and len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert same_weights(loaded, model) and loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_export_of_an_imported_folder_and_of_a_bare_model(store, tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "own")
    store.import_checkpoints(tmp_path / "own", run="imported", step=1)
    store.save(model, run="bare", step=1)
    store.export_hf(tmp_path / "a", run="imported")
    store.export_hf(tmp_path / "b", run="bare", member="", like=model)
    for name in ("a", "b"):
        assert same_weights(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name), model)


def test_what_cannot_be_exported(store, tmp_path):
    model = gpt2()
    store.save({"model": model}, run="a", step=1)
    for options, kind, text in (
            ({}, ckptdelta.InvalidError, "no configuration of its model: pass the model or its config"),
            ({"like": llama()}, ckptdelta.MismatchError, "not those of a LlamaForCausalLM of this configuration: model.embed_tokens.weight is missing"),
            ({"like": torch.nn.Linear(2, 2)}, ckptdelta.UnsupportedError, "a Linear is not a model of transformers"),
            ({"like": transformers.GPT2Config()}, ckptdelta.UnsupportedError, "names no model: pass the model"),
            ({"like": {"model_type": "no such"}}, ckptdelta.InvalidError, "cannot be read by transformers"),
            ({"like": model, "max_shard_size": "much"}, ckptdelta.InvalidError, "transformers cannot write the model"),
            ({"like": model, "member": "net"}, ckptdelta.NotFoundError, "net"),
            ({"like": model, "step": 7}, ckptdelta.NotFoundError, "7")):
        with pytest.raises(kind, match=text):
            store.export_hf(tmp_path / "hf", **options)
        assert not [p for p in tmp_path.iterdir() if "hf" in p.name]
    (tmp_path / "hf").mkdir()
    with pytest.raises(ckptdelta.ExistsError):
        store.export_hf(tmp_path / "hf", like=model)


# --------------------------------------------------------------------------------------------------- ranks, the example


def test_ranks_with_copies_of_the_model(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
    started = [subprocess.Popen([sys.executable, str(ROOT / "tests/support/support_transformers.py"), str(tmp_path)], text=True,
                                env=environment(RANK=str(r), LOCAL_RANK=str(r), **common), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
               for r in (0, 1)]
    done = [(p.communicate(timeout=200)[0], p.returncode) for p in started]
    assert [status for _, status in done] == [0, 0], done
    with ckptdelta.open(tmp_path / "store", readonly=True) as store:
        whole, resumed = (store.state_dict(run=run, step=15, tensors="torch") for run in ("whole", "ranks"))
        assert steps(store, "ranks") == steps(store, "whole") == [3, 6, 9, 12, 15]
    assert all(torch.equal(whole["model"][name], resumed["model"][name]) for name in whole["model"])
    assert all(torch.equal(whole[rng]["cpu"], resumed[rng]["cpu"]) for rng in ("rng_state_0", "rng_state_1"))
    strip = [[{k: v for k, v in e.items() if k in ("step", "loss", "grad_norm", "learning_rate")} for e in s["trainer_state"]["log_history"]]
             for s in (whole, resumed)]
    assert strip[0] == strip[1] and len(strip[0]) > 5


def test_the_example(tmp_path, monkeypatch):
    program = str(ROOT / "examples/finetune_hf.py")
    options = ["--store", str(tmp_path / "store"), "--steps", "12", "--save-steps", "4"]
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [program, *options, *words])
        runpy.run_path(program, run_name="__main__")

    run("--run", "whole", "--export", str(tmp_path / "whole"))
    killed = subprocess.run([sys.executable, program, *options, "--run", "cut", "--die-at", "10"], env=environment(OMP_NUM_THREADS="1"),
                            capture_output=True, text=True, timeout=200)
    assert killed.returncode == -9, killed.stderr
    with ckptdelta.open(tmp_path / "store") as store:
        assert steps(store, "cut")[-1] in (4, 8)
    run("--run", "cut", "--export", str(tmp_path / "cut"))
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
