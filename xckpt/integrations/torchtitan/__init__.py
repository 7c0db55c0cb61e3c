"""torchtitan: its trainer's checkpoint manager, over `xckpt.CheckpointManager`.

``XckptManager.Config(...)`` stands where the trainer's configuration has a checkpoint manager's.
"""

from xckpt.integrations.torchtitan.manager import XckptManager

__all__ = ["XckptManager"]
