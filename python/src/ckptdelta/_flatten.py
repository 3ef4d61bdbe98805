"""A state on its way into a checkpoint: its tensors, and the record of all the rest."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import _fsdp1, _torch
from ._arrays import Leaf, Library, library_of
from ._errors import InvalidError
from ._names import Optimizer, identity, is_optimizer, is_optimizer_state, parameters_of, read_optimizer
from ._native import lib
from ._record import MAX_DEPTH, Node, container_node, join, scalar_node, where
from ._updates import Update, Updates, at_step


@dataclass
class Tensor:
    """A tensor to be saved.

    Attributes:
        name: in the store.
        path: in the state.
        array, leaf, library: the array, and how it is read.
        alias: a name that says its role if `name` does not: optimizer.state.PARAMETER.SLOT.
        buffer: of a module; it is never stored lossily.
    """

    name: str
    path: str
    array: Any
    leaf: Leaf
    library: Library
    alias: str | None = None
    buffer: bool = False


def has_state_dict(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Flattener:
    """Takes a state apart. Optimizers come last, when the names of all parameters are known.

    Args:
        updates: what follows the optimizers of the state.
        names: of the parameters of optimizers' states that have only numbers, by id() of the state, group by group.
        own, prefix: members of the state whose tensor names get this prefix, because each process has its own.
        buffers: paths of buffers, besides those of modules.
        slots: what optimizers of FSDP1 keep on any rank, by id() of the optimizer.
    """

    def __init__(self, updates: Updates | None = None, names: Mapping[int, list[list[str | None]]] | None = None,
                 own: Collection[str] = (), prefix: str = "", buffers: Iterable[str] = (),
                 slots: Mapping[int, list[_fsdp1.Slots | None]] | None = None) -> None:
        self.tensors: list[Tensor] = []
        self.updates: dict[str, Update] = {}  # by the weight's name
        self._followed = updates
        self._given = names or {}
        self._own, self._prefix = own, prefix
        self.weights: dict[Hashable, str] = {}
        self._names: set[str] = set()
        self._keys: dict[Hashable, str] = {}
        self._parameters: dict[Hashable, str] = {}
        self._buffers = set(buffers)
        self._cuts: dict[int, list[_fsdp1.Cut]] = {}
        self._slots = slots or {}
        self._open: list[int] = []
        self._in_optimizer = False
        self._waiting: list[tuple[dict[str, Node], Any, str]] = []

    def run(self, state: Any) -> Node:
        """The root node. Errors: InvalidError, with the path of what cannot be stored."""
        root = self.encode(state, "")
        self.weights = {**self._parameters, **self._keys}
        with self._optimizers():
            for node, optimizer, path in self._waiting:
                node["optimizer"] = self._optimizer(optimizer, path)
        return root

    @contextmanager
    def _optimizers(self) -> Iterator[None]:
        """While what belongs to optimizers is taken apart."""
        before, self._in_optimizer = self._in_optimizer, True
        try:
            yield
        finally:
            self._in_optimizer = before

    def encode(self, value: Any, path: str) -> Node:
        scalar = scalar_node(value, path)
        if scalar is not None:
            return scalar[0]
        library = library_of(value)
        if library is not None:
            return self._tensor(value, library, path)
        if id(value) in self._open:
            raise InvalidError(f"{where(path)} contains itself", path=path)
        if len(self._open) == MAX_DEPTH:
            raise InvalidError(f"{where(path)} is nested more than {MAX_DEPTH} deep", path=path)
        self._open.append(id(value))
        try:
            return self._inner(value, path)
        finally:
            self._open.pop()

    def _inner(self, value: Any, path: str) -> Node:
        if is_optimizer(value):
            _torch.check_optimizer(value, path)
            state = value.state_dict()
            if is_optimizer_state(state):
                return self._wait(value, state, path)
            _torch.check_updated(value, path)
            with self._optimizers():
                return self.encode(state, path)
        if has_state_dict(value):
            return self._module(value, path) if _torch.is_module(value) else self.encode(value.state_dict(), path)
        if is_optimizer_state(value) and (value["state"] or value["param_groups"]):
            return self._wait(None, value, path)
        return container_node(value, path, self.encode)

    def _module(self, module: Any, path: str) -> Node:
        module = _torch.unwrapped(module)
        taken = _fsdp1.take(module, path)
        self._buffers |= {join(path, name) for name in taken.buffers}
        self._cuts |= taken.cuts
        for name, parameter in _torch.parameters_by_name(module):
            self._parameters.setdefault(identity(parameter), join(path, name))
        return {"map": {str(key): self.encode(value, join(path, key)) for key, value in taken.state.items()}}

    def _wait(self, optimizer: Any, state: dict[str, Any], path: str) -> Node:
        node: dict[str, Node] = {"optimizer": None}
        self._waiting.append((node, (optimizer, state), path))
        return node

    def _tensor(self, array: Any, library: Library, path: str, alias: str | None = None) -> Node:
        leaf = library.leaf(array, path)
        name = self._keys.get(leaf.key) if leaf.key is not None else None
        if name is None:
            name = self._new_name(path)
            if self._in_optimizer and alias is None:
                alias = f"optimizer.{path}"  # whatever the optimizer is called in the state, this is no weight
            self.tensors.append(Tensor(name, path, array, leaf, library, alias, path in self._buffers))
            if leaf.key is not None:
                self._keys[leaf.key] = name
        node: dict[str, Node] = {"name": name, "library": leaf.library}
        if leaf.special is not None:
            node["dtype"] = leaf.special
        return {"tensor": node}

    def _new_name(self, path: str) -> str:
        name = wanted = (self._prefix if path.partition(".")[0] in self._own else "") + (path or "tensor")
        number = 1
        while name in self._names:  # a key with a dot may look like two keys
            number += 1
            name = f"{wanted}~{number}"
        try:
            size = len(name.encode("utf-8"))
        except UnicodeEncodeError:
            size = 0
        if not 0 < size <= lib.CKD_NAME_MAX or "\0" in name:
            raise InvalidError(f"{where(path)[:200]!r} cannot be a tensor's name: 1 to {lib.CKD_NAME_MAX} bytes of UTF-8 without NUL",
                               path=path)
        self._names.add(name)
        return name

    # -- optimizers: {"optimizer": {"ids": [[...]], "names": [[...]], "groups": [...], "state": [[group, index, node]], "more": {...}}}

    def _optimizer(self, source: tuple[Any, dict[str, Any]], path: str) -> Node:
        optimizer, state = source
        found = self._read(optimizer, state, path)
        steps = self._followed.groups_for(optimizer, state) if self._followed is not None else None
        scalars = _torch.device_scalars(v for slots in found.state.values() if isinstance(slots, Mapping) for v in slots.values())
        states, number = [], 0
        for group, ids in enumerate(found.ids):
            for index, one in enumerate(ids):
                if one in found.state:
                    states.append([group, index, self._parameter(found, (group, index, number), scalars, path)])
                    name, update = found.names[group][index], steps[group] if steps and group < len(steps) else None
                    if name is not None and update is not None:
                        step = found.state[one].get("step")
                        self.updates[name] = at_step(update, _torch.scalar_from(*scalars[id(step)], path) if id(step) in scalars else step)
                number += 1
        groups = join(path, "param_groups")
        return {"ids": found.ids, "names": found.names, "state": states,
                "groups": [self.encode(g, join(groups, i)) for i, g in enumerate(found.groups)],
                "more": {k: self.encode(v, join(path, k)) for k, v in found.more.items()}}

    def _read(self, optimizer: Any, state: dict[str, Any], path: str) -> Optimizer:
        parameters = None
        if optimizer is not None:
            _torch.check_updated(optimizer, path, self._cuts)
            parameters = parameters_of(optimizer)
        if parameters is not None and _fsdp1.is_flat(parameters, self._cuts):
            return _fsdp1.take_optimizer(state, parameters, self.weights, self._cuts, self._slots.get(id(optimizer)))[0]
        return read_optimizer(state, parameters, self.weights, self._given.get(id(state)))

    def _parameter(self, found: Optimizer, at: tuple[int, int, int], scalars: Mapping[int, tuple[str, bytes]], path: str) -> Node:
        """The state of one parameter. Numbers that torch keeps as tensors go into the record: there are very many.

        Args:
            at: group, index in the group, and number of the parameter.
            scalars: dtype and bytes of those that are on devices, by id().
        """
        group, index, _ = at
        name = found.name_of(*at)
        of = join(join(path, "state"), name)
        node: dict[str, Node] = {}
        for slot, value in found.state[found.ids[group][index]].items():
            if type(slot) is not str:
                raise InvalidError(f"{where(of)} has a key of the type {type(slot).__qualname__}: only strings are names of states", path=of)
            if _torch.is_tensor(value) and value.dim() == 0:
                _torch.LIBRARY.leaf(value, join(of, slot))
                dtype, data = scalars.get(id(value)) or _torch.scalar_bytes(value)
                node[slot] = {"scalar": [dtype, data.hex()]}
                continue
            library = library_of(value)
            alias = f"optimizer.state.{name}.{slot}"
            node[slot] = self.encode(value, join(of, slot)) if library is None else self._tensor(value, library, join(of, slot), alias)
        return {"map": node}


def state_dict_nodes(optimizer: Any) -> Node:
    """An optimizer's node as the node of its state_dict()."""
    ids = optimizer["ids"]
    groups = [{"map": {**group["map"], "params": ids[i]}} for i, group in enumerate(optimizer["groups"])]
    states = [[ids[group][index], node] for group, index, node in optimizer["state"]]
    return {"map": {"state": {"dict": states}, "param_groups": groups, **optimizer["more"]}}
