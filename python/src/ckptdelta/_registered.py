"""The memory that a session of the library has registered. It stays in place from save to save.

A session reads the same addresses at each save. Parameters and the states of optimizers are read where they are. Anything else of
a state may have a new address at each save, as the states of random number generators have. It is copied into a buffer of fixed
size. So is the record of all plain values, which spaces fill up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from . import _dlpack, _fsdp1, _torch
from ._call import Call
from ._arrays import Leaf
from ._device import Device
from ._dtensor import is_cut, is_dtensor
from ._errors import InvalidError
from ._flatten import Flattener, Tensor
from ._names import is_optimizer
from ._native import ffi, lib
from ._ranks import OWN, Ranks, own_part, prefix_of, record_of
from ._record import BLOB, dump
from ._save import Prepared, _Role, _tell_doubts, described, find_roles, in_order, predicted
from ._updates import Update, Updates

GROUP_AT_ONCE, GROUP_FENCED = 0, 1  # as a GPU copies them
"""Memory that only optimizers with a fence write to, and memory that anything may write to once step() has returned."""


def objects_in(state: Any) -> Iterator[Any]:
    """The modules and optimizers in dicts, lists and tuples, each once."""
    waiting, seen = [state], set()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        if _torch.is_module(found) or is_optimizer(found):
            seen.add(id(found))
            yield found
        elif isinstance(found, (dict, list, tuple)):
            seen.add(id(found))
            waiting += found.values() if isinstance(found, dict) else found


def _updated(optimizer: Any) -> Iterator[Any]:
    """The tensors that an optimizer writes to."""
    for group in optimizer.param_groups:
        params = group.get("params") if isinstance(group, dict) else None
        yield from (p for p in params or () if _torch.is_tensor(p))
    states = getattr(optimizer, "state", None)
    for slots in states.values() if isinstance(states, Mapping) else ():
        yield from (v for v in (slots.values() if isinstance(slots, Mapping) else ()) if _torch.is_tensor(v))


def calls_hooks(optimizer: Any) -> bool:
    """torch marks the step() that it has made call hooks. A wrapper may inherit the methods that register them, and call none."""
    registers = all(callable(getattr(optimizer, name, None)) for name in ("register_step_pre_hook", "register_step_post_hook"))
    return registers and getattr(getattr(type(optimizer), "step", None), "hooked", False) is True


def is_capturable(optimizer: Any) -> bool:
    """May a CUDA graph make the optimizer's steps? It calls no hooks when it is replayed."""
    return any(bool(group.get("capturable")) for group in optimizer.param_groups if isinstance(group, dict))


@dataclass
class Snapshot:
    """A state taken apart, and who writes to its memory: `fenced` optimizers, or (`lasting`) at least nobody moves it."""

    tensors: list[Tensor]
    record: bytes
    updates: Mapping[str, Update]
    fenced: set[Hashable | None]
    lasting: set[Hashable | None]
    moved: set[str] = field(default_factory=set)
    """Names of tensors that do move, although they belong to a module or an optimizer."""
    rank: int = 0
    common: list[Tensor] = field(default_factory=list)
    """With several ranks: the tensors that all of them share, and that should have the same values."""
    shared: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    """(name, dtype, shape) of all tensors that they share."""

    def place(self, t: Tensor) -> tuple[int, Device | None] | None:
        """Where the library reads a tensor: its address and device; None: from a buffer."""
        if t.leaf.library != "torch" or t.leaf.key not in self.lasting or t.name in self.moved or not t.library.direct(t.array, host=False):
            return None
        memory = t.library.source(t.array, host=False)
        return int(ffi.cast("uintptr_t", memory.pointer)), memory.device

    def layout(self) -> list[tuple[Any, ...]]:
        """Equal for states that the same registration serves. Another current stream of a device needs another one."""
        return [(t.name, t.alias, t.leaf.code, t.leaf.shape, self.place(t), t.leaf.key in self.fenced) for t in self.tensors]


