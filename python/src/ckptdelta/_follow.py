"""A folder that has the newest weights of a run, and what changed between two checkpoints."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

from ._arrays import library_named, set_region
from ._call import Call, Notices, Progress, logger, path_bytes, text
from ._catalog import Where, end_load, find_checkpoint, id_text, native_text, run_and_step
from ._errors import CancelledError, InvalidError, NotFoundError, StateError
from ._native import ffi, lib
from ._turns import Turns

_SLICE = 1.0
"""Seconds for which a wait stays in the library: Python handles signals in between."""


@dataclass(frozen=True)
class Version:
    """What a folder has.

    Attributes:
        id, run, step, created_ns: of the checkpoint.
        applied: the call changed the folder.
        files: that were replaced.
        bytes: of all tensors in the folder.
        written_bytes: of the values that were loaded and written.
        read_bytes: of the payloads that were read from the store for them.
        passed_over: newer checkpoints that are damaged; the log names them.
    """

    id: str
    run: str
    step: int
    created_ns: int
    applied: bool
    files: int
    bytes: int
    written_bytes: int
    read_bytes: int
    passed_over: int

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


class Follow:
    """A folder that follows the newest weights of a run, for programs that serve a model while it is trained.

    The folder is one that from_pretrained() reads, once a configuration and a tokenizer are there: ``model.safetensors``, or
    shards and an index. docs/follow.md says what it has at any time. One object at a time follows into a folder. Its calls
    may come from any thread, and wait for each other; stop() does not wait. In a forked child they raise StateError.

        with ckptdelta.Follow("runs/rl", "served", run="rl", member="model") as follow:
            for version in follow:          # now, and whenever there is a newer checkpoint
                server.reload("served")

    Args:
        path: the store. One that does not exist yet is waited for.
        into: the folder. It is created, but not the one above it.
        run, tag: what is followed: a run, or the checkpoint with a tag, wherever it is moved. Neither: the only run.
        member: the model's path in the saved state, such as ``"model"``: only the tensors below it, without this
            beginning of their names. None: all weights, by the names that the store has.
        only, exclude: globs of the store's names of tensors.
        max_shard_size: of each file, in bytes; None: 5 GB.
        poll: seconds after which the store is looked at again. On the same machine a new checkpoint is noticed at once.
        overwrite: take over a folder with model files that no follower has written.
        threads, lock_timeout: as for open().

    Errors: NotFoundError (the folder above `into`), InvalidError, BusyError (another follower), ExistsError (the folder has model
    files of others), ReadOnlyError, NoSpaceError, InputOutputError, and those of open().
    """

    def __init__(self, path: str | os.PathLike[str], into: str | os.PathLike[str], *, run: str | None = None, tag: str | None = None,
                 member: str | None = None, only: str | Sequence[str] = (), exclude: str | Sequence[str] = (),
                 max_shard_size: int | None = None, poll: float = 2.0, overwrite: bool = False, threads: int = 0,
                 lock_timeout: float = 30.0) -> None:
        from ._store import store_options

        if not 0.001 <= poll < 4e6 or (max_shard_size is not None and max_shard_size < 1):
            raise InvalidError("poll is from 0.001 to 4,000,000 seconds, and max_shard_size at least 1")
        self.path, self.into = os.fspath(path), os.fspath(into)
        above = os.path.dirname(os.path.abspath(self.into))
        if not os.path.isdir(above):
            raise NotFoundError(f"the folder {above}, in which {self.into} would be, does not exist")
        self._process, self._poll = os.getpid(), poll
        self._turns, self._handle_lock, self._stopped = Turns(), threading.RLock(), threading.Event()
        self._call, self._closed = Call(), False
        self._label = ffi.new_handle(Notices(self.path))
        self._store_options = store_options(threads, lock_timeout, self._label)
        self._kept: list[Any] = []
        self._options = self._native_options(run, tag, member, only, exclude, max_shard_size, overwrite)
        self._owner = ffi.gc(ffi.new("pyckd_follow *"), partial(_close, self._label, self._call, self._kept))
        self._open()

    def _text(self, value: str | None, what: str) -> Any:
        if value is None:
            return ffi.NULL
        self._kept.append(native_text(value, what))
        return self._kept[-1]

    def _list(self, globs: str | Sequence[str], what: str) -> tuple[Any, int]:
        globs = [globs] if isinstance(globs, str) else list(globs)
        self._kept.append(ffi.new("char *[]", [self._text(glob, what) for glob in globs] or [ffi.NULL]))
        return self._kept[-1], len(globs)

    def _native_options(self, run: str | None, tag: str | None, member: str | None, only: str | Sequence[str],
                        exclude: str | Sequence[str], max_shard_size: int | None, overwrite: bool) -> Any:
        options = ffi.new("ckd_follow_options *")
        self._kept.append(ffi.new("char[]", path_bytes(self.into)))
        options.struct_size, options.into = ffi.sizeof("ckd_follow_options"), self._kept[-1]
        options.run, options.tag, options.member = self._text(run, "run"), self._text(tag, "tag"), self._text(member, "member")
        options.only, options.only_count = self._list(only, "only")
        options.exclude, options.exclude_count = self._list(exclude, "exclude")
        options.shard_bytes, options.poll_ms, options.overwrite = max_shard_size or 0, max(1, round(self._poll * 1000)), overwrite
        options.on_progress, options.progress_context = lib.pyckd_on_progress, self._call.handle
        return options

    def _open(self) -> bool:
        """False: there is no store yet. The caller holds the lock, or nobody else has the object."""
        with self._handle_lock:
            status = lib.pyckd_follow_open(self._owner, path_bytes(self.path), self._store_options, self._options, self._call.err)
        try:
            self._call.check(status)
        except NotFoundError:
            return False
        return True

    def _turn(self) -> AbstractContextManager[bool]:
        return self._turns.next(f"a callback or a signal handler called the follower of {self.into} from within its call: only stop() may be called")

    def _check(self) -> None:
        if self._closed:
            raise StateError(f"the folder {self.into} is not followed any more: the object was closed")

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ckptdelta.Follow {self.path!r} into {self.into!r}{', closed' if self._closed else ''}>"

    def __iter__(self) -> Iterator[Version]:
        """Applies the newest checkpoint, and each newer one when it comes, until stop(). A checkpoint that is replaced by a newer one
        in the meantime is left out."""
        while self.wait():
            version = self.apply()
            if version.applied:
                yield version

    def stop(self) -> None:
        """Ends the wait or the iteration of another thread, and later ones. Never waits."""
        self._stopped.set()
        with self._handle_lock:
            if self._owner.follow and self._process == os.getpid():
                lib.ckd_follow_cancel(self._owner.follow)

    def close(self) -> None:
        """Ends following. The folder stays as it is. More calls do nothing."""
        if self._process == os.getpid():
            self.stop()
            with self._turn(), self._handle_lock:
                self._closed = True
                lib.pyckd_follow_close(self._owner)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until there is another checkpoint to apply than the folder has.

        Args:
            timeout: seconds; None: without a limit; 0: only looks.

        Returns: False if the time is over, or after stop(). Errors: InvalidError (the store has several runs), InputOutputError.
        """
        end = None if timeout is None else time.monotonic() + timeout
        newer = ffi.new("int *")
        while True:
            left = _SLICE if end is None else min(_SLICE, max(0.0, end - time.monotonic()))
            with self._turn():
                self._check()
                if self._stopped.is_set():
                    return False
                if self._look(newer, left):
                    return True
            if end is not None and time.monotonic() >= end:
                return False

    def _look(self, newer: Any, seconds: float) -> bool:
        if not self._owner.follow and not self._open():
            self._stopped.wait(min(self._poll, seconds))
            return False
        status = lib.ckd_follow_wait(newer, self._owner.follow, round(seconds * 1000), self._call.err)
        try:
            self._call.check(status)
        except StateError as error:  # there is another store now
            logger.info("%s: %s; it is opened again", self.path, error)
            with self._handle_lock:
                lib.pyckd_follow_close(self._owner)
        except CancelledError:  # by stop()
            return False
        else:
            return bool(newer[0])
        return False

    def apply(self, progress: Progress | None = None) -> Version:
        """Brings the folder to the newest checkpoint that is neither suspect nor damaged; does nothing if it is there.

        The folder has the old version or the new one, whatever happens. Values are compared with their hashes when they are loaded and
        when they are read back.

        Args:
            progress: called with bytes of the folder's tensors that are done, and of all; False cancels the call.

        Returns: what the folder has now.

        Errors: NotFoundError (there is no store or checkpoint yet), StateError (all are suspect), MismatchError (no tensor is chosen),
        CorruptError (all are damaged, and the folder is empty), ExistsError, CancelledError, NoSpaceError, InputOutputError.
        """
        with self._turn():
            self._check()
            if not self._owner.follow and not self._open():
                raise NotFoundError(f"there is no store at {self.path} yet")
            found = ffi.new("ckd_follow_result *")
            self._call.callback.progress = progress
            try:
                self._call.check(lib.ckd_follow_apply(found, self._owner.follow, self._call.err))
            finally:
                self._call.callback.progress = None
            version = _version(found)
        if version.applied:
            logger.info("%s: %s has %s, %d bytes of %d written", self.path, self.into, version, version.written_bytes, version.bytes)
        return version

    @property
    def applied(self) -> Version | None:
        """What the folder has; None: nothing yet. Does not look at the store."""
        with self._turn():
            self._check()
            found = ffi.new("ckd_follow_result *")
            lib.ckd_follow_applied(found, self._owner.follow)
        return _version(found) if id_text(found.checkpoint.id) else None


