"""Converts a checkpoint of Lightning to a state that can be stored, and back: a few of its values have types that the record lacks.

Such values become plain ones, and the member ``ckptdelta`` of the stored dict records their types. So Store.state_dict() reads
the checkpoint without Lightning, and a load gives back the types. Nothing is pickled unless the caller allows it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import io
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _torch
from ._arrays import Library, library_of
from ._call import logger
from ._errors import CorruptError, InvalidError, UnsupportedError
from ._flatten import Flattener, Tensor
from ._native import ffi
from ._pairing import NO_PARAMETER, names_by_shape
from ._record import MAX_DEPTH, Node, check_node, join, scalar_node, tag_of
from ._updates import Update, Updates

KEY = "ckptdelta"
WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"
ATTRIBUTE_DICTS = ("lightning.pytorch.utilities.parsing", "lightning.fabric.utilities.data", "pytorch_lightning.utilities.parsing",
                   "lightning_fabric.utilities.data")
Place = tuple[Any, ...]


# ------------------------------------------------------------------------------------------------- values that are not plain


class _Simplifier:
    """Makes values plain, and records [keys that lead to it, kind, the kind's needs] of each value that was not plain."""

    def __init__(self, pickle: bool) -> None:
        self.pickle = pickle
        self.kinds: list[list[Any]] = []

    def value(self, value: Any, at: Place) -> Any:
        if len(at) > MAX_DEPTH:
            raise InvalidError(f"{_path(at)[:200]} is nested more than {MAX_DEPTH} deep", path=_path(at))
        kind = type(value)
        if _torch.is_tensor(value) or library_of(value) is not None:
            if _torch.is_tensor(value) and kind is _torch.loaded().nn.Parameter:
                self.kinds.append([list(at), "Parameter", value.requires_grad])
            return value
        if scalar_node(value, "") is not None or kind in (set, frozenset):
            return value
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._dict(value, at)
        if kind in (list, tuple, deque):
            inner = [self.value(v, (*at, i)) for i, v in enumerate(value)]
            return deque(inner, value.maxlen) if kind is deque else kind(inner)
        return self._special(value, at)

    def _dict(self, value: Any, at: Place) -> Any:
        metadata = getattr(value, "_metadata", None)  # of a module's state_dict(): versions of its parts
        if isinstance(metadata, dict):
            self.kinds.append([list(at), "state_dict", {key: dict(inner) for key, inner in metadata.items()}])
        items = {key: self.value(inner, (*at, key)) for key, inner in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)

    def _special(self, value: Any, at: Place) -> Any:
        kind = type(value)
        if kind is argparse.Namespace:
            self.kinds.append([list(at), "Namespace", None])
            return self.value(vars(value), at)
        if kind.__name__ == "AttributeDict" and kind.__module__ in ATTRIBUTE_DICTS:
            self.kinds.append([list(at), "AttributeDict", kind.__module__])
            return self.value(dict(value), at)
        if isinstance(value, pathlib.PurePath):
            self.kinds.append([list(at), "path", isinstance(value, pathlib.Path)])
            return str(value)
        if kind is datetime.timedelta:
            self.kinds.append([list(at), "timedelta", None])
            return [value.days, value.seconds, value.microseconds]
        if not self.pickle:
            raise InvalidError(f"{_path(at)} is a {kind.__module__}.{kind.__qualname__}, which only pickle can restore: leave it out, such as with "
                               "save_hyperparameters(ignore=[...]), or pass pickle=True to CheckpointIO if you trust whoever can write to the store",
                               path=_path(at))
        self.kinds.append([list(at), "pickle", None])
        out = io.BytesIO()
        _torch.load_torch(_path(at)).save(value, out)
        return out.getvalue()


def _path(at: Place) -> str:
    found = ""
    for key in at:
        found = join(found, key)
    return found or "the checkpoint"


def simplified(checkpoint: dict[str, Any], pickle: bool) -> dict[str, Any]:
    """The checkpoint as it is stored. Tensors stay the same objects. Errors: InvalidError, with the path of what cannot be stored."""
    if not isinstance(checkpoint, dict):
        raise InvalidError(f"a checkpoint is a dict, not a {type(checkpoint).__name__}")
    if KEY in checkpoint:
        raise InvalidError(f"the checkpoint has a member {KEY!r}, a name that CheckpointIO needs for itself", path=KEY)
    simplifier = _Simplifier(pickle)
    found = simplifier.value(checkpoint if type(checkpoint) in (dict, OrderedDict) else dict(checkpoint), ())
    if simplifier.kinds:
        found[KEY] = {"version": 1, "kinds": simplifier.kinds}
    return dict(found) if type(found) is dict else OrderedDict(found)


def original(stored: Any, pickle: bool) -> dict[str, Any]:
    """The checkpoint as it was. Errors: CorruptError; UnsupportedError (it needs pickle, or was written by a newer version)."""
    if not isinstance(stored, dict):
        raise CorruptError("the checkpoint is not a dict, so Lightning has not written it")
    known = stored.pop(KEY, None)
    if known is None:
        return stored
    try:
        if known["version"] != 1:
            raise UnsupportedError(f"the checkpoint was saved by a newer version of ckptdelta.lightning ({known['version']}): update ckptdelta")
        kinds: dict[Place, list[tuple[str, Any]]] = {}
        for at, kind, more in known["kinds"]:
            kinds.setdefault(tuple(at), []).append((kind, more))
        inner = {at[:n] for at in kinds for n in range(len(at))}
        found: dict[str, Any] = _Original(kinds, inner, pickle).value(stored, ())
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidError):
            raise
        raise CorruptError(f"the checkpoint's list of types is malformed: {error!r:.200}", path=KEY) from None


