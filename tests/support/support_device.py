"""Tensors of torch in the memory of an emulated device, for the tests of the Python package where there is no GPU.

To torch they are tensors in host memory, so the tests put one function of the package in another's place: the one that says on which
device a tensor is. Import this module before the library looks for a device. torch writes at once, where a GPU's stream would do it in
its order: call settle() first, as a stream waits for what it was told to wait for.
"""

import ctypes
import os
import weakref

import pytest

from support_python import BUILD, ckptdelta, torch

PATH = BUILD / "tests/libemulated_device.so"
assert PATH.exists(), f"{PATH} is missing: make build-tests builds it"
os.environ["CKD_CUDA"] = str(PATH)

_CALL = ctypes.c_void_p
_TO_HOST = 1


class _Failure(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("call", ctypes.c_char * 48), ("reason", ctypes.c_char * 160)]


class _Queue(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int), ("stream", ctypes.c_void_p), ("products", ctypes.c_void_p), ("finished", ctypes.c_void_p)]


class _Backend(ctypes.Structure):
    """The beginning of device_backend (kernels/device.h)."""

    _fields_ = [("version", ctypes.c_uint32), ("name", ctypes.c_char_p), ("count", _CALL), ("describe", _CALL), ("owner", _CALL),
                ("allocate", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(_Failure))),
                ("release", ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)),
                ("allocate_pinned", _CALL), ("release_pinned", _CALL), ("queue_open", _CALL), ("queue_close", _CALL),
                ("queue_after_stream", _CALL), ("stream_after_queue", _CALL),
                ("finish", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Queue), ctypes.POINTER(_Failure)))]


class Emulated:
    """The device. `stream`: the current one, for the package; it stands for the default stream, whatever its number."""

    def __init__(self):
        self._library = ctypes.CDLL(str(PATH))
        self._library.ckd_device_backend.restype = ctypes.POINTER(_Backend)
        self._backend = self._library.ckd_device_backend().contents
        self._ranges = {}
        self.stream = 0
        self.used = 0

    def device_of(self, tensor):
        at = tensor.data_ptr() if tensor.numel() else 0
        if not any(start <= at < start + size for start, size in self._ranges.items()):
            return None
        self.used += 1
        return ckptdelta._device.Device(0, self.stream)

    def _allocate(self, size):
        """A tensor of bytes."""
        at, why = ctypes.c_void_p(), _Failure()
        assert self._backend.allocate(ctypes.byref(at), 0, max(size, 1), ctypes.byref(why)) == 0, why.reason
        memory = (ctypes.c_uint8 * max(size, 1)).from_address(at.value)
        self._ranges[at.value] = max(size, 1)
        weakref.finalize(memory, self._release, at.value)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _release(self, at):
        del self._ranges[at]
        self._backend.release(0, at)

    def put(self, tensor, offset=0):
        """A contiguous copy on the device, so many elements behind the beginning of an allocation."""
        size = tensor.element_size()
        found = self._allocate((tensor.numel() + offset) * size)[offset * size:(tensor.numel() + offset) * size]
        found = found.view(tensor.dtype).view(tensor.shape) if tensor.numel() else torch.empty_like(tensor)
        with torch.no_grad():
            return found.copy_(tensor)

    def move(self, module, optimizer=None):
        """Puts parameters, buffers and the states of the optimizer on the device, except numbers."""
        for one in module.modules():
            for parameter in one._parameters.values():
                if parameter is not None:
                    parameter.data = self.put(parameter.data)
            for name, buffer in one._buffers.items():
                one._buffers[name] = None if buffer is None else self.put(buffer)
        for slots in optimizer.state.values() if optimizer is not None else ():
            for slot, value in slots.items():
                if value.dim():
                    slots[slot] = self.put(value)

    def settle(self):
        """What the default stream waits for is done."""
        why = _Failure()
        assert self._backend.finish(ctypes.byref(_Queue(device=0)), ctypes.byref(why)) == 0, why.reason

    @property
    def copied_to_host(self):
        """Bytes, so far."""
        return (ctypes.c_uint64 * 3).in_dll(self._library, "emulated_copied")[_TO_HOST]

    def limit(self, size):
        """Larger pieces of the device's memory are refused; 0: none is."""
        ctypes.c_uint64.in_dll(self._library, "emulated_largest_memory").value = size

    def fail_after(self, calls):
        ctypes.c_int.in_dll(self._library, "emulated_fail_after").value = calls


@pytest.fixture
def device(monkeypatch):
    found = Emulated()
    monkeypatch.setattr(ckptdelta._device, "device_of", found.device_of)
    yield found
    found.limit(0), found.fail_after(0)