def _version(r: Any) -> Version:
    c = r.checkpoint
    return Version(id=id_text(c.id), run=text(c.run), step=int(c.step), created_ns=int(c.created_ns), applied=bool(r.applied),
                   files=int(r.files), bytes=int(r.bytes), written_bytes=int(r.written_bytes), read_bytes=int(r.read_bytes),
                   passed_over=int(r.passed_over))


def _close(label: Any, call: Call, kept: list[Any], owner: Any) -> None:
    lib.pyckd_follow_close(owner)


# ------------------------------------------------------------------------------------------------------------ changes

Box = Sequence[slice]
"""A part of a tensor: one slice for each dimension, without a step."""


def _set_box(region: Any, box: Box, shape: tuple[int, ...]) -> None:
    if len(box) != len(shape) or any(part.step not in (None, 1) for part in box):
        raise InvalidError(f"the box has a slice for each of the {len(shape)} dimensions, none with a step")
    ends = [part.indices(size) for part, size in zip(box, shape)]
    set_region(region, [start for start, _, _ in ends], [max(0, stop - start) for start, stop, _ in ends], shape)


def _begin(owner: Any, store: Any, where: Where, call: Call) -> Any:
    at = run_and_step(where)
    assert at is not None
    info = find_checkpoint(store, at[0], at[1], call)
    load = ffi.gc(ffi.new("pyckd_load *"), partial(end_load, owner))
    call.check(lib.pyckd_load_begin(load, store, ffi.addressof(info, "id"), ffi.NULL, call.err))
    return load


