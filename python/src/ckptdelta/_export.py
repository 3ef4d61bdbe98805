"""States as files of torch.save(), and folders of transformers, torch.distributed.checkpoint and DeepSpeed."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _deepspeed_export, _torch
from ._errors import ExistsError, InvalidError, UnsupportedError
from ._foreign import TRAINER_PARTS, TRAINER_STATE
from ._record import Node, members, tag_of

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
PARTS = {part: name for name, part in reversed(TRAINER_PARTS.items())}


def form_of(path: Path, state: Any) -> str:
    """The form that a path and a state suggest."""
    if path.suffix in SUFFIXES:
        return "torch"
    has_config = isinstance(state, dict) and isinstance(state.get("files"), dict) and "config.json" in state["files"]
    return "transformers" if has_config else "dcp"


def write(path: Path, form: str, state: Any) -> None:
    """Writes a state. The file or folder is complete and durable, or does not exist.

    Errors: InvalidError (no such form; the state does not fit), ExistsError, UnsupportedError (a package is not installed), OSError.
    """
    writers: dict[str, Callable[[Path, Any], None]] = {"torch": _write_torch, "transformers": _write_transformers, "dcp": _write_dcp,
                                                     "deepspeed": _deepspeed_export.write}
    if form not in writers:
        raise InvalidError(f"form is one of {', '.join(writers)}, not {form!r}", path="form")
    write_whole(path, lambda part: writers[form](part, state))


# ------------------------------------------------------------------------------------------------------ names of states


def optimizers_by_name(state: Any, root: Node) -> Any:
    """A state whose optimizers have names of parameters in place of numbers, where these are known. Dicts and lists are changed in place.

    A name is the one within its model, as DCP's state dicts have it.

    Args:
        root: the node that the state was built from.
    """
    return _by_name(state, root, state)


def _by_name(value: Any, node: Node, state: Any) -> Any:
    tag = tag_of(node)
    if tag == "optimizer":
        return _named(value, node["optimizer"], state)
    pairs = enumerate(node) if isinstance(node, list) else members(node) or ()
    for key, child in pairs:
        value[key] = _by_name(value[key], child, state)
    return value


def _named(value: dict[str, Any], content: Node, state: Any) -> dict[str, Any]:
    known = [name for group in content["names"] for name in group]
    if None in known or not all(type(one) is int for group in content["ids"] for one in group):
        return value
    short = {name: _within_model(name, state) or name for name in known}
    if len(set(short.values())) < len(short):  # parameters of two models
        short = {name: name for name in known}
    names = [[short[name] for name in group] for group in content["names"]]
    by_id = {one: name for ids, group in zip(content["ids"], names) for one, name in zip(ids, group)}
    return {**value, "state": {by_id[one]: slots for one, slots in value["state"].items()},
            "param_groups": [{**group, "params": own} for group, own in zip(value["param_groups"], names)]}


def _within_model(name: str, state: Any) -> str | None:
    """The key of a tensor in the dict of the state that has it; None: the state has no such path."""
    if isinstance(state, dict) and name in state:
        return name
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    inner = (_within_model(name[len(f"{key}."):], child) for key, child in pairs if name.startswith(f"{key}."))
    return next((found for found in inner if found is not None), None)


# ------------------------------------------------------------------------------------------------------------- writers


def write_whole(path: Path, writer: Callable[[Path], None]) -> None:
    """Calls a function to write a file or folder, which is then complete and durable, or does not exist. Errors: ExistsError, OSError."""
    if os.path.lexists(path):
        raise ExistsError(f"{path} exists already", file=str(path))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        writer(part)
        _sync(part)
        if os.path.lexists(path):
            raise ExistsError(f"{path} exists already", file=str(path))
        os.rename(part, path)
        _sync_one(path.parent)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            _sync_one(Path(folder) / name)
        _sync_one(Path(folder))
    if not path.is_dir():
        _sync_one(path)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_torch(path: Path, state: Any) -> None:
    _torch.load_torch("").save(state, path)


def _write_dcp(path: Path, state: Any) -> None:
    if not isinstance(state, dict):
        raise InvalidError(f"torch.distributed.checkpoint stores dicts, and the state is a {type(state).__name__}")
    import torch.distributed.checkpoint as dcp
    with warnings.catch_warnings():  # of DCP, that there are no other ranks
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _write_transformers(path: Path, state: Any) -> None:
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not model or not all(_torch.is_tensor(t) for t in model.values()):
        raise InvalidError("a folder of transformers needs the tensors of the model in the state's member model", path="model")
    path.mkdir()
    write_files(path, state.get("files", {}))
    _write_weights(path / "model.safetensors", model)
    for part, value in state.items():
        if part in PARTS:
            _write_torch(path / PARTS[part], value)
        elif isinstance(part, str) and part.startswith("rng_state") and Path(part).name == part:
            _write_torch(path / f"{part}.pth", value)
        elif part == "trainer_state":
            (path / TRAINER_STATE).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Writes the member files of an imported folder. Errors: InvalidError (a name that leads out of the folder)."""
    for name, content in files.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise InvalidError(f"files has the name {name!r}, which would lie outside the folder", path="files")
        (folder / name).write_bytes(bytes(content.numpy() if _torch.is_tensor(content) else content))


def _write_weights(path: Path, model: dict[str, Any]) -> None:
    """Writes tied weights once, under their first name, as transformers does; transformers ties them again when it loads."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UnsupportedError("a folder of transformers needs the package safetensors: pip install safetensors") from None
    seen: set[Any] = set()
    weights = {}
    for name, tensor in model.items():
        key = _torch.key_of(tensor)
        if key is None or key not in seen:
            seen.add(key)
            weights[name] = tensor.contiguous()
    save_file(weights, path, metadata={"format": "pt"})
