"""The checkpoints of one Trainer: found, loaded, saved in the background, and deleted when there are too many."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ._call import logger
from ._errors import Error, ExistsError, InvalidError, MismatchError, NotFoundError, StateError
from ._native import lib
from ._record import members
from ._session import Session
from ._store import Store, open as open_store
from ._types import Checkpoint

OWN = {"self", "store", "run", "model", "optimizer", "scheduler", "scaler", "loader", "more", "rng", "every", "every_s", "overhead",
       "metric", "restore_older", "group", "alone", "timeout"}
"""Arguments of Session that the Trainer decides."""
OPTIONS = set(inspect.signature(Session.__init__).parameters) - OWN
LOADED = ("model", "optimizer", "scheduler", "scaler")
NEWEST_KEPT = 2
_EVERY_STEP, _WHEN_ASKED = 1, 1 << 62


def find(store: Store, run: str, step: int | None = None) -> Checkpoint | None:
    """The checkpoint from which a session of the run would continue: the newest, or the one of a step; None: the run is new.

    Errors: NotFoundError (no such step), CorruptError, InputOutputError.
    """
    with Session(store, run, rng=False, alone=True) as session:
        try:
            return session._place(lib.CKD_LATEST if step is None else step)
        except NotFoundError as error:
            if error.file:
                raise
            there = steps_of(store, run)
            if step is None and not there:
                return None
            known = f"it has {', '.join(map(str, there[-8:]))}" if there else "it has no checkpoint"
            raise NotFoundError(f"run {run} has no checkpoint at step {step}: {known}") from None


def steps_of(store: Store, run: str) -> list[int]:
    """The steps of a run and of the branches that continue it, sorted."""
    return sorted({c.step for c in store.checkpoints() if c.run == run or c.run.startswith(f"{run}~")})


def refuse_to_start_over(store: Store, run: str, step: int, how: str) -> None:
    """Raises an error if a run has later steps, so that training fails at the start and not at its first save. how: the remedy."""
    newest = find(store, run)
    if newest is not None and newest.step > step:
        raise ExistsError(f"run {run} in the store {store.path} has checkpoints up to step {newest.step}, and training begins at step {step}: {how}")


def members_of(store: Store, found: Checkpoint) -> set[str]:
    """Names of the members of a checkpoint's state."""
    names: set[str] = set()
    store._restore(found.run, found.step, lambda root, restorer: names.update(str(key) for key, _ in members(root) or ()))
    return names


def member(store: Store, found: Checkpoint, name: str) -> Any:
    """One member as new values. Errors: NotFoundError."""
    return store.state_dict(run=found.run, step=found.step, only=name, tensors="torch")[name]


def load(store: Store, found: Checkpoint, parts: Mapping[str, Any], *, first: bool) -> None:
    """Loads model, optimizer, scheduler and scaler in place, as far as the checkpoint has them. Errors: those of Store.load().

    Args:
        first: this is the process that says what all would say.
    """
    there = members_of(store, found)
    wanted = {name: parts[name] for name in LOADED if parts.get(name) is not None}
    if "model" not in there:
        raise MismatchError(f"{found} has no member model, so no Trainer saved it: load it with Store.load()")
    missing = sorted(wanted.keys() - there)
    if missing and first:
        logger.warning("%s has no %s: training goes on with new ones", found, " and no ".join(missing))
    store.load({name: value for name, value in wanted.items() if name in there}, run=found.run, step=found.step)


