"""Shards that torch.distributed.checkpoint writes as safetensors (HuggingFaceStorageWriter with save_distributed): each file says where in
the whole tensors its parts belong. No file says how many files there are, so a missing one is noticed only if it leaves a hole."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from . import _torch
from ._errors import CorruptError, UnsupportedError
from ._deferred import Deferred

INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"


@dataclass
class _Whole:
    """A tensor, and its parts in files: by offsets, (file, shape)."""

    dtype: Any
    parts: dict[tuple[int, ...], tuple[Path, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        ends = [[begin + size for begin, size in zip(at, shape)] for at, (_, shape) in self.parts.items()]
        return tuple(map(max, zip(*ends)))


def shard_names(path: Path) -> set[str]:
    """Names of the shards in a folder."""
    return {file.name for file in path.glob("*.safetensors") if file.is_file() and _has_info(file)}


def _has_info(file: Path) -> bool:
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        # Only short metadata of the writer comes before it.
        return f'"{INFO}"'.encode() in f.read(min(size, 4 << 20))


def read_shards(path: Path, names: set[str]) -> dict[str, Any]:
    """The whole tensors by name. Their elements are read when they are saved. Errors: CorruptError, UnsupportedError."""
    files = {path / name: _opened(path / name) for name in sorted(names)}
    wholes: dict[str, _Whole] = {}
    for file, opened in files.items():
        _add(wholes, file, opened)
    return {name: _joined(path, name, whole, files) for name, whole in wholes.items()}


def _opened(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UnsupportedError(f"{file} needs the package safetensors: pip install safetensors", file=str(file)) from None
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # its errors have no class of their own in all versions
        raise CorruptError(f"{file} cannot be read: {error}", file=str(file)) from error


def _add(wholes: dict[str, _Whole], file: Path, opened: Any) -> None:
    try:
        info = json.loads((opened.metadata() or {}).get(INFO, ""))
        offsets = {name: tuple(int(at) for at in info[name][OFFSETS]) for name in opened.keys()}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{file} does not say where its tensors are ({INFO}): {error}", file=str(file)) from error
    for name, at in offsets.items():
        part = opened.get_slice(name)
        shape = tuple(part.get_shape())
        dtype = (part[0:0] if shape and shape[0] else opened.get_tensor(name)).dtype
        whole = wholes.setdefault(name, _Whole(dtype))
        others = next(iter(whole.parts), at)
        if whole.dtype != dtype or len(at) != len(shape) or len(others) != len(at) or min(at, default=0) < 0:
            raise CorruptError(f"{file} has a part of {name} that does not fit those of other files: {dtype}, {shape} at {at}", file=str(file))
        if math.prod(shape) and at in whole.parts and math.prod(whole.parts[at][1]):
            raise CorruptError(f"{file} and {whole.parts[at][0].name} have the same part of {name}, at {at}", file=str(file))
        if math.prod(shape) or not whole.parts:
            whole.parts[at] = (file, shape)


def _joined(path: Path, name: str, whole: _Whole, files: dict[Path, Any]) -> Deferred:
    torch = _torch.load_torch(str(path))
    whole.parts = {at: part for at, part in whole.parts.items() if math.prod(part[1])} or whole.parts
    shape = whole.shape
    if not _is_tiled(shape, whole.parts):
        raise CorruptError(f"{path}: the parts of {name} do not make up a whole of {shape}: is a shard missing?", file=str(path))

    def make() -> Any:
        if len(whole.parts) == 1:
            (file, _), = whole.parts.values()
            return files[file].get_tensor(name)
        made = torch.empty(shape, dtype=whole.dtype)
        for at, (file, size) in whole.parts.items():
            made[tuple(slice(begin, begin + length) for begin, length in zip(at, size))] = files[file].get_tensor(name)
        return made

    return Deferred(shape, whole.dtype, make)


def _is_tiled(shape: tuple[int, ...], parts: dict[tuple[int, ...], tuple[Path, tuple[int, ...]]]) -> bool:
    """Do the parts cover the whole, each element once? Every part is a box of the cells between all their edges."""
    if sum(math.prod(size) for _, size in parts.values()) != math.prod(shape):
        return False
    edges = [sorted({at[d] for at in parts} | {at[d] + size[d] for at, (_, size) in parts.items()}) for d in range(len(shape))]
    numbers = [{edge: i for i, edge in enumerate(own)} for own in edges]
    taken: set[tuple[int, ...]] = set()
    for at, (_, size) in parts.items():
        cells = set(product(*(range(number[begin], number[begin + length]) for number, begin, length in zip(numbers, at, size))))
        if cells & taken:
            return False
        taken |= cells
    return True
