"""Checkpoints of DeepSpeed: joins the rank files of ZeRO 1, 2 and 3 to whole tensors.

Each rank has a share of flat buffers, one for each group of parameters. `param_shapes` lists the parameters of a buffer in its order.
ZeRO 1 and 2 cut a buffer into shares; ZeRO 3 cuts each parameter. Buffers are padded at the end, and with `parameter_alignment` after
each parameter. The files stay mapped, and a tensor is joined when it is saved. DeepSpeed need not be installed: the few objects of its
classes in the files are read as dicts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from . import _torch
from ._errors import CorruptError, UnsupportedError
from ._deferred import Deferred
from ._record import join
from ._torch_file import Attributes, read_torch

Shapes = dict[str, tuple[int, ...]]
Cuts = dict[str, list[tuple[int, int, int]]]
"""By parameter: (rank, begin, end) of its parts in the shares of a buffer."""

MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
EXPERTS = re.compile(r"layer_\d+_expert_\d+_|expp_rank_\d+_")
LATEST = "latest"
MASTER = "fp32"  # the name of masters in the states of parameters
CLASSES = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Attributes,
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": Attributes,
}
# Members that only describe the sharding. An import has the names and shapes of whole tensors instead.
OF_MODEL = ("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments")
OF_OPTIMIZER = ("base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups", "param_groups",
                "param_slice_mappings", "partition_count", "group_paddings", "param_alignment_paddings", "ds_version", "ds_config",
                "universal_checkpoint_info")
CONVERT = "convert it with DeepSpeed's ds_to_universal and import what that makes, or see docs/layouts.md"


def is_checkpoint(names: set[str]) -> bool:
    """Are these the names of files of a checkpoint's folder?"""
    return any(MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name) for name in names)


def latest_in(path: Path, names: set[str], needed: bool) -> Path | None:
    """The checkpoint folder that the file `latest` of a folder names; None: there is none. Errors: CorruptError (it is needed and missing)."""
    if LATEST not in names or not (path / LATEST).is_file():
        return None
    with open(path / LATEST, encoding="utf-8", errors="replace") as f:
        tag = f.read(300).strip()
    if tag and Path(tag).name == tag and (path / tag).is_dir():
        return path / tag
    if needed:
        raise CorruptError(f"{path / LATEST} names the folder {tag!r}, which is not there: without that file, what is beside it is imported alone",
                           file=str(path / LATEST))
    return None


