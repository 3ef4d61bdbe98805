"""Memory of CUDA devices that the library reads and writes itself.

It cannot where the package was built without CUDA, where the driver is too old for it, and with ROCm. Tensors then go through host
memory.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ._call import Call, logger, text
from ._native import ffi, lib

_BACKEND = "libckptdelta_cuda.so"


class Device(NamedTuple):
    """A device, as CUDA numbers it, and the stream that orders accesses to its memory: a cudaStream_t, 0: the legacy default one."""

    ordinal: int
    stream: int

    def native(self) -> Any:
        """A new ``ckd_device *``."""
        found = ffi.new("ckd_device *")
        found.struct_size = ffi.sizeof("ckd_device")
        found.device, found.stream = self.ordinal, ffi.cast("void *", self.stream)
        return found


def device_of(tensor: Any) -> Device | None:
    """The device of a tensor of torch and the current stream there; None: the library has to read and write it in host memory.

    The library's accesses then come after all work that is on that stream now, and before all later work on it. So temporary tensors
    may be dropped as soon as a call has returned: the caching allocator gives their memory to later work on the same stream.
    """
    where = tensor.device
    if where.type != "cuda" or tensor.numel() == 0 or not is_usable(where.index):
        return None
    return Device(where.index, int(sys.modules["torch"].cuda.current_stream(where).cuda_stream))


def wait_for(device: Device) -> None:
    """Makes the current stream of the device wait for another one that the library has made wait."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    current = torch.cuda.current_stream(device.ordinal)
    if int(current.cuda_stream) != device.stream:
        default = torch.cuda.default_stream(device.ordinal)  # an ExternalStream of number 0 would be a new stream
        current.wait_stream(torch.cuda.ExternalStream(device.stream, device=device.ordinal) if device.stream else default)


@functools.cache
def is_usable(index: int) -> bool:
    """Does the library read and write memory of this CUDA device? If not, the log says why, once."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.hip:
        return False
    call = Call()
    if lib.ckd_device_check(index, call.err) == 0:
        return True
    why = text(call.err.message)
    if os.environ.get("CKD_CUDA") or Path(__file__).with_name(_BACKEND).exists():
        logger.warning("tensors of device %d go through host memory: %s", index, why)
    else:
        logger.debug("tensors of device %d go through host memory, as the package was built without CUDA", index)
    return False
