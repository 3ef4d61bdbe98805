"""The store: saves, loads, lists and verifies checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ._call import Call, Notices, Parts, Progress, absolute, logger, path_bytes, text
from ._catalog import (Where, checkpoint_from, end_load, find_checkpoint, native_text, read_blob, read_own_record, read_root, run_and_step,
                       step_number, stored_tensors, tensor_from, verification_from)
from ._errors import Error, InvalidError, NotFoundError, StateError
from ._export import form_of, optimizers_by_name, write as write_export, write_whole
from ._export_hf import FILES, weights_in, write_pretrained
from ._flatten import Flattener
from ._follow import Box, changes
from ._foreign import find_all, size_of, step_of
from ._native import ffi, lib
from ._pairing import names_by_shape
from ._ranks import with_own
from ._record import BLOB, dump
from ._restore import Restorer, only_within
from ._retention import DAY, Policy, Pruned, delete_options, ids_of, native_policy, policy_from, prune, trashed
from ._save import Content, Options, options_of, save_all
from ._turns import Turns
from ._types import Checkpoint, Fidelity, Role, TensorInfo, Verification
from ._updates import Updates


def open(path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False, threads: int = 0,
         lock_timeout: float = 30.0) -> Store:
    """Opens the store in a directory.

    Args:
        path: the directory. For writing, its absolute path has at most 493 bytes.
        create: make the store, and the directories above it, if there is none. Without it, that is a NotFoundError.
        readonly: change nothing, not even an outdated catalog. Takes precedence over `create`.
        threads: workers that code and decode; 0: one per core, at most 16.
        lock_timeout: seconds to wait for a lock that another process holds.

    Errors: NotFoundError, UnsupportedError (another format), InvalidError (something else is there), ReadOnlyError,
    CorruptError, BusyError, InputOutputError.
    """
    return Store(path, create=create, readonly=readonly, threads=threads, lock_timeout=lock_timeout)


class Store:
    """An open store. Any number of processes and objects may have the same store open.

    Threads may share a store; their calls wait for each other, and with more than one store open they run side by side.
    The interpreter's lock is free while the library works. In a forked child a store that the parent opened raises
    StateError: open it again there. Use it as a context manager, or call close().
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False, threads: int = 0,
                 lock_timeout: float = 30.0) -> None:
        if threads < 0 or not 0 <= lock_timeout < 4e6:
            raise InvalidError("threads and lock_timeout must not be negative, and lock_timeout at most 4,000,000 seconds")
        self.path = os.fspath(path)
        self._options = (readonly, threads, lock_timeout)
        self._again = partial(open, create=create, readonly=readonly, threads=threads, lock_timeout=lock_timeout)
        self._process = os.getpid()
        self._turns = Turns()
        self._notices = Notices(self.path)
        label = ffi.new_handle(self._notices)
        self._owner = ffi.gc(ffi.new("pyckd_store *"), partial(_close, label))
        options = store_options(threads, lock_timeout, label)
        mode = lib.CKD_OPEN_READ if readonly else lib.CKD_OPEN_CREATE if create else lib.CKD_OPEN_WRITE
        call = Call()
        call.check(lib.pyckd_store_open(self._owner, path_bytes(path), mode, options, call.err))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ckptdelta.Store {self.path!r}{'' if self._owner.store else ', closed'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a store sent to another process, is the same store opened again."""
        return self._again, (absolute(self.path),)

    def close(self) -> None:
        """Closes the store when the calls of other threads have returned. More calls do nothing."""
        if self._process == os.getpid():
            with self._turn():
                lib.pyckd_store_close(self._owner)

    def _turn(self) -> AbstractContextManager[bool]:
        """``with self._turn():`` is this thread's turn to use the handle."""
        return self._turns.next("a callback called the store from within its call")

    @property
    def _handle(self) -> Any:
        if not self._owner.store:
            raise StateError(f"the store {self.path} is closed")
        return self._owner.store

    # ------------------------------------------------------------------------------------------------------- save

    def save(self, state: Any, *, run: str, step: int, fidelity: Fidelity = "exact",
             role_fidelity: Mapping[Role, Fidelity] | None = None, base: bool = False, parent: Where | None = None,
             resumed_from: Where | None = None, on_duplicate: Literal["error", "same", "branch"] = "error",
             metric: tuple[str, float] | None = None, codec: Literal["auto", "raw", "zstd", "lz4"] = "auto", level: int = 0,
             effort: int = 0, target_ratio: float = 0.0, max_error: float = 0.0, max_load_cost: float = 0.0,
             staging_bytes: int = 0, updates: Updates | None = None, progress: Progress | None = None) -> Checkpoint:
        """Saves a state as the checkpoint `step` of `run`. The checkpoint is durable when the call returns.

        The state is a module, an optimizer, an array, or dicts, lists and tuples of these and of plain values. An object
        with state_dict() and load_state_dict() stands for its state_dict(). Arrays of any shape go to the engine from
        their own memory if they are contiguous and in host memory or on a CUDA device, else as a copy, one at a time;
        nothing may write to them meanwhile. Arrays that are the same memory are stored once. All other values become one record, without
        pickle: None, bool, int, float, complex, str, bytes, bytearray, BytesIO, range, list, tuple, dict, OrderedDict,
        defaultdict, Counter, deque, set, frozenset, scalars of numpy, and sizes, dtypes and devices of torch.

        The names of tensors are their paths in the state, such as ``model.layers.0.weight``. States of an optimizer have
        the name of their parameter: ``optimizer.state.model.layers.0.weight.exp_avg``.

        Args:
            state: what to save.
            run: 1 to 128 of ``A-Z a-z 0-9 . _ - ~``, not starting with a dot or a dash.
            step: 0 to 2**64 - 2. The run must not have it.
            fidelity: ``"exact"``, ``"near"`` or ``"coarse"``. Only weights, moments and masters are stored lossily. Buffers of modules,
                integers and f64 stay exact in any case. Other float arrays outside modules and optimizers count as weights.
            role_fidelity: of single roles.
            base: depend on no other checkpoint.
            parent: the checkpoint that this one is a delta on; None: the newest of the run before `step`.
            resumed_from: the checkpoint that training resumed from; lossy saves use it.
            on_duplicate: if the run has this step: ``"error"``; ``"same"`` if the content is equal, else an error;
                ``"branch"``: continue as ``RUN~2``.
            metric: name and value to record, such as ``("val_loss", 2.31)``.
            codec, level: how bytes are packed; level of zstd (1 to 19) or LZ4 (1 to 12), 0: the default.
            effort: of lossy saves, 1 (fast) to 9 (small); 0: 5.
            target_ratio: of lossy deltas, raw bytes to stored ones; 0: the fidelity decides.
            max_error: bound on every error of a lossy save, in RMS of its matrix; 0: none.
            max_load_cost: limit on the cost of loading the checkpoint, in loads of a base; 0: 4.
            staging_bytes: memory that the save may hold besides the state; 0: 256 MiB.
            updates: what follows the optimizers of the state; for exact saves one step apart.
            progress: called on this thread with bytes done and in total; False cancels the save.

        Returns: the checkpoint as committed.

        Errors: InvalidError (with the path of what cannot be stored), ExistsError, NotFoundError (the parent), MismatchError,
        ReadOnlyError, NoSpaceError, BusyError, CancelledError, InputOutputError, CorruptError (the parent). After an error
        nothing is committed. After a KeyboardInterrupt, checkpoints() says whether the commit had been made.
        """
        return self._save(state, Flattener(updates), Options(
            run=run, step=step, fidelity=fidelity, role_fidelity=role_fidelity or {}, base=base, parent=run_and_step(parent),
            resumed_from=run_and_step(resumed_from), on_duplicate=on_duplicate, metric=metric, codec=codec, level=level, effort=effort,
            target_ratio=target_ratio, max_error=max_error, max_load_cost=max_load_cost, staging_bytes=staging_bytes), updates, progress)

    def _save(self, state: Any, flat: Flattener, chosen: Options, updates: Updates | None = None, progress: Progress | None = None) -> Checkpoint:
        record = dump(flat.run(state))
        done = self._commit(Content(flat.tensors, flat.updates, {BLOB: record}), chosen, progress)
        if updates is not None:
            updates.saved()
        return done

    def _commit(self, content: Content, chosen: Options, progress: Progress | None = None) -> Checkpoint:
        """Saves the tensors and the record of a state."""
        options = options_of(chosen)
        call = Call(progress)
        with self._turn():
            info = save_all(self._owner, self._handle, options, content, call)
        done = checkpoint_from(info)
        logger.info("%s: saved %s, %d bytes of %d", self.path, done, done.stored_bytes, done.raw_bytes)
        return done

    # ----------------------------------------------------------------------------------------------------- import

    def import_checkpoints(self, path: str | os.PathLike[str], *, run: str, step: int | None = None, fidelity: Fidelity = "exact",
                           pickle: bool = False, progress: Progress | None = None) -> Sequence[Checkpoint]:
        """Saves checkpoints that other libraries wrote. state_dict() returns their contents.

        The path is a file of torch.save() (.pt, .pth, .bin, .ckpt of Lightning) or of safetensors, a folder of transformers
        with or without what its Trainer needs to resume, one of torch.distributed.checkpoint, of Megatron (torch_dist) or of
        DeepSpeed (ZeRO 1 to 3, or universal), or a folder of several of these. Forms are recognised by content, not by name.
        Tensors that were sharded over ranks become whole. Of several checkpoints, the oldest comes first, and steps that the run
        already has are left out, so an interrupted import continues when it is called again. Two checkpoints of the same step are
        an error. States of optimizers get the names of their parameters if the order of the model is known and the shapes leave no
        doubt.

        Args:
            path: the file or folder to import.
            run: the run to save to.
            step: of a single checkpoint; None: the step that it records (``global_step``, ``step``, ``iteration`` and the
                like), else the last number in its name.
            fidelity: as for save().
            pickle: restore objects that only pickle can restore. That runs code from the files.
            progress: as for save(), but it counts bytes of all files; those that are left out count as done.

        Returns: the new checkpoints.

        Errors: NotFoundError; UnsupportedError (the form is not known, or needs pickle, or a package that is not installed);
        CorruptError; InvalidError (no step is known; a value cannot be stored); and those of save(). Checkpoints that were saved
        before an error stay.
        """
        done = []
        found, several = find_all(path)
        if several and step is not None:
            raise InvalidError(f"{path} has {len(found)} checkpoints: step is for a single one", path="step")
        there = {checkpoint.step for checkpoint in self.checkpoints(run)} if several else set()
        seen: dict[int, Path] = {}
        parts = Parts(progress, [size_of(one.path) for one in found])
        for part, one in zip(parts, found):  # in this order, so that the iteration of the parts ends and reports the last one as done
            state = one.read(pickle)
            at = step_of(state, one) if step is None else step
            if at is None:
                continue
            if at in seen and not one.is_extra:
                raise InvalidError(f"{seen[at]} and {one.path} are both step {at}: import each by itself, as another step or run", path="step")
            seen[at] = one.path
            if at in there:
                logger.info("%s: %s@%d is there already; %s is left out", self.path, run, at, one.path)
                continue
            names = names_by_shape(state) if one.ordered(state) else {}
            flat = Flattener(names=names, buffers=one.buffers(state))
            done.append(self._save(state, flat, Options(run=run, step=at, fidelity=fidelity), progress=part))
            if several:
                there.add(at)
        return done

    def export_checkpoint(self, path: str | os.PathLike[str], *, run: str | None = None, step: int | None = None,
                          form: Literal["torch", "transformers", "dcp", "deepspeed"] | None = None, progress: Progress | None = None) -> Checkpoint:
        """Writes a checkpoint in the form of another library. All of it is held in host memory. The path must not exist.

        Args:
            path: the file or folder to make.
            run, step: as for load().
            form: ``"torch"``: a file of torch.save(); ``"transformers"``: a folder, from which its Trainer resumes if the
                checkpoint was imported from such a folder; ``"dcp"``: a folder of torch.distributed.checkpoint, with the states of
                optimizers by the names of parameters, as get_state_dict() of torch.distributed.checkpoint.state_dict has them;
                ``"deepspeed"``: a universal checkpoint, if it was imported from one of DeepSpeed. None: a file of torch.save() if the
                path has its suffix, else a folder of transformers if the checkpoint has a model's configuration, else of dcp.
            progress: as for load().

        Returns: the checkpoint. The file or folder is durable.

        Errors: those of state_dict(); ExistsError; InvalidError (the state does not fit the form); UnsupportedError; OSError.
        """
        found = self._to_load(run, step)
        built: list[Any] = []

        def plan(root: Any, restorer: Restorer) -> None:
            built.extend((root, restorer.build(root, "")))

        self._restore(found.run, found.step, plan, tensors="torch", progress=progress)
        root, state = built
        target = Path(path)
        chosen = form or form_of(target, state)
        write_export(target, chosen, optimizers_by_name(state, root) if chosen == "dcp" else state)
        return found

    def export_hf(self, path: str | os.PathLike[str], *, run: str | None = None, step: int | None = None, like: Any = None,
                  member: str = "model", max_shard_size: int | str | None = None, progress: Progress | None = None) -> Checkpoint:
        """Writes the model of a checkpoint as a folder that from_pretrained() of transformers reads: weights in safetensors, the
        configuration, and the tokenizer if the checkpoint has one. Nothing else of the checkpoint is read. The path must not exist.

        Args:
            path: the folder to make.
            run, step: as for load().
            like: a model, which is not changed, its configuration, or a folder with a configuration. None: the checkpoint's own
                configuration, which ckptdelta.transformers and imported folders have.
            member: the model's path in the state; ``""``: the state is the model.
            max_shard_size: of each file of weights, in bytes, or as ``"5GB"``. None: the default of save_pretrained().
            progress: as for load().

        Returns: the checkpoint. The folder is durable.

        Errors: those of state_dict(); ExistsError; InvalidError (no configuration); MismatchError (the model that it describes has
        other weights); UnsupportedError (transformers is not installed, or has no such model); OSError.
        """
        found = self._to_load(run, step)
        parts = None if not member else [member, FILES]
        state = self.state_dict(run=found.run, step=found.step, only=parts, tensors="torch", progress=progress)
        weights = weights_in(state, member, found)
        files = state.get(FILES, {}) if member else {}
        write_whole(Path(path), partial(write_pretrained, weights=weights, files=files, like=like, max_shard_size=max_shard_size))
        return found

    # ------------------------------------------------------------------------------------------------------- load

    def load(self, state: Any, *, run: str | None = None, step: int | None = None, strict: bool = True,
             progress: Progress | None = None) -> Checkpoint:
        """Loads a checkpoint into a state in place.

        Arrays are overwritten, modules and optimizers get their state, dicts and lists are refilled with plain values. Dicts
        may leave out keys: what they do not have is not read. All names, dtypes and shapes are compared before anything is
        written. Every block that is read is verified.

        Args:
            state: as it was saved, or a part: ``{"model": model}``. For a checkpoint of the command or of a C program, the
                paths in the state are the names of tensors.
            run: None: the only run of the store.
            step: None: the newest.
            strict: if False, objects that the checkpoint does not have stay as they are, and tensors that a module has no place for are
                left out.
            progress: called between batches of 256 MiB with bytes done and in total; False cancels the load, and what was
                read so far has been written.

        Returns: the checkpoint that was loaded; training continues after its `step`.

        Errors: NotFoundError, MismatchError (names the first differences; nothing was written), InvalidError (with the path of
        what nothing can be loaded into), CorruptError and InputOutputError (then the state is partly overwritten: load
        another checkpoint), UnsupportedError.
        """
        return self._restore(run, step, lambda root, restorer: restorer.place_root(state, root), strict=strict, progress=progress)

    def state_dict(self, *, run: str | None = None, step: int | None = None, only: str | Sequence[str] | None = None,
                   tensors: Literal["numpy", "torch"] | None = None, progress: Progress | None = None) -> Any:
        """Loads a checkpoint, or a part, as new arrays (in host memory) and values.

        Args:
            run, step: as for load().
            only: a path, or several: ``"model"`` or ``"model.layers.0"``. Only what is below it is read. The result is nested as
                in the whole state.
            tensors: the library whose arrays are made; None: the one that each array was saved from (numpy for DLPack).
            progress: as for load().

        Returns: the saved state, with state_dict()s in place of objects. Arrays that were the same memory are the same array.
        For a checkpoint of the command or of a C program: a dict of all tensors by name.

        Errors: as for load(), and NotFoundError if there is nothing below `only`.
        """
        if tensors not in (None, "numpy", "torch"):
            raise InvalidError(f"tensors is 'numpy' or 'torch', not {tensors!r}")
        prefixes = [only] if isinstance(only, str) else None if only is None else list(only)
        found: list[Any] = []

        def plan(root: Any, restorer: Restorer) -> None:
            found.append(restorer.build(root if prefixes is None else only_within(root, prefixes), ""))

        self._restore(run, step, plan, tensors=tensors, progress=progress)
        return found[0]

    def _restore(self, run: str | None, step: int | None, plan: Callable[[Any, Restorer], None], *, strict: bool = True,
                 tensors: str | None = None, progress: Progress | None = None, rank: int = 0) -> Checkpoint:
        """rank: this process in a session of several ranks; it gets its own members."""
        call = Call(progress)
        with self._turn():
            store = self._handle
            info = find_checkpoint(store, run, step, call, healthy=True)
            load = ffi.gc(ffi.new("pyckd_load *"), partial(end_load, self._owner))
            try:
                call.check(lib.pyckd_load_begin(load, store, ffi.addressof(info, "id"), ffi.NULL, call.err))
                stored = stored_tensors(load.load)
                root, flat = read_root(load.load, stored)
                if rank:
                    root = with_own(root, rank, read_own_record(load.load, stored, rank, call))
                restorer = Restorer(stored, partial(read_blob, load.load), flat=flat, tensors=tensors, strict=strict,
                                    label=f"{text(info.run)}@{int(info.step)}")
                plan(root, restorer)
                restorer.run(load.load, call)
            finally:
                lib.pyckd_load_end(load)
        return checkpoint_from(info)

    # ---------------------------------------------------------------------------------------------------- content

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """All checkpoints, or those of one run, by run and step."""
        call = Call()
        with self._turn():
            found = ffi.gc(ffi.new("ckd_checkpoint_list **"), lib.pyckd_checkpoints_free)
            call.check(lib.ckd_store_list(found, self._handle, native_text(run, "run") if run is not None else ffi.NULL, call.err))
            return [checkpoint_from(found[0].items[i]) for i in range(found[0].count)]

    list = checkpoints

    def runs(self) -> Sequence[str]:
        """Names of the runs, sorted."""
        return sorted({checkpoint.run for checkpoint in self.checkpoints()})

    def find(self, *, run: str | None = None, step: int | None = None) -> Checkpoint:
        """One checkpoint: of the only run, the newest, unless told otherwise. Errors: NotFoundError, InvalidError (several runs)."""
        with self._turn():
            return checkpoint_from(find_checkpoint(self._handle, run, step, Call()))

    def _to_load(self, run: str | None, step: int | None) -> Checkpoint:
        """The checkpoint that load() loads: the newest that is not suspect, unless its step is given."""
        with self._turn():
            return checkpoint_from(find_checkpoint(self._handle, run, step, Call(), healthy=True))

    def tensors(self, *, run: str | None = None, step: int | None = None) -> Sequence[TensorInfo]:
        """The tensors of a checkpoint, in the order in which they were saved. Errors: as for find()."""
        call = Call()
        with self._turn():
            store = self._handle
            info = find_checkpoint(store, run, step, call)
            found = ffi.gc(ffi.new("ckd_tensor_list **"), lib.pyckd_tensors_free)
            call.check(lib.ckd_store_tensors(found, store, ffi.addressof(info, "id"), call.err))
            return [tensor_from(found[0].items[i]) for i in range(found[0].count)]

    def changes(self, tensor: str, *, before: Where, after: Where, box: Box | None = None,
                tensors: Literal["numpy", "torch"] | None = None) -> tuple[Any, Any]:
        """The elements of a tensor whose bits differ between two checkpoints: a sparse update of a model in memory.

            positions, values = store.changes("model.lm_head.weight", before=("rl", 41), after=("rl", 42))
            model.lm_head.weight.data.view(-1)[positions] = values

        Only blocks that differ are read. A rank of a tensor-parallel model asks for its own box.

        Args:
            tensor: its name in the store, as tensors() has it.
            before, after: two checkpoints of the store.
            box: a slice for each dimension; None: the whole tensor.
            tensors: the library whose arrays are made; None: torch if it is imported, else numpy.

        Returns: positions in the row-major order of the whole tensor (int64), and the values that `after` has there, both in
        host memory and with one dimension.

        Errors: NotFoundError, MismatchError (the dtype or shape differs), InvalidError (the box), CorruptError, InputOutputError.
        """
        with self._turn():
            return changes(self._owner, self._handle, tensor, before, after, box, tensors)

    # -------------------------------------------------------------------------------------------------- retention

    def delete(self, *, run: str, step: int | Iterable[int], undo_s: float = DAY) -> Sequence[Checkpoint]:
        """Deletes checkpoints: all of them, or none if one must not be deleted. Deltas on them load as before.

        A deletion waits for saves under way. That of a Session may itself wait for the next step of the optimizer: call the
        session's fence() before a deletion or a prune on the thread that trains.

        Args:
            run: the run that has them.
            step: one, or several.
            undo_s: seconds for which undelete() can restore them. After that time, the next open for writing or collect() removes
                their files; 0: now. Files that other checkpoints need stay until these are compacted.

        Returns: the deleted checkpoints.

        Errors: NotFoundError, StateError (one is pinned or tagged), InvalidError, BusyError, CorruptError, ReadOnlyError,
        NoSpaceError, InputOutputError.
        """
        options, call = delete_options(undo_s), Call()
        steps = [step_number(one) for one in dict.fromkeys(step)] if isinstance(step, Iterable) else [step_number(step)]
        with self._turn():
            store = self._handle
            found = [checkpoint_from(find_checkpoint(store, run, one, call)) for one in steps]
            call.check(lib.ckd_store_delete(store, ids_of([one.id for one in found]), len(found), options, call.err))
            if options.undo_s == 0:
                self._collect_now(store)
        return found

    def undelete(self, *, run: str, step: int | Iterable[int]) -> Sequence[Checkpoint]:
        """Restores deleted checkpoints: all of them, or none.

        Returns: the restored checkpoints. Errors: NotFoundError (not in the trash, or the files are removed), ExistsError (the step was
        saved again), and those of delete().
        """
        call = Call()
        steps = [step_number(one) for one in dict.fromkeys(step)] if isinstance(step, Iterable) else [step_number(step)]
        with self._turn():
            store = self._handle
            trash = trashed(store, call)
            there = {}
            for i in range(trash[0].count):
                one = checkpoint_from(trash[0].items[i].checkpoint)
                there[one.run, one.step] = one
            for one_step in steps:
                if (run, one_step) not in there:
                    raise NotFoundError(f"{run}@{one_step} is not among the deleted checkpoints that can be restored")
            found = [there[run, one_step] for one_step in steps]
            call.check(lib.ckd_store_undelete(store, ids_of([one.id for one in found]), len(found), call.err))
        return found

    def prune(self, policy: Policy, *, run: str | None = None, dry_run: bool = False) -> Pruned:
        """Deletes the checkpoints that a policy does not keep. The two newest healthy ones of each run stay, and are verified first.

        Args:
            policy: the rules.
            run: None: every run by itself.
            dry_run: delete nothing; only return the result.

        Errors: InvalidError (it keeps nothing), NotFoundError (the run), CorruptError (one of these two is damaged, or the
        dependencies are not known; nothing was deleted), and those of delete().
        """
        call = Call()
        name = native_text(run, "run") if run is not None else ffi.NULL
        with self._turn():
            store = self._handle
            owner = prune(store, policy, name, dry_run, call)
            done = owner[0]
            items = [done.items[i] for i in range(done.count)]
            kept = tuple(checkpoint_from(item.checkpoint) for item in items if item.kept)
            deleted = tuple(checkpoint_from(item.checkpoint) for item in items if not item.kept)
            if deleted and not dry_run and policy.undo_s == 0:
                self._collect_now(store)
            return Pruned(kept, deleted, int(done.bytes))

    def set_policy(self, policy: Policy | None, *, run: str | None = None) -> None:
        """Stores a policy in the store, for all programs that save to it; None removes it. This call deletes nothing.

        With `automatic`, a save of the run applies the policy in its commit, once that many checkpoints can be deleted, and compacts
        deltas on deleted checkpoints. If that fails, the log has a warning, and the save succeeds.

        Args:
            run: need not exist yet; None: all runs without a policy of their own.

        Errors: InvalidError (it keeps nothing), NotFoundError (there is none to remove), ReadOnlyError, BusyError, NoSpaceError,
        InputOutputError.
        """
        call = Call()
        name = native_text(run, "run") if run is not None else ffi.NULL
        with self._turn():
            store = self._handle
            if policy is None:
                call.check(lib.ckd_store_clear_policy(store, name, call.err))
            else:
                call.check(lib.ckd_store_set_policy(store, native_policy(policy, name), call.err))

    def policy(self, run: str | None = None) -> Policy | None:
        """The stored policy that applies to a run: its own, else the one of all runs. None: there is none."""
        call = Call()
        found = ffi.new("ckd_stored_policy *")
        with self._turn():
            try:
                call.check(lib.ckd_store_policy(found, self._handle, native_text(run, "run") if run is not None else ffi.NULL, call.err))
            except NotFoundError:
                return None
        return policy_from(found.policy)

    def collect(self) -> int:
        """Removes for good the deleted checkpoints whose `undo_s` is over, when no load or save of any process is under way.

        Returns: the number of bytes freed. Errors: BusyError (loads and saves did not end within lock_timeout), and those of
        delete().
        """
        with self._turn():
            return self._collect(self._handle, Call())

    def _collect_now(self, store: Any) -> None:
        """After a deletion, which has been made whatever comes of this."""
        try:
            self._collect(store, Call())
        except Error as error:
            logger.warning("%s: deleted checkpoints still take space, until collect() or the next open for writing: %s", self.path, error)

    @staticmethod
    def _collect(store: Any, call: Call) -> int:
        done = ffi.new("ckd_collected *")
        call.check(lib.ckd_store_collect(done, store, ffi.NULL, call.err))
        return int(done.bytes)

    # ----------------------------------------------------------------------------------------------------- verify

    def verify(self, *, run: str | None = None, step: int | None = None, quick: bool = False, sample: float = 0.0, seed: int = 0,
               progress: Progress | None = None) -> Verification:
        """Checks every hash, down to the values of all tensors.

        Args:
            run: None: all runs.
            step: with `run`, one checkpoint; None: all of them.
            quick: only structure and checksums of what is stored; nothing is decoded.
            sample: decode about this share of the blocks (0 to 1) and check the rest as `quick` does; 0: all.
            seed: of the sample.
            progress: as for save().

        Returns: what was checked, and the damage; it is true if there is none. Damage is not an error.

        Errors: InvalidError, NotFoundError, CancelledError, InputOutputError.
        """
        if step is not None and run is None:
            raise InvalidError("step needs run: which one is to be verified?")
        call = Call(progress)
        options = ffi.new("ckd_verify_options *")
        options.struct_size = ffi.sizeof("ckd_verify_options")
        name = native_text(run, "run") if run is not None else ffi.NULL
        options.run, options.quick, options.sample, options.seed = name, quick, sample, seed
        options.step, options.one_step = step_number(step) if step is not None else 0, step is not None
        options.on_progress, options.progress_context = lib.pyckd_on_progress, call.handle
        with self._turn():
            found = ffi.gc(ffi.new("ckd_verify_result **"), lib.pyckd_verified_free)
            call.check(lib.ckd_store_verify(found, self._handle, options, call.err))
            return verification_from(found[0])


def store_options(threads: int, lock_timeout: float, label: Any) -> Any:
    """label: handle of the Notices, which must live as long as the store is open."""
    options = ffi.new("ckd_store_options *")
    options.struct_size = ffi.sizeof("ckd_store_options")
    options.threads, options.lock_timeout_ms = threads, max(1, round(lock_timeout * 1000))
    options.on_message, options.on_info, options.message_context = lib.pyckd_on_message, lib.pyckd_on_info, label
    return options


def _close(label: Any, owner: Any) -> None:
    lib.pyckd_store_close(owner)
