"""Markers: small text files where Lightning expects checkpoints. Each says which checkpoint of a store it stands for.

Lightning asks the file system whether a checkpoint exists, how old it is, and which file is the last one, and it makes symbolic
links to checkpoints. A marker works for all of these. Several markers may stand for one checkpoint, such as last.ckpt
and epoch=0-step=50.ckpt. Each marker then has the differences of its record, because Lightning records a checkpoint's path in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._errors import CorruptError, InvalidError, NotFoundError, UnsupportedError

FIRST = "ckptdelta marker 1\n"
TEXT = FIRST + """
This file stands for a checkpoint of PyTorch Lightning that is in a store of ckptdelta.
ckptdelta.lightning.CheckpointIO reads it when its path is passed as ckpt_path; ckptdelta.lightning.load_checkpoint() reads it
without a Trainer. Whoever deletes it by hand leaves the checkpoint in the store.

"""
_UNFINISHED = re.compile(r"\..*\.new-\d+")  # a marker whose writer was killed
MEMBERS = {"store": str, "run": str, "step": int, "id": str, "changes": list}


@dataclass(frozen=True)
class Marker:
    """The content of a marker.

    Attributes:
        store: absolute path of the store.
        run, step, id: of the checkpoint. The id finds it even if its run was renamed.
        changes: differences from the checkpoint's own record.
    """

    store: str
    run: str
    step: int
    id: str
    changes: list[list[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"

    def write(self, path: Path) -> None:
        """Makes or replaces the file atomically and durably. Errors: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{name}: {json.dumps(getattr(self, name), separators=(',', ':'))}\n" for name in MEMBERS)
        new = path.with_name(f".{path.name}.new-{os.getpid()}")
        try:
            with open(new, "w", encoding="ascii") as f:
                f.write(TEXT + "".join(lines))
                f.flush()
                os.fsync(f.fileno())
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def path_of(path: str | os.PathLike[str]) -> Path:
    """Errors: UnsupportedError (a path that is not in the local file system)."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise UnsupportedError(f"{text} is not in the local file system: the marker of a checkpoint must be, such as with "
                               "ModelCheckpoint(dirpath=...). The store itself is where CheckpointIO was told to put it", file=text)
    return Path(os.path.abspath(text))  # the working folder may be another one when a marker is looked for


def read_marker(path: Path) -> Marker | None:
    """The marker at a path; None if something else is there. Errors: NotFoundError, CorruptError, OSError."""
    try:
        with open(path, "rb") as f:
            if f.read(len(FIRST)) != FIRST.encode():
                return None
            text = f.read().decode("ascii")
    except IsADirectoryError:
        return None
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such checkpoint", file=str(path)) from None
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is a damaged marker: {error}", file=str(path)) from None
    try:
        members = {name: json.loads(value) for name, value in re.findall(r"^(\w+): (.*)$", text, re.MULTILINE) if name in MEMBERS}
        if any(type(members[name]) is not kind for name, kind in MEMBERS.items()):
            raise ValueError("a member is of the wrong type")
        return Marker(**members)
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is a damaged marker ({error!r:.100}): load the checkpoint as RUN@STEP", file=str(path)) from None


def is_marked(checkpoint_id: str, folders: Iterable[Path]) -> bool:
    """Does any file in these folders stand for the checkpoint? A marker that cannot be read might, so it counts as yes."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(folder):
                if not entry.is_file(follow_symlinks=False) or _UNFINISHED.fullmatch(entry.name):
                    continue
                try:
                    marker = read_marker(Path(entry.path))
                except NotFoundError:
                    continue
                except (CorruptError, OSError):
                    return True
                if marker is not None and marker.id == checkpoint_id:
                    return True
    return False


def folders_of(checkpoint: Any) -> set[Path]:
    """The folders where the callbacks of a checkpoint save. A file name with a slash, such as that of a metric, makes subfolders."""
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    found = set()
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict):
            with contextlib.suppress(UnsupportedError):
                folder = state.get("dirpath")
                if isinstance(folder, (str, os.PathLike)) and os.fspath(folder):
                    found |= {Path(at) for at, _, _ in os.walk(path_of(folder))} | {path_of(folder)}
                paths = [state.get(name) for name in ("best_model_path", "last_model_path", "kth_best_model_path")]
                best = state.get("best_k_models")
                paths += best if isinstance(best, dict) else ()
                found |= {path_of(path).parent for path in paths if isinstance(path, (str, os.PathLike)) and os.fspath(path)}
    return found


def check_free(path: Path) -> None:
    """Refuses to replace a folder with a marker. Errors: InvalidError."""
    if path.is_dir():
        raise InvalidError(f"{path} is a folder: a checkpoint needs another path", path=str(path))
