"""Checkpoints of other libraries: files of torch.save() and safetensors; folders of transformers, torch.distributed.checkpoint, DeepSpeed
and Megatron.

A form is recognised by content, not by the names of files. Objects that need code to be restored are read only if the caller allows it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import _deepspeed, _deepspeed_universal, _megatron, _shards, _torch
from ._call import logger
from ._errors import CorruptError, InvalidError, NotFoundError, UnsupportedError
from ._torch_file import Attributes, allowed_globals, plain, read_torch

STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "iter_num", "iter", "num_updates")
METADATA_FILE = ".metadata"  # of torch.distributed.checkpoint
TRAINER_STATE = "trainer_state.json"
TRAINER_PARTS = {"optimizer.pt": "optimizer", "optimizer.bin": "optimizer", "scheduler.pt": "scheduler", "scaler.pt": "scaler"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
BESIDE = {TRAINER_STATE, "config.json", "adapter_config.json"}
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
METADATA_CLASSES = {("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path"),
                    ("collections", "OrderedDict"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


@dataclass(frozen=True)
class Foreign:
    """A checkpoint that another library wrote.

    Attributes:
        path: its file or folder.
        form: its name for people.
        read: returns its state. With True it may also restore objects that need code.
        ordered: are the tensors of a state in the order in which the model has its parameters?
        buffers: which tensors of a state are buffers, by path.
        is_extra: it is beside other checkpoints, and may be the same as one of them.
        is_whole: folders inside it are parts of it, not checkpoints of their own.
    """

    path: Path
    form: str
    read: Callable[[bool], Any]
    ordered: Callable[[Any], bool]
    buffers: Callable[[Any], set[str]] = lambda state: set()
    is_extra: bool = False
    is_whole: bool = False


def recognise(path: str | os.PathLike[str]) -> Foreign:
    """Recognises a file or folder. Errors: NotFoundError; UnsupportedError, which says what it is and what can read it."""
    found = Path(path)
    if found.is_dir():
        return _folder(found)
    if not found.exists():
        raise NotFoundError(f"{found}: there is no such file or folder", file=str(found))
    if not found.is_file():
        raise UnsupportedError(f"{found} is neither a regular file nor a folder", file=str(found))
    return _file(found)


def find_all(path: str | os.PathLike[str]) -> tuple[list[Foreign], bool]:
    """(the checkpoint at a path, False), or (the checkpoints of a folder, by the last number in their names, True).

    Errors: as for recognise().
    """
    folder = Path(path)
    try:
        itself = recognise(folder)
    except UnsupportedError as error:
        found = _members(folder) if folder.is_dir() else []
        if not found:
            raise error
        return found, True
    if itself.is_whole:
        return [itself], False
    # A Trainer may leave the last model beside the folders of its checkpoints.
    found = [one for one in _members(folder) if one.path.is_dir()] if folder.is_dir() else []
    return ([*found, replace(itself, is_extra=True)], True) if found else ([itself], False)


def _members(folder: Path) -> list[Foreign]:
    found = []
    for child in sorted(folder.iterdir(), key=lambda p: (number_in(p.name) is None, number_in(p.name) or 0, p.name)):
        with contextlib.suppress(UnsupportedError):
            found.append(recognise(child))
    return found


def number_in(name: str) -> int | None:
    """The last number in a file's name: ``checkpoint-500``, ``epoch=3-step=1200.ckpt``."""
    numbers = re.findall(r"\d+", re.sub(r"\.(pt|pth|bin|ckpt|safetensors)$", "", name))
    return int(numbers[-1]) if numbers else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(path) for name in names)


def step_of(state: Any, one: Foreign) -> int | None:
    """The step that a state records, else the number in its name; None for an extra one that records none. Errors: InvalidError."""
    places = [state.get("trainer_state"), state] if isinstance(state, dict) else []
    for key, place in ((key, place) for place in places if isinstance(place, dict) for key in STEP_KEYS):
        value: Any = place.get(key)
        value = value.item() if _torch.is_tensor(value) and value.dim() == 0 else value
        if type(value) is int and value >= 0:
            return value
    if one.is_extra:  # the number in the name of an output folder is no step
        logger.warning("%s: the model beside the checkpoints is left out: it does not say which step it is", one.path)
        return None
    number = number_in(one.path.name)
    if number is None:
        raise InvalidError(f"{one.path} does not say which step it is: pass step=N (--step)", path="step")
    return number


