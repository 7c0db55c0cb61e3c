"""Accelerate: `save_state` and `load_state` of all that an `Accelerator` has prepared."""

from xckpt.integrations.accelerate.state import load_state, save_state

__all__ = ["load_state", "save_state"]
