"""The last step of an optimizer: what a save one step after another predicts its values from."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from . import _torch
from ._errors import InvalidError
from ._native import ffi, lib


@dataclass(frozen=True)
class Update:
    """Hyper-parameters of one step, as the library takes them. step: updates made, this one included."""

    kind: int
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    step: int = 1

    def native(self) -> Any:
        found = ffi.new("ckd_optimizer *")
        found.struct_size = ffi.sizeof("ckd_optimizer")
        for name, value in vars(self).items():
            setattr(found, name, value)
        return found


@dataclass
class _Followed:
    optimizer: Any
    hook: Any
    groups: list[Update | None]
    steps: int  # since the last save


class Updates:
    """Follows optimizers of torch, so that saves one step apart take a fraction of the bytes.

    The first moment determines the gradient, and the gradient the second moment and the weights, up to rounding. With the
    hyper-parameters of the step between two exact saves, little more than the first moment has to be stored. They are taken
    when the step has been made, before a scheduler changes the learning rate. Values are stored bit for bit whatever they say::

        updates = ckptdelta.Updates(optimizer)
        for step in range(1, steps + 1):
            ...
            optimizer.step()
            scheduler.step()
            store.save(state, run="gpt", step=step, updates=updates)

    It helps if exactly one step was made since the last save with it, for Adam, AdamW and SGD with momentum, in f32, if the model is
    in the same state. Otherwise a save is as without it. Loads of such checkpoints cost more; see ``max_load_cost`` of Store.save().

    Args:
        optimizers: of torch; each step of them from now on is noted, which takes microseconds.

    Errors: InvalidError (an object that calls no hooks after its steps).
    """

    def __init__(self, *optimizers: Any) -> None:
        self._followed: dict[int, _Followed] = {}
        for optimizer in optimizers:
            register = getattr(optimizer, "register_step_post_hook", None)
            if not callable(register):
                raise InvalidError(f"a {type(optimizer).__name__} calls no hooks after its steps: pass an optimizer of torch")
            self._followed[id(optimizer)] = _Followed(optimizer, register(self._after_step), [], 0)

    def __enter__(self) -> Updates:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Follows the optimizers no longer."""
        for followed in self._followed.values():
            followed.hook.remove()
        self._followed.clear()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        followed = self._followed.get(id(optimizer))
        if followed is not None:
            followed.groups = [_update_or_none(optimizer, group) for group in optimizer.param_groups]
            followed.steps += 1

    def groups_of(self, optimizer: Any) -> list[Update | None] | None:
        """The last step, group by group; None if there was not exactly one since the last save."""
        followed = self._followed.get(id(optimizer))
        return followed.groups if followed is not None and followed.steps == 1 else None

    def groups_for(self, optimizer: Any, state: Mapping[str, Any]) -> list[Update | None] | None:
        """The same for an optimizer and its state_dict(); the optimizer may be None, for one that is not in the state itself."""
        return self.groups_of(optimizer)

    def saved(self) -> None:
        """A checkpoint was committed: steps are counted from here on."""
        for followed in self._followed.values():
            followed.steps = 0


class EveryUpdate(Updates):
    """Follows all optimizers of the process, for a caller that sees only their states."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        super().__init__()
        self._seen: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        note = weakref.WeakMethod(self._after_step)
        hook = register_optimizer_step_post_hook(lambda *step: (found := note()) and found(*step))
        self._remove = weakref.finalize(self, hook.remove)

    def close(self) -> None:
        super().close()
        self._remove()
        self._seen.clear()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        followed = self._seen.setdefault(optimizer, _Followed(None, None, [], 0))
        followed.groups = [_update_or_none(optimizer, group) for group in optimizer.param_groups]
        followed.steps += 1

    def groups_of(self, optimizer: Any) -> list[Update | None] | None:
        followed = self._seen.get(optimizer)
        return followed.groups if followed is not None and followed.steps == 1 else None

    def groups_for(self, optimizer: Any, state: Mapping[str, Any]) -> list[Update | None] | None:
        """The optimizer is the one that has the first tensor of the state."""
        first = next((v for slots in state["state"].values() for v in slots.values() if _torch.is_tensor(v)), None)
        for found in list(self._seen) if first is not None else ():
            if any(v is first for slots in found.state.values() for v in slots.values()):
                return self.groups_of(found)
        return None

    def saved(self) -> None:
        for followed in self._seen.values():
            followed.steps = 0


def _number(value: Any) -> float:
    """NaN for what is not known without waiting for a device."""
    if _torch.is_tensor(value) and value.device.type != "cpu":
        return math.nan
    return float(value)


def _update_of(optimizer: Any, group: dict[str, Any]) -> Update | None:
    """The step of one group; None if the library cannot predict such a step."""
    optim = _torch.load_torch("").optim
    if group.get("maximize") or group.get("amsgrad"):
        return None
    if isinstance(optimizer, (optim.Adam, optim.AdamW)):  # a subclass may add masters or clipping; a wrong guess does no harm
        decoupled = isinstance(optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        beta1, beta2 = map(_number, group["betas"])
        found = Update(lib.CKD_ADAMW if decoupled else lib.CKD_ADAM, _number(group["lr"]), beta1, beta2, _number(group["eps"]),
                       _number(group["weight_decay"]))
    elif isinstance(optimizer, optim.SGD) and group["momentum"]:
        found = Update(lib.CKD_SGD, _number(group["lr"]), weight_decay=_number(group["weight_decay"]), momentum=_number(group["momentum"]),
                       dampening=_number(group["dampening"]), nesterov=bool(group["nesterov"]))
    else:
        return None
    numbers = [v for v in vars(found).values() if isinstance(v, float)]
    fine = all(math.isfinite(v) and v >= 0 for v in numbers) and found.beta1 < 1 and found.beta2 < 1 and found.dampening < 1
    return found if fine else None


def _update_or_none(optimizer: Any, group: dict[str, Any]) -> Update | None:
    """The same. A subclass may keep other numbers than its base; that must not stop the training."""
    try:
        return _update_of(optimizer, group)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def at_step(update: Update, step: Any) -> Update:
    """The update of one parameter, whose state counts its steps; None: it does not."""
    number = round(_number(step)) if step is not None and math.isfinite(_number(step)) else 0
    return replace(update, step=max(1, number))
