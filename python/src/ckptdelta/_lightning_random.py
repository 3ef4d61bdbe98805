"""Adds the states of random number generators to checkpoints of Lightning, which leaves them out."""

from __future__ import annotations

import sys
from typing import Any

from ._call import logger
from ._lightning_io import load_lightning
from ._rng import RandomState
from ._torch import load_torch

_BASE: Any = load_lightning("callbacks").Callback


class RandomStates(_BASE):  # type: ignore[misc, unused-ignore]
    """A callback that puts the random number generators of Python, numpy and torch into each checkpoint, and restores them.

    Lightning's checkpoints do not have them. With this callback a training that was interrupted and resumed has the same losses, bit
    for bit, if it is deterministic by itself and the checkpoint was saved at the end of an epoch. Within an epoch Lightning does not
    restore the order of the samples. Every rank gets its own states back. Put it last among the callbacks: it restores the states in
    on_fit_start().

    Args:
        generators: other generators by name, such as the one that shuffles: ``RandomStates(shuffle=generator)``. They have the methods of
            torch.Generator.

    A generator that the checkpoint does not have stays as it is, and the logger ``ckptdelta`` has a warning.
    """

    def __init__(self, **generators: Any) -> None:
        super().__init__()
        self.generators = generators
        self._waiting: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Lightning calls it on each rank."""
        own = {"all": RandomState().state_dict(), "generators": {name: one.get_state() for name, one in self.generators.items()}}
        states: list[Any] = [own]
        distributed = _process_group()
        if distributed is not None:
            states = [None] * distributed.get_world_size()
            distributed.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._waiting = list(state_dict["ranks"])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        states, self._waiting = self._waiting, None
        if states is None:
            return
        if trainer.global_rank >= len(states):
            logger.warning("the checkpoint has random states of %d ranks: those of rank %d are not restored", len(states), trainer.global_rank)
            return
        found = states[trainer.global_rank]
        for name, generator in self.generators.items():
            if name in found["generators"]:
                generator.set_state(found["generators"][name])
            else:
                logger.warning("the checkpoint has no random state of the generator %s: it is not restored", name)
        RandomState().load_state_dict(found["all"])


def _process_group() -> Any:
    """torch.distributed if there are several processes, else None."""
    if "torch" not in sys.modules:
        return None
    distributed = load_torch("").distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return distributed if several else None
