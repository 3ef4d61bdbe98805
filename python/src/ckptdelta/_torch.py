"""Tensors, modules and optimizers of torch, which is imported only when a tensor of it is asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from . import _device
from ._arrays import CODES, COMPLEX, Leaf, Memory, check_shape, plain_name, stored_shape
from ._dtensor import box_of, is_dtensor, local_of
from ._errors import InvalidError, UnsupportedError
from ._native import ffi

# Floats of eight bits that the library does not know: their bytes are stored.
BYTES_ONLY = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


_SPAN = 1 << 16
"""Words that are summed together, in host memory. A device sums 256 times as many. A sum takes as much memory besides."""
_ODD = 0x1E3779B97F4A7C15


def loaded() -> Any:
    """The module torch if the process has imported it, else None. A state cannot hold a tensor of it otherwise."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    torch = loaded()
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    torch = loaded()
    return torch is not None and hasattr(torch, "nn") and isinstance(value, torch.nn.Module)


def load_torch(path: str) -> Any:
    try:
        import torch
    except ImportError:
        raise UnsupportedError(f"{path or 'the state'} is a tensor of torch, which cannot be imported here: "
                               "ask for arrays of numpy (tensors='numpy')", path=path) from None
    return torch


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not(tensor: Any) -> str | None:
    """Why such a tensor has no elements that could be stored as they are."""
    torch = loaded()
    if hasattr(tensor, "local_shards") or hasattr(tensor, "local_tensor"):
        return f"a {type(tensor).__name__}, of which each rank has a part: use ckptdelta.dcp, or FSDP2 (fully_shard) and DTensor"
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter without a shape yet: run the module once first"
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}: pass its to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor: pass its int_repr() and the scales"
    if tensor.device.type == "meta":
        return "on the meta device, so it has no elements"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor) \
            and getattr(type(tensor), "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None):
        return f"a {type(tensor).__name__}, whose elements are not in one stretch of memory"
    return None


def _check_writable(tensor: Any, path: str) -> None:
    """Errors: InvalidError (a tensor that torch does not write into)."""
    why = None
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        why = "an expanded tensor, several elements of which are the same memory: pass its clone()"
    elif tensor.is_inference() and not loaded().is_inference_mode_enabled():
        why = "an inference tensor, which changes only in inference mode: load below torch.inference_mode(), or pass its clone()"
    if why:
        raise InvalidError(f"nothing can be loaded into {path or 'the state'}: it is {why}", path=path)


def key_of(tensor: Any) -> Hashable | None:
    """Equal for tensors that are the same memory seen the same way. For a distributed tensor, this process's memory counts."""
    try:
        tensor = local_of(tensor)
        if tensor.numel() == 0:
            return None
        # A lazy conjugate has the same memory as the original.
        return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.is_conj(), tensor.is_neg())
    except (RuntimeError, ValueError):  # it has no memory
        return None


def leaf_of(dtype: Any, shape: tuple[int, ...], key: Hashable | None, path: str) -> Leaf:
    """Describes a tensor. Errors: InvalidError."""
    name = dtype_name(dtype)
    if name in CODES:
        code, special = CODES[name], None
    elif name in COMPLEX:
        code, special = CODES[COMPLEX[name]], name
    elif name in BYTES_ONLY:
        code, special = CODES["uint8"], name
    else:
        raise InvalidError(f"{path or 'the state'} is a tensor of dtype {name}, which cannot be stored", path=path)
    stored = stored_shape(shape, name)
    check_shape(stored, path)
    return Leaf(code, stored, "torch", special, key)


class _Torch:
    def leaf(self, array: Any, path: str) -> Leaf:
        why = _why_not(local_of(array))
        if why:
            raise InvalidError(f"{path or 'the state'} is {why}", path=path)
        leaf = leaf_of(array.dtype, tuple(array.shape), key_of(array), path)
        box = box_of(array, path)
        if box is not None and len(box[1]) < len(leaf.shape):
            box = ((*box[0], 0), (*box[1], 2))  # pairs of numbers are never cut
        return replace(leaf, part=box)

    def source(self, array: Any, *, host: bool) -> Memory:
        torch = loaded()
        array = local_of(array.detach())
        with torch.no_grad():
            if not host and _device.device_of(array) is not None:
                try:
                    return _memory(_as_in_memory(array).contiguous(), host=False)
                except torch.cuda.OutOfMemoryError:
                    pass  # the device has no room for a copy
            return _memory(_as_in_memory(array.cpu()).contiguous(), host=True)

    def target(self, array: Any, path: str, *, host: bool) -> Memory:
        array = local_of(array)
        _check_writable(array, path)
        if self.direct(array, host=host):
            return replace(_memory(array, host=host), finish=lambda: _changed(array))
        torch = loaded()
        other = _empty(array, "cpu" if host or _device.device_of(array) is None else array.device)

        def finish() -> None:
            with torch.no_grad():
                array.detach().copy_(other)

        return replace(_memory(other, host=host), finish=finish)

    def direct(self, array: Any, *, host: bool) -> bool:
        array = local_of(array)
        there = array.device.type == "cpu" or (not host and _device.device_of(array) is not None)
        return bool(there and array.is_contiguous() and not array.is_conj() and not array.is_neg())

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        torch = load_torch(path)
        name = plain_name(code, special)
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"{path or 'the state'} is stored as {name}, which this version of torch does not have", path=path)
        pairs = name in COMPLEX
        if pairs and (not shape or shape[-1] != 2):
            raise UnsupportedError(f"{path or 'the state'} is stored as {name}, but not in pairs", path=path)
        tensor = torch.empty(shape[:-1] if pairs else shape, dtype=dtype, device="cpu")
        if tensor.numel() * tensor.element_size() != Leaf(code, shape, "torch", special, None).nbytes:
            raise UnsupportedError(f"{path or 'the state'} is stored as {name}, but with other bytes", path=path)
        return tensor, _memory(tensor, host=True)


