"""DeepSpeed's universal checkpoints: each state of each parameter is a file, `zero/PARAMETER/exp_avg.pt`, beside the model files of the ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from . import _torch
from ._deepspeed import (CLASSES, MASTER, OF_MODEL, OF_OPTIMIZER, Shapes, groups_of, is_of_one_rank, other_ranks, rank_files, read_model, shapes_of,
                         weights)
from ._errors import CorruptError, UnsupportedError
from ._deferred import Deferred
from ._torch_file import read_torch

PARAMETERS = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
TENSOR = "param"  # in a parameter's file; files of ZeRO 3 are a flat tensor alone


def read(path: Path, unsafe: bool = False) -> dict[str, Any]:
    """The content of a universal checkpoint, in the same form as that of rank files: see _deepspeed.read_ranks().

    Errors: CorruptError, UnsupportedError.
    """
    files = rank_files(path, parallel=True)[0]
    if (0, 0) not in files:
        raise CorruptError(f"{path} has no file mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt, which says what is in "
                           "the others", file=str(path))
    parts = [read_model(files[rank], unsafe, pipeline=True) for rank in sorted(files) if rank[1] == 0]
    model = parts[0]
    shapes = _all_shapes(parts, files[0, 0])
    file = path / PARAMETERS / OPTIMIZER_STATE
    optimizer = read_torch(file, unsafe, CLASSES)
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("param_groups"), list):
        raise CorruptError(f"{file} has no param_groups: DeepSpeed's universal checkpoints do", file=str(file))
    states, more = _states(path / PARAMETERS, shapes, optimizer, unsafe)
    _check_unknown(path / PARAMETERS, set(states).union(*(part["module"] or () for part in parts)))
    rest = {key: value for key, value in model.items() if key not in OF_MODEL}
    cut = is_of_one_rank(files[0, 0])
    if len(parts) > 1 or model["module"] is None:
        model, cut = _buffers_only(model, states, files[0, 0]), True
    elif cut:
        rest.update(other_ranks(path, {rank: one for (_, rank), one in files.items()}, model, unsafe))
    module = weights(model, states, cut=cut)
    own = {key: value for key, value in optimizer.items() if key not in OF_OPTIMIZER}
    return {"module": module, "optimizer": {"state": states, "param_groups": groups_of(optimizer["param_groups"], shapes, file), **own, **more},
            **rest}


def _all_shapes(parts: list[dict[str, Any]], file: Path) -> list[Shapes]:
    """Names of parameters by buffer. Shapes are those of a tensor parallel rank. Each stage of a pipeline has parameters of its own."""
    told = [shapes_of(part, file) for part in parts]
    if len({len(shapes) for shapes in told}) > 1:
        raise CorruptError(f"{file.parent}: the files of models do not have the same groups of parameters", file=str(file))
    return [{name: shape for shapes in told for name, shape in shapes[number].items()} for number in range(len(told[0]))]


def _states(folder: Path, shapes: list[Shapes], optimizer: dict[str, Any], unsafe: bool) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(states of parameters by name, other members of the files, which say how tensor parallel ranks cut a parameter)."""
    inner = optimizer.get("optimizer_state_dict")  # of ZeRO 3, with the numbers that no parameter's file has
    numbers = inner.get("state", {}) if isinstance(inner, dict) else {}
    found: dict[str, dict[str, Any]] = {}
    told: dict[str, Any] = {}
    for number, group in enumerate(shapes):
        scalars = {slot: value for slot, value in numbers.get(number, {}).items() if not _torch.is_tensor(value) or value.dim() == 0}
        files = {name: sorted((folder / name).glob("*.pt")) for name in group}
        _check_files(folder, files)
        for name, shape in group.items():
            found[name] = dict(scalars)
            for file in files[name]:
                found[name][file.stem], more = _state(file, shape, unsafe)
                if more and more != {"cat_dim": 0}:
                    told[name] = more
    return found, {"universal": told} if told else {}


def _check_files(folder: Path, files: dict[str, list[Path]]) -> None:
    """All parameters of a buffer have the same states, except those without gradients, which have only a master."""
    wanted = {MASTER}.union(*({file.name.removesuffix(".pt") for file in own} for own in files.values()))
    for name, own in files.items():
        there = {file.name.removesuffix(".pt") for file in own}
        missing = sorted(wanted - there)
        if missing and there != {MASTER}:
            file = folder / name / f"{missing[-1]}.pt"
            raise CorruptError(f"{file} is missing", file=str(file))


def _check_unknown(folder: Path, known: set[str]) -> None:
    """Refuses folders of unknown parameters. The model's buffers and frozen parameters may have folders as well."""
    unknown = sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name not in known)
    if unknown:
        raise CorruptError(f"{folder / unknown[0]} is of a parameter that no file of a model names", file=str(folder / unknown[0]))


def _state(file: Path, shape: tuple[int, ...], unsafe: bool) -> tuple[Any, dict[str, Any]]:
    """(a number, or a tensor that is read when it is saved; the other members of its file)."""
    value = read_torch(file, unsafe, CLASSES)
    more = {key: one for key, one in value.items() if key != TENSOR} if isinstance(value, dict) else {}
    tensor: Any = value.get(TENSOR) if isinstance(value, dict) else value
    if not _torch.is_tensor(tensor):
        if isinstance(value, dict):
            raise CorruptError(f"{file} has no tensor {TENSOR}", file=str(file))
        return value, {}
    if not isinstance(value, dict) and tensor.dim() > 0:
        if tensor.numel() != math.prod(shape):
            raise CorruptError(f"{file} has {tensor.numel()} elements, but the parameter has the shape {shape}", file=str(file))
    else:
        shape = tuple(tensor.shape)
    if tensor.dim() == 0:
        return tensor, more

    def make() -> Any:
        again = read_torch(file, unsafe, CLASSES)
        return (again[TENSOR] if isinstance(again, dict) else again).reshape(shape)

    return Deferred(shape, tensor.dtype, make), more


def _buffers_only(model: dict[str, Any], states: dict[str, Any], file: Path) -> dict[str, Any]:
    """A model parallel rank's model without its weights, which are only parts. Errors: UnsupportedError (a weight that no state has)."""
    module, buffers = model["module"] or {}, set(model.get("buffer_names") or ())
    aliases = set(model.get("shared_params") or ())
    frozen = [name for name, value in module.items() if _torch.is_tensor(value) and name not in states and name not in buffers | aliases]
    if frozen:
        raise UnsupportedError(f"{file} has a part of {frozen[0]}, a frozen parameter of model parallel ranks, which universal checkpoints do not "
                               f"have: see docs/layouts.md", file=str(file))
    return {**model, "module": {name: value for name, value in module.items() if name not in states and name not in aliases}}
