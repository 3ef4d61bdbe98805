"""States of an Accelerator in a store.

These are functions because accelerate's hooks cover only the weights. Accelerator.save_state() always pickles optimizers, schedulers
and random states into its folder, and these are most of the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ._call import Progress, logger
from ._catalog import Where
from ._errors import Error, MismatchError, StateError, UnsupportedError
from ._rng import RandomState
from ._store import Store, open
from ._types import Checkpoint, Fidelity, Role
from ._updates import Updates

WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_XPU", "MULTI_HPU", "MULTI_MUSA", "MULTI_SDAA")
PARTS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "dataloader": "_dataloaders", "custom": "_custom_objects"}


def save_state(accelerator: Any, store: str | os.PathLike[str] | Store, *, run: str, step: int, fidelity: Fidelity = "exact",
               role_fidelity: Mapping[Role, Fidelity] | None = None, base: bool = False, resumed_from: Where | None = None,
               on_duplicate: Literal["error", "same", "branch"] = "error", metric: tuple[str, float] | None = None,
               updates: Updates | None = None, progress: Progress | None = None) -> Checkpoint:
    """Saves the same objects as Accelerator.save_state(), as the checkpoint `step` of `run`: models, optimizers, schedulers, the
    scaler, samplers and stateful data loaders, registered objects, and the random states of all processes.

    Call it on all processes. The first one writes; the call returns, or fails, on all of them. Nothing is pickled. Tensors are
    named ``model.layer.weight`` and ``optimizer.state.model.layer.weight.exp_avg``; names of further models and optimizers begin
    with ``model_1`` and ``optimizer_1``.

    Hooks of register_save_state_pre_hook() are not called. The epoch of each data loader and the state of its shuffling generator
    are saved as well, which accelerate leaves out.

    Args:
        accelerator: its prepared and registered objects are saved.
        store: an open store or its directory, which is made if there is none. Only the first process opens it.
        run, step, fidelity, role_fidelity, base, resumed_from, on_duplicate, metric, updates, progress: as for Store.save().

    Returns: the checkpoint as committed.

    Errors: those of Store.save(); StateError on the other processes if the first one failed; UnsupportedError for FSDP, DeepSpeed,
    Megatron and XLA, where each process has only a part of the state: use ckptdelta.dcp.
    """
    _check_whole(accelerator)
    ranks = _gathered(accelerator, RandomState().state_dict())

    def save() -> Checkpoint:
        state = {**_state(accelerator), "rng": {str(rank): one for rank, one in enumerate(ranks)},
                 "accelerate": {"version": 1, "counts": _counts(accelerator), "step": accelerator.step, "processes": accelerator.num_processes}}
        opened = store if isinstance(store, Store) else open(store)
        try:
            return opened.save(state, run=run, step=step, fidelity=fidelity, role_fidelity=role_fidelity, base=base, resumed_from=resumed_from,
                               on_duplicate=on_duplicate, metric=metric, updates=updates, progress=progress)
        finally:
            if opened is not store:
                opened.close()

    return _on_first(accelerator, save)


def load_state(accelerator: Any, store: str | os.PathLike[str] | Store, *, run: str | None = None, step: int | None = None,
               progress: Progress | None = None) -> Checkpoint:
    """Loads a checkpoint of save_state() into the accelerator's objects, in place. Call it on all processes; each reads the store.

    Everything is compared before anything is written. Random states are restored for processes that the checkpoint has.
    Training continues after ``checkpoint.step`` with the same losses, bit for bit, if it is deterministic by itself and the
    checkpoint was saved at the end of an epoch. Within an epoch, skip the batches that were seen with
    accelerator.skip_first_batches(). Their order is the same if the loader shuffles with accelerate's use_seedable_sampler. But a
    loader draws a random number when it starts, so dropout differs.

    Args:
        accelerator: has the same models, optimizers, schedulers, loaders and registered objects as at the save.
        store: an open store or its directory.
        run, step, progress: as for Store.load().

    Returns: the checkpoint that was loaded.

    Errors: those of Store.load(); MismatchError (the accelerator has other numbers of models, optimizers and so on, or save_state() did
    not save the checkpoint); UnsupportedError, as for save_state().
    """
    _check_whole(accelerator)
    opened = store if isinstance(store, Store) else open(store, readonly=True)
    try:
        # All processes load the same checkpoint, even if another one is committed meanwhile.
        found = _on_first(accelerator, lambda: opened._to_load(run, step))
        known = _description(opened, found)
        _check_counts(accelerator, found, known)
        state: dict[str, Any] = _state(accelerator)
        own = str(accelerator.process_index)
        if accelerator.process_index < known["processes"]:
            state["rng"] = {own: RandomState()}
        else:
            logger.warning("%s has random states of %d processes: those of process %s are not restored", found, known["processes"], own)
        opened.load(state, run=found.run, step=found.step, progress=progress)
        accelerator.step = known["step"]
        return found
    finally:
        if opened is not store:
            opened.close()


# ------------------------------------------------------------------------------------------------------------- the state


class _Loader:
    """A prepared data loader as an object with a state."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def _generators(self) -> dict[str, Any]:
        """The generators that decide which sample comes next, by name."""
        sampler = self.loader.get_sampler() if hasattr(self.loader, "get_sampler") else getattr(self.loader, "sampler", None)
        found = {"loader": getattr(self.loader, "generator", None), "sampler": getattr(sampler, "generator", None),
                 "synchronized": getattr(self.loader, "synchronized_generator", None)}
        return {name: one for name, one in found.items() if hasattr(one, "get_state") and hasattr(one, "set_state")}

    def _is_stateful(self) -> bool:
        return bool(getattr(self.loader, "use_stateful_dataloader", False))

    def state_dict(self) -> dict[str, Any]:
        sampler = self.loader.get_sampler() if hasattr(self.loader, "get_sampler") else None
        return {"iteration": getattr(self.loader, "iteration", None), "epoch": getattr(sampler, "epoch", None),
                "initial_seed": getattr(sampler, "initial_seed", None),
                "generators": {name: one.get_state() for name, one in self._generators().items()},
                "loader": self.loader.state_dict() if self._is_stateful() else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sampler = self.loader.get_sampler() if hasattr(self.loader, "get_sampler") else None
        for target, key in ((self.loader, "iteration"), (sampler, "epoch"), (sampler, "initial_seed")):
            if state[key] is not None and hasattr(target, key):
                setattr(target, key, state[key])
        for name, generator in self._generators().items():
            if name in state["generators"]:
                generator.set_state(state["generators"][name])
        if state["loader"] is not None and self._is_stateful():
            self.loader.load_state_dict(state["loader"])


def _state(accelerator: Any) -> dict[str, Any]:
    """The objects of an accelerator, by names like those of accelerate's own files."""
    state: dict[str, Any] = {}
    for name, attribute in PARTS.items():
        for i, one in enumerate(getattr(accelerator, attribute)):
            key = name if i == 0 else f"{name}_{i}"
            state[key] = _Loader(one) if name == "dataloader" else _unwrapped(one) if name == "optimizer" else one
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _counts(accelerator: Any) -> dict[str, int]:
    return {**{name: len(getattr(accelerator, attribute)) for name, attribute in PARTS.items()}, "scaler": int(accelerator.scaler is not None)}


def _description(store: Store, found: Checkpoint) -> dict[str, Any]:
    try:
        known = store.state_dict(run=found.run, step=found.step, only="accelerate")["accelerate"]
        if known["version"] != 1:
            raise UnsupportedError(f"{found} was saved by a newer version of ckptdelta.accelerate ({known['version']}): update ckptdelta")
        return {"counts": dict(known["counts"]), "step": int(known["step"]), "processes": int(known["processes"])}
    except (LookupError, TypeError, ValueError):
        raise MismatchError(f"{found} was not saved by ckptdelta.accelerate: load it with Store.load()") from None


def _check_counts(accelerator: Any, found: Checkpoint, known: dict[str, Any]) -> None:
    own = _counts(accelerator)
    different = [f"{known['counts'].get(name, 0)} of {name}, not {count}" for name, count in own.items() if known["counts"].get(name, 0) != count]
    if different:
        raise MismatchError(f"{found} has {', '.join(different)}: prepare and register the same objects as when it was saved")


# --------------------------------------------------------------------------------------------------------- all processes


def _check_whole(accelerator: Any) -> None:
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind not in WHOLE:
        raise UnsupportedError(f"with {kind} each process has a part of the state: save it with ckptdelta.dcp, which takes the parts together")


def _gathered(accelerator: Any, own: Any) -> list[Any]:
    """Each process's value. These are objects of this training, which were never in a store."""
    if accelerator.num_processes == 1:
        return [own]
    distributed = _distributed()
    found: list[Any] = [None] * accelerator.num_processes
    distributed.all_gather_object(found, own)
    return found


def _on_first(accelerator: Any, work: Callable[[], Checkpoint]) -> Checkpoint:
    """Runs a function on the first process. All processes return its result, or fail with it."""
    if accelerator.num_processes == 1:
        return work()
    told: list[Any] = [None, None]
    failure: BaseException | None = None
    if accelerator.process_index == 0:
        try:
            told[0] = work()
        except BaseException as error:
            failure = error
            told[1] = error if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    _distributed().broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0] is None:
        raise StateError(f"the first process failed: {told[1]}") from (told[1] if isinstance(told[1], Error) else None)
    done: Checkpoint = told[0]
    return done


def _distributed() -> Any:
    import torch.distributed
    return torch.distributed