def empty_like(tensor: Any, dtype: str) -> Any | None:
    """A tensor where another one is, and sharded like it, with undefined elements; None if that one is a plain one in host memory."""
    torch = loaded()
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not (is_dtensor(tensor) or _device.device_of(tensor) is not None):
        return None
    with torch.no_grad():
        return torch.empty_like(tensor.detach(), dtype=found)


def _changed(tensor: Any) -> None:
    """Tells autograd that the elements are others: a backward pass that needs the old ones fails instead of going wrong."""
    with loaded().no_grad():
        tensor.detach().view(-1)[:0].zero_()


def _as_in_memory(tensor: Any) -> Any:
    """Lazily conjugated or negated numbers are not yet what they are in memory."""
    return tensor.resolve_conj().resolve_neg()


def _empty(like: Any, where: Any) -> Any:
    """A contiguous tensor, in host memory if the device has no room for it."""
    torch = loaded()
    try:
        return torch.empty(like.shape, dtype=like.dtype, device=where)
    except torch.cuda.OutOfMemoryError:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _memory(tensor: Any, *, host: bool) -> Memory:
    return Memory(ffi.cast("void *", tensor.data_ptr()), tensor, device=None if host else _device.device_of(tensor))


LIBRARY = _Torch()


def scalar_bytes(tensor: Any) -> tuple[str, bytes]:
    """(dtype, bytes) of a tensor of no dimensions."""
    memory = LIBRARY.source(tensor, host=True)
    return dtype_name(tensor.dtype), bytes(ffi.buffer(memory.pointer, tensor.element_size()))


def device_scalars(values: Iterable[Any]) -> dict[int, tuple[str, bytes]]:
    """scalar_bytes() of the tensors of no dimensions that are on CUDA devices, by id(). The host waits once for each device."""
    torch = loaded()
    found: dict[int, tuple[str, bytes]] = {}
    by_device: dict[Any, list[Any]] = {}
    for value in values:
        if is_tensor(value) and value.dim() == 0 and value.device.type == "cuda" and _why_not(local_of(value)) is None:
            by_device.setdefault(value.device, []).append(value)
    for there in by_device.values():
        with torch.no_grad():
            joined = torch.cat([_as_in_memory(local_of(t.detach())).reshape(1).view(torch.uint8) for t in there])
        memory, at = LIBRARY.source(joined, host=True), 0
        data = bytes(ffi.buffer(memory.pointer, joined.numel()))
        for tensor in there:
            found[id(tensor)] = (dtype_name(tensor.dtype), data[at:at + tensor.element_size()])
            at += tensor.element_size()
    return found


def sum_of_words(tensor: Any, begin: int, end: int) -> Any:
    """A sum of the words between two bytes of a tensor's memory, on its device. `begin` is a multiple of 8, which a word has.

    None: the device has no memory left.
    """
    torch = loaded()
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        local = _as_in_memory(tensor.detach())
        if not local.is_contiguous():
            local = local.permute(sorted(range(local.dim()), key=lambda d: -local.stride(d))).contiguous()
        data = (torch.view_as_real(local) if local.is_complex() else local).reshape(-1).view(torch.uint8)[begin:end]
        size = data.numel() // 8 * 8
        aligned = data if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else data.clone()
        spans = aligned[:size].view(torch.int64).split(_SPAN if data.device.type == "cpu" else 256 * _SPAN)
        total = sum(map(_sum, spans), torch.zeros((), dtype=torch.int64, device=data.device))
        rest = data[size:].to(torch.int64)
        return total + (rest << (8 * torch.arange(rest.numel(), device=rest.device))).sum() if rest.numel() else total
    return None


def _sum(words: Any) -> Any:
    """Modulo 2**64. Of signs that change, two cancel in the sum of the words, but not in that of their upper halves."""
    return words.sum() + (words >> 32).sum() * _ODD


def to_host(numbers: list[Any]) -> tuple[Any, Any]:
    """(the numbers of one device as one tensor in host memory, an event to wait for before it is read; None: it is there)."""
    torch = loaded()
    with torch.no_grad():
        joined = torch.stack(numbers)
        if joined.device.type != "cuda":
            return joined.cpu(), None
        host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
        host.copy_(joined, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(joined.device))
        return host, event


