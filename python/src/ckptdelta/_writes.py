"""Writes to memory that a session is still copying."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._call import logger
from ._dtensor import is_dtensor
from ._flatten import Tensor
from ._torch import is_tensor


class Writes:
    """Notices that something else than an optimizer has written to its tensors between a save and the fence.

    torch counts the operations that change a tensor in place. It does not count those on ``tensor.data``, nor those of other packages.

    Attributes:
        names: the tensors that were written to. They are copied before step() returns.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._watched: list[tuple[str, Any, int]] = []

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Begins with the tensors that are copied until the fence. Parts of distributed tensors have no count of their own."""
        self._watched = [(t.name, t.array, t.array._version) for t in tensors
                         if is_tensor(t.array) and not is_dtensor(t.array) and not t.array.is_inference()]

    def end(self) -> bool:
        """To be called before a fence. Was anything written to since watch()?"""
        found = [name for name, tensor, version in self._watched if tensor._version != version]
        self._watched = []
        if found:
            more = f" and {len(found) - 1} more tensors were" if len(found) > 1 else " was"
            logger.warning("%s%s written to before the copy was complete, so that save fails: call session.fence() before such writes. "
                           "From now on step() copies what was written to before it returns", found[0], more)
            self.names.update(found)
        return bool(found)
