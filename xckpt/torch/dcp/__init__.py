"""torch.distributed.checkpoint (DCP) and xckpt's format.

`XckptStorageWriter` and `XckptStorageReader` are one argument of `dcp.save`, `dcp.async_save` and
`dcp.load`; everything else, planners included, stays DCP's.

    dcp.save(state, storage_writer=XckptStorageWriter("s3://bucket/run/step-1000"))
    dcp.load(state, storage_reader=XckptStorageReader("s3://bucket/run/step-1000"))

`import_checkpoint` and `export_checkpoint` turn the folders that DCP has written into checkpoints,
and back.
"""

from __future__ import annotations

from xckpt.torch.dcp.folders import export_checkpoint, import_checkpoint
from xckpt.torch.dcp.reader import XckptStorageReader
from xckpt.torch.dcp.writer import XckptStorageWriter

__all__ = ["XckptStorageReader", "XckptStorageWriter", "export_checkpoint", "import_checkpoint"]
