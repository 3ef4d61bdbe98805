"""A checkpoint on its way back: into a state in place, or as new arrays and values.

All names, dtypes and shapes are compared before anything is written.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _fsdp1, _numpy, _torch
from ._arrays import NAMES, Box, Leaf, Library, Memory, Range, library_named, library_of, set_part
from ._call import Call
from ._dcp_record import stream_of
from ._dtensor import local_of
from ._errors import CancelledError, CorruptError, InvalidError, MismatchError, NotFoundError, nearest
from ._flatten import has_state_dict, state_dict_nodes
from ._names import identity, is_optimizer, is_optimizer_state, parameters_of
from ._native import ffi, lib
from ._record import Node, join, members, tag_of, value_of, where

BATCH_BYTES = 256 << 20
SHOWN = 5
_CONTAINERS = (dict, list, deque, set, bytearray, io.BytesIO)


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint: dtype of the library, and shape."""

    code: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Request:
    name: str
    stored: Stored
    memory: Memory
    part: Box | Range | None = None

    @property
    def nbytes(self) -> int:
        return Leaf(self.stored.code, self.stored.shape, "", None, None, self.part).nbytes


@dataclass(frozen=True)
class _Late:
    """A tensor that is read by itself after all others, into temporary memory."""

    name: str
    stored: Stored
    target: Any
    library: Library
    path: str
    part: Box | Range | None

    def request(self) -> _Request:
        return _Request(self.name, self.stored, self.library.target(self.target, self.path, host=False), self.part)

    @property
    def nbytes(self) -> int:
        return Leaf(self.stored.code, self.stored.shape, "", None, None, self.part).nbytes


def flat_root(names: Sequence[str]) -> Node:
    """The root of a checkpoint without a record, as the command and C programs write: a dict of all tensors."""
    library = "torch" if _torch.loaded() is not None else "numpy"
    return {"map": {name: {"tensor": {"name": name, "library": library}} for name in names}}


def only_within(root: Node, prefixes: Sequence[str]) -> Node:
    """The parts of a state whose paths have one of the prefixes. What is no dict is taken whole. Errors: NotFoundError."""
    found = _within(root, "", prefixes)
    if found is None:
        raise NotFoundError(f"the checkpoint has nothing below {' or '.join(repr(p) for p in prefixes)}", path=prefixes[0] if prefixes else "")
    return found


def _within(node: Node, path: str, prefixes: Sequence[str]) -> Node:
    if any(path == p or path.startswith(f"{p}.") for p in prefixes):
        return node
    if path and not any(p.startswith(f"{path}.") for p in prefixes):
        return None
    tag, inside = tag_of(node), members(node)
    if tag is None or inside is None:
        return node
    content = node[tag]
    pairs = content.items() if tag == "map" else content[1] if tag == "defaultdict" else content
    kept = [(pair[0], found) for pair, (key, child) in zip(pairs, inside)
            if (found := _within(child, join(path, key), prefixes)) is not None]
    if not kept:
        return None
    made: Node = dict(kept) if tag == "map" else [list(pair) for pair in kept]
    return {tag: [content[0], made] if tag == "defaultdict" else made}


