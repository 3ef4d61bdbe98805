"""Tensors that all ranks have whole, compared with each other while they train.

Data-parallel ranks start from the same values and make the same steps, so their parameters and states of optimizers stay the same, bit for
bit. A bit that flips on one of them stays wrong there, and what it does to gradients reaches all ranks. The first save compares all of these
tensors, and each later save a part of them, in turn. A sum of their bits is enough: one bit that differs changes it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _torch
from ._call import logger
from ._dtensor import is_dtensor
from ._fsdp1 import Part
from ._native import lib

if TYPE_CHECKING:
    from ._flatten import Tensor
    from ._ranks import Ranks

_PARTS = 16
"""A save compares one of so many parts: it copies all tensors, so this costs a fraction of it."""
_LEAST = 1 << 20
"""Bytes of a part, at least."""
_WORD = 8
"""A part of a tensor begins at a multiple of so many bytes."""

Value = tuple[tuple[int, ...], "int | None"]
"""The strides of a tensor, and the sum of its words in that part."""


@dataclass
class _Sums:
    """Sums that were begun at a step. Those of a device are there when its event is."""

    step: int
    part: int
    strides: dict[str, tuple[int, ...]]
    hosts: list[tuple[list[str], Any, Any]] = field(default_factory=list)

    def values(self) -> dict[str, Value]:
        found: dict[str, int] = {}
        for names, sums, event in self.hosts:
            if event is not None:
                event.synchronize()
            found |= dict(zip(names, sums.tolist()))
        return {name: (strides, found.get(name)) for name, strides in self.strides.items()}


class Replicas:
    """A rank's view of the tensors that all ranks have whole.

    Args:
        ranks: the ranks. compare_all() and compare() are collective.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._left_out: set[str] = set()  # they were found to differ
        self._same_at: dict[int, int] = {}  # by part: the last step at which it was the same on all ranks
        self._first = -1  # when all was compared
        self._drifts = False  # the ranks train models of their own: nothing is compared
        self._next = 0
        self._sums: _Sums | None = None
        self._wrong: tuple[int, str] | None = None  # on this rank: the first step whose values may be wrong, and what is to be said

    @property
    def compares(self) -> bool:
        """Were they compared once?"""
        return self._first >= 0

    def compare_all(self, tensors: Sequence[Tensor], step: int) -> None:
        """Before the first save. Rank 0 warns of tensors that differ, and they are not compared any more: the model may be meant to be so."""
        values = self._begin(tensors, step, 0, 1 << 62).values()
        self._first = step
        if self._agree(values):
            return
        answers = self._ranks.gather(values)
        differing = _differing(answers)
        self._left_out |= differing.keys()
        if self._ranks.rank == 0 and differing:
            name = next(iter(differing))
            other = next(rank for rank, answer in enumerate(answers) if answer[name] != answers[0][name])
            logger.warning("%s and %d more tensors are not the same on rank 0 and rank %d, and a checkpoint has them only once: make the model the "
                           "same on all ranks (DistributedDataParallel does); what each rank has a part of goes through ckptdelta.dcp",
                           name, len(differing) - 1, other)

    def begin(self, tensors: Sequence[Tensor], step: int) -> None:
        """Begins the sums of the next part. A device makes them in the order of its current stream, and nobody waits."""
        total = sum(_bytes(t) for t in self._whole(tensors))
        size = max(_LEAST, -(-total // _PARTS))
        size += -size % _WORD
        part = self._next % max(1, -(-total // size))
        self._sums, self._next = self._begin(tensors, step, part * size, (part + 1) * size), part + 1
        self._sums.part = part

    def digest(self) -> str:
        """Of the sums that were begun last; equal on all ranks if what was summed is."""
        return "" if self._sums is None else _digest(self._sums.values())

    def compare(self, digests: Sequence[str]) -> None:
        """Takes the ranks' digests. If this rank is among those whose values are wrong, tell() says so."""
        sums, self._sums = self._sums, None
        if sums is None or not all(digests):
            return
        since = self._same_at.get(sums.part, self._first)
        if len(set(digests)) == 1:
            self._same_at[sums.part] = sums.step
            return
        answers = self._ranks.gather(sums.values())
        differing = _differing(answers)
        if 2 * sum(len(odd) == self._ranks.world for odd in differing.values()) > len(sums.strides):
            self._drift(since, sums.step)
            return
        self._left_out |= differing.keys()
        names = [name for name, odd in differing.items() if self._ranks.rank in odd]
        if not names:
            return
        others = "the other ranks" if len(differing[names[0]]) < self._ranks.world else "another rank, and nothing tells which is right"
        more = f" and {len(names) - 1} more tensors are" if len(names) > 1 else " is"
        self._wrong = since + 1, (f"{names[0]}{more} not the same as on {others}: the values were the same at step {since}, and differ at step "
                                  f"{sums.step}; the memory of a machine or a GPU may be faulty")

    def _drift(self, since: int, step: int) -> None:
        """Most tensors are others on all ranks. Some trainings mean that: they average now and then."""
        self._drifts = True
        if self._ranks.rank == 0:
            logger.warning("the ranks had the same model at step %d, and have different ones at step %d: a checkpoint has each tensor of one of them. "
                           "They are not compared any more", since, step)

    def tell(self, session: Any) -> None:
        """Raises the alarm, once. session: a ``ckd_session *``."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            lib.ckd_session_alarm(session, lib.CKD_ALARM_REPLICA, wrong[0], wrong[1].encode("utf-8", "replace"))

    def _whole(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [] if self._drifts else [t for t in tensors if t.name not in self._left_out and not is_dtensor(t.array) and not isinstance(t.array, Part)]

    def _agree(self, values: dict[str, Value]) -> bool:
        return len(set(self._ranks.gather(_digest(values)))) == 1

    def _begin(self, tensors: Sequence[Tensor], step: int, begin: int, end: int) -> _Sums:
        """Of the bytes from `begin` to `end` of all tensors in a row."""
        sums, at = _Sums(step, 0, {}), 0
        by_device: dict[Any, list[tuple[str, Any]]] = {}
        for t in self._whole(tensors):
            low, high = max(0, begin - at), min(_bytes(t), end - at)
            at += _bytes(t)
            if low < high:
                sums.strides[t.name] = tuple(t.array.stride())
                found = _torch.sum_of_words(t.array, low - low % _WORD, high if high == _bytes(t) else high - high % _WORD)
                if found is not None:
                    by_device.setdefault(found.device, []).append((t.name, found))
        for there in by_device.values():
            with contextlib.suppress(RuntimeError):  # no memory: these have no sums, and the other ranks do not wait
                sums.hosts.append(([name for name, _ in there], *_torch.to_host([one for _, one in there])))
        return sums


def _bytes(t: Tensor) -> int:
    return int(t.array.numel() * t.array.element_size())


def _digest(values: dict[str, Value]) -> str:
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:32]


def _differing(answers: Sequence[dict[str, Value]]) -> dict[str, set[int]]:
    """The ranks whose values are not those of more than half of the ranks, by tensor. Without such a half these are all ranks."""
    return dict(_odd_ones(answers))


def _odd_ones(answers: Sequence[dict[str, Value]]) -> Iterator[tuple[str, set[int]]]:
    for name in answers[0]:
        values = [answer.get(name) for answer in answers]
        if any(value is None or value[1] is None or value[0] != answers[0][name][0] for value in values):
            continue  # no sum; or elements in another order, which have other words
        value, count = Counter(values).most_common(1)[0]
        if count < len(values):
            yield name, {rank for rank, other in enumerate(values) if other != value} if 2 * count > len(values) else set(range(len(values)))
