"""One call at a time of an object that threads share."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from ._call import check_process
from ._errors import StateError


class Turns:
    """Threads wait for each other. A call from within another one, as a callback makes it, would wait for itself and is refused.

    An interrupt must not leave the lock held. CPython handles signals when a call has returned and when a loop jumps back, so also inside
    of a context manager that is written in Python, after it has taken its lock. ``with`` on the lock itself takes and releases it in C,
    and handles none in between (3.14 may; python/cpython#148874). So next() returns the lock, for ``with turns.next(...):``.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._owned = threading.Condition(self._lock)

    def next(self, refusal: str) -> AbstractContextManager[bool]:
        """Errors: StateError: `refusal`, if this thread is in a call already; or the process is a forked child, where another thread of
        the parent may hold the lock for ever."""
        check_process(self._process)
        try:
            self._owned.notify()  # nobody waits; only the thread that holds the lock may call it
        except RuntimeError:
            return self._lock
        raise StateError(refusal)