class Restorer:
    """Plans what is read where, then reads it.

    Args:
        stored: the tensors of the checkpoint.
        blob: gives the content of a blob of the checkpoint.
        flat: the checkpoint has no record; its tensors' names are the paths.
        tensors: library of new arrays; None: the one that each was saved from.
        strict: what is missing, and what a module or an optimizer has no place for, is an error.
        label: RUN@STEP of the checkpoint, for errors.
    """

    def __init__(self, stored: dict[str, Stored], blob: Callable[[str], bytes], *, flat: bool, tensors: str | None, strict: bool,
                 label: str = "the checkpoint") -> None:
        self._blob, self._label = blob, label
        self.stored, self.flat, self.tensors, self.strict = stored, flat, tensors, strict
        self.requests: list[_Request] = []
        self.late: list[_Late] = []
        self.after: list[Callable[[], None]] = []
        self.problems: list[tuple[str, str]] = []
        self._listed: set[str] = set()  # paths below which a problem says what there is
        self.weights: dict[Hashable, str] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._cuts: dict[int, list[_fsdp1.Cut]] = {}
        self._made: dict[tuple[str, str, str | None], Any] = {}
        self._taken: dict[Hashable, str] = {}
        self._whole = False

    # ------------------------------------------------------------------------------------------------- new values

    def build(self, node: Node, path: str) -> Any:
        tag = tag_of(node)
        if tag == "tensor":
            return self._new_tensor(node[tag], path)
        if tag == "optimizer":
            return self.build(state_dict_nodes(node[tag]), path)
        if tag == "stream":
            return stream_of(node[tag], path, self._blob)
        if tag == "scalar" and self.tensors == "numpy":
            dtype = _numpy.dtype_named(node[tag][0], path)
            return _numpy.load_numpy(path).frombuffer(bytes.fromhex(node[tag][1]), dtype).reshape(()).copy()
        return value_of(node, path, self.build)

    def _new_tensor(self, content: Node, path: str) -> Any:
        name, special = content["name"], content.get("dtype")
        library = self.tensors or ("numpy" if content["library"] == "dlpack" else content["library"])
        same = (name, library, special)
        if same not in self._made:
            stored = self._stored(name, path)
            array, memory = library_named(library).make(stored.code, stored.shape, special, path)
            self.requests.append(_Request(name, stored, memory))
            self._made[same] = array
        return self._made[same]

    def _stored(self, name: str, path: str) -> Stored:
        found = self.stored.get(name)
        if found is None:
            raise CorruptError(f"{where(path)} is the tensor {name}, which the checkpoint does not have", path=path, tensor=name)
        return found

    # --------------------------------------------------------------------------------------------------- in place

    def place_root(self, state: Any, root: Node, *, whole: bool = False) -> None:
        """Plans the load into a state.

        Args:
            whole: the dict `state` is not the caller's, but what it has is, and is to be as it was saved: its dicts get keys that they do
                not have yet, and a container that cannot be refilled is a difference.

        Errors: MismatchError, which names the first differences; InvalidError.
        """
        self._whole = whole
        if library_of(state) is None and not has_state_dict(state) and not isinstance(state, (dict, list)):
            raise InvalidError(f"nothing can be loaded into a {type(state).__name__}: pass a dict, a module, an optimizer or an array")
        self._scan(state, "")
        if isinstance(state, dict) and not is_optimizer_state(state):
            self._dict(state, root, "")
        else:
            self._place(state, root, "")
        if self.problems:
            shown = "; ".join(text for _, text in self.problems[:SHOWN])
            more = len(self.problems) - SHOWN
            raise MismatchError(f"{self._label} does not fit: {shown}{f'; and {more} more' if more > 0 else ''}", path=self.problems[0][0])

    def _scan(self, value: Any, path: str, depth: int = 0) -> None:
        """Names of the tensors in the state, by their memory: optimizers know their parameters by nothing else."""
        if _torch.is_tensor(value):
            key = _torch.key_of(value)
            if key is not None:
                self.weights.setdefault(key, path)
        elif _torch.is_module(value):
            module = _torch.unwrapped(value)
            taken = _fsdp1.take(module, path)
            self._cuts |= taken.cuts
            self._states[id(value)] = state = taken.state
            for name, parameter in _torch.parameters_by_name(module):
                self.weights.setdefault(identity(parameter), join(path, name))
            for key, tensor in state.items():
                self._scan(tensor, join(path, key), depth + 1)
        elif isinstance(value, (dict, list, tuple)) and depth < 100 and not is_optimizer_state(value):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                self._scan(inner, join(path, key), depth + 1)

    def _problem(self, path: str, text: str) -> None:
        self.problems.append((path, f"{where(path)}: {text}"))

    def _missing(self, path: str, key: Any, there: Iterable[Any], *, in_module: bool) -> None:
        """Notes that the checkpoint does not have `key` below `path`, with what may have been meant. there: names that it has."""
        names = list(dict.fromkeys(str(name).split(".")[0] if self.flat else str(name) for name in there)) if len(self.problems) < SHOWN else []
        near = nearest(str(key), names)
        said = f"; did you mean {' or '.join(near)}?" if near else ""
        if names and not in_module and path not in self._listed:
            self._listed.add(path)
            said = f" (it has: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}){said}"
        self._problem(join(path, key), f"the checkpoint does not have it{said}")

    def _place(self, target: Any, node: Node, path: str) -> Any:
        """What is to be at the place of `target`; the same object if the load writes into it."""
        library = library_of(target)
        if library is not None:
            return self._array(target, library, node, path)
        if has_state_dict(target):
            return self._object(target, node, path)
        if not _has_arrays(target):
            return self.build(node, path)
        if isinstance(target, dict):
            return self._dict(target, node, path)
        return self._sequence(target, node, path)

    def _members(self, node: Node, path: str) -> dict[Any, Node] | None:
        if tag_of(node) == "optimizer":
            node = state_dict_nodes(node["optimizer"])
        found = members(node)
        if found is None:
            self._problem(path, "the checkpoint has something else than a dict here")
        return None if found is None else dict(found)

    def _child(self, inside: dict[Any, Node], key: Any) -> Node | None:
        """The node of a key. Names in a checkpoint without a record are paths."""
        if key in inside or not self.flat:
            return inside.get(key)
        prefix = f"{key}."
        found = {name[len(prefix):]: node for name, node in inside.items() if name.startswith(prefix)}
        return {"map": found} if found else None

    def _dict(self, target: dict[Any, Any], node: Node, path: str) -> Any:
        inside = self._members(node, path)
        for key, old in target.items() if inside is not None else ():
            here = join(path, key)
            child = self._child(inside or {}, key)
            if child is None and key not in (inside or {}):
                if self.strict:
                    self._missing(path, key, inside or {}, in_module=False)
                continue
            new = self._place(old, child, here)
            if new is not old:
                fill = _refilled
                if self._whole and not path and isinstance(old, _CONTAINERS) and type(old) is not type(new):
                    fill = _refilled_dict
                    if not (isinstance(old, dict) and isinstance(new, dict)):
                        self._problem(here, f"the checkpoint has a {type(new).__name__} here, not a {type(old).__name__}")
                self.after.append(lambda key=key, old=old, new=new, fill=fill: target.__setitem__(key, fill(old, new)))  # type: ignore[misc]
        if self._whole and path and not self.flat and not any(has_state_dict(one) for one in target.values()):
            more = {key: self.build(child, join(path, key)) for key, child in (inside or {}).items() if key not in target}
            self.after.append(lambda: target.update(more))
        return target

    def _sequence(self, target: Any, node: Node, path: str) -> Any:
        content = node if isinstance(node, list) else node.get("tuple") if isinstance(node, dict) else None
        if not isinstance(content, list) or len(content) != len(target):
            self._problem(path, f"the checkpoint does not have {len(target)} members here")
            return target
        new = [self._place(old, child, join(path, i)) for i, (old, child) in enumerate(zip(target, content))]
        if isinstance(target, list):
            self.after.append(lambda: target.__setitem__(slice(None), [_refilled(old, one) for old, one in zip(target, new)]))
            return target
        return target if all(a is b for a, b in zip(new, target)) else tuple(new)

    def _array(self, target: Any, library: Library, node: Node, path: str) -> Any:
        leaf = library.leaf(target, path)
        tag = tag_of(node)
        if tag == "scalar" and leaf.library == "torch" and leaf.shape == ():
            value = self.build(node, path)
            self.after.append(lambda: _assign(target, value))
        elif tag != "tensor":
            self._problem(path, "the checkpoint has no tensor of this shape here")
        else:
            self._request(target, library, leaf, node["tensor"], path)
        return target

    def _request(self, target: Any, library: Library, leaf: Leaf, content: Node, path: str) -> None:
        name, special = content["name"], content.get("dtype")
        stored = self._stored(name, path)
        kept = Leaf(stored.code, stored.shape, "", special, None)
        if (leaf.code, leaf.shape) != (kept.code, kept.shape) or (not self.flat and leaf.native != kept.native):
            self._problem(path, f"the checkpoint has {_described(kept)}, not {_described(leaf)}")
        elif leaf.key is not None and leaf.key in self._taken:
            if self._taken[leaf.key] != name:  # tied here, but not in the checkpoint: the last one counts
                self.late.append(_Late(name, stored, target, library, path, leaf.part))
        elif leaf.part is None or leaf.nbytes:  # else this process has nothing of it
            self._taken[leaf.key] = name
            if library.direct(target, host=False):
                self.requests.append(_Request(name, stored, library.target(target, path, host=False), leaf.part))
            else:
                library.target(target, path, host=False)  # refuses what cannot be written
                self.late.append(_Late(name, stored, target, library, path, leaf.part))

    # ---------------------------------------------------------------------------------------------------- objects

    def _object(self, target: Any, node: Node, path: str) -> Any:
        if _torch.is_module(target):
            self._module(target, node, path)
        elif is_optimizer(target) and tag_of(node) == "optimizer":
            self._optimizer(target, node["optimizer"], path)
        elif is_optimizer(target) and self.flat:
            self._problem(path, "the checkpoint was not saved by this package, and has no optimizer as such: load its tensors by name")
        else:
            value = self.build(node, path)
            self.after.append(lambda: target.load_state_dict(value))
        return target

    def _module(self, target: Any, node: Node, path: str) -> None:
        module = _torch.unwrapped(target)
        state = self._states.get(id(target)) or _fsdp1.take(module, path).state
        inside = self._members(node, path)
        if inside is None:
            return
        placed = {}
        for key, old in state.items():
            if key in inside:
                placed[key] = self._place(old, inside[key], join(path, key))
            elif self.strict:
                self._missing(path, key, (k for k in inside if k not in state), in_module=True)
        for key in [k for k in inside if k not in state] if self.strict else ():
            self._problem(join(path, key), "the module has no such tensor")
        if not _fsdp1.is_wrapped(module) and (placed.keys() != state.keys() or not _torch.is_in_place(module, state)):
            self.after.append(lambda: _load_module(module, placed, self.strict))

    def _optimizer(self, target: Any, node: Node, path: str) -> None:
        _torch.check_optimizer(target, path)
        _torch.check_updated(target, path, self._cuts)
        own = target.state_dict()
        parameters = parameters_of(target)
        if not is_optimizer_state(own) or parameters is None:
            value = self.build({"optimizer": node}, path)
            self.after.append(lambda: target.load_state_dict(value))
            return
        mine, places = _fsdp1.take_optimizer(own, parameters, self.weights, self._cuts)
        if [len(g) for g in mine.ids] != [len(g) for g in node["ids"]]:
            self._problem(path, f"the checkpoint has groups of {[len(g) for g in node['ids']]} parameters, the optimizer of {[len(g) for g in mine.ids]}")
            return
        at = self._counterparts(mine.names, node["names"], path)
        state: dict[Any, dict[str, Any]] = {}
        for group, index, slots in node["state"]:
            at_group, at_index = at.get((group, index), (0, -1))
            if at_index < 0:
                continue
            place, saved = places[mine.ids[at_group][at_index]], node["names"][group][index]
            here = join(join(path, "state"), saved or str(node["ids"][group][index]))
            self._check_parameter(saved, place, here)
            if place.cut is None:
                state[place.number] = self._slots(target, place.parameter, slots, here)
            elif place.parameter.numel():
                self._cut_slots(target, place, slots, state.setdefault(place.number, {}), here)
        ids = [list(g["params"]) for g in own["param_groups"]]
        groups = [{**self.build(g, join(join(path, "param_groups"), i)), "params": ids[i]} for i, g in enumerate(node["groups"])]
        more = {key: self.build(child, join(path, key)) for key, child in node["more"].items()}
        self.after.append(lambda: _load_optimizer(target, {"state": state, "param_groups": groups, **more}, ids, parameters))

    def _counterparts(self, mine: list[list[str | None]], saved: list[list[str | None]], path: str) -> dict[tuple[int, int], tuple[int, int]]:
        """Which parameter of the optimizer each one of the checkpoint is: by name, those without one in their order.

        Where one side has no name at all, a parameter's place says which it is.
        """
        at: dict[tuple[int, int], tuple[int, int]] = {}
        for group, (names, others) in enumerate(zip(mine, saved)):
            if not (any(names) and any(others)):
                at.update({(group, index): (group, index) for index in range(len(others))})
                continue
            places = {name: place for place, name in enumerate(names) if name is not None}
            nameless = (place for place, name in enumerate(names) if name is None)
            for index, name in enumerate(others):
                place = next(nameless, None) if name is None else places.pop(name, None)
                if place is not None:
                    at[group, index] = (group, place)
                elif name is not None:
                    self._problem(path, f"group {group} of the optimizer does not have the parameter {name}, or the state does not have its module")
            if others.count(None) > names.count(None):
                self._problem(path, f"group {group} of the checkpoint has parameters without names, which may be {' or '.join(places)}")
        return at

    def _check_parameter(self, name: str | None, place: _fsdp1.Place, path: str) -> None:
        """A state that goes to a parameter by its place must not go to one of another shape."""
        weight, shape = self.stored.get(name or ""), place.shape(path)
        if weight is not None and weight.shape != shape:
            self._problem(path, f"the checkpoint has it for a parameter of the shape {list(weight.shape)}, not {list(shape)}")

    def _slots(self, optimizer: Any, parameter: Any, slots: Node, path: str) -> dict[str, Any]:
        """The states of one parameter: in place where the optimizer has the tensor already."""
        there = _states_of(optimizer, parameter)
        found = {}
        for slot, child in slots["map"].items():
            here, old = join(path, slot), there.get(slot)
            is_array = tag_of(child) == "tensor"
            fits = is_array and _torch.is_tensor(old) and self._fits(old, child["tensor"], here)
            if is_array and not fits:
                old = self._part(parameter, child["tensor"], here)
                fits = old is not None
            found[slot] = self._place(old, child, here) if fits else self.build(child, here)
        return found

    def _cut_slots(self, optimizer: Any, place: _fsdp1.Place, slots: Node, found: dict[str, Any], path: str) -> None:
        """The states of one of the parameters that FSDP1 has joined, into those of the flat one."""
        assert place.cut is not None
        there = _states_of(optimizer, place.parameter)
        for slot, child in slots["map"].items():
            here = join(path, slot)
            if tag_of(child) != "tensor":
                value = self.build(child, here)
                if slot in found and found[slot] != value:
                    self._problem(here, f"it is {value} here, but {found[slot]} for a parameter in the same flat one: wrap them apart, or use_orig_params")
                found[slot] = value
                continue
            if slot not in found:
                stored = self._stored(child["tensor"]["name"], here)
                dtype = getattr(_torch.load_torch(here), child["tensor"].get("dtype") or NAMES.get(stored.code, ""))
                found[slot] = _fsdp1.memory_for(place, there.get(slot), dtype)
            self._place(place.cut.part(found[slot], found[slot]), child, here)

    def _part(self, parameter: Any, content: Node, path: str) -> Any | None:
        """A new tensor for a state of a parameter, where that is and sharded like it; None: new ones are made in host memory."""
        stored = self._stored(content["name"], path)
        if stored.shape != tuple(parameter.shape) or content.get("dtype") is not None:
            return None
        return _torch.empty_like(parameter, NAMES.get(stored.code, ""))

    def _fits(self, old: Any, content: Node, path: str) -> bool:
        leaf, stored = _torch.LIBRARY.leaf(old, path), self._stored(content["name"], path)
        return (leaf.code, leaf.shape, leaf.special) == (stored.code, stored.shape, content.get("dtype"))

    # -------------------------------------------------------------------------------------------------- execution

    def run(self, load: Any, call: Call) -> None:
        """Reads everything, then sets plain values and calls load_state_dict() where that is needed."""
        total = sum(r.nbytes for r in self.requests) + sum(late.nbytes for late in self.late)
        done = 0
        for batch in _batches(self.requests):
            done = _read(load, batch, call, done, total)
        for late in self.late:
            done = _read(load, [late.request()], call, done, total)
        for step in self.after:
            step()


