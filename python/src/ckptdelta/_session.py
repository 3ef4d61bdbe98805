"""Background saves: the library's session for a model, its optimizers and everything else that a resume needs."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, cast

from ._arguments import check_numbers, record_metric, state_of, whole_number
from ._call import Call, Notices, logger, path_bytes
from ._catalog import Where, checkpoint_from, run_and_step, step_number
from ._device import Device, wait_for
from ._errors import Error, InvalidError, NotFoundError, ReadOnlyError, StateError, is_damage
from ._interval import Costs, Interval
from ._names import is_optimizer
from ._native import ffi, lib
from ._progress import Progress, Reporter
from ._ranks import check_schedule, ranks_of
from ._record import members
from ._registered import GROUP_AT_ONCE, Registered, Snapshot, calls_hooks, is_capturable, objects_in, take_apart
from ._replicas import Replicas
from ._restore import Restorer
from ._save import Options, options_of
from ._session_start import LEAVE_S, Start, close_left, older_than, restore_told
from ._store import Store, store_options
from ._types import Checkpoint, Fidelity, Role
from ._updates import Updates
from ._writes import Writes

_NEVER = 1 << 62  # the session is asked to save; it does not decide itself
_MAX_STEP = (1 << 63) - 1


class Session(Reporter):
    """Saves in the background while training continues, and restores everything that a resume needs.

    ::

        with ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every=100) as session:
            for step in range(session.restore() + 1, steps + 1):
                ...
                optimizer.step()
                scheduler.step()
                session.step()
            session.save()

    step() returns when everything is copied except parameters and states of optimizers. These are copied while the next forward and
    backward pass runs; a hook makes the next optimizer.step() wait for that. Threads of low priority encode and write. One save is
    under way at a time: the next one waits until it is durable. A kill therefore loses `every` steps and those that were made while
    the last save was written, fewer than twice `every` in all. With max_lag=K it loses at most `every` + K steps.

    Parameters, buffers and states of optimizers on a GPU are copied by the GPU, in the order of the current stream. No call waits for
    that: later work on the stream does, for buffers and for optimizers with capturable=True from step() on, for the rest from the next
    optimizer.step() on.

    Calls may come from one thread at a time, in the process that made the session. Parameters of an optimizer whose step() does not
    call torch's hooks are copied before step() returns. Other code that writes to parameters between step() and the next step of their
    optimizer must call fence() first. If the session notices that it has not, it deletes the checkpoint, and the save fails.

    With torch.distributed, all ranks of a group make the session together, and all call step(), save(), restore() and close() in the
    same order. Each rank saves its parts of distributed tensors (FSDP, DTensor). Replicated parameters (DDP) are saved once. `loader`
    and `rng` are each rank's own. Everything else is rank 0's. Any number of ranks may restore: each reads the parts that it needs. A
    rank that the checkpoint does not have takes rank 0's `loader` and leaves its random states as they are. Only `every` decides when
    to save. If a rank dies, saves fail on all others; durable checkpoints stay.

    Args:
        store: an open store, not a read-only one. The session opens it once more for itself.
        run: as for Store.save().
        model, optimizer, scheduler, scaler, loader: to be saved; each a single object, or a dict or list of them, or None. All but the
            model need state_dict() and load_state_dict().
        more: other members of the state. Dicts, lists, deques, sets and bytearrays in it, such as ``{"progress": {"epoch": 0}}``, are
            restored in place. A bare number is saved but not restored, because nothing refers to it.
        rng: save and restore the generators of random, numpy, torch and CUDA.
        every: steps; save at multiples of it.
        every_s: seconds between the beginnings of saves.
        overhead: save as often as possible while saves cost at most this share of training time. 0.035 if none of the three is given.
        max_lag: steps by which training may be ahead of a save that is not durable yet; after these step() waits. 0: step() returns
            when its save is durable. None: only the next save waits.
        fidelity, role_fidelity, effort, target_ratio, max_error, max_load_cost, on_duplicate: as for Store.save(). A run that is
            continued from an older checkpoint becomes the branch ``RUN~2``.
        parent: the checkpoint that training starts from, if the run has none to restore: of another run, for example. The first save is a
            delta on it. Each later one is a delta on the one before, whose values the session has, so step() and save() take no parent.
        metric: name of the value that step() and save() accept.
        snapshot_bytes: host memory for copies; 0: as much as the state. With room for two copies (exact saves of a state in host memory),
            a save need not read its parent from the store.
        device_bytes: memory of each GPU for copies of its tensors; 0: as much as they take. The GPU then copies faster, and encodes lossy saves.
            What does not fit, and all of it with None, is copied to pinned host memory, which counts as `snapshot_bytes`.
        device_reference_bytes: memory of each GPU for weights as a load would return them: with `device_bytes`, lossy saves then need
            not read them from the store. 0: none.
        restore_older: restore() takes the newest checkpoint that is not damaged. Not with several ranks, which might choose differently.
        group: the process group whose ranks save together; None: the default group, if torch.distributed is initialised.
        alone: this process saves by itself, even if torch.distributed is initialised.
        timeout: seconds to wait for a rank that is late.

    Errors: InvalidError, ReadOnlyError, and those of open().
    """

    def __init__(self, store: Store, run: str, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None,
                 loader: Any = None, more: Mapping[str, Any] | None = None, rng: bool = True, every: int | None = None,
                 every_s: float | None = None, overhead: float | None = None, max_lag: int | None = None, fidelity: Fidelity = "exact",
                 role_fidelity: Mapping[Role, Fidelity] | None = None, effort: int = 0, target_ratio: float = 0.0, max_error: float = 0.0,
                 max_load_cost: float = 0.0, parent: Where | None = None, on_duplicate: Literal["error", "same", "branch"] = "error",
                 metric: str | None = None, snapshot_bytes: int = 0, device_bytes: int | None = None, device_reference_bytes: int = 0,
                 restore_older: bool = False, group: Any = None, alone: bool = False, timeout: float = 600.0) -> None:
        check_numbers(every=every, every_s=every_s, overhead=overhead, max_lag=max_lag)
        readonly, threads, lock_timeout = store._options
        if readonly:
            raise ReadOnlyError(f"the store {store.path} was opened for reading: a session needs to write")
        if not 0 < timeout < 4e6:
            raise InvalidError(f"timeout is {timeout!r}, but must be a number of seconds up to 4,000,000")
        self._ranks, self._timeout = ranks_of(group, alone), timeout
        self._is_first = self._ranks is None or self._ranks.rank == 0  # it says what all ranks would say alike
        if self._ranks is not None:
            check_schedule(every, every_s, overhead, restore_older)
        self._store, self._restore_older, self._max_lag = store, restore_older, max_lag
        # To the library 0 bytes of a device are as much as a snapshot takes. No tensor fits into one byte.
        self._memory = {"snapshot_bytes": snapshot_bytes, "device_bytes": 1 if device_bytes is None else device_bytes,
                        "device_reference_bytes": device_reference_bytes}
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
        self._state = state_of({k: v for k, v in given.items() if v is not None}, more or {}, rng)
        self._save_options = Options(
            run=run, step=0, fidelity=fidelity, role_fidelity=role_fidelity or {}, base=False, parent=None, resumed_from=None,
            on_duplicate=on_duplicate, metric=(metric, float("nan")) if metric is not None else None, codec="auto", level=0, effort=effort,
            target_ratio=target_ratio, max_error=max_error, max_load_cost=max_load_cost, staging_bytes=0)
        self._interval = Interval(every, every_s, overhead)
        self._process, self._lock, self._closed = os.getpid(), threading.RLock(), False
        label = ffi.new_handle(Notices(store.path, first=self._is_first, heard=store._notices.said))
        self._store_options = store_options(threads, lock_timeout, label)
        self._reported = -1  # the last step that the trainer reported or restored
        self._staged = -1    # the last one that was copied since the last restore
        self._told = -1      # the last one that the library's session knows: it takes no step twice
        self._start = Start(store, run, self._ranks, refuses=on_duplicate == "error", parent=run_and_step(parent))
        self._run, self._resumed = run, cast("tuple[str, int] | None", None)  # where the next save belongs, until there is one
        self._base = self._logged = 0  # saves that were durable at the last restore, and when the last one was logged
        self._failed = 0  # saves of the library's session whose failure was taken
        self._failure: Error | None = None
        self._past = Costs(0, 0, 0, 0, 0, 0)  # of the library's sessions that were closed
        self._registered: Registered | None = None
        self._copying: set[Device] = set()  # whose streams wait for copies from the fence on
        self._replicas = None if self._ranks is None else Replicas(self._ranks)
        self._moves: dict[str, int] = {}  # how often a tensor was found at another address
        self._keep: list[Any] = [label, self._store_options]  # memory that the library reads until its session is closed
        self._owner = ffi.new("pyckd_session *")
        # A finalizer of the module weakref keeps all this alive itself, also when a session and its optimizers are one garbage cycle.
        self._finalizer = weakref.finalize(self, close_left, self._owner, self._keep, store.path, self._process if self._ranks is not None else 0)
        self._writes = Writes()
        self._updates: Updates | None = None
        self._hooks: list[Any] = []
        self._fenced = [o for o in objects_in(self._state) if is_optimizer(o) and calls_hooks(o)]
        self._open()
        self._progress = Progress(run, self._ranks)
        try:
            if every == 1 and fidelity == "exact" and self._fenced:
                self._updates = Updates(*self._fenced)
            for one in self._fenced:
                self._hooks.append(one.register_step_pre_hook(lambda *_: self.fence()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:
            if self._ranks is not None and self._process == os.getpid():
                self._leave_behind()
            else:
                self.close()
        except Error as failure:
            logger.error("%s: %s", self._store.path, failure)  # the exception that ends the block goes first

    def __repr__(self) -> str:
        return f"<ckptdelta.Session {self._run!r} in {self._store.path!r}, step {self.at}>"

    @property
    def at(self) -> int:
        """The last step that was reported or restored; 0: none."""
        return max(self._reported, 0)

    @property
    def last(self) -> Checkpoint | None:
        """The newest checkpoint that this session has made durable; None: none yet."""
        self._check_process()
        info = ffi.new("ckd_checkpoint *")
        return checkpoint_from(info) if lib.pyckd_session_last(info, self._owner) else None

    def restore(self, step: int | None = None) -> int:
        """Loads a checkpoint of the run, or of a branch that continued it, into all objects in place.

        Args:
            step: None: the newest. Below ``ckptdelta run`` the first restore of a session takes the checkpoint that it has chosen, which is
                an older one if the newest is damaged, or if training failed from it again and again.

        Returns: its step; 0 if step is None and the run has no checkpoint. Later saves are deltas on it.

        Errors: NotFoundError (no such step), and those of Store.load(). After an error, later saves continue as if it had not been called.
        If the store is damaged, some objects may have the checkpoint's values and others not: restore another checkpoint.
        """
        return self._go_on(step, self._load_together)

    def _go_on(self, step: int | None, load: Callable[[Checkpoint], Checkpoint]) -> int:
        """restore() with a function that loads the checkpoint or an older one, and returns the one that it loaded."""
        self._check_process()
        with self._lock:
            self._check_open()
            fresh = self._registered is None if self._ranks is None else self._ranks.all(self._is_fresh())
            if not fresh:
                self._end()  # the library would load into the memory that is registered
            self._ensure_open()
            told = self._start.told() if step is None and self._reported < 0 else None
            at = self._find_place(lib.CKD_LATEST if step is None else step_number(step), told)
            if at is None:
                self._start.found(None)
                return 0
            try:
                found = load(at)
            except BaseException:
                self._end()  # the library's session would continue from a checkpoint that was not loaded
                raise
            self._reported, self._staged, self._run, self._resumed = found.step, -1, found.run, (found.run, found.step)
            self._base = self._saved()[0]
            if self._ranks is not None:
                self._replicas = Replicas(self._ranks)  # of all values, as they were restored
            self._start.found(found)
            if self._updates is not None:
                self._updates.saved()
            return found.step

    def step(self, step: int | None = None, *, metric: float | None = None) -> bool:
        """Call it once after each optimizer step, when the state is ready for the next step. Saves if a save is due.

        Args:
            step: the number of the step; None: one more than the last one.
            metric: value that the checkpoint records, if the session was given a metric's name. With one for each step, a value that
                is unlike those before raises an alarm: a message, and below ``ckptdelta run`` what ``--on-anomaly`` says.

        Returns: whether a save began.

        Errors: InvalidError (a step that is not after the last one; a value that cannot be stored); ExistsError (the run has later
        steps, and restore() was not called); and the failure of an earlier save. In that last case this call has done its own work, and
        training can continue.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            self._check_metric(metric)
            number = self.at + 1 if step is None else step_number(step)
            if not self._reported < number <= _MAX_STEP:
                raise InvalidError(f"step {number} is not after step {self._reported}, the last one" if number <= self._reported else
                                   f"step {number} is too large: steps go up to 2**63 - 1")
            self._start.check(number)
            self._reported = number
            self._progress.step(number)
            if metric is not None and self._registered is not None:  # before the first save there is nothing to compare with
                lib.ckd_session_observe(self._owner.session, number, float(metric))
            costs = self._costs()
            due = self._interval.due(number, costs)
            if due:
                self._begin(costs, metric)
            elif self._interval.overhead is not None and self._registered is not None:
                self._told = number
                self._check_status(partial(lib.ckd_session_step, self._owner.session, number))
            self._follow()
            return due

    def save(self, *, metric: float | None = None) -> bool:
        """Saves the last reported step, for example at the end of training, unless it is saved, restored, or its save is under way.

        Returns: whether a save began. Errors: as for step().
        """
        self._check_process()
        with self._lock:
            self._check_open()
            self._check_metric(metric)
            self._reported = self.at
            due = not (self._has_saved() if self._ranks is None else self._ranks.all(self._has_saved()))
            if due:
                self._begin(self._costs(), metric)
            self._follow()
            return due

    def fence(self) -> None:
        """Waits until parameters and states of optimizers are copied and may change. The hook of optimizer.step() calls it.

        On a GPU the current stream waits, not this call.
        """
        if self._process == os.getpid():
            with self._lock:
                self._fence()

    def wait(self) -> None:
        """Returns when every save is durable. Errors: the failure of a save."""
        self._check_process()
        with self._lock:
            self._check_open()
            self._wait()

    def close(self) -> None:
        """Waits until every save is durable, and ends the session. More calls do nothing. Errors: the failure of a save."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._detach()
            self._end()
            self._closed = True
            self._finalizer.detach()
            self._raise_failure()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._updates is not None:
            self._updates.close()

    def _leave_behind(self) -> None:
        """A rank has to wait for the others when it leaves. But they may be waiting for this one, which failed, and then cannot complete
        their saves. So a thread waits for them, and this call waits only a short time."""
        with self._lock:
            if self._closed:
                return
            self._detach()
            self._closed = True
            self._fence()
        thread = threading.Thread(target=self._end, name="ckptdelta-leave", daemon=True)
        thread.start()
        thread.join(LEAVE_S)
        if thread.is_alive():
            logger.warning("%s: the save under way is left behind, as other ranks wait for this one", self._store.path)
        self._raise_failure()

    # ------------------------------------------------------------------------------------------------------ the library

    def _fence(self) -> None:
        if self._writes.end():
            self._staged = -1
            lib.ckd_session_discard(self._owner.session)
        lib.ckd_session_fence(self._owner.session)
        for device in self._copying:  # a training may step on another stream than the one of its last snapshot
            wait_for(device)
        if self._replicas is not None:
            self._replicas.fence()

    def _check_process(self) -> None:
        """Must run before any lock is taken: another thread may have held the lock at the fork."""
        if self._process != os.getpid():
            raise StateError("a session belongs to the process that made it: make another one in a forked child")

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the session is closed")

    def _check_metric(self, metric: float | None) -> None:
        if metric is not None and self._save_options.metric is None:
            raise InvalidError("the metric has no name: give the session one, such as metric='loss'")

    def _open(self) -> None:
        prepared = options_of(self._start.options(self._save_options, saves=self._saved()[0]))
        options = ffi.new("ckd_session_options *")
        options.struct_size = ffi.sizeof("ckd_session_options")
        run = ffi.new("char[]", self._run.encode("utf-8", "replace"))
        prepared.options.run = run
        options.save, options.store, options.every_steps = prepared.options, self._store_options, _NEVER
        options.snapshot = lib.CKD_SNAPSHOT_LAZY
        for name, value in self._memory.items():
            setattr(options, name, whole_number(name, value))
        options.restore_older = self._restore_older
        ranks = self._ranks.native(self._timeout) if self._ranks is not None else None
        if ranks is not None:
            options.ranks = ranks[0]
            self._keep.append(ranks)
        self._prepared = prepared
        call = Call()
        call.check(lib.pyckd_session_open(self._owner, path_bytes(self._store.path), options, call.err))

    def _ensure_open(self) -> None:
        """A session of the library registers its memory once. The next session continues where the last one ended."""
        if self._owner.session:
            return
        saved, last = self._saved()
        if saved > self._base:
            self._run, self._resumed = last.run, None
        self._open()
        if self._resumed is not None:
            try:
                self._place(self._resumed[1])
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        """Closes the library's session when its saves are durable. Their failure is kept."""
        self._fence()
        if not self._owner.session:
            return
        self._past = self._costs()
        self._check_status(partial(lib.pyckd_session_close, self._owner))
        self._log()
        self._registered, self._failed, self._told, self._copying = None, 0, -1, set()
        del self._keep[2:]

    def _place(self, step: int) -> Checkpoint:
        """Makes the library's session, which must have nothing registered, continue from a checkpoint."""
        call, info = Call(), ffi.new("ckd_checkpoint *")
        call.check(lib.ckd_session_restore(info, self._owner.session, step, call.err))
        return checkpoint_from(info)

    def _is_fresh(self) -> bool:
        return bool(self._owner.session) and self._registered is None

    def _find_place(self, step: int, told: tuple[int, str] | None = None) -> Checkpoint | None:
        """The checkpoint to restore, from which the library's session continues; None: the newest was asked for, and the run has none."""
        found: Checkpoint | None = None
        failure: Error | None = None
        try:
            found = self._place(step) if told is None else restore_told(self._place, *told)
        except Error as error:
            # If a file is missing, the run is not new.
            failure = None if isinstance(error, NotFoundError) and step == lib.CKD_LATEST and told is None and not error.file else error
        if self._ranks is not None:
            try:
                return self._ranks.place(found, failure)
            except BaseException:
                self._end()  # it may stand at a checkpoint at which the others do not
                raise
        if failure is not None:
            raise failure
        return found

    def _load_together(self, found: Checkpoint) -> Checkpoint:
        if self._ranks is None:
            return self._load(found)
        failure: Exception | None = None
        try:
            self._load(found)
        except Exception as error:  # whatever an object's load_state_dict() raises: the others wait for this rank
            failure = error
        self._ranks.check(failure)
        return found

    def _load(self, found: Checkpoint) -> Checkpoint:
        rank = self._ranks.rank if self._ranks is not None else 0
        while True:
            try:
                return self._store._restore(found.run, found.step, self._place_all, rank=rank)
            except Error as error:
                older = older_than(self._store, found) if self._restore_older and is_damage(error) else None
                if older is None:
                    raise
                logger.warning("%s is damaged (%s): %s is restored instead", found, error, older)
                found = self._place(older.step)

    def _place_all(self, root: Any, restorer: Restorer) -> None:
        state = dict(self._state)  # it gets what replaces a member: nobody else would have it
        if self._ranks is not None and "rng" in state and "rng" not in dict(members(root) or ()):
            logger.warning("rank %d: its random states stay as they are: the checkpoint is of fewer ranks", self._ranks.rank)
            state = {key: value for key, value in state.items() if key != "rng"}
        restorer.place_root(state, root, whole=True)

    def _begin(self, costs: Costs, metric: float | None) -> None:
        """Makes a snapshot. Memory of optimizers is copied until the fence."""
        begun = time.monotonic()
        # Without a step of an optimizer since, the last snapshot may still be copied. The next one has to wait for that anyway.
        self._fence()
        state, again = self._take_apart()
        if again:
            if self._registered is not None:
                self._registered.count_moves(self._moves, state)
            self._end()
        registered = self._registered or self._register(state)
        if self._replicas is not None:
            self._replicas.tell(self._owner.session)
        registered.fill(state)
        self._interval.begun(costs, time.monotonic() - begun)
        record_metric(self._owner.session, metric)
        self._told = self._reported
        self._copying = set(registered.devices) if registered.has_fenced else set()
        self._check_status(partial(lib.pyckd_session_save, self._owner, self._reported, GROUP_AT_ONCE, not registered.has_fenced))
        self._writes.watch(registered.fenced(state))
        if self._poll().staged_step == self._reported:
            self._staged = self._reported
            if self._updates is not None:
                self._updates.saved()

    def _take_apart(self) -> tuple[Snapshot, bool]:
        """(the snapshot to save, whether memory must be registered again). Errors: a failure of any rank is raised on all."""
        failure: Exception | None = None
        state = Snapshot([], b"", {}, set(), set())
        try:
            state = take_apart(self._state, self._updates, [one for one in self._fenced if not is_capturable(one)], self._ranks)
        except Exception as error:  # whatever an object's state_dict() raises
            failure = error
        state.moved = {name for name, count in self._moves.items() if count > 1}
        state.fenced -= {t.leaf.key for t in state.tensors if t.name in self._writes.names}
        fits = self._registered is not None and self._told != self._reported and self._registered.fits(state)
        if self._replicas is not None:
            # A group that a rank has left, or that was late, makes no more saves.
            return state, self._replicas.prepare(failure, self._is_fresh(), fits and self._poll().failed == 0, state, self._reported)
        if failure is not None:
            raise failure
        return state, self._registered is not None and not fits

    def _register(self, state: Snapshot) -> Registered:
        if self._replicas is not None and not self._replicas.compares:
            self._replicas.compare_all(state.common, self._reported)
        self._ensure_open()
        try:
            registered = Registered(self._owner.session, state, self._prepared, Call())
            self._keep.append(registered)
            self._registered = registered
        except BaseException:
            self._end()  # part of the state may be registered
            raise
        return registered

    def _saved(self) -> tuple[int, Any]:
        """(saves that have become durable, the newest of them)."""
        info = ffi.new("ckd_checkpoint *")
        saved = int(lib.pyckd_session_last(info, self._owner))
        return saved, checkpoint_from(info)

    def _has_saved(self) -> bool:
        """Is the last step durable, or its save under way?"""
        if self._start.restored == self._reported:
            return True
        if self._staged != self._reported:
            return False
        if self._poll().under_way:
            return True
        saved, last = self._saved()
        return saved > self._base and bool(last.step == self._reported)

    def _follow(self) -> None:
        """Waits if the last save is too far behind; then raises what has failed."""
        now = self._poll()
        if self._max_lag is not None and self._staged >= 0 and self._reported - self._staged >= self._max_lag and now.under_way:
            self._wait()
        elif now.failed > self._failed:
            self._failed = int(now.failed)
            if self._failure is None:  # the library tells each failure once
                self._check_status(partial(lib.ckd_session_wait, self._owner.session, lib.CKD_STAGED))
        self._log()
        self._raise_failure()

    def _wait(self) -> None:
        self._fence()
        if self._owner.session:
            self._check_status(partial(lib.ckd_session_wait, self._owner.session, lib.CKD_DURABLE))
        self._log()
        self._raise_failure()

    def _check_status(self, function: Any) -> None:
        """A failure of an earlier save comes with any call. It is raised when this one has done its work."""
        call = Call()
        try:
            call.check(function(call.err))
        except Error as failure:
            if self._failure is not None:  # nobody has seen it yet
                logger.error("%s: %s", self._store.path, self._failure)
            self._failure = failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _poll(self) -> Any:
        found = ffi.new("ckd_session_state *")
        lib.ckd_session_poll(found, self._owner.session)
        return found

    def _costs(self) -> Costs:
        now, past = self._poll(), self._past
        return Costs(past.trained + now.trained_ns / 1e9, past.lost + (now.stall_ns + now.interference_ns) / 1e9, now.step_ns / 1e9,
                     now.last_persist_ns / 1e9 or past.last_save, past.saved + int(now.saved), int(now.under_way))

    def _log(self) -> None:
        saved, done = self._saved()
        if saved != self._logged:
            self._logged = saved
            level = logging.INFO if self._is_first else logging.DEBUG
            logger.log(level, "%s: saved %s, %d bytes of %d", self._store.path, done, done.stored_bytes, done.raw_bytes)
