"""Exceptions: one class for each status of the C library."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


class Error(Exception):
    """A failure that the library or this package reports.

    Attributes:
        status: name of the C status, such as ``"CORRUPT"``.
        message: one sentence: the problem, its cause, and what to do.
        path: where in the state that was passed in, such as ``"optimizer.state.0"``; ``""`` if it concerns no part of it.
        tensor: name of the stored tensor; ``""`` if none.
        file: file of the store; ``""`` if none.
        offset: byte offset in ``file``; ``None`` if none.
        sys_errno: ``errno`` of the system call that failed; 0 if none.
    """

    status = "INVALID"

    def __init__(self, message: str, *, path: str = "", tensor: str = "", file: str = "", offset: int | None = None,
                 sys_errno: int = 0) -> None:
        self.message, self.path, self.tensor = message, path, tensor
        self.file, self.offset, self.sys_errno = file, offset, sys_errno
        super().__init__(message)

    def __str__(self) -> str:
        where = [text for text in (f"tensor {self.tensor}" if self.tensor and self.tensor not in self.message else "",
                                   self.file if self.file and self.file not in self.message else "",
                                   f"byte {self.offset}" if self.offset is not None else "") if text]
        return self.message + (f" ({', '.join(where)})" if where else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), dict(vars(self)))


def _again(kind: type[Error], fields: dict[str, Any]) -> Error:
    error = kind(fields["message"])
    vars(error).update(fields)
    return error


class InvalidError(Error, ValueError):
    """An argument or a state makes no sense, or cannot be stored."""

    status = "INVALID"


class NoMemoryError(Error, MemoryError):
    """Out of memory."""

    status = "NOMEM"


class InputOutputError(Error):
    """The operating system refused; ``sys_errno`` says why."""

    status = "IO"


class NoSpaceError(InputOutputError):
    """The disk or a quota is full. Nothing was committed."""

    status = "NOSPACE"


class NotFoundError(Error, LookupError):
    """No such store, run, step or tensor."""

    status = "NOT_FOUND"


class ExistsError(Error):
    """The run has this step already."""

    status = "EXISTS"


class CorruptError(Error):
    """Stored bytes are damaged or missing."""

    status = "CORRUPT"


class UnsupportedError(Error):
    """Written by a newer version, or needs a feature that this build lacks."""

    status = "UNSUPPORTED"


class BusyError(Error):
    """Another process held the store's lock for longer than ``lock_timeout``."""

    status = "BUSY"


class ReadOnlyError(Error):
    """The store was opened for reading, or lies on a read-only file system."""

    status = "READ_ONLY"


class StateError(Error, RuntimeError):
    """The call does not fit the state of the object: it is closed, in use, or belongs to another process."""

    status = "STATE"


class MismatchError(Error, ValueError):
    """Names, dtypes or shapes differ from what was asked for."""

    status = "MISMATCH"


class CancelledError(Error):
    """A progress callback cancelled the call."""

    status = "CANCELLED"


class DeviceError(Error):
    """A GPU is missing or refused a call."""

    status = "DEVICE"


_CLASSES: dict[str, type[Error]] = {
    c.status: c for c in (InvalidError, NoMemoryError, InputOutputError, NoSpaceError, NotFoundError, ExistsError, CorruptError,
                          UnsupportedError, BusyError, ReadOnlyError, StateError, MismatchError, CancelledError, DeviceError)}


def class_of(status: str) -> type[Error]:
    """Returns the class for a C status; Error itself for one that this version does not know."""
    return _CLASSES.get(status, Error)


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """At most two of the names that may have been meant, the nearest first."""
    longer = [other for other in names if name and other.startswith(name)]
    return list(dict.fromkeys([*difflib.get_close_matches(name, names, n=2), *longer]))[:2]


def is_damage(error: Error) -> bool:
    """As ckd_error_is_damage."""
    return isinstance(error, CorruptError) or (bool(error.file) and isinstance(error, (NotFoundError, InputOutputError))
                                               and not isinstance(error, NoSpaceError))
