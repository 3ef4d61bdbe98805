"""Arrays that can be tensors: those of numpy, of torch, and of libraries that support DLPack.

No library of arrays is imported here before the state holds one of its arrays, or the user asks for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ._device import Device
from ._errors import InvalidError
from ._native import lib

# Names of the library's dtypes, as numpy and torch spell them.
CODES: dict[str, int] = {
    "float64": lib.CKD_F64, "float32": lib.CKD_F32, "float16": lib.CKD_F16, "bfloat16": lib.CKD_BF16,
    "float8_e4m3fn": lib.CKD_F8_E4M3, "float8_e5m2": lib.CKD_F8_E5M2,
    "int64": lib.CKD_I64, "int32": lib.CKD_I32, "int16": lib.CKD_I16, "int8": lib.CKD_I8,
    "uint64": lib.CKD_U64, "uint32": lib.CKD_U32, "uint16": lib.CKD_U16, "uint8": lib.CKD_U8, "bool": lib.CKD_BOOL,
}
NAMES = {code: name for name, code in CODES.items()}
# Pairs of real numbers: the last dimension of what is stored is 2.
COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


@dataclass(frozen=True)
class Range:
    """Elements of a tensor in the order of its rows."""

    start: int
    count: int


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, lengths) in each dimension."""


@dataclass(frozen=True)
class Leaf:
    """The stored description of an array.

    Attributes:
        code: dtype of the library.
        shape: as stored; with a last dimension of 2 for complex numbers. Of a distributed tensor, the whole of it.
        library: ``"numpy"``, ``"torch"`` or ``"dlpack"``.
        special: name of the array's dtype if the code does not say it, such as ``"complex64"``; else ``None``.
        key: equal for arrays that are the same memory seen the same way; ``None``: equal to nothing.
        part: what this process has of a distributed tensor; ``None``: all of it.
    """

    code: int
    shape: tuple[int, ...]
    library: str
    special: str | None
    key: Hashable | None
    part: Box | Range | None = None

    @property
    def nbytes(self) -> int:
        """Of what this process has."""
        count = self.part.count if isinstance(self.part, Range) else math.prod(self.part[1] if self.part else self.shape)
        return count * int(lib.ckd_dtype_size(self.code))

    @property
    def native(self) -> str | None:
        """``special`` without the byte order, in which arrays may differ whose values are the same."""
        return None if self.special is not None and self.special[0] in "<>" else self.special


@dataclass(frozen=True)
class Memory:
    """Contiguous memory of an array.

    Attributes:
        pointer: a ``void *``.
        owner: keeps the memory alive.
        finish: to be called when a load has written it; ``None``: nothing is left to do.
        device: where the memory is; ``None``: on the host.
    """

    pointer: Any
    owner: object
    finish: Callable[[], None] | None = None
    device: Device | None = None


class Library(Protocol):
    """How arrays of one library are read and made. Errors name the path of the array in the state.

    `host`: the caller needs host memory. Otherwise memory may be on a device, as Memory.device says.
    """

    def leaf(self, array: Any, path: str) -> Leaf:
        """Describes an array. Raises InvalidError for one that cannot be stored."""

    def source(self, array: Any, *, host: bool) -> Memory:
        """The array's elements, row-major: its own memory if that is contiguous, else a copy."""

    def target(self, array: Any, path: str, *, host: bool) -> Memory:
        """Where a load writes: the array's own memory, or other memory that `finish` copies from."""

    def direct(self, array: Any, *, host: bool) -> bool:
        """Are source() and target() the array's own memory?"""

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        """A new array in host memory, its elements undefined, for what is stored so."""


def library_of(value: object) -> Library | None:
    """The library whose array the value is; None if it is no array."""
    from . import _deferred, _dlpack, _fsdp1, _numpy, _torch

    if _torch.is_tensor(value):
        return _torch.LIBRARY
    if isinstance(value, _deferred.Deferred):
        return _deferred.LIBRARY
    if isinstance(value, _fsdp1.Part):
        return _fsdp1.LIBRARY
    if _numpy.is_array(value):
        return _numpy.LIBRARY
    return _dlpack.LIBRARY if _dlpack.is_array(value) else None


def library_named(name: str) -> Library:
    from . import _numpy, _torch

    return _torch.LIBRARY if name == "torch" else _numpy.LIBRARY


def stored_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    return (*shape, 2) if dtype in COMPLEX else shape


def plain_name(code: int, special: str | None) -> str:
    """The dtype's name without a byte order; dates are the integers that they are stored as."""
    if special is not None and special[0] not in "<>":
        return special
    return {"c8": "complex64", "c16": "complex128"}.get((special or "")[1:], NAMES.get(code, "?"))


def set_region(region: Any, offsets: Sequence[int], lengths: Sequence[int], shape: tuple[int, ...]) -> None:
    """Sets a ckd_region to a box of a tensor of this shape. Complex numbers have one more dimension, which is never cut."""
    pairs = len(shape) - len(lengths)
    offsets, lengths = [*offsets, *[0] * pairs], [*lengths, *[2] * pairs]
    if tuple(lengths) == shape:
        return  # the whole tensor
    region.kind = lib.CKD_REGION_BOX
    for d, (offset, length) in enumerate(zip(offsets, lengths)):
        region.offsets[d], region.lengths[d] = offset, length


def set_part(region: Any, part: Box | Range, shape: tuple[int, ...]) -> None:
    """Sets a ckd_region to a part of a tensor of this shape."""
    if isinstance(part, Range):
        region.kind, region.start, region.count = lib.CKD_REGION_FLAT, part.start, part.count
    else:
        set_region(region, *part, shape)


def check_shape(shape: tuple[int, ...], path: str) -> None:
    if len(shape) > lib.CKD_MAX_DIMS:
        raise InvalidError(f"{path or 'the state'} has {len(shape)} dimensions (complex numbers take one); "
                           f"{lib.CKD_MAX_DIMS} are the limit", path=path)
