"""Calls into the library: errors become exceptions, callbacks come back to Python."""

from __future__ import annotations

import _thread
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from types import TracebackType
from typing import Any

from ._errors import Error, StateError, class_of
from ._native import ffi, lib

logger = logging.getLogger("ckptdelta")

Progress = Callable[[int, int], object]
"""Receives bytes of tensor data done, and in total. ``False`` (and only that) cancels the call."""


def text(value: Any) -> str:
    """A char pointer or array of the library as text. Names of files need not be UTF-8."""
    return bytes(ffi.string(value)).decode("utf-8", "surrogateescape") if value else ""


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    found = os.fsencode(path)
    if b"\0" in found:
        raise class_of("INVALID")(f"the path {path!r} has a NUL character")
    return found


def absolute(store: str) -> str:
    """A store's path for other processes and folders. The address of a bucket stays as it is."""
    return store if store.startswith("s3://") else os.path.abspath(store)


_PHRASES = (
    ("call ckd_session_restore", "call session.restore()"),
    ("call ckd_session_fence", "call session.fence()"),
    ("call ckd_ranks_leave, then ckd_ranks_join", "make another session"),
    ("look for the step with ckd_store_find", "look for the step with Store.find()"),
    ("set on_duplicate to CKD_DUPLICATE_BRANCH", 'pass on_duplicate="branch"'),
    ("CKD_DUPLICATE_SAME_OK", 'on_duplicate="same"'),
    ("open it with CKD_OPEN_WRITE", "open it without readonly=True"))
"""What the library's messages advise a C program, and the same for Python."""


def in_python(message: str) -> str:
    for of_c, of_python in _PHRASES:
        message = message.replace(of_c, of_python)
    return message


_ALIKE = (" is not used: ", " is suspect and passed over: ", "; saving a base instead of a delta on it", " not the same on all ranks: ", "every user of this machine can remove")
"""In notices of what each process finds in the store for itself."""
_KEPT = 1000


class Notices:
    """Logs the notices of one open store.

    Args:
        path: of the store.
        first: False: another process of the group says what all of them find.
        heard: texts that this process has logged before, from the same store opened otherwise.
    """

    def __init__(self, path: object, *, first: bool = True, heard: Set[str] = frozenset()) -> None:
        self.said: set[str] = set()
        self._path, self._first, self._heard = str(path), first, heard

    def log(self, level: int, message: str) -> None:
        known = message in self._heard or (not self._first and any(phrase in message for phrase in _ALIKE))
        if len(self.said) < _KEPT:
            self.said.add(message)
        logger.log(logging.DEBUG if known else level, "%s: %s", self._path, message)


class Parts:
    """Joint progress of several calls: an iterator of their progress functions. Each call's share is its size.

    A call is taken to be done when the next function is asked for, and the last one when the iteration ends.
    """

    def __init__(self, progress: Progress | None, sizes: Sequence[int]) -> None:
        self.progress = progress
        self.sizes = sizes
        self.total = sum(sizes)

    def __iter__(self) -> Iterator[Progress | None]:
        before, told = 0, 0
        for size in self.sizes:
            if self.progress is None:
                yield None
                continue

            def part(done: int, total: int, before: int = before, size: int = size) -> object:
                nonlocal told
                told = max(told, before + (size * done // total if total else 0))
                return self.progress(told, self.total) if self.progress is not None else None

            yield part
            before += size
        if self.progress is not None and self.sizes and told < self.total:
            self.progress(self.total, self.total)


class Callback:
    """Of a call: the function that receives its progress, and what that has raised."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.exception: BaseException | None = None


class Call:
    """One call of the library, or several that share a progress callback. Use check() on each status.

    An exception of a callback, KeyboardInterrupt included, cancels the call, and check() raises it.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.err = ffi.new("ckd_error *")
        self.callback = Callback(progress)
        self.handle = ffi.new_handle(self.callback)  # a handle of the call would be a cycle, which waits for the garbage collector

    def check(self, status: int) -> None:
        """Raises the exception of a callback, else that of the status."""
        if self.callback.exception is not None:
            exception, self.callback.exception = self.callback.exception, None
            raise exception
        if status != 0:
            raise self.error(status)

    def error(self, status: int) -> Error:
        err = self.err
        same = err.status == status
        offset = int(err.offset)
        return class_of(text(lib.ckd_status_name(status)))(
            (in_python(text(err.message)) if same else "") or f"the call failed with {text(lib.ckd_status_name(status))}",
            tensor=text(err.tensor) if same else "", file=text(err.file) if same else "",
            offset=None if not same or offset == lib.CKD_NO_OFFSET or not text(err.file) else offset,
            sys_errno=int(err.sys_errno) if same else 0)


def _keep(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    """Keeps what a callback raised for check(). A signal may have raised it before the first line had run."""
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "pyckd_on_progress":
            ffi.from_handle(trace.tb_frame.f_locals["context"]).exception = exception
            return
        trace = trace.tb_next
    logger.error("a callback failed", exc_info=(kind, exception, trace))


@ffi.def_extern(error=1, onerror=_keep)  # type: ignore[untyped-decorator, unused-ignore]
def pyckd_on_progress(context: Any, done: int, total: int) -> int:
    # Also without a callback of the user's: here Python handles signals, so that Ctrl-C ends a long save.
    progress = ffi.from_handle(context).progress
    return 1 if progress is not None and progress(done, total) is False else 0


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def pyckd_on_message(context: Any, message: Any) -> None:
    _log(logging.WARNING, context, message)


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def pyckd_on_info(context: Any, message: Any) -> None:
    _log(logging.INFO, context, message)


def _log(level: int, context: Any, message: Any) -> None:
    try:
        ffi.from_handle(context).log(level, text(message))
    except BaseException as error:  # the library continues, and the interrupt is raised again when it has returned
        if isinstance(error, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            print(f"ckptdelta: a logging handler failed: {error!r}", file=sys.stderr)


def check_process(process: int) -> None:
    if process != os.getpid():
        raise StateError("this store was opened by another process: open it again after a fork")