# ---------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class _Rank:
    """The part of the optimizer that one data parallel rank has.

    Attributes:
        stage: of ZeRO.
        count: of the ranks that share the buffers.
        masters: its shares, by buffer.
        state: of the optimizer inside, by buffer: shares, and numbers.
        groups: `param_groups`, whose parameters are numbers of buffers.
        paddings: elements after each parameter, by buffer; None: there are none.
        rest: other members, the same on all ranks.
    """

    file: Path
    stage: int
    count: int
    masters: list[Any]
    state: Mapping[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    paddings: list[list[int]] | None
    rest: dict[str, Any]


def rank_files(path: Path, *, parallel: bool = False) -> tuple[dict[tuple[int, int], Path], dict[tuple[int, int], Path]]:
    """Files of models and of optimizers, by model parallel and data parallel rank. Errors: UnsupportedError."""
    models: dict[tuple[int, int], Path] = {}
    optimizers: dict[tuple[int, int], Path] = {}
    for name in sorted(os.listdir(path)):
        if EXPERTS.match(name):
            raise UnsupportedError(f"{path} has experts in files of their own, such as {name}: {CONVERT}", file=str(path / name))
        for pattern, files in ((MODEL, models), (OPTIMIZER, optimizers)):
            found = pattern.fullmatch(name)
            if found is None:
                continue
            rank = int(found["mp"]), int(found["dp"] or 0)
            if rank[0] and not parallel:
                raise UnsupportedError(f"{path} has parts of the model's tensors or layers in each file of a model parallel rank, such as "
                                       f"{name}: {CONVERT}", file=str(path / name))
            if parallel and rank in files and is_of_one_rank(path / name) and not is_of_one_rank(files[rank]):
                continue  # a universal checkpoint for jobs with ZeRO of any stage: the other file has the whole model
            if rank in files:
                raise CorruptError(f"{path} has two files of one rank, {files[rank].name} and {name}: are they of two checkpoints?",
                                   file=str(path / name))
            files[rank] = path / name
    return models, optimizers


def is_of_one_rank(file: Path) -> bool:
    """Is it a model's file with parts of the parameters, as those of ZeRO 3 are?"""
    found = MODEL.fullmatch(file.name)
    return found is not None and found["dp"] is not None


def _read_rank(file: Path, unsafe: bool) -> _Rank:
    whole = read_torch(file, unsafe, CLASSES)
    own = whole.get("optimizer_state_dict") if isinstance(whole, dict) else None
    if not isinstance(own, dict):
        raise CorruptError(f"{file} has no optimizer_state_dict: DeepSpeed's files of optimizers do", file=str(file))
    if own.get("ds_zero_partition_groups") is not None:
        raise UnsupportedError(f"{file} is of experts that groups of ranks share: {CONVERT}", file=str(file))
    stage = int(own.get("zero_stage", 1))
    masters, base = (own.get(key) for key in (("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else
                                              ("single_partition_of_fp32_groups", "base_optimizer_state")))
    counts = own.get("partition_count")
    counts = set(counts) if isinstance(counts, list) else {counts}
    if len(counts) > 1:
        raise UnsupportedError(f"{file} has groups that different numbers of ranks share, {sorted(counts)}: {CONVERT}", file=str(file))
    if isinstance(base, list):  # an "elastic" checkpoint, which leaves out the groups
        base = {"state": dict(enumerate(base)), "param_groups": [{"params": [i]} for i in range(len(base))]}
    count = counts.pop()
    if type(count) is not int or not isinstance(masters, list) or not isinstance(base, dict) or not {"state", "param_groups"} <= base.keys():
        raise CorruptError(f"{file} lacks weights, states or groups of the optimizer, or the number of ranks: was it written by DeepSpeed's "
                           "ZeRO, and not changed since?", file=str(file))
    return _Rank(file, stage, count, masters, base["state"], base["param_groups"], own.get("param_alignment_paddings"),
                 {k: v for k, v in own.items() if k not in OF_OPTIMIZER})


def _read_ranks(path: Path, files: dict[int, Path], unsafe: bool) -> list[_Rank]:
    """All ranks, in order. Errors: CorruptError, if one is missing or is of another checkpoint."""
    ranks = {number: _read_rank(file, unsafe) for number, file in sorted(files.items())}
    first = next(iter(ranks.values()))
    _check_ranks(path, files, first.count, first.file)
    for rank in ranks.values():
        for what, own, others in (("ranks", rank.count, first.count), ("stage of ZeRO", rank.stage, first.stage),
                                  ("buffers", len(rank.masters), len(first.masters))):
            if own != others:
                raise CorruptError(f"{rank.file} and {first.file} are of different checkpoints: {what}: {own} and {others}", file=str(rank.file))
    return [ranks[number] for number in range(first.count)]


def _check_ranks(path: Path, files: dict[int, Path], count: int, told_by: Path) -> None:
    missing = [number for number in range(count) if number not in files]
    if missing:
        there = next(iter(files.values())).name
        name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{missing[0]}", there)
        more = f", and those of {len(missing) - 1} more ranks" if len(missing) > 1 else ""
        raise CorruptError(f"{path / name} is missing{more}: {told_by.name} says that there are {count} ranks", file=str(path / name))
    extra = [number for number in files if number >= count]
    if extra:
        raise CorruptError(f"{path} has files of {len(files)} ranks, but {told_by.name} says that there are {count}: are they of two checkpoints?",
                           file=str(files[extra[0]]))


# -------------------------------------------------------------------------------------------------------- whole tensors


def _cut(stage: int, shapes: Shapes, sizes: list[int], paddings: list[int] | None = None) -> Cuts:
    """Where the parameters of a buffer are. Errors: ValueError, if the shares do not have these sizes."""
    if paddings is not None and len(paddings) != len(shapes):
        raise ValueError(f"paddings of {len(paddings)} parameters, but there are {len(shapes)}")
    found: Cuts = {}
    count, at = len(sizes), 0
    starts = [0, *accumulate(sizes)]
    for (name, shape), padding in zip(shapes.items(), paddings or repeat(0)):
        elements = math.prod(shape)
        if stage == 3:
            share = -(-elements // count)
            found[name] = [(r, at, at + min(share, elements - r * share)) for r in range(count) if elements > r * share]
            at += share
        else:
            found[name] = [(r, max(at, starts[r]) - starts[r], min(at + elements, starts[r + 1]) - starts[r])
                           for r in range(count) if starts[r] < at + elements and at < starts[r + 1]]
            at += elements + padding
    align = 2 * count
    fits = all(size == at for size in sizes) if stage == 3 else starts[-1] >= at and -(-at // align) == -(-starts[-1] // align)
    if not fits:
        raise ValueError(f"{' and '.join(map(str, sorted(set(sizes))))} elements on {count} ranks, but its parameters take {at}")
    return found


def joined(shares: list[Any], cuts: list[tuple[int, int, int]], shape: tuple[int, ...]) -> Deferred:
    """A parameter whose parts are in the shares."""
    torch = _torch.load_torch("")

    def make() -> Any:
        parts = [shares[rank][begin:end] for rank, begin, end in cuts] or [shares[0][:0]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.reshape(shape)

    return Deferred(shape, shares[0].dtype, make)


def rounded(master: Deferred, dtype: Any) -> Deferred:
    """A weight of another dtype, as DeepSpeed makes it from its master when it loads ZeRO 3. The same object if it has the dtype."""
    return master if master.dtype == dtype else Deferred(master.shape, dtype, lambda: master.make().to(dtype))


def _parameters(ranks: list[_Rank], number: int, shapes: Shapes) -> dict[str, dict[str, Any]]:
    """States of the parameters of one buffer, masters among them, by name."""
    first = ranks[0]
    states = [rank.state.get(number, {}) for rank in ranks]
    slots: dict[str, list[Any]] = {MASTER: [rank.masters[number] for rank in ranks]}
    found: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for slot, value in states[0].items():
        values = [state.get(slot) for state in states]
        if _torch.is_tensor(value) and value.dim() > 0:
            slots[slot] = values
            continue
        other = next((rank for rank, one in zip(ranks, values) if one is None or not same(one, value)), None)
        if other is not None:
            raise CorruptError(f"{other.file} and {first.file} are of different checkpoints: {slot} is {other.state.get(number, {}).get(slot)} "
                               f"and {value}", file=str(other.file))
        for name in shapes:
            found[name][slot] = value
    for slot, shares in slots.items():
        if not all(_torch.is_tensor(share) and share.dim() == 1 for share in shares):
            raise UnsupportedError(f"{first.file}: {slot} of buffer {number} is not one flat tensor on each rank, as other states of ZeRO are: "
                                   f"{CONVERT}", file=str(first.file))
        try:
            cuts = _cut(first.stage, shapes, [share.numel() for share in shares], first.paddings[number] if first.paddings else None)
        except ValueError as error:
            raise CorruptError(f"{first.file.parent}: {slot} of buffer {number} has {error}: are the files of one checkpoint?",
                               file=str(first.file)) from error
        for name, shape in shapes.items():
            found[name][slot] = joined(shares, cuts[name], shape)
    return found


def same(a: Any, b: Any) -> bool:
    """Are two values equal, tensors and all?"""
    if _torch.is_tensor(a) or _torch.is_tensor(b):
        return bool(_torch.is_tensor(a) and _torch.is_tensor(b) and a.dtype == b.dtype and a.shape == b.shape and a.equal(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if type(a).__module__ == "numpy":
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


# ------------------------------------------------------------------------------------------------------------ the state


def shapes_of(model: dict[str, Any], file: Path) -> list[Shapes]:
    """Names and shapes of the parameters, by buffer. Errors: UnsupportedError."""
    told = model.get("param_shapes")
    told = [told] if isinstance(told, dict) else told
    if not isinstance(told, list) or not all(isinstance(group, dict) for group in told):
        raise UnsupportedError(f"{file} has no param_shapes, the names and shapes of what is in the optimizer's buffers: {CONVERT}",
                               file=str(file))
    return [{name: tuple(shape) for name, shape in group.items()} for group in told]


def dtype_of(model: dict[str, Any]) -> Any:
    """The dtype in which the model is trained, by the configuration."""
    torch = _torch.load_torch("")
    config = model.get("ds_config")
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        part = config.get(key) if isinstance(config, dict) else None
        if isinstance(part, dict) and part.get("enabled") is True:
            return dtype
    return torch.float32


def weights(model: dict[str, Any], states: dict[str, dict[str, Any]], *, cut: bool) -> dict[str, Any]:
    """The model's tensors in their order. cut: its file has no weights, so they are made from their masters."""
    found: dict[str, Any] = dict(model.get("module") or {})
    for name, state in states.items():
        there: Any = found.get(name)
        master = state[MASTER]
        if cut or there is None:
            # DeepSpeed leaves an empty tensor of the weight's dtype.
            found[name] = rounded(master, there.dtype if _torch.is_tensor(there) else dtype_of(model))
        elif there.dtype == master.dtype and tuple(there.shape) == master.shape and there.equal(master.make()):
            state[MASTER] = there  # stored once
    for alias, name in (model.get("shared_params") or {}).items():
        if name in found:
            found[alias] = found[name]
    return found


def buffers(state: dict[str, Any]) -> set[str]:
    """Paths of the model's buffers in a state."""
    return {join("module", name) for name in state.get("buffer_names") or ()}


def groups_of(groups: list[dict[str, Any]], shapes: list[Shapes], file: Path) -> list[dict[str, Any]]:
    """`param_groups` with names of parameters in place of numbers of buffers."""
    numbers = [number for group in groups for number in group.get("params", [])]
    if sorted(numbers) != list(range(len(shapes))):
        raise CorruptError(f"{file} has groups of the buffers {numbers}, but there are {len(shapes)} of them", file=str(file))
    return [{**group, "params": [name for number in group["params"] for name in shapes[number]]} for group in groups]


def read_ranks(path: Path, unsafe: bool = False) -> dict[str, Any]:
    """The content of a checkpoint's rank files: `module`, `optimizer` with states by name, and everything else that rank 0 wrote.

    Errors: CorruptError (a file is missing, cut off, or of another checkpoint); UnsupportedError.
    """
    model_files, optimizer_files = ({rank: file for (_, rank), file in files.items()} for files in rank_files(path))
    if 0 not in model_files:
        raise CorruptError(f"{path} has no file mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt, which says what is in "
                           "the others", file=str(path))
    model = read_model(model_files[0], unsafe)
    rest = {key: value for key, value in model.items() if key not in OF_MODEL}
    if not optimizer_files:
        if model.get("param_shapes") is not None:
            raise CorruptError(f"{path} has no file zero_pp_rank_0_mp_rank_00_optim_states.pt nor one of another rank", file=str(path))
        return {"module": model["module"], "optimizer": model.get("optimizer"), **rest}
    ranks = _read_ranks(path, optimizer_files, unsafe)
    shapes = shapes_of(model, model_files[0])
    if len(shapes) != len(ranks[0].masters):
        raise CorruptError(f"{ranks[0].file} has {len(ranks[0].masters)} buffers, but {model_files[0].name} has the shapes of {len(shapes)}",
                           file=str(ranks[0].file))
    states: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(shapes):
        states.update(_parameters(ranks, number, group))
    cut = ranks[0].stage == 3
    if cut:
        rest.update(other_ranks(path, model_files, model, unsafe))
    module = weights(model, states, cut=cut)
    return {"module": module, "optimizer": {"state": states, "param_groups": groups_of(ranks[0].groups, shapes, ranks[0].file), **ranks[0].rest},
            **rest}


def read_model(file: Path, unsafe: bool, *, pipeline: bool = False) -> dict[str, Any]:
    model = read_torch(file, unsafe, CLASSES)
    if not isinstance(model, dict) or "module" not in model:
        raise CorruptError(f"{file} has no module: DeepSpeed's files of models do", file=str(file))
    if model["module"] is None and not pipeline:
        raise UnsupportedError(f"{file} is of a pipeline, which has the weights of each layer in a file of its own: {CONVERT}", file=str(file))
    return dict(model)


def other_ranks(path: Path, files: dict[int, Path], model: dict[str, Any], unsafe: bool) -> dict[str, Any]:
    """Puts frozen parameters of ZeRO 3 into the model. Returns values of other ranks that differ from rank 0's, such as random states."""
    count = model.get("dp_world_size")
    _check_ranks(path, files, count if type(count) is int else len(files), files[0])
    models = [model, *(read_model(files[rank], unsafe) for rank in range(1, len(files)))]
    shapes: Mapping[str, Any] = model.get("frozen_param_shapes") or {}
    module = model["module"] = dict(model["module"])
    for name, shape in shapes.items():
        shares: list[Any] = [(one.get("frozen_param_fragments") or {}).get(name) for one in models]
        try:
            sizes = [share.numel() for share in shares]
            cuts = _cut(3, {name: tuple(shape)}, sizes)
        except (ValueError, AttributeError) as error:
            raise CorruptError(f"{path}: the frozen parameter {name} does not have the same share on all ranks: {error}", file=str(path)) from error
        module[name] = joined(shares, cuts[name], tuple(shape))
    # Only rank 0 writes shared_params.
    told = set(OF_MODEL) | {"shared_params"}
    differing = {str(rank): {k: v for k, v in other.items() if k not in told and not (k in model and same(v, model[k]))}
                 for rank, other in enumerate(models) if rank}
    differing = {rank: own for rank, own in differing.items() if own}
    return {"ranks": differing} if differing else {}
