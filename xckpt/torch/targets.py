"""Targets of torch's adapter: memory that a load fills, and the leaf that comes of it.

1. Nothing is allocated before the first box is asked for. Then `Memory` is made: a view of local
   memory for each box, and what finishes the leaf.
2. A view that NumPy can write is handed out as it is. For any other, `buffer` gives host memory of
   the box's size, and `commit` copies it into the view.
3. `result` finishes the leaf: new tensors get their ``requires_grad``, old ones a new version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from xckpt.core.geometry.boxes import Boxes
from xckpt.torch.buffers import reachable

__all__ = ["Memory", "TensorTarget", "mark_changed"]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a load writes, and what comes of it."""

    views: Sequence[torch.Tensor]
    """The local memory of each box, outside autograd, of that box's sizes."""
    finish: Callable[[], torch.Tensor]
    """Gives the leaf; called once, when all boxes are filled."""


@dataclass(slots=True)
class TensorTarget:
    """A tensor of any kind to be loaded: new memory, or the caller's own."""

    shape: tuple[int, ...]
    dtype: str
    """Empty where this rank has no part of the tensor and does not know."""
    boxes: Boxes
    allocate: Callable[[], Memory]
    """Called once, at the first box or at `result`."""
    annotation: str = field(default="", init=False)
    _memory: Memory | None = field(default=None, init=False)
    _buffers: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def buffer(self, index: int) -> torch.Tensor:
        """The tensor's own memory where NumPy can write it, else host memory of the box's sizes."""
        with self._lock:
            if index not in self._buffers:
                view = self._made().views[index]
                if not reachable(view):
                    view = torch.empty(view.shape, dtype=view.dtype, device="cpu")
                self._buffers[index] = view
            return self._buffers[index]

    def commit(self, index: int) -> None:
        """Copy host memory to where it belongs; memory that was written itself stays.

        A box without elements may be committed without its buffer ever having been asked for.
        """
        with self._lock:
            filled = self._buffers.pop(index, None)
            view = self._made().views[index]
        if filled is not None and not reachable(view):
            # Only in inference mode may a tensor made in it be written.
            with torch.inference_mode(view.is_inference()):
                view.copy_(filled)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one that requires gradients if the caller's does."""
        with self._lock:
            return self._made().finish()

    def _made(self) -> Memory:
        if self._memory is None:
            self._memory = self.allocate()
        return self._memory


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors that NumPy wrote behind torch's back a new version.

    A backward pass under way must not take the new values for the ones that it saved.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
