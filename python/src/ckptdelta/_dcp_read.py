"""The reader of ckptdelta.dcp: each rank reads the boxes that its planner asks for."""

from __future__ import annotations

import dataclasses
import io
import os
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, StorageMeta, TensorProperties,
                                                   TensorStorageMetadata)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from ._arrays import Leaf, Memory, set_region
from ._call import Call
from ._catalog import checkpoint_from, end_load, find_checkpoint, read_blob, step_number, stored_tensors
from ._dcp import PICKLE, Addressed, opened
from ._dcp_record import BLOB, Items, Record, described_as, harmless, leaf_of, parse, scalar_of, stream_of
from ._errors import MismatchError, NotFoundError, UnsupportedError
from ._native import ffi, lib
from ._record import plain
from ._restore import BATCH_BYTES
from ._store import Store
from ._torch import LIBRARY
from ._types import Checkpoint


@dataclasses.dataclass
class _Region:
    """A box of a tensor on its way into a tensor of the state."""

    name: str
    leaf: Leaf
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    memory: Memory
    nbytes: int
    commit: Any


class StorageReader(Addressed, checkpoint.StorageReader):  # type: ignore[misc, unused-ignore]
    """Reads for dcp.load() what a StorageWriter has saved, in any number of ranks, whatever wrote it.

    Each rank reads the boxes that its planner asks for, and every block that is read is verified. Tensors of checkpoints that
    Store.save(), the command or a C program saved can be loaded as well, by their names. dcp.load() converts dtypes as it does
    for its own files.

    Args:
        store: an open store or its directory. The reader opens it for itself.
        run: None: the only run of the store, unless the checkpoint id names it.
        step: None: the newest, unless there is a checkpoint id.
        pickle: also load objects that only pickle can restore. That runs code from the store.

    Attributes:
        run, step: what is to be loaded.
        checkpoint: what was loaded last; None before that.

    Errors come as DCP's CheckpointException, which names the rank: those of Store.load(). UnsupportedError: an object that
    only pickle can restore.
    """

    def __init__(self, store: str | os.PathLike[str] | Store, run: str | None = None, *, step: int | None = None,
                 pickle: bool = False) -> None:
        super().__init__()
        self.run, self.step, self.pickle = run, None if step is None else step_number(step), pickle
        self.checkpoint: Checkpoint | None = None
        self._store = store
        self._opened: Store | None = None
        self._load: Any = None
        self._record: Record | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None, "_load": None, "_record": None}

    def __repr__(self) -> str:
        return f"<ckptdelta.dcp.StorageReader {self.checkpoint_id or 'of the newest'}>"

    def close(self) -> None:
        """Ends a load that has not come to its end. More calls do nothing; the reader can be used again."""
        if self._load is not None:
            lib.pyckd_load_end(self._load)
        if self._opened is not None:
            self._opened.close()
        self._load = self._opened = self._record = None

    # A parameter named kwargs would have DCP ask once more, for the metadata of one rank.
    def read_metadata(self, *args: Any, **more: Any) -> Any:
        """What the checkpoint has. Each tensor is one chunk, so each rank reads the boxes that it needs."""
        self._begin(self.run, self.step)
        assert self._record is not None
        record = self._record
        state: dict[str, Any] = {}
        for name, t in record.tensors.items():
            size = torch.Size(t.size)
            properties = TensorProperties(dtype=_dtype(t.dtype, name), requires_grad=t.requires_grad)
            state[name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])
        for name in (*record.items.values, *record.items.streams):
            state[name] = BytesStorageMetadata()
        return Metadata(state_dict_metadata=state, planner_data=record.planner_data, storage_data={},
                        storage_meta=StorageMeta(checkpoint_id=str(self.checkpoint)))

    def _begin(self, run: str | None, step: int | None) -> None:
        self.close()
        call = Call()
        try:
            self._opened = opened(self._store, readonly=True)
            with self._opened._turn():
                store = self._opened._handle
                info = find_checkpoint(store, run, step, call, healthy=True)
                self._load = ffi.gc(ffi.new("pyckd_load *"), partial(end_load, self._opened._owner))
                call.check(lib.pyckd_load_begin(self._load, store, ffi.addressof(info, "id"), ffi.NULL, call.err))
            stored = stored_tensors(self._load.load)
            try:
                self._record = parse(self._blob(BLOB))
            except NotFoundError:
                self._record = Record({name: described_as(t.code, t.shape) for name, t in stored.items()}, Items(), None)
            self.checkpoint = checkpoint_from(info)
        except BaseException:
            self.close()
            raise

    def _blob(self, name: str) -> bytes:
        return read_blob(self._load.load, name)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """All ranks load what the coordinator found, even if another checkpoint was committed meanwhile."""
        assert self.checkpoint is not None
        return [dataclasses.replace(plan, storage_data=(self.checkpoint.run, self.checkpoint.step, self.checkpoint.id)) for plan in plans]

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Reads everything that the plan asks for."""
        try:
            if self._load is None or self.checkpoint is None or self.checkpoint.id != plan.storage_data[2]:
                self._begin(*plan.storage_data[:2])
            regions = []
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value(item.storage_index.fqn))
                else:
                    region = self._region(item, planner)
                    regions += [region] if region is not None else []
            for batch in _batches(regions):
                _read(self._load.load, batch)
        finally:
            self.close()
        result: Any = Future()
        result.set_result(None)
        return result

    def _value(self, name: str) -> io.BytesIO:
        """What the planner gets for an item that is no tensor: bytes of torch.save()."""
        assert self._record is not None
        items = self._record.items
        if name in items.values:
            return _saved(plain(items.values[name], name))
        if name not in items.streams:
            raise NotFoundError(f"the checkpoint has no item {name}", path=name)
        stream = items.streams[name]
        if stream.position is not None:
            return _saved(stream_of((stream.blob, stream.position), name, self._blob))
        data = self._blob(stream.blob)
        if not self.pickle:
            harmless(data, name, PICKLE)
        return io.BytesIO(data)

    def _region(self, item: Any, planner: Any) -> _Region | None:
        """A box to be read; None if it needed no reading."""
        assert self._record is not None
        name = item.storage_index.fqn
        described = self._record.tensors.get(name)
        if described is None:
            raise NotFoundError(f"the checkpoint has no tensor {name}", path=name)
        target = planner.resolve_tensor(item).detach()
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if tuple(target.shape) != lengths:
            raise MismatchError(f"{name}: the planner gives {list(target.shape)} for a region of {list(lengths)}", path=name)
        if name in self._record.items.scalars:
            target.copy_(scalar_of(self._record.items, name))
            planner.commit_tensor(item, target)
            return None
        if 0 in lengths:
            planner.commit_tensor(item, target)
            return None
        leaf, dtype = leaf_of(described, name), _dtype(described.dtype, name)
        if target.dtype == dtype:
            memory = LIBRARY.target(target, name, host=True)
        else:
            other = torch.empty(lengths, dtype=dtype)
            memory = Memory(LIBRARY.target(other, name, host=True).pointer, other, lambda: target.copy_(other))
        return _Region(name, leaf, offsets, lengths, memory, target.numel() * dtype.itemsize, lambda: planner.commit_tensor(item, target))


def _saved(value: Any) -> io.BytesIO:
    """What a planner of DCP takes for a value."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def _dtype(name: str, path: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"{path} is stored as {name}, which this version of torch does not have", path=path)
    return found


def _batches(regions: list[_Region]) -> list[list[_Region]]:
    """In their order, so many at a time that an interrupt need not wait long."""
    batches: list[list[_Region]] = []
    size = BATCH_BYTES
    for region in regions:
        if size + region.nbytes > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(region)
        size += region.nbytes
    return batches


def _read(load: Any, batch: list[_Region]) -> None:
    call = Call()
    array = ffi.new("ckd_load_request[]", len(batch))
    names = [ffi.new("char[]", region.name.encode()) for region in batch]
    shapes = [ffi.new("uint64_t[]", list(region.leaf.shape) or [0]) for region in batch]
    for item, name, shape, region in zip(array, names, shapes, batch):
        item.struct_size = ffi.sizeof("ckd_load_request")
        item.name, item.dtype, item.ndim, item.shape = name, region.leaf.code, len(region.leaf.shape), shape
        set_region(item.region, region.offsets, region.lengths, region.leaf.shape)
        item.data, item.size = region.memory.pointer, region.nbytes
    call.check(lib.ckd_load_all(load, array, len(batch), lib.CKD_DIFFERS_UNEXPECTED, call.err))
    for region in batch:
        if region.memory.finish:
            region.memory.finish()
        region.commit()
