"""What a session looks at before its first save: the run may exist already, or its name may be mistyped. And its end, if nobody closes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._call import Call, logger
from ._catalog import checkpoint_from
from ._errors import Error, ExistsError, NotFoundError, nearest
from ._native import ffi, lib
from ._ranks import Ranks
from ._save import Options
from ._types import Checkpoint

if TYPE_CHECKING:
    from ._store import Store

LEAVE_S = 10.0
"""How long a rank that fails waits for the others to complete a save."""

_SHOWN = 5
_left: list[Any] = []  # sessions whose saves other ranks have not completed, and the memory that they read


def _is_supervised(store: Store) -> bool:
    """Does `ckptdelta run` restart this process from checkpoints of the store?"""
    where = os.environ.get("CKPTDELTA_STORE", "")
    return bool(os.environ.get("CKPTDELTA_RUN")) and bool(where) and os.path.realpath(where) == os.path.realpath(store.path)


def _warn_of_other_run(store: Store, run: str) -> None:
    """Saves to another run are no progress for `ckptdelta run`. Branches of its run (RUN~2) are."""
    watched = os.environ.get("CKPTDELTA_RUN", "")
    same = run.split("~")[0] == watched.split("~")[0]
    if same and not _is_supervised(store):
        logger.warning("this session saves to the store %s, but `ckptdelta run` was started for the run %s in %s: it neither counts these "
                       "saves as progress nor restarts from them", store.path, watched, os.environ.get("CKPTDELTA_STORE") or "no store")
    elif not same and _is_supervised(store):
        logger.warning("this session saves to the run %s, but `ckptdelta run` was started for the run %s: it neither counts these saves as "
                       "progress nor restarts from them", run, watched)


def told_checkpoint(store: Store, run: str) -> tuple[int, str] | None:
    """(step, "RUN@STEP") of the checkpoint that `ckptdelta run` has chosen for this attempt; None: it has not, or for another run.

    The second is "" if only the step is known.
    """
    step = os.environ.get("CKPTDELTA_STEP", "")
    if os.environ.get("CKPTDELTA_RUN") != run or not _is_supervised(store):
        return None
    return (int(step), os.environ.get("CKPTDELTA_CHECKPOINT", "")) if step.isdecimal() and step.isascii() else None


def restore_told(place: Callable[[int], Checkpoint], step: int, name: str) -> Checkpoint:
    """Makes a session continue from the named checkpoint. `place` knows steps only: the run may have one, and a branch another."""
    for where in (step, lib.CKD_LATEST, step):
        try:
            found = place(where)
        except Error:
            if where == step:
                raise
            continue  # the newest may be damaged, and that is why this one was chosen
        if not name or f"{found.run}@{found.step}" == name:
            return found
    raise NotFoundError(f"{name}, which CKPTDELTA_CHECKPOINT names, cannot be restored: {found.run}@{found.step} has the same step")


def older_than(store: Store, than: Checkpoint) -> Checkpoint | None:
    call, info = Call(), ffi.new("ckd_checkpoint *")
    try:
        with store._turn():
            call.check(lib.ckd_store_previous(info, store._handle, than.run.encode(), than.step, call.err))
    except NotFoundError:
        return None
    return checkpoint_from(info)


class Start:
    """Where a session begins.

    Attributes:
        restored: the step that was restored last; -1: none.

    Args:
        parent: (run, step) of the checkpoint that the first save is a delta on, unless one is restored.

    Errors: NotFoundError (the parent), on all ranks.
    """

    def __init__(self, store: Store, run: str, ranks: Ranks | None, *, refuses: bool, parent: tuple[str, int] | None = None) -> None:
        self.restored = -1
        self._store, self._run, self._ranks, self._parent = store, run, ranks, parent
        self._looked = False
        _warn_of_other_run(store, run)
        if parent is not None:
            self._check_parent(*parent)
        # steps up to this one are another training's; -1: none are
        self._newest = _newest_step(store, run) if refuses else -1

    def _check_parent(self, run: str, step: int) -> None:
        """The first save would learn it, long after. If the run has checkpoints, the parent is not needed, and may be deleted."""
        failure: Exception | None = None
        try:
            if _newest_step(self._store, self._run) < 0:
                self._store.find(run=run, step=step)
        except Error as error:
            failure = error
        if self._ranks is not None:
            self._ranks.check(failure)
        elif failure is not None:
            raise failure

    def options(self, chosen: Options, *, saves: int) -> Options:
        """Those of a session of the library, which this one has had `saves` checkpoints from. Without any, training comes from the parent."""
        return replace(chosen, parent=self._parent, resumed_from=self._parent) if self.restored < 0 and saves == 0 else chosen

    def told(self) -> tuple[int, str] | None:
        """As told_checkpoint, of the run with which the session was opened."""
        return told_checkpoint(self._store, self._run)

    def found(self, at: Checkpoint | None) -> None:
        """Notes the checkpoint that was restored. None: the newest was asked for, and the run has none."""
        self._newest = -1
        if at is not None:
            self.restored = at.step
        elif self._ranks is None or self._ranks.rank == 0:
            _tell_new_run(self._store, self._run)

    def check(self, step: int) -> None:
        """A training that starts over in its run would learn it at its first save. Only the first check asks the other ranks.

        Errors: ExistsError, on all ranks.
        """
        failure = None if self._newest < step else ExistsError(
            f"run '{self._run}' already has checkpoints up to step {self._newest}, and this session did not resume from them: call "
            "session.restore(), choose another run, or pass on_duplicate=\"branch\"")
        if self._ranks is not None and not self._looked:
            self._ranks.check(failure)
        elif failure is not None:
            raise failure
        self._looked = True


def _newest_step(store: Store, run: str) -> int:
    """-1: the run is new, or it cannot be told now. Then the first save tells why."""
    try:
        return store.find(run=run).step
    except Error:
        return -1


def _tell_new_run(store: Store, run: str) -> None:
    """A mistyped name would start from nothing, and nobody would notice."""
    try:
        others = [other for other in store.runs() if other != run]
    except Error:  # it is closed, for example
        return
    if others:
        near = nearest(run, others)
        shown = [*near, *(other for other in others if other not in near)]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        logger.warning("%s: run '%s' is new; the store has: %s%s", store.path, run, ", ".join(shown[:_SHOWN]), more)


def _is_done(session: Any) -> bool:
    """Waits a short time for the save under way. At the exit of a process no thread can be started that would wait longer."""
    found, end = ffi.new("ckd_session_state *"), time.monotonic() + LEAVE_S
    lib.ckd_session_fence(session)
    while True:
        lib.ckd_session_poll(found, session)
        if not found.under_way or time.monotonic() >= end:
            return not found.under_way
        time.sleep(0.01)


def close_left(owner: Any, keep: list[Any], path: Any, ranked: int) -> None:
    """For a session that nobody has closed, when it is collected or the process exits.

    Args:
        keep: memory that it reads.
        ranked: the process that made it as one of several ranks; 0: it is alone.
    """
    if owner.session and ranked == os.getpid() and not _is_done(owner.session):
        _left.append((owner, keep))
        logger.warning("%s: the save under way is left behind, as other ranks wait for this one", path)
        return
    call = Call()
    status = lib.pyckd_session_close(owner, call.err)
    if status != 0:
        logger.error("%s: %s", path, call.error(status))
