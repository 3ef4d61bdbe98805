"""Arrays of numpy, which is imported when the first one is met or asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from ._arrays import CODES, COMPLEX, NAMES, Leaf, Memory, check_shape, stored_shape
from ._errors import InvalidError, UnsupportedError
from ._native import ffi

if TYPE_CHECKING:
    import numpy as np

# Of the package ml_dtypes, which gives numpy bfloat16 and others.
_BYTES_ONLY = ("float8_e4m3", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e3m4")


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_scalar(value: object) -> TypeGuard[np.generic]:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def load_numpy(path: str) -> Any:
    try:
        import numpy
    except ImportError:
        raise UnsupportedError(f"{path or 'the state'} is an array of numpy, which cannot be imported here", path=path) from None
    return numpy


def dtype_named(name: str, path: str) -> Any:
    """The dtype with this name, one of ml_dtypes included."""
    numpy = load_numpy(path)
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", *_BYTES_ONLY):
        try:
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]

            return numpy.dtype(getattr(ml_dtypes, name))
        except ImportError:
            raise UnsupportedError(f"{path or 'the state'} is stored as {name}, which numpy has only with the package ml_dtypes: "
                                   "install it, or ask for tensors of torch (tensors='torch')", path=path) from None
    try:
        return numpy.dtype(name)
    except TypeError:
        raise UnsupportedError(f"{path or 'the state'} is stored as {name}, which numpy does not have", path=path) from None


def _code(dtype: Any, path: str) -> tuple[str, int, str | None]:
    """(name, dtype of the library, its name if the library's does not say it)."""
    plain = dtype.newbyteorder("=")
    name = plain.name
    special = None if plain == dtype else dtype.str
    if dtype.kind in "fiub" and name in CODES:
        return name, CODES[name], special
    if name in COMPLEX:
        return name, CODES[COMPLEX[name]], name if special is None else special
    if dtype.kind in "mM":
        return name, CODES["int64"], dtype.str
    if dtype.type.__module__.split(".")[0] == "ml_dtypes":
        if name in CODES:
            return name, CODES[name], None
        if name in _BYTES_ONLY:
            return name, CODES["uint8"], name
    raise InvalidError(f"{path or 'the state'} is a numpy array of dtype {dtype}, which cannot be stored", path=path)


class _Numpy:
    def leaf(self, array: Any, path: str) -> Leaf:
        numpy = sys.modules["numpy"]
        if type(array) not in (numpy.ndarray, numpy.memmap):
            raise InvalidError(f"{path or 'the state'} is a {type(array).__name__}, of which only the elements could be stored: "
                               "pass numpy.asarray(it)", path=path)
        name, code, special = _code(array.dtype, path)
        shape = stored_shape(array.shape, name)
        check_shape(shape, path)
        where = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str, name) if array.size else None
        return Leaf(code, shape, "numpy", special, where)

    def source(self, array: Any, *, host: bool) -> Memory:
        return _memory(_native_order(array), writable=False)

    def target(self, array: Any, path: str, *, host: bool) -> Memory:
        if not array.flags.writeable:
            raise InvalidError(f"{path or 'the state'} is a read-only array: nothing can be loaded into it", path=path)
        if self.direct(array, host=host):
            return _memory(array, writable=True)
        numpy = sys.modules["numpy"]
        other = numpy.empty(array.shape, array.dtype.newbyteorder("="))
        memory = _memory(other, writable=True)

        def finish() -> None:
            array[...] = other

        return Memory(memory.pointer, memory.owner, finish)

    def direct(self, array: Any, *, host: bool) -> bool:
        return bool(array.flags.c_contiguous and array.dtype.isnative)

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        numpy = load_numpy(path)
        dtype = dtype_named(special or NAMES.get(code, "?"), path)
        if dtype.itemsize == 0 or dtype.kind not in "fiubcmMV" or dtype.hasobject:
            raise UnsupportedError(f"{path or 'the state'} is stored as {special}, which this version does not know", path=path)
        pairs = dtype.kind == "c"
        if pairs and (not shape or shape[-1] != 2):
            raise UnsupportedError(f"{path or 'the state'} is stored as {special}, but not in pairs", path=path)
        array = numpy.empty(shape[:-1] if pairs else shape, dtype)
        if array.nbytes != Leaf(code, shape, "numpy", special, None).nbytes:
            raise UnsupportedError(f"{path or 'the state'} is stored as {special}, but with other bytes", path=path)
        if dtype.isnative:
            return array, _memory(array, writable=True)
        return array, self.target(array, path, host=True)


def _native_order(array: Any) -> Any:
    numpy = sys.modules["numpy"]
    # ascontiguousarray would give a scalar a dimension.
    found = array if array.flags.c_contiguous else array.copy(order="C")
    return found if found.dtype.isnative else numpy.array(found, dtype=found.dtype.newbyteorder("="))


def _memory(array: Any, *, writable: bool) -> Memory:
    numpy = sys.modules["numpy"]
    if array.size == 0:
        return Memory(ffi.NULL, array)
    flat = array.reshape(-1).view(numpy.uint8)
    # The buffer keeps the array from being resized meanwhile.
    buffer = ffi.from_buffer("uint8_t[]", flat, require_writable=writable)
    return Memory(ffi.cast("void *", buffer), (array, buffer))


LIBRARY = _Numpy()

# A scalar as bytes: what its array of no dimensions holds.


def scalar_bytes(value: np.generic, path: str) -> tuple[str, bytes]:
    """(dtype as numpy writes it, bytes) of a scalar of numpy."""
    dtype = value.dtype
    if dtype.hasobject or dtype.kind == "V" or dtype.name in ("float128", "longdouble", "complex256", "clongdouble"):
        raise InvalidError(f"{path or 'the state'} is a numpy scalar of dtype {dtype}, which cannot be stored", path=path)
    return dtype.str, value.tobytes()


def scalar_from(dtype: str, data: bytes, path: str) -> Any:
    numpy = load_numpy(path)
    found = numpy.dtype(dtype)
    if found.hasobject or found.itemsize != len(data) or found.kind == "V":
        raise UnsupportedError(f"{path or 'the state'} is stored as a numpy scalar of dtype {dtype}, which this version does not know",
                               path=path)
    return numpy.frombuffer(data, found)[0] if data else found.type()


def array_from(dtype: str, shape: Sequence[int], data: bytes, path: str) -> Any:
    found = dtype_named(dtype, path)
    if found.hasobject:
        raise ValueError("an array of objects")
    return load_numpy(path).frombuffer(data, found).reshape(shape).copy()


