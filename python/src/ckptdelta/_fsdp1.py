"""FullyShardedDataParallel (FSDP1): each process has a range of a parameter's elements.

A flat parameter joins the parameters of a wrapped module end to end, and each rank keeps a range of it. The optimizer updates the flat
parameter, or with use_orig_params=True views of the ranges. Both are taken apart by the names and shapes of the parameters that the model
was made of. So a checkpoint looks like that of a model without the wrapper.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import _torch
from ._arrays import COMPLEX, Leaf, Memory, Range
from ._errors import InvalidError
from ._names import Optimizer, is_optimizer, parameters_of, read_optimizer
from ._record import join

if TYPE_CHECKING:
    from ._ranks import Ranks

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
Slots = Mapping[str, tuple[str, Any]]
"""What an optimizer keeps for a parameter, by name: ("tensor", dtype), ("scalar", (dtype, bytes)) or ("value", number)."""


@dataclass(frozen=True, eq=False)
class Part:
    """A range of a whole tensor.

    Attributes:
        tensor: the elements that this process has, in one dimension.
        shape: of the whole.
        start: of the range, in the order of rows.
        key: as Leaf.key, but also for ranges without elements.
        owner: id() of the parameter or state that the memory belongs to.
    """

    tensor: Any
    shape: tuple[int, ...]
    start: int
    key: Hashable
    owner: int


@dataclass(frozen=True)
class Cut:
    """Where a named parameter is in the memory of a tensor that an optimizer updates.

    Attributes:
        name: in the state that has the model.
        shape: of the whole.
        at, count: the range within that tensor. No elements: another rank has them.
        start: of the range within the whole.
    """

    name: str
    shape: tuple[int, ...]
    at: int
    count: int
    start: int

    def part(self, tensor: Any, owner: Any) -> Part:
        """The range of a tensor that is laid out as the parameter is, and belongs to `owner`. NO_SHARD keeps the shape of the whole."""
        return Part(tensor.detach().view(-1)[self.at:self.at + self.count], self.shape, self.start, ("part", id(owner), self.name), id(owner))


class _Library:
    """Parts are read and written as the tensors of torch that they are."""

    def leaf(self, array: Part, path: str) -> Leaf:
        found = replace(_torch.LIBRARY.leaf(array.tensor, path), key=array.key)
        pairs = 2 if found.special in COMPLEX else 1
        shape, count = (*array.shape, *found.shape[1:]), array.tensor.numel()
        part = None if count == math.prod(array.shape) else Range(array.start * pairs if count else 0, count * pairs)
        return replace(found, shape=shape, part=part)

    def source(self, array: Part, *, host: bool) -> Memory:
        return _torch.LIBRARY.source(array.tensor, host=host)

    def target(self, array: Part, path: str, *, host: bool) -> Memory:
        return _torch.LIBRARY.target(array.tensor, path, host=host)

    def direct(self, array: Part, *, host: bool) -> bool:
        return _torch.LIBRARY.direct(array.tensor, host=host)

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        return _torch.LIBRARY.make(code, shape, special, path)


LIBRARY = _Library()


# ------------------------------------------------------------------------------------------------------------ modules


@dataclass(frozen=True)
class Taken:
    """A module taken apart.

    Attributes:
        state: what state_dict() has. Below FSDP1 that would gather whole tensors, so it has parts instead.
        buffers: names of its buffers.
        cuts: below FSDP1 the parameters within each tensor that an optimizer updates, by id() of that.
    """

    state: dict[str, Any]
    buffers: set[str]
    cuts: dict[int, list[Cut]]


def _flat_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """(name of the wrapper, flat parameter)."""
    wrappers = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kind = getattr(wrappers, "FullyShardedDataParallel", None)
    if not isinstance(kind, type):
        return
    for name, one in module.named_modules():
        handle = getattr(one, "_handle", None) if isinstance(one, kind) else None
        if handle is not None:
            yield name, handle.flat_param


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_wrapped(module: Any) -> bool:
    return next(_flat_parameters(module), None) is not None


def take(module: Any, path: str) -> Taken:
    """Takes a module apart. Its parameters keep their names in the state, not the module. Errors: InvalidError."""
    if not is_wrapped(module):
        _torch.check_parameters(module.parameters(), path)
        return Taken(module.state_dict(), _torch.buffer_names(module), {})
    state: dict[str, Any] = {}
    buffers: set[str] = set()
    cuts: dict[int, list[Cut]] = {}
    try:
        for name, flat in _flat_parameters(module):
            _take_flat(flat, _clean(f"{name}." if name else ""), path, state, cuts)
    except AttributeError as error:
        raise InvalidError(f"{path or 'the state'} is wrapped in a FullyShardedDataParallel that this package does not know ({error}): use "
                           "fully_shard (FSDP2), or save its sharded state dicts with ckptdelta.dcp", path=path) from error
    _torch.check_parameters(module.parameters(), path, known=cuts)
    for name, one in module.named_modules(remove_duplicate=False):
        if type(one).get_extra_state is not _torch.load_torch(path).nn.Module.get_extra_state:
            raise InvalidError(f"{join(path, _clean(name))} has an extra state, which cannot be saved below FullyShardedDataParallel: use fully_shard "
                               "(FSDP2)", path=path)
        for key, buffer in one._buffers.items():
            if buffer is not None and key not in one._non_persistent_buffers_set:
                buffers.add(_clean(f"{name}.{key}" if name else key))
                state[_clean(f"{name}.{key}" if name else key)] = buffer
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in cuts:
            state[_clean(name)] = parameter.detach()
    return Taken(state, buffers, {key: [replace(cut, name=join(path, cut.name)) for cut in own] for key, own in cuts.items()})


def _take_flat(flat: Any, prefix: str, path: str, state: dict[str, Any], cuts: dict[int, list[Cut]]) -> None:
    """The parameters that a flat one joins. Its memory may be the whole one during a step; the rank's own is there all the time."""
    local = getattr(flat, "_local_shard", None)
    memory = flat.detach() if local is None else local
    originals = flat._params or [None] * len(flat._fqns)
    if not all(flat._contiguities) or any(extension is not None for extension in flat._param_extensions):
        raise InvalidError(f"{path or 'the state'} has parameters below FullyShardedDataParallel that are not contiguous, or distributed tensors: "
                           "use fully_shard (FSDP2), or save its sharded state dicts with ckptdelta.dcp", path=path)
    for fqn, shape, info, original in zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals):
        cut = Cut(_clean(prefix + fqn), tuple(shape), info.offset_in_shard or 0, info.numel_in_shard or 0, info.intra_param_start_idx or 0)
        state[cut.name] = cut.part(memory, flat if original is None else original)
        cuts.setdefault(id(flat if original is None else original), []).append(cut if original is None else replace(cut, at=0))
    for name, _, module, first, _, first_module in flat._shared_param_infos:  # tied ones
        state[_clean(prefix + join(module, name))] = state[_clean(prefix + join(first_module, first))]


