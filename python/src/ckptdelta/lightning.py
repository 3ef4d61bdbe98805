"""PyTorch Lightning: a plugin that saves a Trainer's checkpoints in a store, each as a delta on the previous one.

    from lightning.pytorch import Trainer
    from ckptdelta.lightning import CheckpointIO

    trainer = Trainer(plugins=[CheckpointIO("runs")], callbacks=[ModelCheckpoint(every_n_train_steps=100, save_last=True)])
    trainer.fit(model, ckpt_path="last")

Needs Lightning: the package lightning or pytorch_lightning.
"""

from ._lightning_io import CheckpointIO
from ._lightning_load import load_checkpoint, load_from_checkpoint
from ._lightning_random import RandomStates

__all__ = ["CheckpointIO", "RandomStates", "load_checkpoint", "load_from_checkpoint"]
