"""The record of a checkpoint that torch.distributed.checkpoint saved: one JSON document, without pickle.

It has what the library's tensors do not tell: dtypes and sizes as torch sees them, tensors of no dimensions, values that are
no tensors, and the planner's data. python/README.md describes it.
"""

from __future__ import annotations

import copy
import io
import json
import os
from dataclasses import dataclass, field
from typing import Any, cast

from . import _numpy, _torch
from ._arrays import CODES, COMPLEX, NAMES, Leaf, check_shape, stored_shape
from ._catalog import step_number
from ._errors import CorruptError, InvalidError, UnsupportedError
from ._record import MAX_DEPTH, Node, base, check_node, container_node, scalar_node, tag_of, unbase, value_of
from ._store import Store, open

BLOB = "dcp/state.json"
PICKLE = "pass pickle=True to StorageWriter and StorageReader if you trust whoever can write to the store"
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


def decode(node: Node, path: str) -> Any:
    """The value of a node. Errors: CorruptError, UnsupportedError."""
    if tag_of(node) != "array":
        return value_of(node, path, decode)
    try:
        name, shape, data = node["array"]
        dtype = _numpy.dtype_named(name, path)
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return _numpy.load_numpy(path).frombuffer(unbase(data), dtype).reshape(shape).copy()
    except (ValueError, TypeError) as error:
        raise CorruptError(f"{path}: the record of an array is malformed: {error}", path=path) from None


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
        return Record(tensors, items, decode(found["planner"], "the planner's data"))
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


# ------------------------------------------------------------------------------------------------------------- pickle


def saved(value: Any) -> io.BytesIO:
    """What a planner of DCP takes for a value."""
    out = io.BytesIO()
    _torch.load_torch("").save(value, out)
    out.seek(0)
    return out


def check_harmless(data: bytes, path: str, remedy: str) -> None:
    """Do bytes of torch.save() need no code but torch's own? Errors: UnsupportedError with the remedy."""
    try:
        _torch.load_torch(path).load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a pickle can raise
        first = str(error).strip().split("\n")[0]
        raise UnsupportedError(f"{path} is an object that only pickle can restore: {remedy} ({first:.200})", path=path) from None


# ------------------------------------------------------------------------------------------------ what both sides use


def parse_id(checkpoint_id: object, run: str | None) -> tuple[str | None, int]:
    """(run, step) of a checkpoint id. Errors: InvalidError."""
    if isinstance(checkpoint_id, int):
        return run, step_number(checkpoint_id)
    text = os.fspath(cast(Any, checkpoint_id))
    name, at, step = text.rpartition("@") if isinstance(text, str) else ("", "", "")
    if not step.isascii() or not step.isdecimal() or (at and not name):
        raise InvalidError(f"a checkpoint id is RUN@STEP, or a step, not {checkpoint_id!r}")
    return name if at else run, step_number(int(step))


def is_id(checkpoint_id: object) -> bool:
    try:
        parse_id(checkpoint_id, "")
        return True
    except (InvalidError, TypeError):
        return False


class Addressed:
    """What DCP asks of a writer and of a reader alike about the id of the checkpoint."""

    run: str | None
    step: int | None

    @property
    def checkpoint_id(self) -> str | None:
        """RUN@STEP of the next save or load, None if that is not known."""
        return None if self.run is None or self.step is None else f"{self.run}@{self.step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is it RUN@STEP, or a step?"""
        return is_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Called by DCP before a save or load that has a checkpoint id. Errors: InvalidError."""
        if checkpoint_id is not None:
            self.run, self.step = parse_id(checkpoint_id, self.run)


def opened(store: str | os.PathLike[str] | Store, *, readonly: bool) -> Store:
    """A store of one's own: a save of another thread does not wait for it."""
    return copy.copy(store) if isinstance(store, Store) else open(store, readonly=readonly)
