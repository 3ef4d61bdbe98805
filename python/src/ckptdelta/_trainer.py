"""A Trainer of transformers whose checkpoints are in a store.

A Trainer passes the path of a checkpoint folder to the methods that load its parts. Here the folder is a temporary one that has only
trainer_state.json, and these methods load from the store. They are private to transformers, as are the attributes with losses that are
not logged yet; tests/python/test_python_transformers.py fails if they change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import _trainer_state as parts
from . import _trainer_saves as saves
from ._call import logger
from ._errors import Error, InvalidError, NotFoundError, StateError, UnsupportedError, class_of
from ._ranks import told
from ._store import Store
from ._trainer_saves import Saves
from ._types import Checkpoint, Fidelity

try:
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    from ._trainer_callback import Reports
except ImportError as error:
    raise ImportError(f"ckptdelta.transformers needs the packages transformers, accelerate and torch: {error}") from error

STATE_FILE = "trainer_state.json"
START_OVER = "resume (resume_from_checkpoint=True), or save to a new run (run=...)"


_Trainer: Any = object
"""The class that StoreMixin is mixed into. Attributes that StoreMixin does not define are the Trainer's."""


class StoreMixin(_Trainer):  # type: ignore[misc]
    """Lets a Trainer of transformers save into a store and resume from it. with_store() and Trainer are made with it.

    Args, besides those of the Trainer:
        store: an open store or the path of one, which is made if it is not there.
        run: the run that checkpoints belong to; its steps are the Trainer's global steps.
        fidelity: of the saves: ``"exact"``, ``"near"`` or ``"coarse"``.
        save_options: other arguments of Session: role_fidelity, effort, target_ratio, max_error, max_load_cost, parent,
            on_duplicate, snapshot_bytes, device_bytes, device_reference_bytes, max_lag.
        args: TrainingArguments say when to save. save_total_limit, load_best_model_at_end, save_only_model and metric_for_best_model
            mean the same as in transformers, but at least two checkpoints stay.

    Saves run in the background while training continues: see Session. train() returns when all are durable.

    Errors: UnsupportedError (FSDP, DeepSpeed, XLA, sagemaker: use ckptdelta.dcp), InvalidError, and those of open().
    """

    def __init__(self, *args: Any, store: Store | str | os.PathLike[str], run: str, fidelity: Fidelity = "exact",
                 save_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_parallelism()
        self.checkpoint_run = run
        self._saves = Saves(store, run, {"fidelity": fidelity, **(save_options or {})}, read_only=not self.is_world_process_zero())
        self._resumed: _Resumed | None = None
        self._files: dict[str, Any] = {}
        self._ranks: list[dict[str, Any]] = []
        self.add_callback(_Begin(self))
        if self.args.push_to_hub and str(getattr(self.args, "hub_strategy", "")).rpartition(".")[2].lower() != "end":
            self._tell("checkpoints in a store are not pushed to the hub: only the model at the end is (hub_strategy='end')", level=logging.WARNING)

    def _check_parallelism(self) -> None:
        kinds = {"FSDP": ("is_fsdp_enabled", "is_fsdp_xla_enabled"), "DeepSpeed": ("is_deepspeed_enabled",),
                 "a model that is sharded as it is loaded": ("is_distributed_loading_by_transformers",)}
        for kind, names in kinds.items():
            if any(getattr(self, name, False) for name in names):
                raise UnsupportedError(f"ckptdelta.transformers saves models of which each rank has a copy, and this Trainer uses {kind}: "
                                       "save with ckptdelta.dcp")

    @property
    def checkpoint_store(self) -> Store:
        """The store that checkpoints are saved in."""
        return self._saves.store

    # ---------------------------------------------------------------------------------------------------------- train

    def train(self, resume_from_checkpoint: str | os.PathLike[str] | int | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains, as the Trainer does.

        Args:
            resume_from_checkpoint: True: the newest checkpoint of the run or of a branch that continues it. If the run has none, the
                newest folder in output_dir, so that an existing training can move to a store. If there is no folder either, training
                starts from the beginning, so the same command starts and restarts. A number, also as a string: that step of the run;
                if the run has later steps, new saves go to a branch, such as ``gpt~2``. ``"RUN@STEP"``: a checkpoint, also of another
                run. The path of a folder: as in transformers.
            args, kwargs: as for train() of the Trainer.

        Returns: the result of the Trainer's train(), when all saves are durable.

        Errors: NotFoundError (no such checkpoint), ExistsError (training does not resume, and the run has later steps), CorruptError
        (pass an older step), MismatchError (another model), the failure of a save, and those of the Trainer.
        """
        self._resumed = None
        place = self._agreed(lambda: self._place_of(resume_from_checkpoint))
        with contextlib.ExitStack() as stack:
            path = place
            if isinstance(place, Checkpoint):
                self._resumed = _Resumed.read(self._saves.store, place, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptdelta-"))))
                path = self._resumed.folder
                self._tell("%s: training resumes from %s", self._saves.store.path, place)
            return super().train(path, *args, **kwargs)

    def _place_of(self, wanted: Any) -> Checkpoint | str | None:
        """The checkpoint or folder to resume from; None: training starts from the beginning. Errors: as for train()."""
        store, run = self._saves.store, self.checkpoint_run
        found: Checkpoint | str | None
        if wanted is None or wanted is False:
            self._refuse_to_start_over(0)
            return None
        if wanted is True:
            output = self.args.output_dir
            found = saves.find(store, run)
            if found is None and output and os.path.isdir(output):
                found = get_last_checkpoint(output)
            if found is None:
                logger.info("%s: run %s has no checkpoint yet: training begins", store.path, run)
            return found
        if isinstance(wanted, int) or (isinstance(wanted, str) and wanted.isdecimal() and not os.path.isdir(wanted)):
            return saves.find(store, run, int(wanted))
        path = str(os.fspath(wanted))
        if os.path.isdir(path):
            if os.path.isfile(os.path.join(path, STATE_FILE)):
                self._refuse_to_start_over(json.loads(Path(path, STATE_FILE).read_text())["global_step"])
            return path
        named = re.fullmatch(r"([^/@]+)@(\d+)", path)
        if named is None:
            raise NotFoundError(f"{path} is neither a folder nor a checkpoint of a store, such as {run}@100")
        return store.find(run=named[1], step=int(named[2]))

    def _refuse_to_start_over(self, step: int) -> None:
        if self.args.save_strategy != "no" and self._saves.options.get("on_duplicate", "error") == "error":
            saves.refuse_to_start_over(self._saves.store, self.checkpoint_run, step, START_OVER)

    def _tell(self, message: str, *args: Any, level: int = logging.INFO) -> None:
        """Logs what all processes would say alike, once."""
        if self.is_world_process_zero():
            logger.log(level, message, *args)

    def _agreed(self, decide: Callable[[], Any]) -> Any:
        """Runs a function on rank 0, and returns its result, or raises its error, on all ranks. An error of another package, which the
        other ranks may be unable to restore, is a StateError there."""
        if self.args.world_size <= 1:
            return decide()
        from accelerate.utils import broadcast_object_list
        result, failure = None, None
        if self.is_world_process_zero():
            try:
                result = decide()
            except Exception as error:  # otherwise the other ranks would wait for this one
                failure = error
        status = failure.status if isinstance(failure, Error) else StateError.status
        answer: list[Any] = [result, told(failure), status]
        broadcast_object_list(answer)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise class_of(answer[2])(f"rank 0: {answer[1]}")
        return answer[0]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._saves.end()  # the session of an earlier attempt, whose larger batch did not fit into memory
        self._files = {}
        try:
            result = super()._inner_training_loop(*args, **kwargs)
        except BaseException:
            self._saves.end(quietly=True)
            raise
        self._saves.end()
        if self.is_world_process_zero() and self.args.save_strategy != "no":
            self._saves.rotate(self.args.save_total_limit, self.state.best_model_checkpoint)
        return result

    # ----------------------------------------------------------------------------------------------------------- save

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        if trial is not None or getattr(self, "hp_search_backend", None) is not None:
            raise UnsupportedError("a search for hyperparameters starts many trainings, but a run is a single one: search with save_strategy='no'")
        self.store_flos()
        self._note_best()
        self._ranks = self._gathered({"rng": parts.random_state(self.args.world_size > 1), "loss": self._pending_loss()})
        self._agreed(self._save_present)

    def _save_present(self) -> None:
        self.state.stateful_callbacks = transformers.TrainerState(stateful_callbacks=self._stateful()).stateful_callbacks
        if not self._saves.begun:
            self._begin()
        self._saves.save(self.state.global_step, parts.metric_of(self.state, self.args.metric_for_best_model),
                         limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _begin(self, at: Checkpoint | None = None) -> None:
        state = self._parts()
        each_step = self.state.save_steps == 1 and self.args.save_strategy == "steps"
        self._saves.begin(state, metric=self.args.metric_for_best_model, each_step=each_step, at=at)
        if parts.writes_outside_steps(state.get("optimizer")):
            self._saves.fence_at_once()

    def _parts(self) -> dict[str, Any]:
        """The members of the state. Members that the Trainer does not have are None."""
        processing = getattr(self, "processing_class", None)
        self._files = self._files or parts.files_of(self.model, processing or getattr(self.data_collator, "tokenizer", None))
        found: dict[str, Any] = {"model": parts.model_member(self.model)}
        if not self.args.save_only_model:
            found |= {"optimizer": parts.inner_optimizer(self.optimizer), "scheduler": self.lr_scheduler,
                      "scaler": getattr(self.accelerator, "scaler", None)}
            found |= {_rng_name(rank, self.args.world_size): parts.Live(partial(self._random_state_of, rank))
                      for rank in range(self.args.world_size)}
        return {**found, "trainer_state": parts.Live(lambda: parts.trainer_state(self.state)), "progress": parts.Live(self._progress),
                "training_args": parts.Live(lambda: parts.arguments(self.args)), "files": self._files}

    def _random_state_of(self, rank: int) -> Any:
        return self._ranks[rank]["rng"]

    def _gathered(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Each rank's value, by rank."""
        if self.args.world_size <= 1:
            return [mine]
        from accelerate.utils import gather_object
        return list(gather_object([mine]))

    def _stateful(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, transformers.trainer_callback.ExportableState)]

    def _pending_loss(self) -> float:
        """The sum of losses since the last log."""
        loss = getattr(self, "_tr_loss", None)
        return float(loss.item()) if loss is not None else 0.0

    def _progress(self) -> dict[str, Any]:
        """Losses that are not logged yet. A Trainer's folder does not have them, so its first log after a resume covers only part of the steps."""
        return {"pending_losses": [rank["loss"] for rank in self._ranks], "last_logged": getattr(self, "_globalstep_last_logged", None)}

    def _note_best(self) -> None:
        """Names the best checkpoint. A step that was evaluated but not saved does not become it, as in transformers."""
        best, now = self.state.best_global_step, self.state.global_step
        if best:
            self.state.best_model_checkpoint = self._agreed(
                lambda: f"{self._saves.branch}@{best}" if best == now else self._saves.named(best) or self.state.best_model_checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        """Where the Trainer looks for checkpoint folders to delete. It must not find those in output_dir, which this training did not make."""
        return os.path.join(super()._get_output_dir(trial), "ckptdelta")

    # ----------------------------------------------------------------------------------------------------------- load

    def _is_resumed(self, checkpoint: Any) -> bool:
        return self._resumed is not None and checkpoint == self._resumed.folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model is loaded together with its optimizer, which knows its parameters by the model's names."""
        if not self._is_resumed(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_resumed(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self._resumed is not None
        found = self._resumed.checkpoint
        if self.is_world_process_zero() and self.args.save_strategy != "no":
            self._ranks = [{"rng": {}, "loss": 0.0} for _ in range(self.args.world_size)]
            self._begin(found)
            self._saves.go_on(found, lambda at: saves.load(self._saves.store, at, self._parts(), first=True))
        else:
            saves.load(self._saves.store, found, self._parts(), first=self.is_world_process_zero())

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._is_resumed(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._is_resumed(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        assert self._resumed is not None
        state = self._resumed.random_state(self.args.process_index, self.args.world_size)
        if state is None:
            logger.warning("%s has no random state of rank %d of %d: later random numbers will differ", self._resumed.checkpoint,
                           self.args.process_index, self.args.world_size)
        else:
            parts.set_random_state(state)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._saves.fence()  # no step of the optimizer has followed the last save
        if self._saves.placed(best) is None:  # a folder of the training that this one has resumed from
            super()._load_best_model()
            return
        found = self._agreed(lambda: self._saves.best(best))
        self._saves.store.load({"model": parts.model_member(self.model)}, run=found.run, step=found.step)
        self._tell("the best model is that of %s (%s %s)", found, self.args.metric_for_best_model, self.state.best_metric)


class _Resumed:
    """A checkpoint that training resumes from: the parts that a Trainer reads, besides objects with a state."""

    def __init__(self, store: Store, checkpoint: Checkpoint, folder: str, members: set[str]) -> None:
        self.store, self.checkpoint, self.folder, self._members = store, checkpoint, folder, members
        self.best: str | None = None
        self.progress: dict[str, Any] = {}

    @classmethod
    def read(cls, store: Store, checkpoint: Checkpoint, folder: Path) -> _Resumed:
        members = saves.members_of(store, checkpoint)
        if "trainer_state" not in members:
            raise InvalidError(f"{checkpoint} has no member trainer_state, so no Trainer saved it: load it with Store.load()")
        state = saves.member(store, checkpoint, "trainer_state")
        path = folder / f"checkpoint-{checkpoint.step}"
        path.mkdir()
        found = cls(store, checkpoint, str(path), members)
        found.best = state.get("best_model_checkpoint")
        if state.get("best_global_step") == checkpoint.step:  # the name was given before the save, which may have begun a branch
            found.best = str(checkpoint)
        if "progress" in members:
            found.progress = saves.member(store, checkpoint, "progress")
        # With a name, the Trainer would look for a folder of that name.
        (path / STATE_FILE).write_text(json.dumps({**state, "best_model_checkpoint": None}))
        return found

    def random_state(self, rank: int, world: int) -> Any:
        name = _rng_name(rank, world)
        return saves.member(self.store, self.checkpoint, name) if name in self._members else None


class _Begin(Reports):
    """Begins the session before the first step, which it has to see, and restores values that a Trainer resets after it has loaded a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._saves = trainer, trainer._saves

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        resumed, trainer = self._trainer._resumed, self._trainer
        if trainer.is_world_process_zero() and args.save_strategy != "no" and not trainer._saves.begun:
            trainer._begin()
        if resumed is None:
            return
        if resumed.best is not None and state.best_global_step:
            state.best_model_checkpoint = resumed.best
        losses, logged = resumed.progress.get("pending_losses", []), resumed.progress.get("last_logged")
        if getattr(trainer, "_tr_loss", None) is not None and logged is not None and len(losses) == args.world_size:
            trainer._tr_loss += losses[args.process_index]
            trainer._total_loss_scalar -= sum(losses) / len(losses)  # the mean at the end covers only steps after the resume
            trainer._globalstep_last_logged = logged


def _rng_name(rank: int, world: int) -> str:
    return "rng_state" if world <= 1 else f"rng_state_{rank}"


class Trainer(StoreMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer with its checkpoints in a store: see StoreMixin for store, run, fidelity and save_options::

        trainer = Trainer(model=model, args=args, train_dataset=dataset, store="runs", run="gpt")
        trainer.train(resume_from_checkpoint=True)
    """


def with_store(trainer: Any) -> Any:
    """A subclass of a Trainer whose checkpoints are in a store: ``with_store(trl.SFTTrainer)(..., store="runs", run="sft")``.

    It is also a decorator for classes. The subclass takes the arguments of the Trainer and those of StoreMixin.

    Errors: InvalidError (not a subclass of transformers.Trainer).
    """
    if not isinstance(trainer, type) or not issubclass(trainer, transformers.Trainer):
        raise InvalidError(f"with_store() takes a subclass of transformers.Trainer, not {trainer!r}")
    if issubclass(trainer, StoreMixin):
        return trainer
    return type(trainer.__name__, (StoreMixin, trainer), {"__doc__": trainer.__doc__, "__module__": trainer.__module__})
