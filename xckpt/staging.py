"""Copies of a state that background saves are made from; see `xckpt.save_async`."""

from xckpt.engine.stager import AsyncStager, BlockingAsyncStager

__all__ = ["AsyncStager", "BlockingAsyncStager"]
