"""Writes to memory that a session is still copying."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._call import logger
from ._dtensor import is_dtensor
from ._errors import Error, NotFoundError, StateError
from ._flatten import Tensor
from ._store import Store
from ._torch import is_tensor
from ._types import Checkpoint


class Writes:
    """Notices that something else than an optimizer has written to its tensors between a save and the fence.

    torch counts the operations that change a tensor in place. It does not count those on ``tensor.data``, nor those of other packages.

    Args:
        keeps: never delete a checkpoint: it may have been there before, with the same content.

    Attributes:
        names: the tensors that were written to. They are copied before step() returns.
        found: those of the newest save whose checkpoint is not deleted yet.
    """

    def __init__(self, store: Store, *, keeps: bool) -> None:
        self.names: set[str] = set()
        self.found: list[str] = []
        self._store, self._keeps, self._step = store, keeps, -1
        self._watched: list[tuple[str, Any, int]] = []

    def watch(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Begins with the tensors that are copied until the fence. Parts of distributed tensors have no count of their own."""
        self._step = step
        self._watched = [(t.name, t.array, t.array._version) for t in tensors
                         if is_tensor(t.array) and not is_dtensor(t.array) and not t.array.is_inference()]

    def end(self) -> bool:
        """To be called before a fence. Was anything written to since watch()?"""
        found = [name for name, tensor, version in self._watched if tensor._version != version]
        self._watched = []
        self.found += found
        self.names.update(found)
        return bool(found)

    def take_back(self, saved: Checkpoint | None) -> StateError:
        """Deletes the checkpoint of the save, if that is the newest one that was made. Returns the failure of the save."""
        names, left = self.found, ""
        if saved is not None and saved.step == self._step and self._keeps:
            left = f"; {saved} stays, as it may be older than this save: compare it before you use it"
        elif saved is not None and saved.step == self._step:
            try:
                self._store.delete(run=saved.run, step=saved.step, undo_s=0)
            except NotFoundError:
                pass  # another rank has deleted it
            except Error as error:
                logger.error("%s: %s cannot be deleted: %s", self._store.path, saved, error)
                left = f"; {saved} could not be deleted, and must not be used"
        self.found = []  # not earlier: after an interrupt, the close of the session tries again
        more = f" and {len(names) - 1} more tensors were" if len(names) > 1 else " was"
        return StateError(f"the save of step {self._step} is taken back: {names[0]}{more} written to before the copy was complete{left}; call "
                          "session.fence() before such writes. From now on step() copies what was written to before it returns")
