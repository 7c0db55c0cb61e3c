"""Lightning: checkpoints of a `Trainer` are checkpoints of xckpt.

Lightning asks in two ways: a plugin for one rank (`XckptCheckpointIO`), and a strategy for all of
them (`XckptModelParallelStrategy`).
"""

from xckpt.integrations.lightning.checkpoint_io import XckptCheckpointIO
from xckpt.integrations.lightning.model_parallel import XckptModelParallelStrategy

__all__ = ["XckptCheckpointIO", "XckptModelParallelStrategy"]