def scalar_from(dtype: str, data: bytes, path: str) -> Any:
    torch = load_torch(path)
    found = getattr(torch, dtype, None)
    tensor = torch.empty((), dtype=found, device="cpu") if isinstance(found, torch.dtype) else None
    if tensor is None or tensor.element_size() != len(data):
        raise UnsupportedError(f"{path or 'the state'} is stored as a tensor of {dtype}, which this version of torch does not have",
                               path=path)
    ffi.memmove(_memory(tensor, host=True).pointer, data, len(data))
    return tensor


def constant(value: object) -> tuple[str, Any] | None:
    """(kind, text or numbers) of a Size, dtype or device of torch; None for anything else."""
    torch = loaded()
    if torch is None or not hasattr(torch, "Size"):
        return None
    if isinstance(value, torch.Size):
        return "Size", list(value)
    if isinstance(value, torch.dtype):
        return "dtype", dtype_name(value)
    return ("device", str(value)) if isinstance(value, torch.device) else None


def constant_from(kind: str, value: Any, path: str) -> Any:
    torch = load_torch(path)
    if kind == "Size":
        return torch.Size(value)
    if kind == "device":
        try:
            return torch.device(value)
        except RuntimeError:
            kind = "no device"
    found = getattr(torch, value, None) if kind == "dtype" else None
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"{path or 'the state'} is torch.{value}, which this version of torch does not have", path=path)
    return found


# ---------------------------------------------------------------------------------------------------- modules


def unwrapped(module: Any) -> Any:
    """The module inside torch.compile, DataParallel and DistributedDataParallel, whose names are those of the model."""
    torch = loaded()
    parallel = torch.nn.parallel
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module) in (parallel.DataParallel, parallel.DistributedDataParallel):
            inner = module.module
        if inner is None or not is_module(inner):
            return module
        module = inner


def check_parameters(parameters: Iterable[Any], path: str, known: Container[int] = ()) -> None:
    """Refuses those that look like whole tensors, although each rank has another part of them. Errors: InvalidError.

    Args:
        known: id() of parameters of FSDP1 whose parts are known.
    """
    for parameter in parameters:
        if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in known:
            raise InvalidError(f"{path or 'the state'} has parameters of FullyShardedDataParallel, and the state does not have the wrapper, which "
                               "knows the part of the whole that they are: pass the wrapped model, together with its optimizer", path=path)
        whole = getattr(parameter, "ds_numel", None)
        if whole is not None and whole > parameter.numel():
            raise InvalidError(f"{path or 'the state'} has parameters that ZeRO 3 of DeepSpeed has spread over the ranks: save with "
                               "engine.save_checkpoint(), and import_checkpoints() takes it in", path=path)


def check_optimizer(optimizer: Any, path: str) -> None:
    """Refuses optimizers of which each rank has a part. Errors: InvalidError."""
    if any(kind.__name__ == "ZeROOptimizer" and kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
        raise InvalidError(f"{path or 'the state'} is a {type(optimizer).__name__} of DeepSpeed, of which each rank has a part: save with "
                           "engine.save_checkpoint(), and import_checkpoints() takes it in", path=path)


def check_updated(optimizer: Any, path: str, known: Container[int] = ()) -> None:
    """check_parameters() of what an optimizer updates."""
    for group in optimizer.param_groups:
        params = group.get("params") if isinstance(group, dict) else None
        check_parameters((p for p in params if is_tensor(p)) if isinstance(params, list) else (), path, known)


def buffer_names(module: Any) -> set[str]:
    """Names of the buffers, which no optimizer updates."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def parameters_by_name(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters by the names that they have in state_dict(). One that has several names comes with each."""
    yield from module.named_parameters(remove_duplicate=False)


def renormalised(module: Any) -> Iterator[Any]:
    """The parameters that a forward pass writes to: embeddings with max_norm shorten the rows that it looks up."""
    for one in module.modules():
        if getattr(one, "max_norm", None) is not None:
            yield from one.parameters(recurse=False)


def is_in_place(module: Any, state: dict[str, Any]) -> bool:
    """Is the module as it should be when the tensors of its state_dict() have been written, without load_state_dict()?"""
    torch = loaded()
    module_type = torch.nn.Module
    normal = torch.nn.modules.batchnorm._NormBase._load_from_state_dict
    own = {key_of(tensor) for tensor in chain(module.parameters(), module.buffers())}
    if not all(is_tensor(value) and (value.numel() == 0 or key_of(value) in own) for value in state.values()):
        return False
    return all(type(m).load_state_dict is module_type.load_state_dict
               and type(m)._load_from_state_dict in (module_type._load_from_state_dict, normal)
               and not getattr(m, "_load_state_dict_pre_hooks", None) and not getattr(m, "_load_state_dict_post_hooks", None)
               for m in module.modules())
