"""Plain values as JSON with types: what is no tensor becomes one record of a checkpoint, without pickle.

A node of the record is a JSON null, boolean, number or string, which stands for itself, a JSON list of nodes, which is a
list, or a JSON object with one member, whose name is the type. python/README.md lists the types.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from . import _numpy, _torch
from ._errors import CorruptError, InvalidError, UnsupportedError

Node = Any
BLOB = "python/state.json"
FORMAT, VERSION = "ckptdelta.python", 1
MAX_DEPTH = 100
_FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (list, dict, set, int, float, str, tuple, bool)}


def join(path: str, key: object) -> str:
    """The path of a member: keys and indexes, separated by dots."""
    name = key if isinstance(key, str) else str(key) if isinstance(key, int) else repr(key)
    return f"{path}.{name}" if path else name


def where(path: str) -> str:
    return path or "the state"


def base(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def unbase(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


# ---------------------------------------------------------------------------------------------------- values to nodes


def scalar_node(value: Any, path: str) -> tuple[Node] | None:
    """The node of a value without members, in a tuple; None if the value is no such."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return (value,)
    if kind is int:
        return (value if -(2**63) <= value < 2**63 else {"int": hex(value)},)
    if kind is float:
        return (value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()},)
    if kind is complex:
        return ({"complex": struct.pack(">dd", value.real, value.imag).hex()},)
    if kind in (bytes, bytearray):
        return ({kind.__name__: base(value)},)
    if kind is io.BytesIO:
        return ({"bytesio": base(value.getvalue())},)
    if kind is range:
        return ({"range": [value.start, value.stop, value.step]},)
    if _numpy.is_scalar(value):
        dtype, data = _numpy.scalar_bytes(value, path)
        return ({"numpy": [dtype, base(data)]},)
    constant = _torch.constant(value)
    return ({"torch": list(constant)},) if constant else None


Encode = Callable[[Any, str], Node]


def container_node(value: Any, path: str, encode: Encode) -> Node:
    """The node of a container of Python's own; InvalidError for what cannot be stored."""
    kind = type(value)
    if kind is list:
        return [encode(v, join(path, i)) for i, v in enumerate(value)]
    if kind is tuple:
        return {"tuple": [encode(v, join(path, i)) for i, v in enumerate(value)]}
    if kind is deque:
        return {"deque": [value.maxlen, [encode(v, join(path, i)) for i, v in enumerate(value)]]}
    if kind is dict:
        return _dict_node(value, path, encode)
    if kind is OrderedDict or kind is Counter:
        return {kind.__name__: _pairs(value, path, encode)}
    if kind is defaultdict:
        factory = value.default_factory
        name = None if factory is None else factory.__name__ if factory in _FACTORIES.values() else ""
        if name == "":
            raise InvalidError(f"{where(path)} is a defaultdict whose default is made by {factory!r}: pass dict(it)", path=path)
        return {"defaultdict": [name, _pairs(value, path, encode)]}
    if kind in (set, frozenset):
        return {kind.__name__: [encode(v, join(path, repr(v))) for v in _in_order(value)]}
    raise InvalidError(f"{where(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: pass its state_dict(), "
                       "or numbers, strings, bytes, lists, tuples, dicts, sets, arrays", path=path)


def _in_order(values: Any) -> list[Any]:
    """The same set gives the same record."""
    return sorted(values, key=lambda v: (type(v).__name__, repr(v)))


def _dict_node(value: dict[Any, Any], path: str, encode: Encode) -> Node:
    if all(type(k) is str for k in value):
        return {"map": {k: encode(v, join(path, k)) for k, v in value.items()}}
    return {"dict": _pairs(value, path, encode)}


def _pairs(value: Any, path: str, encode: Encode) -> list[Node]:
    return [[_key(k, path), encode(v, join(path, k))] for k, v in value.items()]


def _key(key: Any, path: str) -> Node:
    node = scalar_node(key, join(path, key))
    if node is not None:
        return node[0]
    if type(key) in (tuple, frozenset):
        return container_node(key, join(path, key), _key)
    raise InvalidError(f"{where(path)} has a key of the type {type(key).__qualname__}, which cannot be stored: {key!r:.100}", path=path)


def dump(root: Node) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, "state": root}, separators=(",", ":"), allow_nan=False).encode("ascii")


# ---------------------------------------------------------------------------------------------------- nodes to values


def parse(data: bytes) -> Node:
    """The root node of a record. Errors: CorruptError, UnsupportedError (a newer version)."""
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise ValueError("another format")
        version = int(found["version"])
        if version > VERSION:
            raise UnsupportedError(f"the checkpoint's plain values are of version {version}, this package reads {VERSION}: update it")
        check_node(found["state"], 0)
        return found["state"]
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, IndexError) as error:
        raise CorruptError(f"the record of the checkpoint's plain values ({BLOB}) is malformed: {error}") from None


def check_node(node: Node, depth: int) -> None:
    """Checks the nodes whose members others read. Raises ValueError, or what a wrong type raises."""
    if depth > 4 * MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(node, list):
        for child in node:
            check_node(child, depth + 1)
    if not isinstance(node, dict):
        return
    (tag, content), = node.items()
    if tag == "map":
        for child in content.values():
            check_node(child, depth + 1)
    elif tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        for key, child in content[1] if tag == "defaultdict" else content:
            check_node(key, depth + 1)
            check_node(child, depth + 1)
    elif tag in ("tuple", "set", "frozenset", "deque"):
        check_node(content[1] if tag == "deque" else content, depth + 1)
    elif tag == "tensor":
        if not isinstance(content["name"], str) or content["library"] not in ("numpy", "torch", "dlpack") \
                or not isinstance(content.get("dtype", "x"), str) or not content.get("dtype", "x"):
            raise ValueError("a tensor has no name, library or dtype")
    elif tag == "optimizer":
        _check_optimizer(content, depth)


