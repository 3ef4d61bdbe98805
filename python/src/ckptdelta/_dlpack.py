"""Arrays of other libraries (JAX, CuPy, MLX, ...), through the DLPack protocol. Loads make no arrays of theirs."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from . import _device
from ._arrays import CODES, COMPLEX, Leaf, Memory, check_shape, stored_shape
from ._errors import InvalidError
from ._native import ffi

_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_CUDA = 2
_LEGACY_STREAM = 1  # of CUDA, as DLPack numbers it; to CUDA itself it is 0
_NAMES = {(0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (1, 16): "uint16",
          (1, 32): "uint32", (1, 64): "uint64", (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
          (4, 16): "bfloat16", (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool",
          (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


def is_array(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


class _View:
    """A borrowed view. The capsule owns it: not consumed, it releases the memory when it goes."""

    def __init__(self, array: Any, path: str) -> None:
        kind, number = map(int, array.__dlpack_device__())
        self.device: _device.Device | None = None
        if kind == _CUDA and _device.is_usable(number):
            self.device = _device.Device(number, 0)
        elif kind not in _HOST:
            raise InvalidError(f"{path or 'the state'} is not in host memory (DLPack device {kind}): copy it there", path=path)
        self.capsule = array.__dlpack__() if self.device is None else array.__dlpack__(stream=_LEGACY_STREAM)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = _DLTensor.from_address(pointer(self.capsule, b"dltensor"))
        self.name = _NAMES.get((tensor.code, tensor.bits), "?") if tensor.lanes == 1 else "?"
        self.shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.item = tensor.bits // 8

    def contiguous(self) -> bool:
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides or ())):
            if length != 1 and stride != step:
                return False
            step *= length
        return True


class _DLPack:
    def leaf(self, array: Any, path: str) -> Leaf:
        view = _View(array, path)
        if view.name not in CODES and view.name not in COMPLEX:
            raise InvalidError(f"{path or 'the state'} is a {type(array).__name__} of a dtype that cannot be stored", path=path)
        shape = stored_shape(view.shape, view.name)
        check_shape(shape, path)
        pairs = view.name in COMPLEX
        # Not the address: the array may have made a copy for this view, whose memory is soon used again.
        return Leaf(CODES[COMPLEX[view.name] if pairs else view.name], shape, "dlpack", view.name if pairs else None, ("dlpack", id(array)))

    def source(self, array: Any, *, host: bool) -> Memory:
        view = _View(array, "")
        device = view.device if math.prod(view.shape) else None
        if device is not None and (host or not view.contiguous()):
            raise InvalidError(f"a {type(array).__name__} on a GPU is not contiguous, or is needed in host memory: copy it there")
        address, owner = (view.address, view) if view.contiguous() else _packed(view)
        return Memory(ffi.cast("void *", address), owner, device=device)

    def target(self, array: Any, path: str, *, host: bool) -> Memory:
        raise InvalidError(f"{path or 'the state'} is a {type(array).__name__}, which may not be changed in place: "
                           "take its values from Store.state_dict()", path=path)

    def direct(self, array: Any, *, host: bool) -> bool:
        return False

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        raise NotImplementedError("arrays of other libraries are given back as numpy's")


def check_host(array: Any, path: str) -> None:
    """Raises InvalidError for an array on a device, whose bytes are not within reach."""
    if _View(array, path).device is not None:
        raise InvalidError(f"{path or 'the state'} is a {type(array).__name__} on a GPU, which only Store.save() can read: copy it to host memory",
                           path=path)


def _packed(view: _View) -> tuple[int, object]:
    """(address, owner) of a contiguous copy. numpy copies it if it is there, else this takes a microsecond an element."""
    strides = view.strides or ()
    try:
        import numpy
    except ImportError:
        return _packed_slowly(view, strides)

    class Bytes:
        """What numpy has to know: elements of any kind are so many bytes."""

        __array_interface__ = {"version": 3, "shape": view.shape, "typestr": f"|V{view.item}", "data": (view.address, True),
                               "strides": tuple(stride * view.item for stride in strides)}

    copy = numpy.array(Bytes(), order="C")
    return int(copy.__array_interface__["data"][0]), copy


def _packed_slowly(view: _View, strides: tuple[int, ...]) -> tuple[int, object]:
    copy = ctypes.create_string_buffer(math.prod(view.shape) * view.item)
    for number in range(math.prod(view.shape)):
        rest, offset = number, 0
        for length, stride in zip(reversed(view.shape), reversed(strides)):
            rest, index = divmod(rest, length)
            offset += index * stride
        ctypes.memmove(ctypes.addressof(copy) + number * view.item, view.address + offset * view.item, view.item)
    return ctypes.addressof(copy), copy


LIBRARY = _DLPack()
