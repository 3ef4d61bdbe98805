"""The writer of ckptdelta.dcp: one part of a joint save on each rank, one commit on the coordinator."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ._arrays import set_region
from ._call import Call, logger
from ._catalog import Where, checkpoint_from, run_and_step
from ._dcp import PICKLE, Addressed, opened
from ._dcp_record import BLOB, Described, Items, Record, Stream, dump, encode, harmless, leaf_of
from ._errors import InvalidError, MismatchError, StateError
from ._flatten import Tensor
from ._native import ffi, lib
from ._save import Options, Prepared, _abort, _Role, _tell_doubts, find_roles, in_order, native_tensor, options_of
from ._store import Store
from ._torch import LIBRARY, dtype_name, scalar_bytes
from ._types import Checkpoint, Fidelity, Role


def _key(item: Any) -> tuple[str, tuple[int, ...]]:
    """What a write item is a region of, and where; all regions of a tensor without elements are the same one."""
    index = item.index
    tensor = item.tensor_data
    offset = () if tensor is None or 0 in tensor.size else tuple(tensor.chunk.offsets)
    return str(index.fqn), offset


def _is_scalar(item: Any) -> bool:
    return item.type == WriteItemType.TENSOR and len(item.tensor_data.size) == 0


def _is_stored(item: Any) -> bool:
    """Does the item go to the library as a tensor? A shard without elements does not, if others have elements."""
    if item.type == WriteItemType.BYTE_IO or _is_scalar(item):
        return False
    return 0 in item.tensor_data.size or 0 not in item.tensor_data.chunk.sizes


def _described_item(item: Any) -> Described:
    data = item.tensor_data
    return Described(dtype_name(data.properties.dtype), tuple(data.size), bool(data.properties.requires_grad))


def _as_tensor(item: Any) -> Tensor:
    name = item.index.fqn
    return Tensor(name, name, None, leaf_of(_described_item(item), name), LIBRARY)


@dataclasses.dataclass
class _Open:
    """A save under way: on the coordinator not sealed yet, elsewhere sealed and waiting for the commit.

    Attributes:
        store, owner: the store, opened for this save, and its pyckd_save.
        items: what this rank puts into the record.
        options: with run, step and the id of the checkpoint.
        sealed: the part has been handed out.
    """

    store: Store
    owner: Any
    items: Items
    options: Prepared
    sealed: bool = False

    def end(self) -> None:
        """Leaves what is committed, removes what is not."""
        if self.sealed and self.owner.save and self._is_committed():
            lib.pyckd_save_end(self.owner)
        lib.pyckd_save_abort(self.owner)
        self.store.close()

    def _is_committed(self) -> bool:
        if self.store._process != os.getpid():
            return False
        info, options = ffi.new("ckd_checkpoint *"), self.options.options
        wanted = bytes(options.checkpoint_id.bytes)
        with self.store._turn():
            status = lib.ckd_store_find(info, self.store._handle, options.run, options.step, ffi.NULL)
        if status == lib.CKD_OK and bytes(info.id.bytes) == wanted:
            return True
        branches = options.on_duplicate == lib.CKD_DUPLICATE_BRANCH  # only the library knows of which name
        return bool(branches and wanted.hex() in {checkpoint.id for checkpoint in self.store.checkpoints()})


def _end_all(held: list[_Open], busy: threading.Lock) -> None:
    """Of a writer that is no more. Without this, what it holds would look like the leftovers of a process that died.

    At the exit of the process, a thread may still be saving. Its save stays, because the thread uses it.
    """
    while held and not busy.locked():
        try:
            held.pop().end()
        except Exception as error:  # nobody could take it
            logger.debug("the end of a StorageWriter: %s", error)


UNDER_WAY = ("a save with this StorageWriter is under way: wait for it (the future that dcp.async_save() has returned), or use another "
             "StorageWriter")


class StorageWriter(Addressed, checkpoint.StorageWriter):  # type: ignore[misc, unused-ignore]
    """Writes what dcp.save() and dcp.async_save() save into a store, as the checkpoint `step` of `run`.

    Every rank writes the regions that the planner gave it. Rank 0 commits all of them at once when every rank has written its
    own; if a rank fails, the save fails on all, and there is no checkpoint. Tensors are stored as deltas on the newest
    checkpoint of the run before `step`, whatever its layout. Values that are no tensors become one record without pickle.

    A writer can be used for any number of saves, one after another, and may be sent to another process. Wait for the future of
    dcp.async_save() before the next save: until then it is refused. close() releases what the writer holds of the last save; so
    does the next save, or its deletion.

    Args:
        store: an open store or its directory, which is made if there is none. The writer opens it for itself.
        run: 1 to 128 of ``A-Z a-z 0-9 . _ - ~``, not starting with a dot or a dash; None: each checkpoint id names it.
        step: of the next save, if dcp.save() gets no checkpoint id. It can be set later as well.
        parent, metric: as for Store.save(), for all saves until they are set to something else. Rank 0's count.
        on_duplicate: as for Store.save(), but ``"same"`` works only in a single process.
        fidelity, role_fidelity, base, resumed_from, codec, level, effort, target_ratio, max_error, max_load_cost,
            staging_bytes: as for Store.save(); the same on all ranks.
        pickle: also store objects that only pickle can restore. Loading them runs code from the store.

    Attributes:
        run, step: where the next save goes.
        parent, metric: of the next save. They can be set before each one: ``writer.metric = ("loss", 0.3)``.
        checkpoint: what the last save has committed; None before that, and on ranks other than 0.

    Errors come as DCP's CheckpointException, which names the rank. Those of Store.save(), and InvalidError for an item that
    cannot be stored, for a save without collectives by several processes, and if there is no run or step. StateError for a save
    that begins while another one is under way.
    """

    def __init__(self, store: str | os.PathLike[str] | Store, run: str | None = None, *, step: int | None = None,
                 fidelity: Fidelity = "exact", role_fidelity: Mapping[Role, Fidelity] | None = None, base: bool = False,
                 parent: Where | None = None, resumed_from: Where | None = None,
                 on_duplicate: Literal["error", "same", "branch"] = "error", metric: tuple[str, float] | None = None, codec: str = "auto",
                 level: int = 0, effort: int = 0, target_ratio: float = 0.0, max_error: float = 0.0, max_load_cost: float = 0.0,
                 staging_bytes: int = 0, pickle: bool = False) -> None:
        super().__init__()
        self.run, self.step, self.pickle, self.parent, self.metric = run, step, pickle, parent, metric
        self.checkpoint: Checkpoint | None = None
        self._store = store
        self._options = Options(
            run="", step=0, fidelity=fidelity, role_fidelity=role_fidelity or {}, base=base, parent=run_and_step(parent),
            resumed_from=run_and_step(resumed_from), on_duplicate=on_duplicate, metric=metric, codec=codec, level=level, effort=effort,
            target_ratio=target_ratio, max_error=max_error, max_load_cost=max_load_cost, staging_bytes=staging_bytes)
        options_of(self._options)  # tells now what cannot be
        self._is_coordinator = True
        self._hold()

    def _hold(self) -> None:
        self._held: list[_Open] = []  # at most one
        self._busy = threading.Lock()  # of the thread that uses what is held
        self._plans: list[Any] = []
        self._named: int | None = None  # the thread that has named the next save, until it begins
        self._next: tuple[int, str, int] | None = None  # the thread of the save that is planned, its run and step
        weakref.finalize(self, _end_all, self._held, self._busy)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_held", "_busy", "_plans", "_named", "_next")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold()

    def __repr__(self) -> str:
        return f"<ckptdelta.dcp.StorageWriter {self.checkpoint_id or 'without a step'}>"

    def close(self) -> None:
        """Releases what the writer holds of the last save. More calls do nothing; the writer can be used again.

        Errors: StateError (a thread is saving: wait for the future of dcp.async_save()).
        """
        with self._turn():
            self._end()

    def _end(self) -> None:
        if self._held:
            self._held.pop().end()

    def _turn(self) -> AbstractContextManager[bool]:
        """``with self._turn():`` is for whatever uses the save that is held. It does not wait for a save, which would end before it is complete."""
        if self._busy.locked():
            raise StateError(UNDER_WAY)
        return self._busy

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        super().reset(checkpoint_id)
        self._named = threading.get_ident()

    def storage_meta(self) -> Any:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # What is held stays until write_data(): it may be this rank's part of a save that others are still writing.
        self._turn()
        thread, named, self._named = threading.get_ident(), self._named, None
        if named not in (None, thread):
            raise StateError(UNDER_WAY)
        if self.run is None or self.step is None:
            raise InvalidError("there is no run or no step to save: pass checkpoint_id='RUN@STEP', or set them in the StorageWriter")
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not kwargs.get("use_collectives", True) and (many or not is_coordinator):
            raise InvalidError("use_collectives=False is not supported: without collectives nobody knows when all ranks have "
                               "written their parts")
        self._is_coordinator, self.checkpoint, self._next = is_coordinator, None, (thread, self.run, self.step)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """On the coordinator: names the checkpoint, and says which rank writes what is in several plans."""
        thread, run, step = self._next or (None, None, None)
        if thread != threading.get_ident():
            raise StateError(UNDER_WAY)
        known = self._plans if len(self._plans) == len(plans) else [None] * len(plans)
        plans = [plan if getattr(plan, "usable", True) else old for plan, old in zip(plans, known)]
        if None in plans:
            raise InvalidError("the planner caches plans that this StorageWriter has not seen: use one StorageWriter for all saves, "
                               "or leave enable_plan_caching off")
        self._plans = plans
        if self._options.on_duplicate == "same" and len(plans) > 1:
            raise InvalidError("on_duplicate='same' compares with the checkpoint that is there, which only a single process can do")
        parent = run_and_step(self.parent)
        new = ffi.new("ckd_id *")
        call = Call()
        call.check(lib.ckd_id_new(new, call.err))
        roles = self._roles(plans, call)
        seen: set[Any] = set()
        result = []
        for rank, plan in enumerate(plans):
            task: dict[str, Any] = {"id": bytes(new.bytes), "rank": rank, "world": len(plans), "run": run, "step": step, "parent": parent,
                                    "metric": self.metric, "roles": {}, "skip": set()}
            mine: set[Any] = set()
            for item in plan.items:
                if _key(item) in seen:
                    task["skip"].add(_key(item))
                elif _is_stored(item) or item.tensor_data is None or _is_scalar(item):
                    mine.add(_key(item))
                if _is_stored(item):
                    task["roles"][item.index.fqn] = roles[item.index.fqn]
            seen |= mine
            result.append(dataclasses.replace(plan, storage_data=task))
        return result

    def _roles(self, plans: list[Any], call: Call) -> dict[str, tuple[int, str | None, bool]]:
        """By name. Only the coordinator sees all names."""
        tensors = {item.index.fqn: item for plan in plans for item in plan.items if _is_stored(item)}
        described = [_as_tensor(item) for item in tensors.values()]
        found = find_roles(described, call)
        if any(options_of(self._options).lossy.values()):
            _tell_doubts(described, found)
        return {t.name: (r.role, r.weight, r.largest) for t, r in zip(described, found)}

    # --------------------------------------------------------------------------------------------------- every rank

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes what the plan says. Other ranks than the coordinator make it durable."""
        task = plan.storage_data
        if not isinstance(task, dict) or "id" not in task:
            raise StateError("the plan has not been through prepare_global_plan() of this StorageWriter")
        options = options_of(dataclasses.replace(self._options, **{name: task[name] for name in ("run", "step", "parent", "metric")}))
        call = Call()
        with self._turn():
            self._end()
            try:
                save = self._begin(task, options, call)
                self._write_items(plan, planner, save, call)
                part = b"" if self._is_coordinator else self._seal(save, call)
            except BaseException:
                self._end()
                raise
        items = save.items
        delivered = (task["id"], task["rank"], part, items.scalars, items.values, {name: (s.blob, s.position) for name, s in items.streams.items()})
        result: Any = Future()
        result.set_result([WriteResult(index=MetadataIndex(fqn="ckptdelta"), size_in_bytes=len(part), storage_data=delivered)])
        return result

    def _begin(self, task: dict[str, Any], prepared: Prepared, call: Call) -> _Open:
        options = prepared.options
        options.rank, options.world = task["rank"], task["world"]
        options.checkpoint_id.bytes = task["id"]
        options.on_progress, options.progress_context = lib.pyckd_on_progress, call.handle
        store = opened(self._store, readonly=False)
        owner = ffi.gc(ffi.new("pyckd_save *"), partial(_abort, store._owner))
        try:
            with store._turn():
                call.check(lib.pyckd_save_begin(owner, store._handle, options, call.err))
        except BaseException:
            lib.pyckd_save_abort(owner)
            store.close()
            raise
        self._held[:] = [_Open(store, owner, Items(), prepared)]
        return self._held[0]

    def _write_items(self, plan: Any, planner: Any, save: _Open, call: Call) -> None:
        task = plan.storage_data
        # An empty tensor can have several regions with one key.
        items = list({_key(item): item for item in plan.items if _key(item) not in task["skip"]}.values())
        stored = [item for item in items if _is_stored(item)]
        tensors = [_as_tensor(item) for item in stored]
        roles = [_Role(role, weight, largest, False) for role, weight, largest in (task["roles"][t.name] for t in tensors)]
        for i in in_order(tensors, roles, save.options.lossy, {}):
            tensor, alive = self._native_tensor(stored[i], planner.resolve_data(stored[i]), tensors[i], roles[i])
            call.check(lib.ckd_save_tensor(save.owner.save, tensor, call.err))
            del alive
        number = 0
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                number += self._write_value(item, planner, f"dcp/{task['rank']}/{number}", save, call)
            elif _is_scalar(item):
                dtype, data = scalar_bytes(planner.resolve_data(item).detach())
                save.items.scalars[item.index.fqn] = (dtype, data.hex())

    @staticmethod
    def _native_tensor(item: Any, array: Any, t: Tensor, role: _Role) -> tuple[Any, Any]:
        """(ckd_tensor, what must stay alive while it is used)."""
        chunk = item.tensor_data.chunk
        whole = 0 in item.tensor_data.size
        lengths = tuple(item.tensor_data.size) if whole else tuple(chunk.sizes)
        local = LIBRARY.leaf(array, t.path)
        if local.code != t.leaf.code or (not whole and tuple(array.shape) != lengths):
            raise MismatchError(f"{t.name}: the planner gives {dtype_name(array.dtype)} {list(array.shape)} for a region of "
                                f"{list(lengths)}", path=t.name)
        tensor, alive = native_tensor(t, role, LIBRARY.source(array, host=True))
        set_region(tensor.region, tuple(chunk.offsets), lengths, t.leaf.shape)
        return tensor, alive

    def _write_value(self, item: Any, planner: Any, blob: str, save: _Open, call: Call) -> int:
        """Plain values go to the record, others to a blob. Returns how many blobs it took."""
        name, items = item.index.fqn, save.items
        position: int | None = None
        data: Any = None
        if _gives_objects(planner):
            value = planner.lookup_object(item.index)
            if type(value) is io.BytesIO:
                data, position = value.getbuffer(), value.tell()
            else:
                try:
                    items.values[name] = encode(value, name)
                    return 0
                except InvalidError:
                    pass  # it goes through torch.save()
        if data is None:
            data = planner.resolve_data(item).getbuffer()
            if not self.pickle:
                harmless(bytes(data), name, PICKLE)
        # An empty buffer may have no memory at all.
        source = ffi.from_buffer(data) if len(data) else ffi.new("char[]", 1)
        call.check(lib.ckd_save_blob(save.owner.save, blob.encode(), source, len(data), call.err))
        items.streams[name] = Stream(blob, position)
        return 1

    @staticmethod
    def _seal(save: _Open, call: Call) -> bytes:
        """Makes this rank's part durable. Returns it as bytes for the coordinator."""
        part = ffi.gc(ffi.new("ckd_part *"), lib.ckd_part_free)
        call.check(lib.ckd_save_seal(part, save.owner.save, call.err))
        save.sealed = True
        return bytes(ffi.buffer(part.data, part.size))

    # -------------------------------------------------------------------------------------------------- coordinator

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commits what all ranks have written."""
        with self._turn():
            save = self._held[0] if self._held else None
            ids = {result[0].storage_data[0] for result in results}
            if save is None or ids != {bytes(save.options.options.checkpoint_id.bytes)}:
                raise StateError("close(), or another save with this StorageWriter, has ended this save before it was complete: wait for each save")
            try:
                self._commit(save, metadata, [result[0].storage_data[1:] for result in results])
            finally:
                self._end()

    def _commit(self, save: _Open, metadata: Any, delivered: list[tuple[Any, ...]]) -> None:
        call = Call()
        parts: list[bytes] = [b""] * len(delivered)
        everything = Items()
        own = 0
        for rank, part, scalars, values, streams in delivered:
            parts[rank] = part
            own = own if part else rank
            everything.update(Items(scalars, values, {name: Stream(*s) for name, s in streams.items()}))
        tensors = {name: Described(dtype_name(m.properties.dtype), tuple(m.size), bool(m.properties.requires_grad))
                   for name, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        record = dump(Record(tensors, everything, metadata.planner_data))
        call.check(lib.ckd_save_blob(save.owner.save, BLOB.encode(), ffi.from_buffer(record), len(record), call.err))
        info = ffi.new("ckd_checkpoint *")
        try:
            if len(parts) == 1:
                call.check(lib.pyckd_save_commit(info, save.owner, call.err))
            else:
                self._publish(info, save, parts, own, call)
        except KeyboardInterrupt:
            if save.owner.committed:
                logger.warning("the interrupt came after the commit: the checkpoint is in the store")
            raise
        self.checkpoint = done = checkpoint_from(info)
        logger.info("%s: saved %s, %d bytes of %d", save.store.path, done, done.stored_bytes, done.raw_bytes)

    def _publish(self, info: Any, save: _Open, parts: list[bytes], own: int, call: Call) -> None:
        """Commits the parts of the other ranks and this one's own, number `own`."""
        parts[own] = self._seal(save, call)
        buffers = [ffi.from_buffer(part) for part in parts]
        array = ffi.new("ckd_part[]", len(parts))
        for item, buffer, part in zip(array, buffers, parts):
            item.data, item.size = ffi.cast("void *", buffer), len(part)
        call.check(lib.pyckd_save_publish(info, save.owner, array, len(parts), call.err))


def _gives_objects(planner: Any) -> bool:
    """Does the planner store objects as torch.save() writes them? Then they need not be pickled first."""
    default = checkpoint.DefaultSavePlanner
    return isinstance(planner, default) and type(planner).resolve_data is default.resolve_data \
        and type(planner).transform_object is default.transform_object
