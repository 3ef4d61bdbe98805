"""A Trainer of Hugging Face transformers that saves into a store and resumes from it, instead of from checkpoint folders.

    from ckptdelta.transformers import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=dataset, store="runs", run="gpt")
    trainer.train(resume_from_checkpoint=True)                  # the newest checkpoint of the run, or from the beginning

with_store() does the same for other Trainer classes, such as trl's. CheckpointCallback saves beside a Trainer whose class you
cannot choose. Store.export_hf() writes a folder that from_pretrained() reads. Needs transformers.
"""

from ._trainer import StoreMixin, Trainer, with_store
from ._trainer_callback import CheckpointCallback

__all__ = ["CheckpointCallback", "StoreMixin", "Trainer", "with_store"]
