"""Reads files of torch.save(), and makes their values plain."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import _torch
from ._errors import CorruptError, UnsupportedError

FACTORIES = (None, list, dict, set, int, float, str, tuple, bool)


class Attributes(dict[str, Any]):
    """Stands for an object of another library. Only its attributes are read."""

    def __init__(self, *_: object) -> None:  # arguments of the class are not attributes
        super().__init__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.update(state)


def value_of(value: Any) -> Any:
    """Stands for the class of an enumeration: its members are read as their values."""
    return value


def read_torch(path: Path, unsafe: bool = False, classes: Mapping[str, Any] | None = None) -> Any:
    """A file of torch.save(). Tensors stay in the file, mapped into memory, where its format allows that.

    Args:
        unsafe: restore objects that need code.
        classes: by full name, the classes that stand for those of another library, which need not be installed.
    """
    torch = _torch.load_torch(str(path))
    classes = classes or {}
    options = {"map_location": "cpu", "weights_only": not unsafe}
    if unsafe and classes:
        options["pickle_module"] = _pickle_with(classes)
    try:
        with allowed_globals(torch, classes):
            try:
                state = torch.load(path, mmap=True, **options)
            except RuntimeError:  # an older format, or not in a file system that maps files
                state = torch.load(path, **options)
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing", file=str(path)) from None
    except pickle.UnpicklingError as error:
        if unsafe:
            raise CorruptError(f"{path} cannot be read by torch.load(): {error}", file=str(path)) from error
        what = re.findall(r"GLOBAL ([\w.]+)", str(error))
        raise UnsupportedError(f"{path} holds {f'a {what[0]}' if what else 'objects'}, which only pickle can restore, and that runs code from "
                               "the file: allow it with pickle=True (--pickle) if you trust whoever wrote it", file=str(path)) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        raise CorruptError(f"{path} cannot be read by torch.load(): {str(error).strip()[:300]}", file=str(path)) from error
    return plain(state)


def _pickle_with(classes: Mapping[str, Any]) -> Any:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return classes[f"{module}.{name}"] if f"{module}.{name}" in classes else super().find_class(module, name)

    return SimpleNamespace(**{**vars(pickle), "Unpickler": Unpickler})


def allowed_globals(torch: Any, classes: Mapping[str, Any] | None = None) -> Any:
    """torch.load() takes arrays of numpy, such as the state of its random numbers, and BytesIO only if their parts are named."""
    named: list[Any] = [(stand_in, name) for name, stand_in in (classes or {}).items()]
    named.append(io.BytesIO)
    try:
        import numpy
        kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"}
        core = getattr(numpy, "_core", None) or numpy.core
        named += [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype, *kinds]
    except (ImportError, AttributeError):
        pass
    return torch.serialization.safe_globals(named) if hasattr(torch.serialization, "safe_globals") else contextlib.nullcontext()


def plain(value: Any) -> Any:
    """Dicts, lists and tuples of other classes as plain ones, such as Lightning's AttributeDict and named tuples."""
    if isinstance(value, Mapping) and type(value) is not Counter:
        items = {key: plain(inner) for key, inner in value.items()}
        if type(value) is defaultdict and value.default_factory in FACTORIES:
            return defaultdict(value.default_factory, items)
        return OrderedDict(items) if type(value) is OrderedDict else items
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, tuple) and not isinstance(value, _torch.load_torch("").Size):
        return tuple(plain(inner) for inner in value)
    if isinstance(value, Path):
        return str(value)
    return value