# --------------------------------------------------------------------------------------------------------- optimizers


def slots_of_ranks(objects: Iterable[Any], ranks: Ranks | None) -> dict[int, list[Slots | None]]:
    """What the optimizers keep for each parameter on any rank, by id() of the optimizer: a rank has no state of what it has no elements of.

    Collective if a module is wrapped; the ranks then exchange names, dtypes and step counts.
    """
    found = list(objects)
    if not any(_torch.is_module(one) and is_wrapped(_torch.unwrapped(one)) for one in found):
        return {}
    optimizers = [one for one in found if is_optimizer(one)]
    mine = [_slots_here(one) for one in optimizers]
    everywhere = [mine] if ranks is None else ranks.gather(mine)
    return {id(one): [next((slots for slots in each if slots is not None), None) for each in zip(*(rank[i] for rank in everywhere))]
            for i, one in enumerate(optimizers)}


def _slots_here(optimizer: Any) -> list[Slots | None]:
    """For each parameter; None: this rank has no state of it."""
    states = getattr(optimizer, "state", None)
    every = [states.get(p) if isinstance(states, Mapping) else None for group in parameters_of(optimizer) or () for p in group]
    known = [slots for slots in every if isinstance(slots, Mapping)]
    scalars = _torch.device_scalars(value for slots in known for value in slots.values())
    return [_slots(slots, scalars) if isinstance(slots, Mapping) and slots else None for slots in every]


