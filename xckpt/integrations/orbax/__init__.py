"""Orbax: an item of an Orbax checkpoint that is a checkpoint of xckpt.

Orbax decides when to save, what to keep and what to delete; the folder of the item is xckpt's.
Orbax has two interfaces: `XckptSave` and `XckptRestore` are for its managers of v0,
`XckptCheckpointable` is for v1.
"""

from xckpt.integrations.orbax.checkpointable import XckptCheckpointable
from xckpt.integrations.orbax.items import XckptHandler, XckptRestore, XckptSave

__all__ = ["XckptCheckpointable", "XckptHandler", "XckptRestore", "XckptSave"]
