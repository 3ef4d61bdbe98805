"""Tensors that all ranks have whole, compared with each other while they train.

Data-parallel ranks start from the same values and make the same steps, so their parameters and states of optimizers stay the same, bit for
bit. A bit that flips on one of them stays wrong there, and what it does to gradients reaches all ranks. The first save compares all of these
tensors, and each later save a part of them, in turn. A sum of their bits is enough: one bit that differs changes it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Sequence
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
    from ._registered import Snapshot

_PARTS = 16
"""A save compares one of so many parts: it copies all tensors, so this costs a fraction of it."""
_LEAST = 1 << 20
"""Bytes of a part, at least."""
_WORD = 8
"""A part of a tensor begins at a multiple of so many bytes."""
_PLACES = 16
"""Where a tensor differs, it is compared in so many slices."""
_FEW = 4
"""Of a tensor with fewer slices, nothing tells whether it differs in one place or everywhere."""

Value = tuple[tuple[int, ...], "int | None"]
"""The strides of a tensor, and the sum of its words in that part; None: there was no memory for it."""


@dataclass
class _Sums:
    """Sums that were begun at a step. Those of a device are there when its event is."""

    step: int
    part: int
    tensors: list[Tensor] = field(default_factory=list)
    hosts: list[tuple[list[str], Any, Any]] = field(default_factory=list)

    def values(self) -> dict[str, Value]:
        found: dict[str, int] = {}
        for names, sums, event in self.hosts:
            if event is not None:
                event.synchronize()
            found |= dict(zip(names, sums.tolist()))
        return {t.name: (tuple(t.array.stride()), found.get(t.name)) for t in self.tensors}


class Replicas:
    """A rank's view of the tensors that all ranks have whole.

    Args:
        ranks: the ranks. compare_all() and prepare() are collective.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._left_out: set[str] = set()  # they were found to differ
        self._total = -1  # bytes that are compared
        self._same_at: list[int] = []  # by part: the last step at which it was the same on all ranks
        self._first = -1  # when all was compared
        self._next = 0
        self._sums: _Sums | None = None
        self._wrong: tuple[int, str] | None = None  # the first step whose values may be wrong, and what is to be said
        self._warned = False

    @property
    def compares(self) -> bool:
        """Were they compared once?"""
        return self._first >= 0

    def compare_all(self, tensors: Sequence[Tensor], step: int) -> None:
        """Before the first save. Rank 0 warns of tensors that differ, and they are not compared any more: the model may be meant to be so."""
        values = self._begin(self._whole(tensors), step, 0, 1 << 62).values()
        self._first = step
        if any(one is None for _, one in values.values()):
            logger.debug("the tensors of rank %d are not all compared: there was no memory for it", self._ranks.rank)
        if len(set(self._ranks.gather(_digest(values)))) == 1:
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

    def prepare(self, failure: Exception | None, fresh: bool, fits: bool, state: Snapshot, step: int) -> bool:
        """Ranks.prepare(), in which what was summed at the save before is compared; then begins the sums of this one."""
        mine = ""
        try:
            mine = self.digest()
        except RuntimeError as error:  # of a device; the others wait for this rank
            failure = failure or error
        again, digests = self._ranks.prepare(failure, fresh, fits, state.shared, mine)
        self.compare(digests)
        if self._first >= 0:
            self.begin(state.common, step)
        return again

    def begin(self, tensors: Sequence[Tensor], step: int) -> None:
        """Begins the sums of the next part. A device makes them in the order of its current stream, and nobody waits."""
        whole = self._whole(tensors)
        total = sum(_bytes(t) for t in whole)
        size = max(_LEAST, -(-total // _PARTS))
        size += -size % _WORD
        if total != self._total:  # parts have other borders from now on
            self._total, self._next = total, 0
            self._same_at = [min(self._same_at, default=self._first)] * max(1, -(-total // size))
        part = self._next % len(self._same_at)
        self._sums, self._next = self._begin(whole, step, part * size, (part + 1) * size), part + 1
        self._sums.part = part

    def fence(self) -> None:
        """The current stream of each device waits for the sums, as it may change what they are of."""
        for _, _, event in self._sums.hosts if self._sums is not None else ():
            if event is not None:
                event.wait()

    def digest(self) -> str:
        """Of the sums that were begun last; equal on all ranks if what was summed is. "": there are not all of them."""
        values = self._sums.values() if self._sums is not None else {}
        return _digest(values) if self._sums is not None and all(one is not None for _, one in values.values()) else ""

    def compare(self, digests: Sequence[str]) -> None:
        """Takes the ranks' digests. If values differ in few places, tell() says so."""
        sums, self._sums = self._sums, None
        if sums is None or not all(digests):
            return
        if len(set(digests)) == 1:
            self._same_at[sums.part] = sums.step
            return
        differing = _differing(self._ranks.gather(sums.values()))
        self._left_out |= differing.keys()
        if not differing:
            return
        since, name = min(self._same_at), next(iter(differing))
        more = f" and {len(differing) - 1} more tensors are" if len(differing) > 1 else " is"
        if self._differ_everywhere([t for t in sums.tensors if t.name in differing]):
            if self._ranks.rank == 0 and not self._warned:
                logger.warning("%s%s not the same on all ranks any more, and differ in most places: a checkpoint has the values of one rank. Do the "
                               "ranks train models of their own, or do they not compute alike? Tensors like this are not compared any more",
                               name, more)
            self._warned = True
            return
        odd = sorted(set().union(*differing.values()))
        which = "nothing tells which is right" if len(odd) == self._ranks.world else \
            f"rank {', '.join(map(str, odd))} differ{'s' if len(odd) == 1 else ''} from most others"
        self._wrong = since + 1, (f"{name}{more} not the same on all ranks: {which}; all values were the same at step {since}, these differ at step "
                                  f"{sums.step}; the memory of a machine or a GPU may be faulty")

    def tell(self, session: Any) -> None:
        """Raises the alarm, on all ranks alike. session: a ``ckd_session *``."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            lib.ckd_session_alarm(session, lib.CKD_ALARM_REPLICA, wrong[0], wrong[1].encode("utf-8", "replace"))

    def _differ_everywhere(self, tensors: Sequence[Tensor]) -> bool:
        """Collective. Memory changes in few places. What the ranks train or compute differently differs in most places of some tensor."""
        answers = self._ranks.gather([_places(t.array) for t in tensors])
        for sums in zip(*answers):
            count = min(len(one) for one in sums)
            different = sum(len({one[i] for one in sums}) > 1 for i in range(count))
            if count >= _FEW and 2 * different > count:
                return True
        return False

    def _whole(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t for t in tensors if t.name not in self._left_out and not is_dtensor(t.array) and not isinstance(t.array, Part)]

    def _begin(self, tensors: Sequence[Tensor], step: int, begin: int, end: int) -> _Sums:
        """Of the bytes from `begin` to `end` of all tensors in a row."""
        sums, at = _Sums(step, 0), 0
        by_device: dict[Any, list[tuple[str, Any]]] = {}
        for t in tensors:
            low, high = max(0, begin - at), min(_bytes(t), end - at)
            at += _bytes(t)
            if low < high:
                sums.tensors.append(t)
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


def _places(array: Any) -> list[int]:
    """Sums of the slices of a tensor."""
    size = int(array.numel() * array.element_size())
    step = max(_WORD, -(-size // _PLACES))
    step += -step % _WORD
    found = [_torch.sum_of_words(array, at, min(at + step, size)) for at in range(0, size, step)]
    return [] if any(one is None for one in found) else [int(one) for one in found]


def _differing(answers: Sequence[dict[str, Value]]) -> dict[str, set[int]]:
    """The ranks whose values are not those of more than half of the ranks, by tensor. Without such a half these are all ranks."""
    found: dict[str, set[int]] = {}
    for name, (strides, _) in answers[0].items():
        values = [answer.get(name) for answer in answers]
        if any(value is None or value[1] is None or value[0] != strides for value in values):
            continue  # no sum; or elements in another order, which have other words
        value, count = Counter(values).most_common(1)[0]
        if count < len(values):
            found[name] = {rank for rank, other in enumerate(values) if other != value} if 2 * count > len(values) else set(range(len(values)))
    return found