def _batches(requests: list[_Request]) -> Iterator[list[_Request]]:
    """Requests in their order, so many at a time that an interrupt need not wait long."""
    batch: list[_Request] = []
    size = 0
    for request in requests:
        size += request.nbytes
        if batch and size > BATCH_BYTES:
            yield batch
            batch, size = [], request.nbytes
        batch.append(request)
    if batch:
        yield batch


def _read(load: Any, batch: list[_Request], call: Call, done: int, total: int) -> int:
    """Reads requests into their memory. Returns the bytes done so far."""
    array = ffi.new("ckd_load_request[]", len(batch))
    names = [ffi.new("char[]", r.name.encode()) for r in batch]
    devices = [r.memory.device.native() if r.memory.device is not None else ffi.NULL for r in batch]
    for item, name, device, request in zip(array, names, devices, batch):
        item.struct_size = ffi.sizeof("ckd_load_request")
        item.device = device
        item.name, item.dtype = name, request.stored.code
        item.data, item.size = request.memory.pointer, request.nbytes
        if request.part is not None:
            set_part(item.region, request.part, request.stored.shape)
    call.check(lib.ckd_load_all(load, array, len(batch), lib.CKD_DIFFERS_UNEXPECTED, call.err))
    for request in batch:
        if request.memory.finish:
            request.memory.finish()
    done += sum(request.nbytes for request in batch)
    progress = call.callback.progress
    if progress is not None and progress(done, total) is False:
        raise CancelledError("the progress callback cancelled the load: what was read so far has been written")
    return done


