"""Descriptions of a store's content: plain, immutable records."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

Fidelity = Literal["exact", "near", "coarse"]
"""``exact``: bit for bit. ``near``: lossy, for resuming. ``coarse``: lossy, the smallest."""

Role = Literal["weight", "exp_avg", "exp_avg_sq", "master", "other"]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as the catalog has it.

    Attributes:
        id, parent, resumed_from: 32 hexadecimal digits; ``parent`` and ``resumed_from`` are ``""`` if there is none.
        run, step: where it stands. A run is one training lineage.
        kind: ``"base"``, ``"delta"`` or ``"lossy base"``.
        fidelity: ``"exact"``, ``"near"`` or ``"coarse"``.
        lossy_resumes: how often training resumed from a lossy checkpoint to get here.
        depth: longest chain of deltas.
        world: ranks that wrote it.
        tensors: how many it has.
        raw_bytes, stored_bytes: of its tensors as such, and of its files in the store.
        load_cost: estimated cost of a load, in loads of an exact base of the same state.
        created: when it was committed, UTC.
        metric_name, metric: recorded with it; ``""`` and ``None`` if none.
        suspect: values of its model or optimizer became NaN or infinite. It is loaded only if it is named by its step.
    """

    id: str
    run: str
    step: int
    kind: str
    fidelity: str
    parent: str
    resumed_from: str
    generation: int
    lossy_resumes: int
    depth: int
    world: int
    tensors: int
    raw_bytes: int
    stored_bytes: int
    load_cost: float
    created_ns: int
    metric_name: str = ""
    metric: float | None = None
    suspect: bool = False

    @property
    def created(self) -> datetime:
        return datetime.fromtimestamp(self.created_ns / 1e9, tz=timezone.utc)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name, dtype, shape: as stored. A complex tensor has a last dimension of 2.
        role: decides how a lossy checkpoint codes it.
        raw_bytes, stored_bytes: of its values as such, and of its records.
        method: ``"raw"``, ``"standalone"``, ``"delta"``, ``"step"``, ``"same"``, ``"copy"``, ``"cast"`` or ``"mixed"``.
        depth: longest chain of deltas.
        rel_l2, max_error: against the values that were saved; 0 if exact, NaN if not known.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    method: str
    depth: int
    rel_l2: float
    max_error: float


@dataclass(frozen=True)
class Damage:
    """One damaged or missing place of a store.

    Attributes:
        what: one sentence.
        file, offset: where; ``""`` and ``None`` if not known.
        tensor: ``""`` if it is in no tensor's block.
        checkpoints: ``RUN@STEP`` of those that cannot be loaded, or may not be.
    """

    what: str
    file: str
    tensor: str
    offset: int | None
    checkpoints: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """The amounts that a verification read, and the damage that it found. It is true if there is no damage."""

    checkpoints: int
    files: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...] = field(default=())

    def __bool__(self) -> bool:
        return not self.damage