def _check_optimizer(content: Node, depth: int) -> None:
    ids, names = content["ids"], content["names"]
    if [len(g) for g in ids] != [len(g) for g in names] or len(ids) != len(content["groups"]):
        raise ValueError("an optimizer's groups differ in their lengths")
    if not all(type(i) in (int, str) for g in ids for i in g) or not all(n is None or type(n) is str for g in names for n in g):
        raise ValueError("a parameter of an optimizer has no id or name")
    for group, index, slots in content["state"]:
        if not 0 <= group < len(ids) or not 0 <= index < len(ids[group]) or tag_of(slots) != "map":
            raise ValueError("a state belongs to no parameter of its optimizer")
        check_node(slots, depth + 1)
    for child in [*content["groups"], {"map": content["more"]}]:
        if tag_of(child) != "map":
            raise ValueError("a group of an optimizer is not a dict")
        check_node(child, depth + 1)


def tag_of(node: Node) -> str | None:
    """The type that a node names; None for one that stands for itself, or a list."""
    if isinstance(node, dict) and len(node) == 1:
        return str(next(iter(node)))
    if isinstance(node, dict):
        raise CorruptError("the record of the checkpoint's plain values has an object without a type")
    return None


Decode = Callable[[Node, str], Any]


def value_of(node: Node, path: str, decode: Decode) -> Any:
    """The value of a node. `decode` gives those of its members, which may be tensors."""
    tag = tag_of(node)
    if tag is None:
        return [decode(v, join(path, i)) for i, v in enumerate(node)] if isinstance(node, list) else node
    content = node[tag]
    try:
        build = _BUILD.get(tag)
        if build is not None:
            return build(content, path, decode)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error, OverflowError) as error:
        if isinstance(error, (InvalidError, UnsupportedError)):
            raise
        raise CorruptError(f"{where(path)}: the record of a {tag} is malformed: {error}", path=path) from None
    raise UnsupportedError(f"{where(path)} is a {tag!r:.40}, which this version does not know: update ckptdelta", path=path)


def _list_of(content: Any, path: str, decode: Decode) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("no list")
    return [decode(v, join(path, i)) for i, v in enumerate(content)]


def _pairs_of(content: Any, path: str, decode: Decode) -> list[tuple[Any, Any]]:
    found = []
    for key, node in content:
        key = plain(key, path)
        found.append((key, decode(node, join(path, key))))
    return found


def _deque_of(content: Any, path: str, decode: Decode) -> Any:
    return deque(_list_of(content[1], path, decode), maxlen=content[0])


def _defaultdict_of(content: Any, path: str, decode: Decode) -> Any:
    return defaultdict(None if content[0] is None else _FACTORIES[content[0]], _pairs_of(content[1], path, decode))


def _complex_of(content: Any, path: str, decode: Decode) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(content)))


_BUILD: dict[str, Callable[[Any, str, Decode], Any]] = {
    "int": lambda c, p, d: int(c, 16),
    "float": lambda c, p, d: struct.unpack(">d", bytes.fromhex(c))[0],
    "complex": _complex_of,
    "bytes": lambda c, p, d: unbase(c),
    "bytearray": lambda c, p, d: bytearray(unbase(c)),
    "bytesio": lambda c, p, d: io.BytesIO(unbase(c)),
    "range": lambda c, p, d: range(c[0], c[1], c[2]),
    "numpy": lambda c, p, d: _numpy.scalar_from(c[0], unbase(c[1]), p),
    "array": lambda c, p, d: _numpy.array_from(c[0], c[1], unbase(c[2]), p),
    "torch": lambda c, p, d: _torch.constant_from(c[0], c[1], p),
    "scalar": lambda c, p, d: _torch.scalar_from(c[0], bytes.fromhex(c[1]), p),
    "tuple": lambda c, p, d: tuple(_list_of(c, p, d)),
    "set": lambda c, p, d: set(_list_of(c, p, d)),
    "frozenset": lambda c, p, d: frozenset(_list_of(c, p, d)),
    "deque": _deque_of,
    "map": lambda c, p, d: {k: d(v, join(p, k)) for k, v in c.items()},
    "dict": lambda c, p, d: dict(_pairs_of(c, p, d)),
    "OrderedDict": lambda c, p, d: OrderedDict(_pairs_of(c, p, d)),
    "Counter": lambda c, p, d: Counter(dict(_pairs_of(c, p, d))),
    "defaultdict": _defaultdict_of,
}


def plain(node: Node, path: str) -> Any:
    """The value of a node that has no tensors."""
    return value_of(node, path, plain)


def members(node: Node) -> list[tuple[Any, Node]] | None:
    """(key, node) of the members of a node that is a dict; None if it is not."""
    tag = tag_of(node)
    if tag == "map":
        return list(node["map"].items())
    if tag in ("dict", "OrderedDict", "Counter"):
        return [(plain(key, ""), child) for key, child in node[tag]]
    return [(plain(key, ""), child) for key, child in node[tag][1]] if tag == "defaultdict" else None
