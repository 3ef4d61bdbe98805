"""CheckpointIO of ckptdelta.lightning: checkpoints of PyTorch Lightning in a store.

A checkpoint of the Trainer is the step ``global_step`` of a run. At its path there is a marker (_lightning_marker.py). Only the marker
says which checkpoint the path stands for, so paths and names are free, and several paths may stand for one checkpoint. Saves of one
training are one lineage: each is a delta on the previous one. A second save of a step is compared with the first. If the tensors are the
same, its marker stands for the first checkpoint. Otherwise it belongs to another lineage, with a run of its own: RUN-2. Checkpoints
without optimizers have a run of their own, too: RUN-weights. They can be deleted without waiting for a full checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ._call import Progress, absolute, logger
from ._dcp import is_id, opened, parse_id
from ._errors import BusyError, Error, ExistsError, InvalidError, NotFoundError, StateError, UnsupportedError
from ._lightning_marker import Marker, check_free, folders_of, is_marked, path_of, read_marker
from ._lightning_state import OPTIMIZERS, Flat, changed, difference, original, taken_apart
from ._record import BLOB, Node, dump
from ._save import Content, Options, options_of
from ._store import Store
from ._torch import is_tensor
from ._types import Checkpoint, Fidelity, Role
from ._updates import EveryUpdate

RUN = "lightning"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def load_lightning(part: str) -> Any:
    """A module of Lightning: from the package that the process has imported, else from one that it can import."""
    loaded = [package for package in PACKAGES if package in sys.modules]
    for package in (*loaded, *PACKAGES):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}.{part}")
    raise UnsupportedError("ckptdelta.lightning needs PyTorch Lightning: pip install lightning")


_BASE: Any = load_lightning("plugins.io").CheckpointIO


@dataclass(frozen=True)
class _Last:
    """The newest checkpoint of a lineage.

    Attributes:
        digest: of the tensors as they were passed in, if they are stored lossily.
    """

    run: str
    step: int
    id: str
    digest: bytes = b""


Lineage = tuple[str, int]
"""("" or "weights", how many other checkpoints the same step has before this one)."""
MAIN: Lineage = ("", 0)


class CheckpointIO(_BASE):  # type: ignore[misc, unused-ignore]
    """Saves the checkpoints of a Trainer in a store: ``Trainer(plugins=[CheckpointIO("runs")])``.

    ModelCheckpoint, trainer.save_checkpoint() and ckpt_path work as with files. Where a file would be, there is a marker: a few
    lines of text that name the store, the run and the step. A checkpoint is stored as a delta on the previous one. It
    is stored once if several paths stand for it, such as last.ckpt and epoch=0-step=50.ckpt. When Lightning removes or overwrites
    the last marker of a checkpoint that the plugin knows of, the checkpoint is deleted from the store. ckpt_path may also be
    RUN@STEP, which needs no marker, or a file that Lightning wrote without this plugin.

    Values are stored without pickle. Namespaces, Lightning's AttributeDicts, paths and all values that Store.save() takes come back
    with their types. Threads may share a plugin. It may be sent to other processes, but not while it saves in the background.

    Args:
        store: an open store or its directory, which is made if there is none. The plugin opens it for itself.
        run: the run of the checkpoints: 1 to 128 of ``A-Z a-z 0-9 . _ - ~``, not starting with a dot or a dash. None: the run of
            the checkpoint that training resumes from, else ``"lightning"``. A training that does not resume does not continue an
            existing run: it is saved as RUN~2, RUN~3 and so on. Trainings that run at the same time need different runs.
        background: save_checkpoint() copies the tensors to host memory and returns; a thread saves them. If it fails, the next
            save or removal, or the end of the Trainer's call, raises the error.
        pickle: also store and load objects that only pickle can restore. Loading them runs code from the store.
        undo_s: seconds for which Store.undelete() can restore a deleted checkpoint; 0: its files are removed at once, unless other
            checkpoints need them.
        fidelity, role_fidelity, codec, level, effort, target_ratio, max_error, max_load_cost, staging_bytes, progress: as for
            Store.save(). Only trained parameters and their moments are stored lossily.

    Attributes:
        checkpoint: the last one that was saved; None: none yet.

    Errors of its methods: those of Store.save() and Store.load(), OSError; InvalidError names the path of what cannot be stored.
    """

    def __init__(self, store: str | os.PathLike[str] | Store, run: str | None = None, *, background: bool = False, pickle: bool = False,
                 undo_s: float = 0.0, fidelity: Fidelity = "exact", role_fidelity: Mapping[Role, Fidelity] | None = None,
                 codec: str = "auto", level: int = 0, effort: int = 0, target_ratio: float = 0.0, max_error: float = 0.0,
                 max_load_cost: float = 0.0, staging_bytes: int = 0, progress: Progress | None = None) -> None:
        super().__init__()
        self.run, self.background, self.pickle, self.undo_s, self.progress = run, background, pickle, undo_s, progress
        self.checkpoint: Checkpoint | None = None
        self._store = store
        self._options = Options(
            run=run or RUN, step=0, fidelity=fidelity, role_fidelity=role_fidelity or {}, on_duplicate="branch", codec=codec, level=level,
            effort=effort, target_ratio=target_ratio, max_error=max_error, max_load_cost=max_load_cost, staging_bytes=staging_bytes)
        self._lossy = any(options_of(self._options).lossy.values())  # also reports invalid options now
        self._folders: set[Path] = set()
        self._last: dict[Lineage, _Last] = {}
        self._loaded: _Last | None = None
        self._resumed_from: _Last | None = None
        self._due = float("inf")  # when the first of the deleted checkpoints can go for good
        self._reset()
        self._register()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._handle: Store | None = None
        self._updates: EveryUpdate | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._queue = threading.Lock()  # of _thread and _pending

    @staticmethod
    def _register() -> None:
        """Makes this class a CheckpointIO of both lightning and pytorch_lightning: the Trainer of each accepts only its own class."""
        for package in PACKAGES:
            plugins = sys.modules.get(f"{package}.plugins.io")
            if plugins is not None and not issubclass(CheckpointIO, plugins.CheckpointIO):
                plugins.CheckpointIO.register(CheckpointIO)

    def __getstate__(self) -> dict[str, Any]:
        if self._pending:
            raise StateError("the plugin saves in the background: wait for that, such as with teardown(), before it goes to another process")
        unsent = ("_lock", "_process", "_handle", "_updates", "_thread", "_pending", "_queue")
        return {name: value for name, value in vars(self).items() if name not in unsent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        self._register()

    def __repr__(self) -> str:
        return f"<ckptdelta.lightning.CheckpointIO {self._where()!r}>"

    # ---------------------------------------------------------------------------------------------- what Lightning calls

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        """Saves the dict of Lightning's Trainer, and writes a marker at the path. Both are durable on return, unless saved in the background."""
        if storage_options is not None:
            raise InvalidError("storage_options make no sense here: pass options to CheckpointIO")
        target = path_of(path)
        check_free(target)
        flat = self._taken_apart(checkpoint)
        save = partial(self._save, flat if not self.background else flat.copied(), target, checkpoint.get("global_step"),
                       "" if OPTIMIZERS in checkpoint else "weights", _metric(checkpoint, path), folders_of(checkpoint))
        self._do(save)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads the checkpoint of a marker, of RUN@STEP, or of a file that Lightning wrote. Tensors are in host memory, or where map_location says.

        weights_only=True refuses pickled objects even if the plugin was told to load them.
        """
        self._wait()
        target = path_of(path)
        marker = None
        if target.exists() or not is_id(os.fspath(path)):
            marker = read_marker(target)
            if marker is None:
                return _read_file(target, map_location, weights_only)
        with self._lock, self._reading(marker) as store:
            found = _find(store, marker, path)
            checkpoint = _read(store, found, marker, self.pickle and not weights_only)
            self._note_loaded(found, target, checkpoint)
        return checkpoint if map_location is None else _moved(checkpoint, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes the marker, and the checkpoint if no other marker stands for it. A path that does not exist is not an error."""
        self._do(partial(self._remove, path_of(path)))

    def teardown(self) -> None:
        """Waits for saves in the background, raises their error, and closes the store. The plugin can be used again."""
        try:
            self._wait()
        finally:
            self._close()

    def _taken_apart(self, checkpoint: dict[str, Any]) -> Flat:
        """Steps are counted from one checkpoint with optimizers to the next: if one step was made, its save is predicted."""
        if self._lossy or OPTIMIZERS not in checkpoint:
            return taken_apart(checkpoint, self.pickle)
        if self._updates is None:
            self._updates = EveryUpdate()
        flat = taken_apart(checkpoint, self.pickle, self._updates)
        self._updates.saved()
        return flat

    # --------------------------------------------------------------------------------------------------- background

    def _do(self, work: Callable[[], None]) -> None:
        """Does the work now, or in the background after earlier work. Raises the error of earlier work."""
        self._own_process()
        if not self.background:
            work()
            return
        with self._queue:
            failed = self._finished()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "ckptdelta-lightning")
            self._pending.append(self._thread.submit(work))
            self._pending[-1].add_done_callback(_tell_failure)
        if failed is not None:
            raise failed

    def _finished(self) -> BaseException | None:
        """Removes finished work from the list. Returns its first error."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        errors = [error for future in done if (error := future.exception()) is not None]
        return errors[0] if errors else None

    def _wait(self) -> None:
        self._own_process()
        with self._queue:
            wait(self._pending)
            failed = self._finished()
        if failed is not None:
            raise failed

    def _own_process(self) -> None:
        if self._process != os.getpid():  # a forked child
            self._reset()

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._handle is not None:
            self._handle.close()
        if self._updates is not None:
            self._updates.close()
        self._thread = self._handle = self._updates = None

    # --------------------------------------------------------------------------------------------------------- save

    def _where(self) -> str:
        return os.fspath(self._store.path if isinstance(self._store, Store) else self._store)

    def _opened(self) -> Store:
        if self._handle is None:
            self._handle = opened(self._store, readonly=False)
        return self._handle

    @contextlib.contextmanager
    def _reading(self, marker: Marker | None) -> Any:
        """The store for a load. It is opened for reading, so processes that only load need no right to write."""
        if self._handle is not None:
            yield self._handle
            return
        try:
            store = opened(self._store, readonly=True)
        except NotFoundError as error:
            other = f"; its marker names the store {marker.store}" if marker is not None else ""
            raise NotFoundError(f"{error.message}{other}", file=error.file) from None
        with store:
            yield store

    def _save(self, flat: Flat, path: Path, step: Any, kind: str, metric: tuple[str, float] | None, folders: set[Path]) -> None:
        with self._lock:
            self._folders |= {path.parent, *folders}
            store = self._opened()
            old = None if path.is_symlink() else _marker_or_none(path)  # of a link, the target stays
            found, changes = self._stored(store, flat, step, kind, metric)
            Marker(absolute(self._where()), found.run, found.step, found.id, changes).write(path)
            if old is not None and old.id != found.id:
                self._release(store, old)

    def _stored(self, store: Store, flat: Flat, step: Any, kind: str, metric: tuple[str, float] | None) -> tuple[_Last, list[list[Any]]]:
        """(the checkpoint that has these tensors, the differences of its record)."""
        digest = flat.digest() if self._lossy else b""
        if type(step) is not int or step < 0:  # not from a Trainer, such as weights that are sent between processes
            step = max((one.step for one in store.checkpoints(self._name("weights", 0))), default=0) + 1
        number = 0
        while (last := self._last.get((kind, number))) is not None and last.step == step:
            changes = self._same(store, last, flat, digest)
            if changes is not None:
                return last, changes
            number += 1
        options = replace(self._place(store, (kind, number), step), step=step, metric=metric)
        done = store._commit(Content(flat.tensors, flat.updates, {BLOB: dump(flat.root)}), options, self.progress)
        self.checkpoint = done
        found = self._last[kind, number] = _Last(done.run, done.step, done.id, digest)
        if (kind, number) == MAIN:
            self._resumed_from = None
        return found, []

    def _same(self, store: Store, last: _Last, flat: Flat, digest: bytes) -> list[list[Any]] | None:
        """The differences of the records, if the tensors are those of a checkpoint; else None."""
        if _by_id(store, last) is None:
            return None
        root = _root(store, last)
        if self._lossy:
            return difference(root, flat.root) if digest == last.digest else None
        try:
            same = replace(self._options, run=last.run, step=last.step, on_duplicate="same")
            store._commit(Content(flat.tensors, {}, {BLOB: dump(root)}), same)
        except ExistsError:
            return None
        return difference(root, flat.root)

    def _name(self, kind: str, number: int) -> str:
        """The run of a lineage, before it branches."""
        first = self._last.get(MAIN)
        root = self.run or (_without_branch(first.run) if first is not None else RUN)
        return root + (f"-{kind}" if kind else "") + (f"-{number + 1}" if number else "")

    def _place(self, store: Store, lineage: Lineage, step: int) -> Options:
        """The run of a new checkpoint of a lineage, and its parent."""
        run, last, first = self._name(*lineage), self._last.get(lineage), self._last.get(MAIN)
        parent = last if last is not None and _by_id(store, last) is not None else None
        if lineage != MAIN and first is not None and (parent is None or first.step == step) and _by_id(store, first) is not None:
            parent = first
        resumed = self._resumed_from if lineage == MAIN else None
        resumed = resumed if resumed is not None and _by_id(store, resumed) is not None else None
        continued = last is not None and run in (last.run, _without_branch(last.run))
        if last is not None and continued:
            run = last.run
        elif lineage == MAIN or self._loaded is None:
            run = _unused(store, run)
        return replace(self._options, run=run, base=parent is None and not continued,
                       parent=(parent.run, parent.step) if parent is not None else None,
                       resumed_from=(resumed.run, resumed.step) if resumed is not None else None)

    # ------------------------------------------------------------------------------------------------ load and remove

    def _note_loaded(self, found: Checkpoint, path: Path, checkpoint: dict[str, Any]) -> None:
        """Later saves continue from this checkpoint."""
        self._folders |= {path.parent, *folders_of(checkpoint)}
        if OPTIMIZERS in checkpoint:
            last = _Last(found.run, found.step, found.id)
            self._last = {MAIN: last}
            self._loaded = self._resumed_from = last

    def _remove(self, path: Path) -> None:
        with self._lock:
            if not path.exists() and not path.is_symlink():
                return
            if path.is_symlink():
                path.unlink()  # its target stays
                return
            marker = read_marker(path)
            if marker is None:
                load_lightning("plugins.io").TorchCheckpointIO().remove_checkpoint(path)
                return
            path.unlink()
            self._folders.add(path.parent)
            self._release(self._opened(), marker)

    def _release(self, store: Store, marker: Marker) -> None:
        """Deletes a checkpoint that has lost a marker, unless it has others, or is protected by a pin or a tag.

        If another process holds the store's lock, the checkpoint stays, because that must not end the training. So does the last
        one of its run that is not suspect.
        """
        found = _by_id(store, marker)
        if found is None or is_marked(marker.id, self._folders):
            return
        others = [one.suspect for one in store.checkpoints(found.run) if one.id != found.id]
        if others and all(others) and not found.suspect:
            logger.warning("%s: %s has no marker any more, but stays: all others of its run are suspect", store.path, found)
            return
        try:
            store.delete(run=found.run, step=found.step, undo_s=self.undo_s)
            self._due = min(self._due, time.monotonic() + self.undo_s)
            if self.undo_s and time.monotonic() > self._due + self.undo_s / 10:  # only collect() and opening the store remove files
                self._due = float("inf")
                store.collect()
        except (StateError, BusyError) as error:
            logger.warning("%s: %s has no marker any more, but it or its files stay: %s", store.path, found, error)


# ------------------------------------------------------------------------------------------------------------- the parts


def _marker_or_none(path: Path) -> Marker | None:
    """The marker that a save replaces. A damaged one is ignored, because it must not stop a save."""
    try:
        return read_marker(path)
    except Error:
        return None


def _without_branch(run: str) -> str:
    root, mark, number = run.rpartition("~")
    return root if mark and number.isdecimal() else run


def _unused(store: Store, run: str) -> str:
    runs, number, name = set(store.runs()), 1, run
    while name in runs:
        number += 1
        name = f"{run}~{number}"
    if name != run:
        logger.warning("%s: the run %s exists, and this training does not continue it: it is saved as %s", store.path, run, name)
    return name


def _by_id(store: Store, wanted: Marker | _Last) -> Checkpoint | None:
    """The checkpoint, even if its run has been renamed; None if it is not in the store."""
    with contextlib.suppress(NotFoundError):
        found = store.find(run=wanted.run, step=wanted.step)
        if found.id == wanted.id:
            return found
    return next((one for one in store.checkpoints() if one.id == wanted.id), None)


def _find(store: Store, marker: Marker | None, path: str | os.PathLike[str]) -> Checkpoint:
    if marker is None:
        run, step = parse_id(path, None)
        return store.find(run=run, step=step)
    found = _by_id(store, marker)
    if found is None:
        here = absolute(store.path)
        where = f"; the marker names another store: {marker.store}" if marker.store != here else ""
        raise NotFoundError(f"{os.fspath(path)} stands for {marker} (id {marker.id}), which is not in the store {here}{where}", file=os.fspath(path))
    return found


def _root(store: Store, last: _Last) -> Node:
    found: list[Node] = []
    store._restore(last.run, last.step, lambda root, restorer: found.append(root))
    return found[0]


def _read(store: Store, found: Checkpoint, marker: Marker | None, pickle: bool) -> dict[str, Any]:
    built: list[Any] = []

    def plan(root: Node, restorer: Any) -> None:
        built.append(restorer.build(changed(root, marker.changes) if marker is not None else root, ""))

    store._restore(found.run, found.step, plan, tensors=None)
    return original(built[0], pickle)


def _read_file(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint that Lightning wrote without this plugin."""
    plugin = load_lightning("plugins.io").TorchCheckpointIO()
    options = {} if map_location is None else {"map_location": map_location}
    found: dict[str, Any] = plugin.load_checkpoint(path, weights_only=weights_only, **options)
    return found


def _moved(value: Any, location: Any) -> Any:
    """Moves tensors as a map_location of torch.load() says, which is asked as for tensors in host memory."""
    if is_tensor(value):
        if callable(location):
            storage = value.untyped_storage()
            place = location(storage, "cpu")
            return value if place is None else value.to(place.device)
        return value.to(location.get("cpu", "cpu") if isinstance(location, dict) else location)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], location)
        return value
    if type(value) in (list, tuple):
        return type(value)(_moved(v, location) for v in value)
    return value


def _metric(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> tuple[str, float] | None:
    """Name and value that a ModelCheckpoint monitors, if it has ranked this checkpoint."""
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        best = state.get("best_k_models") if isinstance(state, dict) else None
        score = best.get(os.fspath(path)) if isinstance(best, dict) else None
        name = state.get("monitor") if isinstance(state, dict) else None
        if score is not None and isinstance(name, str) and 0 < len(name.encode()) < 32:
            return name, float(score)
    return None


def _tell_failure(done: Future[None]) -> None:
    """The call that would raise the error of the last save may never come."""
    error = done.exception()
    if error is not None:
        logger.error("a save in the background failed: %s", error)