# ---------------------------------------------------------------------------------------------------------- what it is


def _file(path: Path) -> Foreign:
    with open(path, "rb") as f:
        head = f.read(9)
    if path.suffix == ".distcp":
        raise UnsupportedError(f"{path} is one rank's file of torch.distributed.checkpoint: import its folder", file=str(path))
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return Foreign(path, "torch.save", lambda unsafe: read_torch(path, unsafe), lambda state: True)
    if len(head) == 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return Foreign(path, "safetensors", lambda unsafe: read_safetensors(path), lambda state: False)
    raise UnsupportedError(f"{path} is neither a file of torch.save() nor of safetensors", file=str(path))


def _folder(path: Path) -> Foreign:
    names = set(os.listdir(path))
    if METADATA_FILE in names:
        if _megatron.COMMON in names:
            return Foreign(path, "Megatron", lambda unsafe: _megatron.merged(read_dcp(path, unsafe), path, unsafe), lambda state: False)
        return Foreign(path, "torch.distributed.checkpoint", lambda unsafe: read_dcp(path, unsafe), lambda state: False)
    inside = _deepspeed.latest_in(path, names, needed=bool(names & BESIDE))
    if _deepspeed.is_checkpoint(names):
        return _of_deepspeed(path, path)
    # A folder to which DeepSpeed saved has `latest` as well, and several checkpoints of their own.
    if inside is not None and _deepspeed.is_checkpoint(set(os.listdir(inside))) and (names & BESIDE or not inside.name.startswith("global_step")):
        return _of_deepspeed(path, inside)
    shards = _shards.shard_names(path)
    if shards:
        return Foreign(path, "shards of torch.distributed.checkpoint", lambda unsafe: _of_shards(path, shards, unsafe), lambda state: False)
    if names & {*WEIGHTS, *INDEXES}:
        return Foreign(path, "transformers", lambda unsafe: read_trainer(path, unsafe), lambda state: order_as_model(path, state))
    raise UnsupportedError(f"{path} is not a checkpoint of transformers, DeepSpeed or torch.distributed.checkpoint: it has none of {METADATA_FILE}, "
                           f"*_model_states.pt, {', '.join((*WEIGHTS, *INDEXES))}", file=str(path))


def _of_shards(path: Path, shards: set[str], unsafe: bool) -> dict[str, Any]:
    return {"model": _shards.read_shards(path, shards), **read_trainer(path, unsafe, without=shards)}


def _of_deepspeed(path: Path, inside: Path) -> Foreign:
    """A folder of ranks' files, or one of a Trainer with such a folder inside."""
    universal = (inside / _deepspeed_universal.PARAMETERS).is_dir()
    read = _deepspeed_universal.read if universal else _deepspeed.read_ranks

    def both(unsafe: bool) -> dict[str, Any]:
        beside = {} if inside == path else read_trainer(path, unsafe, without=set())
        return {**beside, **read(inside, unsafe)}

    return Foreign(path, "DeepSpeed universal" if universal else "DeepSpeed", both, lambda state: False, _deepspeed.buffers, is_whole=True)


# ------------------------------------------------------------------------------------------------------------- readers


def read_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UnsupportedError(f"{path} needs the package safetensors: pip install safetensors", file=str(path)) from None
    try:
        return dict(load_file(path))
    except Exception as error:  # its errors have no class of their own in all versions
        raise CorruptError(f"{path} cannot be read: {error}", file=str(path)) from error


def _weights(path: Path) -> Callable[[Path, bool], dict[str, Any]]:
    return (lambda p, unsafe: read_safetensors(p)) if path.suffix == ".safetensors" else read_torch


def _weight_files(path: Path) -> tuple[list[Path], set[str]]:
    """(files of weights, names of these and of their indexes) of a folder of transformers."""
    taken: set[str] = set()
    found: list[Path] = []
    for index in INDEXES:
        if (path / index).is_file():
            shards = sorted(set(json.loads((path / index).read_text())["weight_map"].values()))
            for shard in shards:
                if Path(shard).name != shard:
                    raise CorruptError(f"{path / index} names a file outside the folder: {shard}", file=str(path / index))
                found.append(path / shard)
            taken |= {index, *shards}
    for name in WEIGHTS:
        if not found and (path / name).is_file():
            found.append(path / name)
            taken.add(name)
    return found, taken


