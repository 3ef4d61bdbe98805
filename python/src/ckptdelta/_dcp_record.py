"""The record of a checkpoint that torch.distributed.checkpoint saved: one JSON document, without pickle.

It has what the library's tensors do not tell: dtypes and sizes as torch sees them, tensors of no dimensions, values that are
no tensors, and the planner's data. python/README.md describes it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _numpy, _torch
from ._arrays import CODES, COMPLEX, NAMES, Leaf, check_shape, stored_shape
from ._errors import CorruptError, InvalidError, UnsupportedError
from ._record import MAX_DEPTH, Node, base, check_node, container_node, plain, scalar_node

BLOB = "dcp/state.json"
FORMAT, VERSION = "ckptdelta.dcp", 1


@dataclass(frozen=True)
class Described:
    """A tensor as torch sees it: name of its dtype, global size, and whether it wants gradients."""

    dtype: str
    size: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Stream:
    """Bytes in a blob: a BytesIO with its position, or what torch.save() wrote for an object (position None)."""

    blob: str
    position: int | None


@dataclass
class Items:
    """What one rank, or all of them, wrote beside the library's tensors, by name.

    Attributes:
        scalars: (dtype, bytes in hexadecimal) of tensors of no dimensions.
        values: nodes of plain values.
        streams: what is in blobs.
    """

    scalars: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, Node] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)

    def update(self, other: Items) -> None:
        self.scalars.update(other.scalars)
        self.values.update(other.values)
        self.streams.update(other.streams)


@dataclass(frozen=True)
class Record:
    """The whole record. planner_data is what the planner needs to restore nested states."""

    tensors: dict[str, Described]
    items: Items
    planner_data: Any


def leaf_of(described: Described, path: str) -> Leaf:
    """How the library stores a tensor. Errors: InvalidError."""
    name = described.dtype
    if name in CODES:
        code, special = CODES[name], None
    elif name in COMPLEX:
        code, special = CODES[COMPLEX[name]], name
    elif name in _torch.BYTES_ONLY:
        code, special = CODES["uint8"], name
    else:
        raise InvalidError(f"{path} is a tensor of dtype {name}, which cannot be stored", path=path)
    shape = stored_shape(described.size, name)
    check_shape(shape, path)
    return Leaf(code, shape, "torch", special, None)


def described_as(code: int, shape: tuple[int, ...]) -> Described:
    """A tensor of a checkpoint without a record."""
    return Described(NAMES.get(code, "?"), shape)


# ------------------------------------------------------------------------------------------------------------- values


def encode(value: Any, path: str) -> Node:
    """The node of a value. Beside what the package's own record has, numpy's arrays. Errors: InvalidError."""
    return _encode(value, path, 0)


def _encode(value: Any, path: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise InvalidError(f"{path} is nested more than {MAX_DEPTH} deep", path=path)
    node = scalar_node(value, path)
    if node is not None:
        return node[0]
    if _numpy.is_array(value) and type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" \
            and value.dtype.kind in "biufcmM":
        return {"array": [value.dtype.str, list(value.shape), base(value.tobytes())]}
    return container_node(value, path, lambda inner, where: _encode(inner, where, depth + 1))


def scalar_of(items: Items, name: str) -> Any:
    dtype, data = items.scalars[name]
    try:
        return _torch.scalar_from(dtype, bytes.fromhex(data), name)
    except ValueError as error:
        raise CorruptError(f"{name}: the record of a scalar is malformed: {error}", path=name) from None


# ------------------------------------------------------------------------------------------------------ the document


def dump(record: Record) -> bytes:
    """Errors: InvalidError (planner data that is no plain value)."""
    items = record.items
    return json.dumps({
        "format": FORMAT, "version": VERSION,
        "tensors": {name: [t.dtype, list(t.size), t.requires_grad] for name, t in record.tensors.items()},
        "scalars": items.scalars, "values": items.values,
        "streams": {name: [s.blob, s.position] for name, s in items.streams.items()},
        "planner": encode(record.planner_data, "the planner's data"),
    }, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse(data: bytes) -> Record:
    """Errors: CorruptError, UnsupportedError (a newer version)."""
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise ValueError("another format")
        if int(found["version"]) > VERSION:
            raise UnsupportedError(f"the checkpoint's record of DCP is of version {found['version']}, this package reads {VERSION}: update it")
        tensors = {name: _described(*entry) for name, entry in found["tensors"].items()}
        scalars = {name: (str(dtype), str(bits)) for name, (dtype, bits) in found["scalars"].items()}
        streams = {name: Stream(str(blob), None if position is None else int(position))
                   for name, (blob, position) in found["streams"].items()}
        for node in found["values"].values():
            _check(node)
        _check(found["planner"])
        items = Items(scalars, dict(found["values"]), streams)
        return Record(tensors, items, plain(found["planner"], "the planner's data"))
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, IndexError) as error:
        if isinstance(error, (InvalidError, CorruptError, UnsupportedError)):
            raise
        raise CorruptError(f"the checkpoint's record of DCP ({BLOB}) is malformed: {error}") from None


def _check(node: Node) -> None:
    check_node(node, 0)


def _described(dtype: Any, size: Any, requires_grad: Any) -> Described:
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in size):
        raise ValueError("a tensor has no dtype or size")
    return Described(dtype, tuple(size), bool(requires_grad))


# ------------------------------------------------------------------------------------------------------------ streams


def harmless(data: bytes, path: str, remedy: str) -> Any:
    """The object in bytes of torch.save() that need no code but torch's own. Errors: UnsupportedError with the remedy."""
    try:
        return _torch.load_torch(path).load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a pickle can raise
        first = str(error).strip().split("\n")[0]
        raise UnsupportedError(f"{path} is an object that only pickle can restore: {remedy} ({first:.200})", path=path) from None


