"""A callback that saves checkpoints in a store, beside a plain Trainer's folders or in place of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from . import _trainer_state as parts
from . import _trainer_saves as saves
from ._errors import UnsupportedError
from ._store import Store
from ._trainer_saves import Saves
from ._types import Checkpoint, Fidelity


class Reports(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells `ckptdelta run` the steps and evaluations of a Trainer. A Trainer has no event for the begin of an evaluation."""

    _saves: Saves

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.evaluating(False)  # a program may evaluate in other ways than evaluate()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.trained(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.evaluating(True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.evaluating(False)

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.evaluating(False)


class CheckpointCallback(Reports):
    """Saves into a store whenever a plain Trainer saves::

        callback = CheckpointCallback("runs", "gpt")
        trainer = transformers.Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.restore(trainer))

    Prefer ckptdelta.transformers.Trainer or with_store() if you can choose the class. A callback cannot save the states of other
    callbacks, nor losses that are not logged yet, and needs a folder to load.

    Args:
        store: an open store or the path of one.
        run: as for Store.save().
        instead: the Trainer makes no folders. The callback then saves at the end of a step, before the Trainer logs and evaluates it, so the
            best model is not tracked: do not use it with load_best_model_at_end or save_strategy="best".
        fidelity, save_options: as for StoreMixin.

    Errors: InvalidError; when training begins, UnsupportedError (several ranks), ExistsError (the run has later steps), and those of open().
    """

    def __init__(self, store: Store | str | os.PathLike[str], run: str, *, instead: bool = False, fidelity: Fidelity = "exact",
                 save_options: Mapping[str, Any] | None = None) -> None:
        self._saves, self._instead = Saves(store, run, {"fidelity": fidelity, **(save_options or {})}), instead
        self._objects: dict[str, Any] = {}
        self._restored: Checkpoint | None = None

    def restore(self, trainer: Any, step: int | None = None) -> str | None:
        """Writes a checkpoint of the run as a folder in output_dir, from which any Trainer resumes.

        Args:
            step: None: the newest.

        Returns: the folder ``ckptdelta-restored/ID/checkpoint-STEP`` below output_dir, which is kept if it exists; None if the run has no
        checkpoint and step is None.

        Errors: NotFoundError, and those of Store.export_checkpoint().
        """
        found = saves.find(self._saves.store, self._saves.run, step)
        if found is None:
            return None
        self._restored = found
        # The id tells it from other checkpoints of that step: those of branches, and of what else trains in that folder.
        path = Path(trainer.args.output_dir, "ckptdelta-restored", found.id, f"checkpoint-{found.step}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._saves.store.export_checkpoint(path, run=found.run, step=found.step, form="transformers")
        return str(path)

    # -------------------------------------------------------------------------------------------------------- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if args.world_size > 1:
            raise UnsupportedError("CheckpointCallback saves the state of a single process: with more ranks use ckptdelta.transformers.Trainer "
                                   "(copies of the model) or ckptdelta.dcp (shards)")
        self._saves.end()
        self._objects = objects
        store, run = self._saves.store, self._saves.run
        found, self._restored = self._restored, None
        if found is None or found.step != state.global_step:
            found = saves.find(store, run, state.global_step) if state.global_step and self._saves.has(state.global_step) else None
        if found is None:
            saves.refuse_to_start_over(store, run, state.global_step, "resume from callback.restore(trainer), or save to a new run")
        self._saves.begin(self._parts(args, state), metric=args.metric_for_best_model, each_step=False, at=found)
        if found is not None:
            self._saves.go_on(found, lambda at: None)  # the Trainer has loaded it

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_step_end(args, state, control)
        self._take_over(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_over(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._instead:
            self._save(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saves.end()
        self._saves.rotate(args.save_total_limit, self._best(state))

    def _take_over(self, args: Any, state: Any, control: Any) -> None:
        if self._instead and control.should_save:
            control.should_save = False
            self._save(args, state)

    def _save(self, args: Any, state: Any) -> None:
        self._saves.save(state.global_step, parts.metric_of(state, args.metric_for_best_model), limit=args.save_total_limit,
                         best=self._best(state))
        if args.load_best_model_at_end or state.global_step >= state.max_steps:
            self._saves.fence()  # what writes to the model next may be no step of the optimizer

    def _best(self, state: Any) -> str | None:
        """The checkpoint beside the best folder of the Trainer."""
        found = re.search(r"checkpoint-(\d+)$", state.best_model_checkpoint or "")
        return f"{self._saves.branch}@{found[1]}" if found else None

    def _parts(self, args: Any, state: Any) -> dict[str, Any]:
        of = self._objects
        optimizer = of.get("optimizer")
        inner = parts.inner_optimizer(optimizer)
        if parts.writes_outside_steps(inner):
            self._saves.fence_at_once()
        return {"model": parts.model_member(of["model"]), "optimizer": inner, "scheduler": of.get("lr_scheduler"),
                "scaler": getattr(optimizer, "scaler", None),
                "rng_state": parts.Live(lambda: parts.random_state(False)), "trainer_state": parts.Live(lambda: parts.trainer_state(state)),
                "training_args": parts.Live(lambda: parts.arguments(args)),
                "files": parts.files_of(of["model"], of.get("processing_class"))}
