"""Storage for torch.distributed.checkpoint (DCP): its saves and loads go to a store, each save as a delta on the one before.

    import torch.distributed.checkpoint as dcp
    from ckptdelta.dcp import StorageReader, StorageWriter

    dcp.save(state, checkpoint_id="gpt@1000", storage_writer=StorageWriter("runs"))        # on all ranks
    dcp.load(state, checkpoint_id="gpt@1000", storage_reader=StorageReader("runs"))        # in any number of ranks

Planners, dcp.async_save(), DTensors and resharding work as with DCP's own files. A checkpoint id is ``RUN@STEP``, or a step
alone if the writer or reader was given the run. Needs torch.
"""

from ._dcp_read import StorageReader
from ._dcp_write import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
