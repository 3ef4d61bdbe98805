"""One save: options, roles, the order of tensors, and the calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ._arrays import Memory, set_part
from ._call import Call, logger
from ._errors import Error, InvalidError
from ._flatten import Tensor
from ._native import ffi, lib
from ._updates import Update

FIDELITIES = {"exact": lib.CKD_EXACT, "near": lib.CKD_NEAR, "coarse": lib.CKD_COARSE}
ROLES = {"weight": lib.CKD_ROLE_WEIGHT, "exp_avg": lib.CKD_ROLE_EXP_AVG, "exp_avg_sq": lib.CKD_ROLE_EXP_AVG_SQ,
         "master": lib.CKD_ROLE_MASTER, "other": lib.CKD_ROLE_OTHER}
DUPLICATES = {"error": lib.CKD_DUPLICATE_ERROR, "same": lib.CKD_DUPLICATE_SAME_OK, "branch": lib.CKD_DUPLICATE_BRANCH}
CODECS = {"auto": lib.CKD_CODEC_AUTO, "raw": lib.CKD_CODEC_RAW, "zstd": lib.CKD_CODEC_ZSTD, "lz4": lib.CKD_CODEC_LZ4}


@dataclass(frozen=True)
class Options:
    """Arguments of Store.save() that concern the library."""

    run: str
    step: int
    fidelity: str = "exact"
    role_fidelity: Mapping[Any, str] = field(default_factory=dict)
    base: bool = False
    parent: tuple[str, int] | None = None
    resumed_from: tuple[str, int] | None = None
    on_duplicate: str = "error"
    metric: tuple[str, float] | None = None
    codec: str = "auto"
    level: int = 0
    effort: int = 0
    target_ratio: float = 0.0
    max_error: float = 0.0
    max_load_cost: float = 0.0
    staging_bytes: int = 0


@dataclass(frozen=True)
class Prepared:
    """Options of the library, and the strings that they point to."""

    options: Any
    strings: list[Any]
    lossy: dict[int, bool]


def _choice(choices: Mapping[str, Any], value: str, what: str) -> Any:
    if value not in choices:
        raise InvalidError(f"{what} is one of {', '.join(choices)}, not {value!r}")
    return choices[value]


def options_of(o: Options) -> Prepared:
    """Errors: InvalidError."""
    if isinstance(o.step, bool) or not hasattr(o.step, "__index__") or not 0 <= o.step.__index__() < lib.CKD_LATEST:
        raise InvalidError(f"a step is a number from 0 to 2**64 - 2, not {o.step!r}")
    strings: list[Any] = []

    def string(value: str, what: str) -> Any:
        if not isinstance(value, str) or "\0" in value:
            raise InvalidError(f"{what} must be a string without NUL characters, not {value!r}")
        strings.append(ffi.new("char[]", value.encode("utf-8", "replace")))
        return strings[-1]

    options = ffi.new("ckd_save_options *")
    options.struct_size = ffi.sizeof("ckd_save_options")
    options.run, options.step, options.base = string(o.run, "run"), o.step.__index__(), bool(o.base)
    options.fidelity = _choice(FIDELITIES, o.fidelity, "fidelity")
    for role, fidelity in o.role_fidelity.items():
        options.role_fidelity[_choice(ROLES, role, "a role")] = _choice(FIDELITIES, fidelity, f"the fidelity of {role}")
    if o.parent is not None:
        options.parent_run, options.parent_step = string(o.parent[0], "parent"), o.parent[1]
    if o.resumed_from is not None:
        options.resumed_from_run, options.resumed_from_step = string(o.resumed_from[0], "resumed_from"), o.resumed_from[1]
    if o.metric is not None:
        options.metric_name, options.metric = string(o.metric[0], "the metric's name"), float(o.metric[1])
    options.on_duplicate = _choice(DUPLICATES, o.on_duplicate, "on_duplicate")
    options.codec = _choice(CODECS, o.codec, "codec")
    for name in ("level", "effort", "target_ratio", "max_error", "max_load_cost", "staging_bytes"):
        try:
            setattr(options, name, getattr(o, name))
        except (TypeError, OverflowError):
            raise InvalidError(f"{name} cannot be {getattr(o, name)!r}") from None
    lossy = {role: (options.role_fidelity[role] or options.fidelity) != lib.CKD_EXACT for role in ROLES.values()}
    lossy[lib.CKD_ROLE_OTHER] = False
    return Prepared(options, strings, lossy)


# ------------------------------------------------------------------------------------------------------------- roles


@dataclass(frozen=True)
class _Role:
    role: int
    weight: str | None
    largest: bool
    in_doubt: bool


def find_roles(tensors: list[Tensor], call: Call) -> list[_Role]:
    """Roles, and the weights of moments, as the library finds them in all the names."""
    count = len(tensors)
    names = [ffi.new("char[]", (t.alias or t.name).encode()) for t in tensors]
    shapes = [ffi.new("uint64_t[]", list(t.leaf.shape) or [0]) for t in tensors]
    given, found = ffi.new("ckd_tensor_name[]", count or 1), ffi.new("ckd_tensor_role[]", count or 1)
    for item, name, shape, t in zip(given, names, shapes, tensors):
        item.name, item.dtype, item.ndim, item.shape = name, t.leaf.code, len(t.leaf.shape), shape
        item.role = lib.CKD_ROLE_OTHER if t.buffer else lib.CKD_ROLE_AUTO
    call.check(lib.ckd_roles_find(found, given, count, ffi.NULL, 0, call.err))
    # The weight is one of the names that were passed in: tensors without an alias have their own.
    return [_Role(int(r.role), bytes(ffi.string(r.weight)).decode() if r.weight else None, bool(r.largest), bool(r.in_doubt))
            for r in found[0:count]]


def predicted(tensors: list[Tensor], roles: list[_Role], updates: Mapping[str, Update]) -> dict[str, Update]:
    """The updates of weights that are f32, or have an f32 master, with all their moments: only these can be predicted."""
    masters = {r.weight for r in roles if r.role == lib.CKD_ROLE_MASTER}
    other = {r.weight or t.name for t, r in zip(tensors, roles)
             if r.largest or (t.leaf.code != lib.CKD_F32 and not (r.role == lib.CKD_ROLE_WEIGHT and t.name in masters))}
    return {name: update for name, update in updates.items() if name not in other}


def in_order(tensors: list[Tensor], roles: list[_Role], lossy: Mapping[int, bool], updates: Mapping[str, Update]) -> list[int]:
    """Parameter by parameter, moments before what they belong to, parameters with masters first: masters before copies of them.

    The second moment comes first, unless the first moment alone is exact: the last one is coded so that updates stay small.
    A step is predicted from the first moment.
    """
    parts = {lib.CKD_ROLE_EXP_AVG_SQ: 0, lib.CKD_ROLE_EXP_AVG: 2, lib.CKD_ROLE_MASTER: 3}
    exact_first = not lossy[lib.CKD_ROLE_EXP_AVG] and lossy[lib.CKD_ROLE_EXP_AVG_SQ]
    of = [r.weight or t.name for t, r in zip(tensors, roles)]
    first: dict[str, int] = {}
    masters = {of[i] for i, r in enumerate(roles) if r.role == lib.CKD_ROLE_MASTER}
    for i, name in enumerate(of):
        first.setdefault(name, i)

    def place(i: int) -> tuple[bool, int, int, int]:
        role = roles[i]
        first_moment = role.role == lib.CKD_ROLE_EXP_AVG
        part = 1 if role.largest else -1 if first_moment and (exact_first or of[i] in updates) else parts.get(role.role, 4)
        return of[i] not in masters, first[of[i]], part, i

    return sorted(range(len(tensors)), key=place)


# ------------------------------------------------------------------------------------------------------------- calls


def _abort(store: Any, owner: Any) -> None:
    """Ends a save that nobody has ended. `store` must live until then."""
    lib.pyckd_save_abort(owner)


@dataclass(frozen=True)
class Content:
    """What a checkpoint is to have."""

    tensors: list[Tensor]
    updates: Mapping[str, Update]
    blobs: Mapping[str, bytes]


def save_all(store_owner: Any, store: Any, prepared: Prepared, content: Content, call: Call) -> Any:
    """Saves and commits. Returns the ckd_checkpoint. After any exception nothing of the save is left, unless it was committed."""
    options, tensors = prepared.options, content.tensors
    part = next((t.path for t in tensors if t.leaf.part is not None), None)
    if part is not None:
        raise InvalidError(f"{part} is a distributed tensor, of which this process has a part: save it with ckptdelta.Session or "
                           "ckptdelta.dcp on all ranks, or pass its full_tensor()", path=part)
    options.total_bytes = sum(t.leaf.nbytes for t in tensors)
    options.on_progress, options.progress_context = lib.pyckd_on_progress, call.handle
    roles = find_roles(tensors, call)
    lossy = any(prepared.lossy.values())
    if lossy:
        _tell_doubts(tensors, roles)
    updates = {} if lossy else predicted(tensors, roles, content.updates)
    owner = ffi.gc(ffi.new("pyckd_save *"), partial(_abort, store_owner))
    info = ffi.new("ckd_checkpoint *")
    try:
        call.check(lib.pyckd_save_begin(owner, store, options, call.err))
        for i in in_order(tensors, roles, prepared.lossy, updates):
            _save_tensor(owner, tensors[i], roles[i], updates.get(roles[i].weight or tensors[i].name), call)
        for name, data in content.blobs.items():
            call.check(lib.ckd_save_blob(owner.save, name.encode(), ffi.from_buffer(data), len(data), call.err))
        call.check(lib.pyckd_save_commit(info, owner, call.err))
        return info
    except Error as error:
        paths = {t.name: t.path for t in tensors}
        error.path = error.path or paths.get(error.tensor, "")
        raise
    except KeyboardInterrupt:
        if owner.committed:
            logger.warning("the interrupt came after the commit: the checkpoint is in the store")
        raise
    finally:
        lib.pyckd_save_abort(owner)


def described(t: Tensor, role: _Role) -> tuple[Any, tuple[Any, ...]]:
    """(the ckd_tensor of this process's part, without its data; the objects that must live until the library has read it)."""
    tensor = ffi.new("ckd_tensor *")
    tensor.struct_size = ffi.sizeof("ckd_tensor")
    name, shape = ffi.new("char[]", t.name.encode()), ffi.new("uint64_t[]", list(t.leaf.shape) or [0])
    weight = ffi.new("char[]", role.weight.encode()) if role.weight else ffi.NULL
    tensor.name, tensor.role, tensor.dtype, tensor.ndim = name, role.role, t.leaf.code, len(t.leaf.shape)
    tensor.shape, tensor.weight = shape, weight
    if t.leaf.part is not None:
        set_part(tensor.region, t.leaf.part, t.leaf.shape)
    return tensor, (name, shape, weight)


def native_tensor(t: Tensor, role: _Role, memory: Memory) -> tuple[Any, Any]:
    """The ckd_tensor of a whole tensor, and what must stay alive until the library has read it."""
    tensor, alive = described(t, role)
    nothing = ffi.new("uint64_t *")  # an empty array may have no memory at all
    tensor.data = memory.pointer if memory.pointer else nothing
    device = memory.device.native() if memory.device is not None else ffi.NULL
    tensor.device = device
    return tensor, (*alive, nothing, memory, device)


def _save_tensor(owner: Any, t: Tensor, role: _Role, update: Update | None, call: Call) -> None:
    tensor, alive = native_tensor(t, role, t.library.source(t.array, host=False))
    optimizer = update.native() if update is not None and role.role != lib.CKD_ROLE_OTHER else ffi.NULL
    tensor.optimizer = optimizer
    call.check(lib.ckd_save_tensor(owner.save, tensor, call.err))
    del alive


def _tell_doubts(tensors: list[Tensor], roles: list[_Role]) -> None:
    doubtful = [t.path for t, r in zip(tensors, roles) if r.in_doubt]
    if doubtful:
        more = f" and {len(doubtful) - 3} more" if len(doubtful) > 3 else ""
        logger.warning("%s%s: kept exact, as it is not known which parameter they belong to; save the model in the same state",
                       ", ".join(doubtful[:3]), more)