class _Original:
    """Gives values their types back, the inner ones first."""

    def __init__(self, kinds: dict[Place, list[tuple[str, Any]]], inner: set[Place], pickle: bool) -> None:
        self.kinds, self.inner, self.pickle = kinds, inner, pickle

    def value(self, value: Any, at: Place) -> Any:
        if at in self.inner:
            if isinstance(value, dict):
                for key in value:
                    value[key] = self.value(value[key], (*at, key))
            else:
                inner = [self.value(v, (*at, i)) for i, v in enumerate(value)]
                value = deque(inner, value.maxlen) if type(value) is deque else type(value)(inner)
        for kind, more in reversed(self.kinds.get(at, [])):
            value = self._special(kind, more, value, at)
        return value

    def _special(self, kind: str, more: Any, value: Any, at: Place) -> Any:
        if kind == "pickle":
            if not self.pickle:
                raise UnsupportedError(f"{_path(at)} is an object that only pickle can restore, and that runs code from the store: pass "
                                       "pickle=True to CheckpointIO if you trust whoever can write to the store", path=_path(at))
            return _torch.load_torch(_path(at)).load(io.BytesIO(value), weights_only=False, map_location="cpu")
        make: dict[str, Callable[[], Any]] = {
            "Parameter": lambda: _torch.load_torch(_path(at)).nn.Parameter(value, requires_grad=bool(more)),
            "state_dict": lambda: _with_metadata(value, more),
            "Namespace": lambda: argparse.Namespace(**value),
            "AttributeDict": lambda: _attribute_dict(value, more, _path(at)),
            "path": lambda: pathlib.Path(value) if more else pathlib.PurePath(value),
            "timedelta": lambda: datetime.timedelta(*value),
        }
        if kind not in make:
            raise UnsupportedError(f"{_path(at)} is a {kind!r:.40}, which this version does not know: update ckptdelta", path=_path(at))
        return make[kind]()


def _with_metadata(value: Any, metadata: dict[str, Any]) -> Any:
    found = OrderedDict(value)
    found._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return found


