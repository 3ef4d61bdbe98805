"""Which parameter is which number of an optimizer, found by shapes: the state of an optimizer of torch does not say."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from . import _torch
from ._names import is_optimizer_state
from ._record import join

Shape = tuple[int, ...]
Names = list[list[str | None]]
Model = list[tuple[str, Shape]]

USUAL = ("model", "state_dict", "module", "model_state_dict")
NO_PARAMETER = ("running_mean", "running_var", "num_batches_tracked")


def names_by_shape(state: Any) -> dict[int, Names]:
    """Names of the parameters of the optimizers' states within a state, by id() of each optimizer's state, group by group.

    Groups may have names themselves (param_names), which lack the path of the model in the state. Else a group has its parameters in
    the order of the model, so its shapes are a subsequence of the model's. If there is only one such subsequence, the names are
    certain. Otherwise they are left out.
    """
    optimizers: list[dict[str, Any]] = []
    models: dict[str, Model] = {}
    _look(state, "", optimizers, models)
    found = {}
    for optimizer in optimizers:
        fits = {path: names for path, model in models.items() if (names := _named(optimizer, model, path) or _fit(optimizer, model)) is not None}
        usual = [path for path in USUAL if path in fits]
        if usual or len(fits) == 1:
            found[id(optimizer)] = fits[usual[0] if usual else next(iter(fits))]
    return found


def _look(value: Any, path: str, optimizers: list[dict[str, Any]], models: dict[str, Model]) -> None:
    """Collects the optimizers' states, and the tensors of each dict outside them that may be parameters."""
    if is_optimizer_state(value):
        optimizers.append(value)
    elif isinstance(value, dict):
        model = list(_parameters(value, path))
        if model:
            models[path] = model
        for key, inner in value.items():
            _look(inner, join(path, key), optimizers, models)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _look(inner, join(path, i), optimizers, models)


def _parameters(tensors: dict[Any, Any], path: str) -> Iterator[tuple[str, Shape]]:
    seen: set[Hashable] = set()
    for key, tensor in tensors.items():
        if _torch.is_tensor(tensor) and tensor.is_floating_point() and not str(key).endswith(NO_PARAMETER):
            memory = _torch.key_of(tensor)
            if memory is None or memory not in seen:  # a tied weight is one parameter
                seen.add(memory)
                yield join(path, key), tuple(tensor.shape)


def _named(optimizer: dict[str, Any], model: Model, path: str) -> Names | None:
    """The names that the groups have, if the model at the path has all of them."""
    known = {name for name, _ in model}
    names: Names = []
    for group in optimizer["param_groups"]:
        given = group.get("param_names")
        if not isinstance(given, list) or len(given) != len(group["params"]):
            return None
        names.append([join(path, name) for name in given])
    return names if names and all(name in known for group in names for name in group) else None


def _fit(optimizer: dict[str, Any], model: Model) -> Names | None:
    names: Names = []
    for group in optimizer["param_groups"]:
        shapes = [_shape_of(optimizer["state"].get(one, {})) for one in group["params"]]
        found = _only_subsequence(shapes, model)
        if found is None:
            return None
        names.append([model[i][0] for i in found])
    all_names = [name for group in names for name in group]
    return names if all_names and len(set(all_names)) == len(all_names) else None


def _shape_of(slots: dict[str, Any]) -> Shape | None:
    """The shape of a parameter by its state, whose tensors have the same; None: it is not known."""
    shapes = {tuple(value.shape) for value in slots.values() if _torch.is_tensor(value) and value.dim() > 0}
    return shapes.pop() if len(shapes) == 1 else None


def _only_subsequence(shapes: list[Shape | None], model: Model) -> list[int] | None:
    """Places in the model of a group's parameters; None if there are several ways, or none. They are the same from both ends then."""
    first = _subsequence(shapes, [shape for _, shape in model])
    last = _subsequence(shapes[::-1], [shape for _, shape in reversed(model)])
    if first is None or last is None or first != [len(model) - 1 - i for i in reversed(last)]:
        return None
    return first


def _subsequence(shapes: list[Shape | None], of: list[Shape]) -> list[int] | None:
    """The leftmost one."""
    found: list[int] = []
    at = 0
    for shape in shapes:
        while at < len(of) and shape is not None and of[at] != shape:
            at += 1
        if at == len(of):
            return None
        found.append(at)
        at += 1
    return found
