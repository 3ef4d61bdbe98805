"""Names of an optimizer's states: the ids of its parameters become the names of the tensors that it updates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _torch


@dataclass(frozen=True)
class Optimizer:
    """The state of an optimizer in the form of torch: {"state": {id: {...}}, "param_groups": [{"params": [id]}]}.

    Attributes:
        state: by id: number, or a name as in DCP.
        groups: as they are.
        ids: of each group's parameters.
        names: of the tensors of these parameters; None where it is not known.
        more: what other members the state has.
    """

    state: Mapping[Any, Any]
    groups: list[dict[str, Any]]
    ids: list[list[Any]]
    names: list[list[str | None]]
    more: dict[str, Any]

    def name_of(self, group: int, index: int, number: int) -> str:
        """What its tensors are called by: the parameter's name, or its number in the optimizer."""
        return self.names[group][index] or str(number)


def is_optimizer_state(value: object) -> bool:
    """Has a dict the form of an optimizer's state_dict()?"""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    for group in groups:
        if not isinstance(group, dict) or not all(type(k) is str for k in group) or not isinstance(group.get("params"), list):
            return False
    ids = [i for group in groups for i in group["params"]]
    return (all(type(i) is int for i in ids) or all(type(i) is str for i in ids)) and len(set(ids)) == len(ids) \
        and all(k in set(ids) and isinstance(v, dict) for k, v in state.items()) and all(type(k) is str for k in value)


def is_optimizer(value: object) -> bool:
    """Is it an optimizer of torch, or like one?"""
    return _is_stateful(value) and isinstance(getattr(value, "param_groups", None), list) and not _torch.is_module(value)


def _is_stateful(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def read_optimizer(state: dict[str, Any], parameters: list[list[Any]] | None, weights: Mapping[Hashable, str],
                   otherwise: list[list[str | None]] | None = None) -> Optimizer:
    """Takes a state apart.

    Args:
        parameters: the optimizer's own, group by group; None if only its state is known.
        weights: names by memory, and of parameters by identity().
        otherwise: names of parameters whose memory has none, group by group.
    """
    groups, ids, names = [], [], []
    for number, group in enumerate(state["param_groups"]):
        own = list(group["params"])
        given = group.get("param_names")
        found: list[str | None] = [None] * len(own)
        for i, one in enumerate(own):
            if parameters is not None:
                one_key = _torch.key_of(parameters[number][i])
                found[i] = weights.get(identity(parameters[number][i])) if one_key is None else weights.get(one_key)
            if found[i] is None and otherwise is not None:
                found[i] = otherwise[number][i]
            if found[i] is None and isinstance(given, list) and len(given) == len(own) and isinstance(given[i], str):
                found[i] = given[i]
            if found[i] is None and type(one) is str:
                found[i] = one
        groups.append({k: v for k, v in group.items() if k != "params"})
        ids.append(own)
        names.append(found)
    return Optimizer(state["state"], groups, ids, _unique(names), {k: v for k, v in state.items() if k not in ("state", "param_groups")})


def identity(parameter: object) -> Hashable:
    """A key that tells apart parameters without memory, such as empty parts of distributed tensors."""
    return "parameter", id(parameter)


def _unique(names: list[list[str | None]]) -> list[list[str | None]]:
    """A name that two parameters have tells neither; a number must stay the number of one."""
    count: dict[str | None, int] = {}
    for group in names:
        for name in group:
            count[name] = count.get(name, 0) + 1
    return [[name if name and count[name] == 1 and not name.isdecimal() else None for name in group] for group in names]


def parameters_of(optimizer: Any) -> list[list[Any]] | None:
    """The tensors that an optimizer updates, group by group; None if it does not say."""
    found = []
    for group in optimizer.param_groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(_torch.is_tensor(p) for p in params):
            return None
        found.append(params)
    return found
