"""Ids of checkpoints, and more that the writer and the reader of ckptdelta.dcp share."""

from __future__ import annotations

import copy
import os
from typing import Any, cast

from ._catalog import step_number
from ._errors import InvalidError
from ._store import Store, open

PICKLE = "pass pickle=True to StorageWriter and StorageReader if you trust whoever can write to the store"


def parse_id(checkpoint_id: object, run: str | None) -> tuple[str | None, int]:
    """(run, step) of a checkpoint id. Errors: InvalidError."""
    if isinstance(checkpoint_id, int):
        return run, step_number(checkpoint_id)
    text = os.fspath(cast(Any, checkpoint_id))
    name, at, step = text.rpartition("@") if isinstance(text, str) else ("", "", "")
    if not step.isascii() or not step.isdecimal() or (at and not name):
        raise InvalidError(f"a checkpoint id is RUN@STEP, or a step, not {checkpoint_id!r}")
    return name if at else run, step_number(int(step))


def is_id(checkpoint_id: object) -> bool:
    try:
        parse_id(checkpoint_id, "")
        return True
    except (InvalidError, TypeError):
        return False


class Addressed:
    """What DCP asks of a writer and of a reader alike about the id of the checkpoint."""

    run: str | None
    step: int | None

    @property
    def checkpoint_id(self) -> str | None:
        """RUN@STEP of the next save or load, None if that is not known."""
        return None if self.run is None or self.step is None else f"{self.run}@{self.step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is it RUN@STEP, or a step?"""
        return is_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Called by DCP before a save or load that has a checkpoint id. Errors: InvalidError."""
        if checkpoint_id is not None:
            self.run, self.step = parse_id(checkpoint_id, self.run)


def opened(store: str | os.PathLike[str] | Store, *, readonly: bool) -> Store:
    """A store of one's own: a save of another thread does not wait for it."""
    return copy.copy(store) if isinstance(store, Store) else open(store, readonly=readonly)