def _attribute_dict(value: dict[str, Any], module: str, path: str) -> Any:
    """The same class as it was; a plain dict where that is not installed."""
    if module not in ATTRIBUTE_DICTS:
        raise ValueError(f"{module} has no AttributeDict")
    for name in (module, *ATTRIBUTE_DICTS):
        try:
            return importlib.import_module(name).AttributeDict(value)
        except ImportError:
            continue
    logger.warning("%s is a plain dict now: Lightning, which has its class AttributeDict, is not installed", path)
    return value


# ------------------------------------------------------------------------------------------------------- tensors and record


@dataclass(frozen=True)
class Flat:
    """A checkpoint taken apart: its tensors, the node of its record, and the steps of optimizers that it is one step after."""

    tensors: list[Tensor]
    root: Node
    updates: Mapping[str, Update]

    def copied(self) -> Flat:
        """Replaces the tensors with private copies in host memory."""
        for tensor in self.tensors:
            if _torch.is_tensor(tensor.array):
                tensor.array = tensor.array.detach().to("cpu", copy=True)
            elif hasattr(tensor.array, "copy"):
                tensor.array = tensor.array.copy()
        return self

    def digest(self) -> bytes:
        """Of all tensors' values."""
        found = hashlib.blake2b(digest_size=20)
        for tensor in self.tensors:
            memory = tensor.library.source(tensor.array, host=True)
            found.update(repr((tensor.name, tensor.leaf.code, tensor.leaf.shape)).encode())
            if tensor.leaf.nbytes:
                found.update(ffi.buffer(memory.pointer, tensor.leaf.nbytes))
        return found.digest()


class _Flattener(Flattener):
    """Numbers that Lightning keeps as tensors, such as the best score of a callback, go into the record."""

    def _tensor(self, array: Any, library: Library, path: str, alias: str | None = None) -> Node:
        if _torch.is_tensor(array) and array.dim() == 0 and not path.startswith(f"{WEIGHTS}."):
            _torch.LIBRARY.leaf(array, path)
            dtype, data = _torch.scalar_bytes(array)
            return {"scalar": [dtype, data.hex()]}
        return super()._tensor(array, library, path, alias)


def taken_apart(checkpoint: dict[str, Any], pickle: bool, updates: Updates | None = None) -> Flat:
    """Errors: InvalidError, with the path of what cannot be stored."""
    state = simplified(checkpoint, pickle)
    names = names_by_shape(state)
    flat = _Flattener(updates, names=names)
    root = flat.run(state)
    optimizers = state.get(OPTIMIZERS) or []
    known = bool(optimizers) and all(id(optimizer) in names for optimizer in optimizers)
    trained = {name for groups in names.values() for group in groups for name in group} if known else None
    for tensor in flat.tensors:
        tensor.buffer = _stays_exact(tensor, trained)
    return Flat(flat.tensors, root, flat.updates)


def _stays_exact(tensor: Tensor, trained: set[str | None] | None) -> bool:
    """Tensors that no optimizer trains are never stored lossily: buffers, and whatever hooks put into the checkpoint."""
    if tensor.path.startswith(f"{OPTIMIZERS}."):
        return False
    if not tensor.path.startswith(f"{WEIGHTS}."):
        return True
    return tensor.name not in trained if trained is not None else tensor.path.endswith(NO_PARAMETER)


def difference(old: Node, new: Node) -> list[list[Any]]:
    """The changes that turn one record into another: [keys, node] of the members that differ."""
    if old == new:
        return []
    if tag_of(old) == tag_of(new) == "map" and old["map"].keys() == new["map"].keys():
        return [[[key, *keys], node] for key in new["map"] for keys, node in difference(old["map"][key], new["map"][key])]
    return [[[], new]]


def changed(root: Node, changes: list[list[Any]]) -> Node:
    """The other record. Errors: CorruptError."""
    try:
        for keys, node in changes:
            check_node(node, 0)
            if not keys:
                return node
            place = root
            for key in keys[:-1]:
                place = place["map"][key]
            place["map"][keys[-1]] = node
        return root
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, InvalidError):
            raise
        raise CorruptError(f"the changes in the marker of the checkpoint are malformed: {error!r:.200}") from None
