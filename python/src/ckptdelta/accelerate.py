"""Hugging Face accelerate: saves the state of a training in a store, without pickle, each save as a delta on the one before.

    from ckptdelta.accelerate import load_state, save_state

    save_state(accelerator, store, run="gpt", step=1000)       # on all processes, in place of accelerator.save_state(folder)
    load_state(accelerator, store, run="gpt")                  # the newest

Needs accelerate.
"""

from ._accelerate import load_state, save_state

__all__ = ["load_state", "save_state"]
