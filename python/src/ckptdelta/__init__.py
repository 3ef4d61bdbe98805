"""Delta-compressed checkpoints of training runs.

    import ckptdelta
    store = ckptdelta.open("runs/gpt")
    store.save({"model": model, "optimizer": optimizer, "epoch": 3}, run="gpt", step=1000)
    store.load({"model": model, "optimizer": optimizer}, run="gpt")             # the newest, in place
    state = store.state_dict(run="gpt", step=1000, only="model")                # as new tensors

Successive checkpoints of a run are nearly the same, so each is stored as a base or as a delta on an earlier one, bit for bit by
default. A checkpoint is committed as a whole or not at all, and everything that a load reads is verified.

numpy and torch are optional. Notices that are not errors go to the logger "ckptdelta".
"""

from ._call import Progress, text as _text
from ._catalog import Where
from ._errors import (BusyError, CancelledError, CorruptError, DeviceError, Error, ExistsError, InputOutputError, InvalidError,
                      MismatchError, NoMemoryError, NoSpaceError, NotFoundError, ReadOnlyError, StateError, UnsupportedError)
from ._follow import Follow, Version
from ._native import lib as _lib
from ._retention import Policy, Pruned
from ._session import Session
from ._store import Store, open
from ._types import Checkpoint, Damage, Fidelity, Role, TensorInfo, Verification
from ._updates import Updates

__version__: str = _text(_lib.ckd_version())
__all__ = [
    "BusyError", "CancelledError", "Checkpoint", "CorruptError", "Damage", "DeviceError", "Error", "ExistsError", "Fidelity",
    "Follow", "InputOutputError", "InvalidError", "MismatchError", "NoMemoryError", "NoSpaceError", "NotFoundError", "Policy", "Progress",
    "Pruned", "ReadOnlyError", "Role", "Session", "StateError", "Store", "TensorInfo", "UnsupportedError", "Updates", "Verification",
    "Version", "Where", "open",
]
