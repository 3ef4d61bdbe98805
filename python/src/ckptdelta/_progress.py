"""How far training is, for `ckptdelta run`, and a stack trace when it asks for one."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from ._errors import InvalidError
from ._native import lib

if TYPE_CHECKING:
    from ._ranks import Ranks


class Progress:
    """The slot of this process in the supervisor's memory. Without a supervisor of this run it does nothing."""

    def __init__(self, run: str, ranks: Ranks | None) -> None:
        rank = lib.CKD_PROGRESS_NO_RANK if ranks is None else ranks.rank
        self._reports = bool(lib.ckd_progress_begin(run.encode("utf-8", "replace"), rank))
        if self._reports:
            _write_trace_on_sigquit()

    def step(self, step: int) -> None:
        if self._reports:
            lib.ckd_progress_step(step)

    def enter(self, phase: int) -> int:
        """Returns the phase that this one interrupts."""
        return int(lib.ckd_progress_enter(phase)) if self._reports else phase

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


class Reporter:
    """A session that tells what the trainer does."""

    _progress: Progress

    @contextmanager
    def phase(self, name: Literal["evaluation", "saving"]) -> Iterator[None]:
        """Below ``ckptdelta run``: the block takes longer than a step, and is no hang::

            with session.phase("evaluation"):
                evaluate(model)

        Args:
            name: "evaluation"; or "saving", for what the trainer itself writes. Saves of the session are known as such.
        """
        phases = {"evaluation": lib.CKD_PROGRESS_EVALUATION, "saving": lib.CKD_PROGRESS_SAVING}
        if name not in phases:
            raise InvalidError(f"the phase is {name!r}, but must be 'evaluation' or 'saving'")
        with self._progress.phase(phases[name]):
            yield


def _write_trace_on_sigquit() -> None:
    """The supervisor sends SIGQUIT to a process that hangs, if it handles the signal. A handler of the program stays.

    That the signal is ignored is no choice of the program: nohup and shells without job control start what runs in the background so.
    """
    if signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN) or _is_caught(signal.SIGQUIT) or sys.__stderr__ is None:
        return
    try:
        faulthandler.register(signal.SIGQUIT, file=sys.__stderr__, all_threads=True)
    except (OSError, RuntimeError, ValueError):
        pass  # standard error is closed


def _is_caught(number: int) -> bool:
    """Also by C code, such as faulthandler's, which the module signal does not know."""
    try:
        with open("/proc/self/status") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")]
    except OSError:
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)
