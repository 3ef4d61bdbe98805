"""Tensors that are joined when they are saved, one at a time: their parts are in files of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _torch
from ._arrays import Leaf, Memory
from ._errors import StateError


class Deferred:
    """A tensor of torch that is not in memory as a whole yet.

    Attributes:
        shape: of the whole.
        dtype: of the whole, one of torch.
        make: returns it, in host memory. It is called once for each save.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, make: Callable[[], Any]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.make = make


class _Library:
    """Deferred tensors can only be saved; a load makes tensors."""

    def leaf(self, array: Deferred, path: str) -> Leaf:
        return _torch.leaf_of(array.dtype, array.shape, ("deferred", id(array)), path)

    def source(self, array: Deferred, *, host: bool) -> Memory:
        whole = array.make()
        if tuple(whole.shape) != array.shape or whole.dtype != array.dtype:
            raise StateError(f"a tensor of {tuple(whole.shape)} and {whole.dtype} came out of one of {array.shape} and {array.dtype}")
        return _torch.LIBRARY.source(whole, host=host)

    def target(self, array: Deferred, path: str, *, host: bool) -> Memory:
        raise StateError(f"{path}: nothing can be loaded into a tensor that is made when it is saved", path=path)

    def direct(self, array: Deferred, *, host: bool) -> bool:
        return False

    def make(self, code: int, shape: tuple[int, ...], special: str | None, path: str) -> tuple[Any, Memory]:
        return _torch.LIBRARY.make(code, shape, special, path)


LIBRARY = _Library()