def _described(leaf: Leaf) -> str:
    return f"{leaf.special or NAMES.get(leaf.code, '?')} {list(leaf.shape)}"


def _has_arrays(value: Any, depth: int = 0) -> bool:
    """Is there an array or an object with a state below a value of the state?"""
    if library_of(value) is not None or has_state_dict(value):
        return True
    if depth == 100 or not isinstance(value, (dict, list, tuple)):
        return False
    return any(_has_arrays(v, depth + 1) for v in (value.values() if isinstance(value, dict) else value))


def _refilled_dict(old: dict[Any, Any], new: dict[Any, Any]) -> Any:
    content = {key: _refilled(old[key], value) if key in old else value for key, value in new.items()}
    old.clear()
    old.update(content)
    return old


def _refilled(old: Any, new: Any) -> Any:
    """`new`, in the containers that are there: the caller may have them under other names. A deque keeps its own maxlen."""
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, dict):
        return _refilled_dict(old, new)
    if isinstance(old, (list, deque, tuple)):
        inside = [*map(_refilled, old, new), *list(new)[len(old):]]
        if isinstance(old, tuple):
            return tuple(inside)
        old.clear()
        old.extend(inside)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, io.BytesIO):
        old.seek(0)
        old.truncate()
        old.write(new.getvalue())
        old.seek(0)
    else:
        return new
    return old


def _assign(target: Any, value: Any) -> None:
    with _torch.load_torch("").no_grad():
        local_of(target).copy_(value)


def _load_module(module: Any, state: dict[str, Any], strict: bool) -> None:
    module.load_state_dict(state, strict=strict)


def _states_of(optimizer: Any, parameter: Any) -> Any:
    """What the optimizer keeps for a parameter, by slot; empty if it keeps it in a form of its own."""
    states = getattr(optimizer, "state", None)
    found = states.get(parameter) if isinstance(states, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _load_optimizer(optimizer: Any, state: dict[str, Any], ids: list[list[Any]], parameters: list[list[Any]]) -> None:
    """load_state_dict() casts states to the parameters' dtype. What was saved in another dtype comes back in that."""
    optimizer.load_state_dict(state)
    for group, tensors in zip(ids, parameters):
        for one, parameter in zip(group, tensors):
            now = _states_of(optimizer, parameter)
            for slot, value in state["state"].get(one, {}).items():
                if _torch.is_tensor(value) and _torch.is_tensor(now.get(slot)) and now[slot].dtype != value.dtype:
                    now[slot] = value.to(now[slot].device)


