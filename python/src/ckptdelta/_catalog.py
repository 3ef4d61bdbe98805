"""Queries to the library about checkpoints, and conversion of its answers to Python records."""

from __future__ import annotations

import math
from typing import Any

from . import _dcp_record
from ._arrays import NAMES
from ._call import Call, text
from ._errors import ExistsError, InvalidError, NotFoundError
from ._native import ffi, lib
from ._ranks import record_of
from ._record import BLOB, parse
from ._restore import Stored, flat_root
from ._types import Checkpoint, Damage, TensorInfo, Verification

Where = Checkpoint | tuple[str, int]
"""A checkpoint of the store: as it was returned, or (run, step)."""


def end_load(store: Any, owner: Any) -> None:
    """Ends a load. `store` must live until then."""
    lib.pyckd_load_end(owner)


def native_text(value: str, what: str) -> Any:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidError(f"{what} must be a string without NUL characters, not {value!r}")
    try:
        return ffi.new("char[]", value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidError(f"{what} {value!r} is not valid Unicode") from None


def step_number(step: int) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < lib.CKD_LATEST:
        raise InvalidError(f"a step is a number from 0 to 2**64 - 2, not {step!r}")
    return step.__index__()


def run_and_step(at: Where | None) -> tuple[str, int] | None:
    if at is None:
        return None
    return (at.run, at.step) if isinstance(at, Checkpoint) else (at[0], step_number(at[1]))


def find_checkpoint(store: Any, run: str | None, step: int | None, call: Call, *, healthy: bool = False) -> Any:
    """The checkpoint. With `step` None it is proved to be the newest; if that cannot be known, an error says why.

    healthy: if the newest is suspect, the one before it that is not. Errors: StateError (there is none).
    """
    info = ffi.new("ckd_checkpoint *")
    name = ffi.NULL if run is None else native_text(run, "run")
    number = lib.CKD_LATEST if step is None else step_number(step)
    while True:
        call.check(lib.ckd_store_find(info, store, name, number, call.err))
        if step is not None:
            return info
        try:
            call.check(lib.ckd_store_check_newest(store, info, call.err))
            if healthy:
                call.check(lib.ckd_store_healthy(info, store, info, call.err))
            return info
        except ExistsError:
            continue  # a newer one has been committed meanwhile


def stored_tensors(load: Any) -> dict[str, Stored]:
    found = lib.ckd_load_tensors(load)
    items = (found.items[i] for i in range(found.count))
    return {text(t.name): Stored(int(t.dtype), tuple(int(t.shape[d]) for d in range(t.ndim))) for t in items}


def read_blob(load: Any, name: str) -> bytes:
    """Errors: NotFoundError, CorruptError, InputOutputError."""
    call = Call()
    blob = ffi.gc(ffi.new("pyckd_blob *"), lib.pyckd_blob_free)
    call.check(lib.pyckd_blob_load(blob, load, name.encode(), call.err))
    return bytes(ffi.buffer(blob.data, blob.size)) if blob.size else b""


def read_root(load: Any, stored: dict[str, Stored]) -> tuple[Any, bool]:
    """(root node, whether the names of tensors are their paths, as no record tells others)."""
    try:
        return parse(read_blob(load, BLOB)), False
    except NotFoundError:
        pass
    try:
        return _dcp_record.root_of(_dcp_record.parse(read_blob(load, _dcp_record.BLOB)))
    except NotFoundError:
        return flat_root(list(stored)), True


def read_own_record(load: Any, stored: dict[str, Stored], rank: int, call: Call) -> bytes | None:
    """The record of a rank other than 0; None: the checkpoint was saved by fewer."""
    name = record_of(rank)
    found = stored.get(name)
    if found is None:
        return None
    data = ffi.new("char[]", math.prod(found.shape) or 1)
    request, text_of_name = ffi.new("ckd_load_request *"), ffi.new("char[]", name.encode())
    request.struct_size, request.name, request.dtype = ffi.sizeof("ckd_load_request"), text_of_name, lib.CKD_U8
    request.data, request.size = data, math.prod(found.shape)
    call.check(lib.ckd_load_tensor(load, request, call.err))
    return bytes(ffi.buffer(data, request.size))


def id_text(value: Any) -> str:
    found = bytes(value.bytes)
    return found.hex() if any(found) else ""


def checkpoint_from(c: Any) -> Checkpoint:
    metric = text(c.metric_name)
    return Checkpoint(
        id=id_text(c.id), run=text(c.run), step=int(c.step), kind=text(lib.ckd_kind_name(c.kind)),
        fidelity=text(lib.ckd_fidelity_name(c.fidelity)), parent=id_text(c.parent), resumed_from=id_text(c.resumed_from),
        generation=int(c.generation), lossy_resumes=int(c.lossy_resumes), depth=int(c.depth), world=int(c.world),
        tensors=int(c.tensors), raw_bytes=int(c.raw_bytes), stored_bytes=int(c.stored_bytes), load_cost=float(c.load_cost),
        created_ns=int(c.created_ns), metric_name=metric, metric=float(c.metric) if metric else None,
        suspect=bool(c.suspect))


def tensor_from(t: Any) -> TensorInfo:
    return TensorInfo(
        name=text(t.name), role=text(lib.ckd_role_name(t.role)), dtype=NAMES.get(int(t.dtype), "?"),
        shape=tuple(int(t.shape[d]) for d in range(t.ndim)), raw_bytes=int(t.raw_bytes), stored_bytes=int(t.stored_bytes),
        method=text(t.method), depth=int(t.depth), rel_l2=float(t.rel_l2), max_error=float(t.max_error))


def verification_from(v: Any) -> Verification:
    damage = []
    for i in range(v.damage_count):
        d = v.damage[i]
        offset = int(d.offset)
        damage.append(Damage(what=text(d.what), file=text(d.file), tensor=text(d.tensor), offset=None if offset == lib.CKD_NO_OFFSET else offset,
                             checkpoints=tuple(text(d.checkpoints[k]) for k in range(d.checkpoint_count))))
    return Verification(checkpoints=int(v.checkpoints), files=int(v.files), blocks=int(v.blocks), bytes=int(v.bytes), damage=tuple(damage))