def take_apart(state: Any, updates: Updates | None, fenced: list[Any], ranks: Ranks | None) -> Snapshot:
    """This rank's snapshot.

    Every rank registers its parts of distributed tensors, and replicated parameters and optimizer states: the library decides which rank
    writes which. Buffers and everything else are rank 0's, except the members that each rank has for itself.

    Args:
        fenced: the optimizers that wait before they write.

    Errors: InvalidError, with the path of what cannot be stored.
    """
    rank = ranks.rank if ranks is not None else 0
    slots = _fsdp1.slots_of_ranks(objects_in(state), ranks)
    flat = Flattener(updates, own=OWN if ranks is not None else (), prefix=prefix_of(rank), slots=slots)
    root = flat.run(state)
    for t in flat.tensors:
        if t.leaf.library == "dlpack":
            _dlpack.check_host(t.array, t.path)
    record = dump(root if rank == 0 else own_part(root))
    waiting = {id(optimizer) for optimizer in fenced}
    parts = [t for t in flat.tensors if isinstance(t.array, _fsdp1.Part)]
    keys = _keys_of((t for optimizer in fenced for t in _updated(optimizer)), parts)
    lasting, others, renormalised = set(keys), set[Hashable | None](), set[Hashable | None]()
    for found in objects_in(state):
        if _torch.is_module(found):
            module = _torch.unwrapped(found)
            lasting |= _keys_of(chain(module.parameters(), module.buffers()), parts)
            renormalised |= _keys_of(_torch.renormalised(module), parts)
        elif id(found) not in waiting:  # it writes without waiting, perhaps to what a fenced optimizer writes to as well
            others |= _keys_of(_updated(found), parts)
    others |= renormalised
    snapshot = Snapshot(flat.tensors, record, flat.updates, keys - others - {None}, lasting - {None}, rank=rank)
    if ranks is not None:
        _check_states(state)
        shared = [t for t in flat.tensors if is_dtensor(t.array) or isinstance(t.array, _fsdp1.Part) or (t.leaf.key in snapshot.lasting and not t.buffer)]
        # Each rank shortens the rows that it looks up, until all have seen them.
        snapshot.common = [t for t in shared if t.leaf.key not in renormalised]
        snapshot.shared = [(t.name, t.leaf.code, t.leaf.shape) for t in shared]
        if rank:
            snapshot.tensors = shared + [t for t in flat.tensors if t.path.partition(".")[0] in OWN]
    return snapshot


def _keys_of(tensors: Iterable[Any], parts: list[Tensor]) -> set[Hashable | None]:
    """The keys of tensors, and of parts of FSDP1 that are in their memory."""
    found = list(tensors)
    numbers = {id(t) for t in found}
    return {_torch.key_of(t.detach()) for t in found} | {part.leaf.key for part in parts if part.array.owner in numbers}


def _check_states(state: Any) -> None:
    """A plain tensor in the state of a distributed parameter has other values on each rank. Errors: InvalidError."""
    for optimizer in objects_in(state):
        states = getattr(optimizer, "state", None) if is_optimizer(optimizer) else None
        for parameter, slots in states.items() if isinstance(states, Mapping) else ():
            if is_cut(parameter) and isinstance(slots, Mapping):
                for slot, value in slots.items():
                    if _torch.is_tensor(value) and value.dim() > 0 and not is_dtensor(value):
                        raise InvalidError(f"the optimizer keeps {slot} of a distributed parameter as a plain tensor, which each rank has for "
                                           "itself: use an optimizer whose states are DTensors, or save with ckptdelta.dcp", path=f"optimizer.{slot}")


