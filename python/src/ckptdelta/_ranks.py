"""The processes of a torch.distributed group that save one checkpoint together."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _torch
from ._errors import Error, InvalidError, StateError
from ._native import ffi
from ._record import BLOB, members, parse
from ._types import Checkpoint

OWN = ("loader", "rng")
"""Members of a session's state that each rank has for itself. All others are the same on all ranks, and rank 0's are stored."""


def prefix_of(rank: int) -> str:
    """The prefix of names of tensors that only this rank has. Rank 0's have plain names, as in a save of one process."""
    return f"ranks/{rank}/" if rank else ""


def record_of(rank: int) -> str:
    """The name of a rank's record. Rank 0's is a blob. The others are tensors of bytes, because a save has no blobs of other ranks."""
    return f"{prefix_of(rank)}{BLOB}"


@dataclass(frozen=True)
class Answer:
    """A rank's message to the others before a save.

    Attributes:
        error: why it cannot take part; None: it can.
        fresh: its session of the library is open and has nothing registered.
        fits: the registered memory fits the state, and no save of that session has failed.
        shared: hash of names, dtypes and shapes of the tensors that all ranks share.
        sums: of the values that all ranks have, at the save before (Replicas.digest()).
    """

    error: str | None
    fresh: bool
    fits: bool
    shared: str
    sums: str


class Ranks:
    """A rank's view of the group. All calls but native() are collective.

    Args:
        group: a ProcessGroup.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidError("this process is not in the group: only its ranks make the session")
        self._name = self.gather(uuid.uuid4().hex)[0]
        self._opened = 0

    def gather(self, mine: Any) -> list[Any]:
        """Each rank's value, by rank."""
        found: list[Any] = [None] * self.world
        self._dist.all_gather_object(found, mine, group=self._group)
        return found

    def all(self, mine: bool) -> bool:
        return all(self.gather(mine))

    def check(self, failure: Exception | None) -> None:
        """Raises this rank's failure, else that of the first rank that has one."""
        self._raise(failure, self.gather(told(failure)))

    def _raise(self, failure: Exception | None, found: list[str | None]) -> None:
        if failure is not None:
            raise failure
        for rank, text in enumerate(found):
            if text is not None:
                raise StateError(f"rank {rank}: {text}")

    def place(self, found: Checkpoint | None, failure: Exception | None) -> Checkpoint | None:
        """The checkpoint that all ranks restore; None: none of them has found one. Errors: the failure of a rank; StateError."""
        answers = self.gather((told(failure), None if found is None else (found.run, found.step, found.id)))
        self._raise(failure, [text for text, _ in answers])
        for rank, (_, other) in enumerate(answers):
            if other != answers[0][1]:
                raise StateError(f"rank {rank} has found {_named(other)}, rank 0 {_named(answers[0][1])}: another process saves to the run; "
                                 "restore again, or name the step")
        return found

    def prepare(self, failure: Exception | None, fresh: bool, fits: bool, shared: Sequence[tuple[Any, ...]], sums: str) -> tuple[bool, list[str]]:
        """Before a save. (must all ranks close the library's session, because one of them has to register its memory again? their sums)

        Errors: the failure of a rank; InvalidError (the ranks' states have different tensors).
        """
        mine = Answer(told(failure), fresh, fits, hashlib.sha256(repr(shared).encode()).hexdigest(), sums)
        answers: list[Answer] = self.gather(mine)
        self._raise(failure, [answer.error for answer in answers])
        if any(answer.shared != answers[0].shared for answer in answers):
            self._tell_difference(shared)
        again = not (all(answer.fresh for answer in answers) or all(answer.fits for answer in answers))
        return again, [answer.sums for answer in answers]

    def _tell_difference(self, shared: Sequence[tuple[Any, ...]]) -> None:
        lists = self.gather(list(shared))
        for rank, other in enumerate(lists):
            differing = sorted(set(other) ^ set(lists[0]))
            if differing:
                raise InvalidError(f"rank {rank} and rank 0 do not have the same model and optimizer: {differing[0][0]} differs, and "
                                   f"{len(differing) - 1} more; states of pipeline stages go through ckptdelta.dcp", path=differing[0][0])
        raise InvalidError("the ranks have the tensors of the model and the optimizer in different orders")

    def native(self, timeout: float) -> tuple[Any, Any]:
        """(ckd_ranks_options, the memory that it points to). All ranks open their sessions equally often, so the number identifies a session."""
        self._opened += 1
        name = ffi.new("char[]", f"{self._name}-{self._opened}".encode())
        options = ffi.new("ckd_ranks_options *")
        options.struct_size = ffi.sizeof("ckd_ranks_options")
        options.rank, options.world, options.group, options.timeout_ms = self.rank, self.world, name, max(1, round(timeout * 1000))
        return options, name


def told(failure: Exception | None) -> str | None:
    """What the other ranks hear of a failure."""
    if failure is None:
        return None
    return str(failure) if isinstance(failure, Error) else f"{type(failure).__name__}: {failure}"


def _named(found: tuple[str, int, str] | None) -> str:
    return f"{found[0]}@{found[1]}" if found else "none"


def ranks_of(group: Any, alone: bool) -> Ranks | None:
    """The ranks that save together; None: this process saves by itself."""
    torch = _torch.loaded()
    if alone or torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if group is not None:
            raise InvalidError("there is no process group, or alone=True: leave group out")
        return None
    if torch.distributed.get_world_size(group) == 1:
        return None
    return Ranks(group)


def check_schedule(every: Any, every_s: Any, overhead: Any, restore_older: bool) -> None:
    """Errors: InvalidError (options that ranks would not apply in the same way)."""
    if every_s is not None or overhead is not None:
        raise InvalidError(f"{'every_s' if every_s is not None else 'overhead'} would have the ranks save at different steps: with several ranks, "
                           "use every")
    if every is None:
        raise InvalidError("with several ranks, say how often to save: every=N (steps)", path="every")
    if restore_older:
        raise InvalidError("ranks might not agree on which checkpoint is damaged: with several ranks, leave out restore_older")


def with_own(root: Any, rank: int, record: bytes | None) -> Any:
    """The root of a checkpoint of `world` ranks, with the members that belong to a rank of this session.

    Args:
        record: the same rank's; None: there is none. Random states then stay as they are, because two ranks must not draw the same numbers.
    """
    if rank == 0 or members(root) is None or "map" not in root:
        return root
    own = {} if record is None else parse(record).get("map", {})
    left = {key: node for key, node in root["map"].items() if key != "rng"}
    return {"map": {**left, **own}}


def own_part(root: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the root that a rank other than 0 records."""
    return {"map": {key: node for key, node in root["map"].items() if key in OWN}}
