"""Retention: policies, and deletions that can be undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._call import Call
from ._errors import InvalidError
from ._native import ffi, lib
from ._types import Checkpoint

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Policy:
    """Rules for the checkpoints of a run to keep. A checkpoint stays if any rule keeps it; a rule that is not set keeps nothing.

    The two newest healthy checkpoints of a run, and those that are pinned or tagged, always stay. Suspect ones do not count; if
    the newest of a run is suspect, it stays until a healthy one follows.

    Attributes:
        keep_last: this many of the newest steps.
        keep_every: steps that are multiples of this.
        keep_first: the first step.
        keep_best: this many with the best metric.
        highest_is_best: the highest metric is the best; False: the lowest.
        keep_new_s: those saved at most this many seconds ago.
        keep_within_s: those saved at most this many seconds before the newest step, or before now if that is earlier.
        keep_daily, keep_weekly, keep_monthly: the newest step of each of this many days, weeks or months with a save, in UTC.
        automatic: for Store.set_policy(): a save of the run applies the policy once this many checkpoints can be deleted; 0: only
            Store.prune() applies it.
        undo_s: seconds for which the deletions can be undone; 0: the files are removed at once.
        compact_share: for automatic policies. If deleted checkpoints that deltas still need take more than this percentage of the
            run's files, these deltas are stored without them. 1 to 99; 0: 25; None: never.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_first: bool = False
    keep_best: int = 0
    highest_is_best: bool = False
    keep_new_s: float = 0
    keep_within_s: float = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    automatic: int = 0
    undo_s: float = DAY
    compact_share: int | None = 0


@dataclass(frozen=True)
class Pruned:
    """The result of a policy, or of a dry run.

    Attributes:
        kept, deleted: by run and step.
        bytes: freed when the deleted checkpoints are removed. More is freed when deltas on them are compacted.
    """

    kept: tuple[Checkpoint, ...]
    deleted: tuple[Checkpoint, ...]
    bytes: int


def seconds(value: float, what: str) -> int:
    """Whole seconds, rounded up, so that nothing is removed early. Errors: InvalidError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        raise InvalidError(f"{what} is a number of seconds that is not negative, not {value!r}", path=what)
    return int(-(-value // 1))


def _number(value: Any, what: str, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**bits:
        raise InvalidError(f"{what} is a whole number that is not negative, not {value!r}", path=what)
    return value


def native_policy(policy: Policy, run: Any) -> Any:
    """A ckd_policy; `run` is memory with its name, or NULL, and must live as long. Errors: InvalidError."""
    out = ffi.new("ckd_policy *")
    out.struct_size, out.run = ffi.sizeof("ckd_policy"), run
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name.endswith("_s"):
            value = seconds(value, field.name)
        elif field.name == "compact_share":
            if value is not None and not 0 <= _number(value, field.name, 7) < 100:
                raise InvalidError(f"compact_share is a percentage from 1 to 99, or None, not {value!r}", path=field.name)
            value = lib.CKD_NO_COMPACTION if value is None else value
        elif isinstance(field.default, bool):
            value = int(bool(value))
        else:
            value = _number(value, field.name, 64 if field.name == "keep_every" else 32)
        setattr(out, field.name, value)
    return out


def policy_from(native: Any) -> Policy:
    found: dict[str, Any] = {field.name: int(getattr(native, field.name)) for field in dataclasses.fields(Policy)}
    for name in ("keep_first", "highest_is_best"):
        found[name] = bool(found[name])
    if native.compact_share == lib.CKD_NO_COMPACTION:
        found["compact_share"] = None
    return Policy(**found)


def delete_options(undo_s: float) -> Any:
    options = ffi.new("ckd_delete_options *")
    options.struct_size, options.undo_s = ffi.sizeof("ckd_delete_options"), seconds(undo_s, "undo_s")
    return options


def ids_of(hexadecimal: Sequence[str]) -> Any:
    """An array of ckd_id."""
    array = ffi.new("ckd_id[]", len(hexadecimal))
    for i, text in enumerate(hexadecimal):
        ffi.memmove(ffi.addressof(array, i), bytes.fromhex(text), 16)
    return array


def prune(store: Any, policy: Policy, run: Any, dry_run: bool, call: Call) -> Any:
    """A ckd_prune **, which is released with the result."""
    found = ffi.gc(ffi.new("ckd_prune **"), lib.pyckd_prune_free)
    rules = native_policy(policy, run)
    if dry_run:
        call.check(lib.ckd_store_plan_prune(found, store, rules, call.err))
    else:
        call.check(lib.ckd_store_prune(found, store, rules, delete_options(policy.undo_s), call.err))
    return found


def trashed(store: Any, call: Call) -> Any:
    """A ckd_trash **, which is released with the result."""
    found = ffi.gc(ffi.new("ckd_trash **"), lib.pyckd_trash_free)
    call.check(lib.ckd_store_trash(found, store, call.err))
    return found
