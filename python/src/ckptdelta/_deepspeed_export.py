"""States as universal checkpoints of DeepSpeed, which jobs with ZeRO 1, 2 and 3 on any number of ranks load."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from . import _torch
from ._deepspeed import MASTER
from ._deepspeed_universal import OPTIMIZER_STATE, PARAMETERS, TENSOR
from ._errors import InvalidError, UnsupportedError
from ._names import is_optimizer_state

MODEL_FILE = "mp_rank_00_model_states.pt"
MODEL_FILE_3 = "zero_pp_rank_0_" + MODEL_FILE  # where a job with ZeRO 3 looks
OPTIMIZER_3 = "optimizer_state_dict"
VERSION = 0.2  # of the universal form, without the members that tensor parallel ranks need


def write(path: Path, state: Any) -> None:
    """Makes the folder. Errors: InvalidError (the state is not one of DeepSpeed), UnsupportedError."""
    _check(state)
    torch = _torch.load_torch("")
    module, optimizer = state["module"], state["optimizer"]
    states, told = optimizer["state"], optimizer.get("universal") or {}
    for name, slots in states.items():
        folder = path / PARAMETERS / name
        folder.mkdir(parents=True)
        for slot, value in slots.items():
            whole = _torch.is_tensor(value) and value.dim() > 0
            torch.save({"cat_dim": 0, **told.get(name, {}), TENSOR: value.clone()} if whole else value, folder / f"{slot}.pt")
    groups = [{**group, "params": [number]} for number, group in enumerate(optimizer["param_groups"])]
    shapes = [OrderedDict((name, states[name][MASTER].shape) for name in group["params"]) for group in optimizer["param_groups"]]
    rest = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups", "universal", "loss_scaler")}
    torch.save({**rest, **_scaler(optimizer), **_inner(states, groups), "param_groups": groups, "ds_version": state["ds_version"]},
               path / PARAMETERS / OPTIMIZER_STATE)
    model = {"universal_checkpoint_info": {"universal_checkpoint_version": VERSION}, "frozen_param_shapes": None, "frozen_param_fragments": None,
             **{key: value for key, value in state.items() if key != "ranks"}, "module": OrderedDict(module), "optimizer": None,
             "param_shapes": shapes}
    torch.save(model, path / MODEL_FILE)
    torch.save({**model, "module": OrderedDict()}, path / MODEL_FILE_3)  # DeepSpeed takes all weights from the parameters' files


def _check(state: Any) -> None:
    optimizer: Any = state.get("optimizer") if isinstance(state, dict) else None
    fits = isinstance(optimizer, dict) and is_optimizer_state(optimizer) and isinstance(state.get("module"), dict) and "ds_version" in state
    if not fits or not all(type(name) is str for name in optimizer["state"]):
        raise InvalidError("a checkpoint of DeepSpeed needs module, optimizer and ds_version, as its imports have them", path="optimizer")
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    for name in names:
        if not _torch.is_tensor(optimizer["state"].get(name, {}).get(MASTER)):
            raise InvalidError(f"a checkpoint of DeepSpeed needs the master weight of each parameter: {name} has none",
                               path=f"optimizer.state.{name}")
        if Path(name).name != name or name in ("", ".", ".."):
            raise InvalidError(f"{name!r} cannot be the name of a folder", path=f"optimizer.state.{name}")


def _inner(states: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What jobs with ZeRO 3 read of the optimizer, the number of its steps among it. They take one number for all parameters."""
    steps = [slots["step"] for slots in states.values() if "step" in slots]
    return {OPTIMIZER_3: {"state": {0: {"step": steps[0]}}, "param_groups": groups}} if steps else {}


def _scaler(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The dynamic loss scale, which is an object of DeepSpeed. A static one is in the configuration."""
    told = optimizer.get("loss_scaler")
    if not isinstance(told, dict) or not told.get("dynamic"):
        return {}
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise UnsupportedError("the checkpoint has a dynamic scale of the loss, which needs the package deepspeed: pip install deepspeed") from None
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    vars(scaler).update(told)
    return {"loss_scaler": scaler}
