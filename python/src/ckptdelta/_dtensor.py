"""Distributed tensors: the part of the whole tensor that this process has.

A DTensor's placements say how it is sharded. __create_chunk_list__(), which DCP also calls, gives this process's part.
"""

from __future__ import annotations

import sys
from typing import Any

from ._arrays import Box
from ._errors import InvalidError


def is_dtensor(value: object) -> bool:
    """Is it a DTensor? There is none before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_cut(tensor: object) -> bool:
    """Is it a DTensor of which this process may have a part only?"""
    return is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements)  # type: ignore[attr-defined]


def local_of(tensor: Any) -> Any:
    """The elements that this process has; the tensor itself if it is not distributed."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def box_of(tensor: Any, path: str) -> Box | None:
    """The part that this process has; None: all of it. A part without elements is at the origin. Errors: InvalidError."""
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidError(f"{path or 'the state'} is a distributed tensor of sums that are not complete (Partial): redistribute it first",
                           path=path)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise InvalidError(f"{path or 'the state'} is a distributed tensor of which this process has {len(chunks)} parts: pass its full_tensor()",
                           path=path)
    offsets, lengths = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    if lengths == tuple(tensor.shape):
        return None
    return (offsets, lengths) if 0 not in lengths else ((0,) * len(lengths), lengths)