def read_trainer(path: Path, unsafe: bool = False, without: set[str] | None = None) -> dict[str, Any]:
    """A folder of transformers: the model, and the members that its Trainer needs to resume. Other files are arrays of bytes.

    Args:
        without: names of files that are read elsewhere, as are the weights then.
    """
    torch = _torch.load_torch(str(path))
    files, taken = _weight_files(path)
    taken |= without or set()
    state: dict[str, Any] = {"model": {}} if without is None else {}
    for file in files if without is None else ():
        state["model"].update(_weights(file)(file, unsafe))
    for name, part in TRAINER_PARTS.items():
        if (path / name).is_file():
            state[part] = read_torch(path / name, unsafe)
            taken.add(name)
    for file in sorted(path.glob("rng_state*.pth")):
        state[file.stem] = read_torch(file, unsafe)
        taken.add(file.name)
    if (path / TRAINER_STATE).is_file():
        state["trainer_state"] = json.loads((path / TRAINER_STATE).read_text())
        taken.add(TRAINER_STATE)
    state["files"] = {f.name: torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) if f.stat().st_size else b""
                      for f in sorted(path.iterdir()) if f.is_file() and f.name not in taken}
    return state


def order_as_model(path: Path, state: dict[str, Any]) -> bool:
    """Puts the weights of a folder of transformers, which safetensors sorts by name, in the model's order. Returns whether that is known."""
    if "optimizer" not in state:
        return False
    torch = _torch.load_torch(str(path))
    try:
        import transformers
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            known = list(getattr(transformers, config.architectures[0])(config).state_dict())
    except Exception as error:  # no transformers, or a model that it does not know, which it reports in many ways
        logger.info("%s: the order of its parameters is not known, so the optimizer's states keep their numbers: %s", path, error)
        return False
    weights = state["model"]
    state["model"] = {name: weights[name] for name in known if name in weights}
    missing = [name for name in weights if name not in state["model"]]
    state["model"].update({name: weights[name] for name in missing})
    return not missing


# ------------------------------------------------------------------------------------------ torch.distributed.checkpoint


class _Metadata(pickle.Unpickler):
    """Restores only the classes that the metadata of torch.distributed.checkpoint consists of."""

    def find_class(self, module: str, name: str) -> Any:
        torch = _torch.load_torch("")
        if module.startswith("megatron."):
            return Attributes  # only in the plans of the save, which no load needs
        allowed = (module, name) in METADATA_CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)) or \
            (module in METADATA_MODULES and re.fullmatch(r"_?[A-Z]\w*", name) is not None)
        if not allowed:
            raise pickle.UnpicklingError(f"its metadata has a {module}.{name}")
        return super().find_class(module, name)


def read_dcp(path: Path, unsafe: bool = False) -> Any:
    """A folder of torch.distributed.checkpoint, with whole tensors."""
    torch = _torch.load_torch(str(path))
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            with allowed_globals(torch):
                loaded = torch.load(value, weights_only=not unsafe, map_location="cpu")
            name = read_item.dest_index.fqn
            self.state_dict[name] = loaded
            if self.flatten_state_dict:
                dcp._nested_dict.set_element(self.original_state_dict, self.mappings[name], loaded)

    state: dict[str, Any] = {}
    try:
        with open(path / METADATA_FILE, "rb") as f:
            metadata = (pickle.Unpickler if unsafe else _Metadata)(f).load()
        if not isinstance(metadata, dcp.metadata.Metadata):
            raise pickle.UnpicklingError(f"its metadata is a {type(metadata).__name__}")
        _load_state_dict(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, dcp.api.CheckpointException) as error:
        inner = "; ".join(str(failure[0]) for failure in getattr(error, "failures", {}).values()) or str(error)
        if not unsafe and ("weights_only" in inner.lower() or isinstance(error, pickle.UnpicklingError)):
            raise UnsupportedError(f"{path} holds objects that only pickle can restore, and that runs code from its files ({inner[:200]}): "
                                   "allow it with pickle=True (--pickle) if you trust whoever wrote it", file=str(path)) from error
        raise CorruptError(f"{path} cannot be read by torch.distributed.checkpoint: {inner[:300]}", file=str(path)) from error
    return plain(state)