def stream_of(content: Node, path: str, blob: Callable[[str], bytes]) -> Any:
    """The value of a node `stream`. Errors: UnsupportedError, and those of `blob`."""
    name, position = content
    if position is None:
        return harmless(blob(name), path, "load it with dcp.load() and StorageReader(pickle=True)")
    value = io.BytesIO(blob(name))
    value.seek(position)
    return value


# -------------------------------------------------------------------------------------------------------- the state

_MAX_INDEX = 1 << 20


class _Branch:
    """A dict or a list of the state, as the planner flattened it."""

    def __init__(self) -> None:
        self.members: dict[Any, Any] = {}

    def add(self, path: tuple[Any, ...], leaf: Node) -> None:
        key, rest = path[0], path[1:]
        if key in self.members and not (rest and isinstance(self.members[key], _Branch)):
            raise ValueError("two of its names have the same path")
        if not rest:
            self.members[key] = leaf
            return
        child = self.members.setdefault(key, _Branch())
        child.add(rest, leaf)

    def node(self) -> Node:
        found = {key: child.node() if isinstance(child, _Branch) else child for key, child in self.members.items()}
        if all(type(key) is int for key in found) and found:
            return [found.get(i) for i in range(max(found) + 1)]  # what was empty has no name
        return {"map": {str(key): node for key, node in found.items()}}


def root_of(record: Record) -> tuple[Node, bool]:
    """(root node of the state that was saved, whether it is a dict by name, as no paths are known). Errors: CorruptError."""
    items = record.items
    leaves: dict[str, Node] = {}
    for name, described in record.tensors.items():
        if name not in items.scalars:
            special = leaf_of(described, name).special
            leaves[name] = {"tensor": {"name": name, "library": "torch", **({"dtype": special} if special else {})}}
    leaves |= {name: {"scalar": list(found)} for name, found in items.scalars.items()}
    leaves |= items.values
    leaves |= {name: {"stream": [s.blob, s.position]} for name, s in items.streams.items()}
    paths = record.planner_data
    if not isinstance(paths, Mapping) or not all(_is_path(paths.get(name)) for name in leaves):
        return {"map": leaves}, True
    root = _Branch()
    try:
        for name, leaf in leaves.items():
            root.add(paths[name], leaf)
        return root.node(), False
    except ValueError as error:
        raise CorruptError(f"the checkpoint's record of DCP ({BLOB}) is malformed: {error}") from None


def _is_path(path: Any) -> bool:
    """Does a planner's entry lead through dicts and lists?"""
    return isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH and type(path[0]) is str and all(
        type(key) is str or (type(key) is int and 0 <= key < _MAX_INDEX) for key in path)