class Registered:
    """The registration of one session, made from the first state that it saves.

    Args:
        session: a ``ckd_session *`` that has made no step.
        state: its first state.
        prepared: options of its saves.
    """

    def __init__(self, session: Any, state: Snapshot, prepared: Prepared, call: Call) -> None:
        self._layout = state.layout()
        self._tensors = list(state.tensors)  # their memory stays while it is registered
        self._buffers: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}  # by weight
        size = len(state.record)
        self._record = ffi.new("char[]", size + size // 4 + 16384)
        self.has_fenced = any(place is not None and fenced for *_, place, fenced in self._layout)
        self.devices = {place[1] for *_, place, _ in self._layout if place is not None and place[1] is not None}
        lossy = any(prepared.lossy.values())
        roles = find_roles(state.tensors, call)
        if lossy and state.rank == 0:
            _tell_doubts(state.tensors, roles)
        self._predicted = {} if lossy else predicted(state.tensors, roles, state.updates)
        for i in in_order(state.tensors, roles, prepared.lossy, self._predicted):
            self._add(session, state, i, roles[i], call)
        self._add_record(session, state.rank, call)

    def _add_record(self, session: Any, rank: int, call: Call) -> None:
        size = len(self._record)
        if rank == 0:
            call.check(lib.ckd_session_add_bytes(session, BLOB.encode(), self._record, size, call.err))
            return
        name = record_of(rank)
        leaf = Leaf(lib.CKD_U8, (size,), "numpy", None, None)
        tensor, alive = described(Tensor(name, name, None, leaf, _torch.LIBRARY), _Role(lib.CKD_ROLE_OTHER, None, False, False))
        call.check(lib.ckd_session_add(session, tensor, self._record, GROUP_AT_ONCE, call.err))
        del alive

    def _add(self, session: Any, state: Snapshot, i: int, role: _Role, call: Call) -> None:
        t, place = state.tensors[i], self._layout[i][4]
        if place is None:
            self._buffers[t.name] = ffi.new("char[]", t.leaf.nbytes)
        tensor, alive = described(t, role)
        device = place[1].native() if place is not None and place[1] is not None else ffi.NULL
        tensor.device = device
        update = self._predicted.get(role.weight or t.name)
        if update is not None and role.role != lib.CKD_ROLE_OTHER:
            tensor.optimizer = self._optimizers.setdefault(role.weight or t.name, update.native())
        memory = ffi.cast("void *", place[0]) if place is not None else self._buffers[t.name]
        group = GROUP_FENCED if place is not None and t.leaf.key in state.fenced else GROUP_AT_ONCE
        call.check(lib.ckd_session_add(session, tensor, memory, group, call.err))
        del alive, device  # the library has copied them

    def fits(self, state: Snapshot) -> bool:
        """Can the state be saved with this registration? Same tensors, at the same places, and room for the record."""
        return len(state.record) <= len(self._record) and state.layout() == self._layout

    def fenced(self, state: Snapshot) -> Iterator[Tensor]:
        """The tensors that the library copies until the fence."""
        yield from (t for t, (*_, place, fenced) in zip(state.tensors, self._layout) if place is not None and fenced)

    def count_moves(self, counts: dict[str, int], state: Snapshot) -> None:
        """Tensors that move again and again are read from a buffer, so that no further registration is needed."""
        before = {name: place for name, *_, place, _ in self._layout}
        for name, *_, place, _ in state.layout():
            there = before.get(name)
            if place is not None and there is not None and place[0] != there[0]:
                counts[name] = counts.get(name, 0) + 1
                if counts[name] > 1:
                    state.moved.add(name)

    def fill(self, state: Snapshot) -> None:
        """Copies what is read from buffers, and the settings of the optimizers' last step. The session must not be copying."""
        for t in state.tensors:
            buffer = self._buffers.get(t.name)
            if buffer is not None and t.leaf.nbytes:
                memory = t.library.source(t.array, host=True)
                ffi.memmove(buffer, memory.pointer, t.leaf.nbytes)
        ffi.memmove(self._record, state.record.ljust(len(self._record)), len(self._record))
        for weight, optimizer in self._optimizers.items():
            update = state.updates.get(weight)
            if update is not None:  # else the last one, which predicts a step that was not made: it costs only time
                optimizer[0] = update.native()[0]
