"""Arguments of a session: what they may be, and the state that they make up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._errors import InvalidError
from ._flatten import has_state_dict
from ._native import lib
from ._rng import RandomState


def whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < 1 << 63:
        raise InvalidError(f"{name} is {value!r}, but must be a number of at least 0")
    return int(value.__index__())


def check_numbers(*, every: Any, every_s: Any, overhead: Any, max_lag: Any) -> None:
    for name, value, least in (("every", every, 1), ("max_lag", max_lag, 0)):
        if value is not None and whole_number(name, value) < least:
            raise InvalidError(f"{name} is {value!r}, but must be at least {least}")
    for name, value in (("every_s", every_s), ("overhead", overhead)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1e15):
            raise InvalidError(f"{name} is {value!r}, but must be a number of at least 0")


def state_of(given: dict[str, Any], more: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    for name in ("optimizer", "scheduler", "scaler", "loader"):
        for one in _members(given.get(name)):
            if not has_state_dict(one):
                raise InvalidError(f"{name} is a {type(one).__name__} without state_dict() and load_state_dict()", path=name)
    taken = sorted(set(more) & {"model", "optimizer", "scheduler", "scaler", "loader", "rng"})
    if taken:
        raise InvalidError(f"more has {', '.join(taken)}, which are the session's own names", path=taken[0])
    return {**given, **more, **({"rng": RandomState()} if rng else {})}


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def record_metric(session: Any, metric: float | None) -> None:
    """Gives the library's session the value for its next checkpoints, or none."""
    if metric is None:
        lib.ckd_session_no_metric(session)
    else:
        lib.ckd_session_metric(session, metric)
