"""The state of a Trainer of transformers as members of a checkpoint.

The members are those of an imported checkpoint folder: model, optimizer, scheduler, scaler, rng_state, trainer_state, files. So a
Trainer can resume from an imported folder, and Store.export_checkpoint() makes a folder from which a plain Trainer resumes. There are
two more members: training_args, for people to read, and progress.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import _torch
from ._call import logger
from ._errors import InvalidError
from ._rng import RandomState

WEIGHT_FILES = (".safetensors", ".bin")


class Live:
    """A member whose value is read at each save."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def state_dict(self) -> Any:
        return self._read()

    def load_state_dict(self, state: Any) -> None:
        """Does nothing: the Trainer reads these members when it needs them."""


def plain_json(value: Any, what: str) -> Any:
    """The value after a round trip through JSON. Errors: InvalidError."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{what} cannot be stored as JSON, as a Trainer's checkpoint needs: {error}", path=what) from None


def trainer_state(state: Any) -> dict[str, Any]:
    """A TrainerState as transformers writes it to trainer_state.json. Errors: InvalidError (such as a callback's state that is no JSON)."""
    found: dict[str, Any] = plain_json(dataclasses.asdict(state), "trainer_state")
    return found


def arguments(args: Any) -> dict[str, Any]:
    """Training arguments, for people to read. Values that are not plain become text. Tokens are left out."""
    found: dict[str, Any] = json.loads(json.dumps(args.to_dict(), default=str))
    return found


def adapters_of(model: Any) -> Any:
    """Configurations of a model's adapters by name, if it has any of peft."""
    return getattr(_torch.unwrapped(model), "peft_config", None)


def model_member(model: Any) -> Any:
    """The model. If it has adapters of peft, only the trained parameters, as in a Trainer's folder: the base model has the rest."""
    if not adapters_of(model):
        return model
    return {name: p for name, p in _torch.unwrapped(model).named_parameters() if p.requires_grad}


def files_of(model: Any, processing_class: Any) -> dict[str, Any]:
    """The files that from_pretrained() needs besides the weights, such as config.json and the tokenizer's: tensors of bytes by file name."""
    with tempfile.TemporaryDirectory(prefix="ckptdelta-") as name:
        folder = Path(name)
        _write_config(model, folder)
        if processing_class is not None and hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        return bytes_of(folder)


def bytes_of(folder: Path) -> dict[str, Any]:
    """The files of a folder, except weights, as tensors of bytes."""
    torch = _torch.load_torch("files")
    return {f.name: torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in sorted(folder.iterdir())
            if f.is_file() and f.suffix not in WEIGHT_FILES and f.stat().st_size}


def _write_config(model: Any, folder: Path) -> None:
    """config.json and generation_config.json, as save_pretrained() of the model writes them, or adapter_config.json."""
    adapters = adapters_of(model)
    if adapters:
        next(iter(adapters.values())).save_pretrained(folder)
        return
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return
    try:
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        if getattr(model, "dtype", None) is not None:
            config.dtype = _torch.dtype_name(model.dtype)
        config.save_pretrained(folder)
        if hasattr(model, "can_generate") and model.can_generate():
            model.generation_config.save_pretrained(folder)
    except (ValueError, TypeError, OSError) as error:  # an invalid generation config, for example: a checkpoint can do without it
        logger.warning("the configuration of the model is not saved in checkpoints: %s", error)


def random_state(distributed: bool) -> dict[str, Any]:
    """States of random number generators in the form of a Trainer's rng_state.pth."""
    found = RandomState().state_dict()
    torch = _torch.load_torch("rng_state")
    state = {"python": found["python"], "numpy": found["numpy"], "cpu": found["torch"]}
    if "cuda" in found:
        state["cuda"] = found["cuda"] if distributed else torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    cuda = state.get("cuda")
    several = {"cuda": list(cuda)} if isinstance(cuda, (list, tuple)) else {}
    RandomState().load_state_dict({"python": state["python"], "numpy": state["numpy"], "torch": state["cpu"], **several})
    torch = _torch.load_torch("rng_state")
    if _torch.is_tensor(cuda) and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch inside accelerate's, whose own step() calls no hooks."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def writes_outside_steps(optimizer: Any) -> bool:
    """Does the optimizer also change parameters before and after an evaluation, as schedule-free optimizers do?"""
    return any(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def metric_of(state: Any, name: str | None) -> float | None:
    """The value that an evaluation at the current step has logged."""
    key = name if name is None or name.startswith("eval_") else f"eval_{name}"
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            return None
        if key in entry:
            return float(entry[key])
    return None
