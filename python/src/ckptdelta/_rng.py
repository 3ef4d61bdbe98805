"""States of the random number generators that training draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

from . import _torch
from ._call import logger


class RandomState:
    """The generators of random, numpy and torch (CPU and all CUDA devices) as one object with a state.

    A generator of a library that the process has not imported is left out. Those of CUDA are taken once torch has begun to use it.
    """

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"python": random.getstate()}
        numpy, torch = sys.modules.get("numpy"), _torch.loaded()
        if numpy is not None and hasattr(numpy, "random"):
            found["numpy"] = numpy.random.get_state()
        if torch is not None:
            found["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        if "numpy" in state:
            try:
                import numpy
            except ImportError:
                logger.warning("the random state of numpy is not restored: numpy cannot be imported here")
            else:
                numpy.random.set_state(state["numpy"])
        if "torch" in state:
            _torch.load_torch("rng.torch").set_rng_state(state["torch"])
        if "cuda" in state:
            _restore_cuda(state["cuda"])


def _restore_cuda(states: list[Any]) -> None:
    torch = _torch.load_torch("rng.cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count != len(states):
        logger.warning("the checkpoint has random states of %d CUDA devices, this process has %d: those in both are restored", len(states), count)
    for device, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state, device)
