"""Checkpoints of Megatron (torch_dist): a folder of torch.distributed.checkpoint, and a file of everything that is not sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._errors import CorruptError
from ._torch_file import Attributes, read_torch, value_of

COMMON = "common.pt"
ENUMS = ("AttnBackend", "AttnMaskType", "AttnType", "CudaGraphScope", "LayerType", "ModelType")
CLASSES = {
    "argparse.Namespace": Attributes,  # the arguments of the training
    "signal.Signals": value_of,
    **{f"megatron.core.{module}.{name}": value_of for module in ("enums", "transformer.enums") for name in ENUMS},
}


def merged(tensors: dict[str, Any], path: Path, unsafe: bool) -> dict[str, Any]:
    """The tensors, by their names, and the members of the file: `iteration`, `args`, `optimizer` with its groups. Errors: CorruptError."""
    common = read_torch(path / COMMON, unsafe, CLASSES)
    if not isinstance(common, dict) or tensors.keys() & common.keys():
        raise CorruptError(f"{path / COMMON} is not a dict of what other files do not have: was it written by Megatron?", file=str(path / COMMON))
    return {**tensors, **common}