def _slots(slots: Mapping[Any, Any], scalars: Mapping[int, tuple[str, bytes]]) -> Slots:
    found: dict[str, tuple[str, Any]] = {}
    for name, value in slots.items():
        if _torch.is_tensor(value) and value.dim():
            found[str(name)] = ("tensor", _torch.dtype_name(value.dtype))
        elif _torch.is_tensor(value):
            found[str(name)] = ("scalar", scalars.get(id(value)) or _torch.scalar_bytes(value))
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[str(name)] = ("value", value)
    return found


@dataclass(frozen=True)
class Place:
    """Where a named parameter of an optimizer is: a tensor that it updates, the number of its state, and the range; None: all of it."""

    parameter: Any
    number: Any
    cut: Cut | None

    def shape(self, path: str) -> tuple[int, ...]:
        """Of the whole."""
        return self.cut.shape if self.cut is not None else _torch.LIBRARY.leaf(self.parameter, path).shape


def is_flat(parameters: list[list[Any]] | None, cuts: Mapping[int, list[Cut]]) -> bool:
    return bool(cuts) and any(id(p) in cuts for group in parameters or () for p in group)


def take_optimizer(state: dict[str, Any], parameters: list[list[Any]], weights: Mapping[Hashable, str], cuts: Mapping[int, list[Cut]],
                   slots: list[Slots | None] | None = None) -> tuple[Optimizer, list[Place]]:
    """An optimizer's state by the parameters that its flat ones join, and their places by number. Errors: InvalidError.

    Args:
        state, parameters, weights: as of read_optimizer().
        slots: what ranks have for each parameter; None: what is not here does not matter.
    """
    plain = read_optimizer(state, parameters, weights)
    places: list[Place] = []
    ids: list[list[int]] = []
    names: list[list[str | None]] = []
    states: dict[int, dict[str, Any]] = {}
    number = 0
    for group, own in enumerate(parameters):
        ids.append([])
        names.append([])
        for index, parameter in enumerate(own):
            one, elsewhere = plain.ids[group][index], slots[number] if slots else None
            number += 1
            own_cuts: list[Cut | None] = [*cuts.get(id(parameter), ())]
            for cut in own_cuts or [None]:
                new = len(places)
                places.append(Place(parameter, one, cut))
                ids[-1].append(new)
                names[-1].append(cut.name if cut is not None else plain.names[group][index])
                here = plain.state.get(one)
                if cut is None and here is not None:
                    states[new] = dict(here)
                elif cut is not None and (here or elsewhere):
                    states[new] = _cut_slots(cut, here, parameter, elsewhere)
    return Optimizer(states, plain.groups, ids, names, plain.more), places


def _cut_slots(cut: Cut, here: Mapping[str, Any] | None, parameter: Any, elsewhere: Slots | None) -> dict[str, Any]:
    if not here:
        return {slot: _nothing(cut, slot, *found) for slot, found in (elsewhere or {}).items()}
    found: dict[str, Any] = {}
    for slot, value in here.items():
        if _torch.is_tensor(value) and value.dim():
            if value.shape != parameter.shape:
                raise InvalidError(f"the optimizer keeps {slot} of {cut.name} in a shape of its own, by which a flat parameter of "
                                   "FullyShardedDataParallel cannot be taken apart: use fully_shard (FSDP2)", path=f"optimizer.{slot}")
            found[slot] = cut.part(value, value)
        else:
            found[slot] = value
    return found


def _nothing(cut: Cut, slot: str, kind: str, value: Any) -> Any:
    """A slot of a parameter of which this rank has no elements."""
    if kind == "scalar":
        dtype, data = value
        return _torch.scalar_from(dtype, data, cut.name)
    if kind == "value":
        return value
    torch = _torch.loaded()
    return Part(torch.empty(0, dtype=getattr(torch, value)), cut.shape, 0, ("part", slot, cut.name), 0)


def memory_for(place: Place, slot: Any, dtype: Any) -> Any:
    """The tensor that a load fills for a slot of a place: the one that is there, or a new one. The padding of a new one is 0."""
    parameter = place.parameter.detach()
    if _torch.is_tensor(slot) and slot.shape == parameter.shape and slot.dtype == dtype:
        return slot
    return _torch.loaded().zeros_like(parameter, dtype=dtype)
