"""The model of a checkpoint as a folder that from_pretrained() of transformers reads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import _torch
from ._errors import InvalidError, MismatchError, NotFoundError, UnsupportedError
from ._export import write_files

FILES, CONFIG = "files", "config.json"
NOT_OF_THE_MODEL = ("training_args.bin",)  # pickled, and of no use to from_pretrained()
SHOWN = 3


def weights_in(state: Any, member: str, where: object) -> dict[str, Any]:
    """The weights by the model's names. Errors: NotFoundError."""
    found = state
    for key in member.split(".") if member else ():
        found = found.get(key) if isinstance(found, dict) else None
    if found is None and isinstance(state, dict):  # a checkpoint without a record: its tensors are named by paths
        found = {name.removeprefix(f"{member}."): tensor for name, tensor in state.items() if name.startswith(f"{member}.")}
    if not isinstance(found, dict) or not found or not all(_torch.is_tensor(t) for t in found.values()):
        raise NotFoundError(f"{where} has no weights of a model in its member {member!r}: pass member='PATH' of the model in the state", path=member)
    return found


def write_pretrained(path: Path, *, weights: dict[str, Any], files: dict[str, Any], like: Any, max_shard_size: int | str | None) -> None:
    """Makes the folder. Errors: InvalidError, MismatchError, UnsupportedError, OSError."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError("a folder for from_pretrained() is written by the package transformers: pip install transformers") from None
    model = _empty_model(transformers, like, files)
    _check(model, weights)
    path.mkdir()
    write_files(path, {name: content for name, content in files.items() if name not in NOT_OF_THE_MODEL})
    dtype = next((t.dtype for t in weights.values() if t.is_floating_point()), None)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with _quiet(transformers):
        try:
            (model if dtype is None else model.to(dtype)).save_pretrained(path, state_dict=dict(weights), **options)
        except ValueError as error:  # such as a generation config that contradicts itself, or a size that is none
            raise InvalidError(f"transformers cannot write the model: {error}") from error


def _empty_model(transformers: Any, like: Any, files: dict[str, Any]) -> Any:
    """A model on the meta device, which gives the names of weights, the ties between them, and the configuration."""
    kind: Any
    if _torch.is_module(like):
        model = _torch.unwrapped(like)
        if not isinstance(model, transformers.PreTrainedModel):
            raise UnsupportedError(f"a {type(model).__name__} is not a model of transformers, whose folders from_pretrained() reads", path="like")
        kind, config = type(model), model.config
        generation = getattr(model, "generation_config", None)
    else:
        config, generation = _config(transformers, like, files), None
        names = getattr(config, "architectures", None) or []
        kind = getattr(transformers, names[0], None) if names else None
        if kind is None:
            raise UnsupportedError(f"the configuration names {f'the model {names[0]}, which transformers does not have' if names else 'no model'}: "
                                   "pass the model (like=model)", path="like")
    with _torch.load_torch("").device("meta"):
        model = kind(copy.deepcopy(config))
    if generation is not None:
        model.generation_config = copy.deepcopy(generation)
    return model


def _config(transformers: Any, like: Any, files: dict[str, Any]) -> Any:
    try:
        if isinstance(like, (str, os.PathLike)):
            return transformers.AutoConfig.from_pretrained(like, local_files_only=True)
        if isinstance(like, dict):
            content = like
        elif like is not None:
            return like
        elif CONFIG in files:
            content = json.loads(bytes(files[CONFIG].numpy()))
        else:
            raise InvalidError("the checkpoint has no configuration of its model: pass the model or its config (like=...)", path="like")
        return transformers.AutoConfig.for_model(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidError):
            raise
        raise InvalidError(f"the configuration cannot be read by transformers: {error}", path="like") from error


def _check(model: Any, weights: dict[str, Any]) -> None:
    own = model.state_dict(keep_vars=True)
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    there = {id(own[name]) for name in weights if name in own}  # a folder of transformers has only one of tied weights
    problems = [f"{name} is missing" for name, tensor in own.items() if id(tensor) not in there]
    problems += [f"{name} is not in a {type(model).__name__}" for name in weights if name not in expected]
    problems += [f"{name} has the shape {list(weights[name].shape)}, not {list(shape)}" for name, shape in expected.items()
                 if name in weights and tuple(weights[name].shape) != shape]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise MismatchError(f"the weights are not those of a {type(model).__name__} of this configuration: {'; '.join(problems[:SHOWN])}{more}")


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bar that transformers writes to stderr."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
