"""Reads checkpoints of Lightning's Trainer without one."""

from __future__ import annotations

import io
import os
from typing import Any

from ._errors import InvalidError
from ._lightning_io import CheckpointIO
from ._lightning_marker import path_of, read_marker
from ._store import Store
from ._torch import load_torch


def load_checkpoint(path: str | os.PathLike[str], store: str | os.PathLike[str] | Store | None = None, *, pickle: bool = False) -> dict[str, Any]:
    """The checkpoint that a CheckpointIO saved, as a dict with tensors in host memory.

    Args:
        path: of a marker or of a file that Lightning wrote, or RUN@STEP.
        store: an open store or its directory; None: the one that the marker names.
        pickle: also load objects that only pickle can restore. That runs code from the store.

    Errors: NotFoundError, InvalidError (no store is known), CorruptError, UnsupportedError, OSError.
    """
    if store is None:
        target = path_of(path)
        marker = read_marker(target) if target.exists() else None
        if marker is None and not target.exists():
            raise InvalidError(f"{os.fspath(path)}: there is no such file, and no store was passed to look for it")
        store = marker.store if marker is not None else ""
    return CheckpointIO(store, pickle=pickle).load_checkpoint(path)


def load_from_checkpoint(kind: Any, path: str | os.PathLike[str], store: str | os.PathLike[str] | Store | None = None, *,
                         pickle: bool = False, **options: Any) -> Any:
    """Like ``kind.load_from_checkpoint(path, **options)`` for files: returns a module or data module with the saved parameters.

    Args:
        kind: a class of LightningModule or LightningDataModule.
        path, store, pickle: as for load_checkpoint().
        options: of load_from_checkpoint() of the class, such as map_location, strict, and hyper-parameters.

    Errors: those of load_checkpoint(), and of the class.
    """
    file = io.BytesIO()
    load_torch("").save(load_checkpoint(path, store, pickle=pickle), file)
    file.seek(0)
    # The bytes were written just now, so they can only run code that pickle=True has already allowed.
    return kind.load_from_checkpoint(file, **{"weights_only": False, **options})