def _description(load: Any, tensor: str, where: Where) -> Any:
    found = lib.ckd_load_tensors(load.load)
    for i in range(found.count):
        if text(found.items[i].name) == tensor:
            return found.items[i]
    raise NotFoundError(f"the checkpoint {where if not isinstance(where, tuple) else '@'.join(map(str, where))} has no tensor {tensor!r}")


def changes(owner: Any, store: Any, tensor: str, before: Where, after: Where, box: Box | None,
            tensors: Literal["numpy", "torch"] | None) -> tuple[Any, Any]:
    """What Store.changes returns. `owner` is the store's owner."""
    if tensors not in (None, "numpy", "torch"):
        raise InvalidError(f"tensors is 'numpy' or 'torch', not {tensors!r}")
    call = Call()
    old, new = _begin(owner, store, before, call), None
    try:
        new = _begin(owner, store, after, call)
        info = _description(new, tensor, after)
        name, request = native_text(tensor, "tensor"), ffi.new("ckd_changes_request *")
        request.struct_size, request.tensor = ffi.sizeof("ckd_changes_request"), name
        if box is not None:
            _set_box(request.region, box, tuple(int(info.shape[d]) for d in range(info.ndim)))
        found = ffi.gc(ffi.new("pyckd_changes *"), lib.pyckd_changes_free)
        found.value_size = lib.ckd_dtype_size(info.dtype)
        call.check(lib.pyckd_follow_changes(found, old.load, new.load, request, call.err))
        library = library_named(tensors or ("torch" if "torch" in sys.modules else "numpy"))
        positions, to_positions = library.make(int(lib.CKD_I64), (int(found.count),), None, tensor)
        values, to_values = library.make(int(info.dtype), (int(found.count),), None, tensor)
        if found.count:
            ffi.memmove(to_positions.pointer, found.positions, 8 * found.count)
            ffi.memmove(to_values.pointer, found.values, found.value_size * found.count)
        return positions, values
    finally:
        lib.pyckd_load_end(old)
        if new is not None:
            lib.pyckd_load_end(new)