class Saves:
    """Saves of one Trainer.

    Args:
        store: a store or its path.
        run: to save to.
        options: arguments of Session.
        read_only: for processes that only load.

    Errors: InvalidError, and those of open().
    """

    def __init__(self, store: Store | str | os.PathLike[str], run: str, options: Mapping[str, Any], *, read_only: bool = False) -> None:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise InvalidError(f"save_options has {', '.join(unknown)}: it may have {', '.join(sorted(OPTIONS))}", path="save_options")
        self._given, self.run, self.options, self._read_only = store, run, dict(options), read_only
        self._store: Store | None = None
        self._session: Session | None = None
        self._run = run  # or the branch on which training continues
        self._fence = False
        self._interrupted: int | None = None  # the phase that an evaluation interrupts
        self._best: int | None = None  # the best step that is durable
        self._last: Checkpoint | None = None  # the newest save of this training that is durable
        self._steps: set[int] = set()  # that this training has saved, or is saving

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = self._given if isinstance(self._given, Store) else open_store(self._given, readonly=self._read_only)
        return self._store

    @property
    def branch(self) -> str:
        """The run that has the saves of this training."""
        last = self.last
        return last.run if last is not None else self._run

    @property
    def last(self) -> Checkpoint | None:
        """The newest durable save of this training; None: there is none yet."""
        last = self._session.last if self._session is not None else None
        return last if last is not None else self._last

    def begin(self, parts: Mapping[str, Any], *, metric: str | None, each_step: bool, at: Checkpoint | None = None) -> None:
        """Makes the session.

        Args:
            parts: members of the state.
            each_step: saves are one step apart, so that steps can be predicted.
            at: the checkpoint that go_on() will be given.
        """
        self._run = at.run if at is not None and self._is_own(at) else self.run
        self._best, self._last, self._steps, self._interrupted = None, None, set(), None
        named: dict[str, Any] = {name: parts.get(name) for name in LOADED}
        self._session = Session(self.store, self._run, **named, more={k: v for k, v in parts.items() if k not in LOADED}, rng=False,
                                alone=True, every=_EVERY_STEP if each_step else _WHEN_ASKED, metric=metric, **self.options)

    @property
    def begun(self) -> bool:
        return self._session is not None

    def go_on(self, found: Checkpoint, read: Callable[[Checkpoint], None]) -> None:
        """Makes saves continue from a checkpoint, which `read` loads. A checkpoint of another run is only loaded, and the run begins with a base."""
        session = self._session
        if session is None:
            raise InvalidError("there is no session that could go on")

        def place(at: Checkpoint) -> Checkpoint:
            if at.id != found.id:
                raise ExistsError(f"{found} was to be resumed from, and there is another one now: more than one process trains the run {self.run}")
            read(at)
            return at

        if self._is_own(found):
            session._go_on(found.step, place)
        else:
            refuse_to_start_over(self.store, self.run, found.step, "save to a new run (run=...)")
            read(found)

    def _is_own(self, found: Checkpoint) -> bool:
        return found.run == self.run or found.run.startswith(f"{self.run}~")

    def save(self, step: int, metric: float | None, *, limit: int | None, best: str | None) -> None:
        """Saves the present state as a step in the background, once.

        Args:
            limit, best: as for rotate(). Checkpoints are deleted before the save begins. Later, a deletion would wait for the lock of
                the save, which itself waits for the next step of the optimizer.

        Errors: those of Session.step(), and the failure of an earlier save.
        """
        session = self._session
        if session is None:
            raise InvalidError("there is no session that could save")
        session.wait()  # as the next save would
        self.rotate(limit, best)
        if session.at < step:
            session.step(step, metric=metric)
        self._steps.add(step)
        session.save(metric=metric)
        if self._fence:
            self.fence()

    def trained(self, step: int) -> None:
        """Tells `ckptdelta run` that the step is made."""
        if self._session is not None:
            self._session._progress.step(step)

    def evaluating(self, now: bool) -> None:
        """Tells `ckptdelta run` whether the Trainer evaluates. It may be called again and again."""
        if self._session is None or now == (self._interrupted is not None):
            return
        progress = self._session._progress
        if self._interrupted is None:
            self._interrupted = progress.enter(lib.CKD_PROGRESS_EVALUATION)
        else:
            progress.enter(self._interrupted)
            self._interrupted = None

    def fence_at_once(self) -> None:
        """From now on save() returns when everything is copied, because not only optimizer steps change parameters."""
        self._fence = True

    def fence(self) -> None:
        """Returns when the save under way has copied everything, so that parameters may change."""
        if self._session is not None:
            self._session.fence()

    def wait(self) -> None:
        if self._session is not None:
            self._session.wait()

    def end(self, *, quietly: bool = False) -> None:
        """Waits for the saves under way. quietly: their failure is only logged, because another exception is being raised."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except Error as error:
            if not quietly:
                raise
            logger.error("%s: %s", self.store.path, error)
        finally:
            if session.last is not None:
                self._run, self._last = session.last.run, session.last

    def named(self, step: int) -> str | None:
        """RUN@STEP of a save of this training; None: it has not saved the step. The run may turn out to be a branch: see placed()."""
        return f"{self.branch}@{step}" if step in self._steps else None

    def placed(self, name: str | None) -> tuple[str, int] | None:
        """(run, step) of a checkpoint that was named; None if it is no such name."""
        found = re.fullmatch(r"([^/@]+)@(\d+)", name or "")
        if found is None:
            return None
        step = int(found[2])
        return (self.branch if step in self._steps else found[1]), step

    def best(self, name: str) -> Checkpoint:
        """The best checkpoint, when it is durable. Errors: NotFoundError; the failure of a save."""
        self.wait()
        at = self.placed(name)
        if at is None:
            raise NotFoundError(f"{name} is not a checkpoint of a store")
        return self.store.find(run=at[0], step=at[1])

    def has(self, step: int) -> bool:
        return step in steps_of(self.store, self.run)

    def rotate(self, limit: int | None, best: str | None) -> None:
        """Deletes the oldest checkpoints until `limit` are left, as a Trainer does with folders: never the best one.

        The newest two stay in any case: the one under way is a delta on the newest, and each is a spare for the other. Nothing goes
        before this training has a durable save: until then it may need the checkpoint that it resumed from, which may be an old one.
        Suspect ones do not count, as for policies: only the newest of all stays if it is suspect.

        Args:
            best: RUN@STEP of the best checkpoint.
        """
        last = self.last
        if limit is None or limit <= 0 or last is None:
            return
        run, at = last.run, self.placed(best)
        found = self.store.checkpoints(run)
        steps, healthy = [c.step for c in found], [c.step for c in found if not c.suspect]
        if at is not None and at[0] == run and at[1] in steps:
            self._best = at[1]
        protected = {*steps[-1:], *healthy[-NEWEST_KEPT:], *({self._best} & set(steps))}
        left, keep = len(healthy), max(limit, len(protected & set(healthy)))
        for c in found:
            if c.step not in protected and (c.suspect or left > keep) and self._delete(run, c.step):
                left -= not c.suspect

    def _delete(self, run: str, step: int) -> bool:
        """Was it deleted? A failure does not end the training: the next save tries again."""
        try:
            self.store.delete(run=run, step=step, undo_s=0)
        except StateError as error:
            logger.debug("%s@%d is kept: %s", run, step, error)  # pinned or tagged
        except Error as error:
            logger.warning("%s@%d is not deleted: %s", run, step, error)
        else:
            return True
        return False
