"""Tensors of any kind as leaves: what a save reads of them, and what a load fills.

1. A `TensorLeaf` is boxes of a tensor, and a view of local memory for each.
2. A `TensorTarget` allocates nothing before the first box is asked for. Then `Memory` is made: a
   view of local memory for each box, and what finishes the leaf.
3. A view that NumPy can write is handed out as it is. For any other, `TensorTarget.buffer` gives
   host memory of the box's size, and `TensorTarget.commit` copies it into the view.
4. `TensorTarget.result` finishes the leaf: new tensors get their ``requires_grad``, old ones a new
   version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from xckpt.core.geometry.box import Boxes
from xckpt.core.metadata import Sharding
from xckpt.torch.buffers import reachable


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of any kind to be saved: boxes of it, and the local elements of each."""

    shape: tuple[int, ...]
    """The global shape, in elements."""
    dtype: str
    """Empty where this rank has no part of the tensor and does not know."""
    boxes: Boxes
    """The whole of a plain tensor; of a sharded one the boxes that this rank holds."""
    parts: Sequence[torch.Tensor]
    """The elements of each box, outside autograd: views of the caller's memory."""
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    def data(self, index: int) -> torch.Tensor:
        """A view of the caller's memory, on its own device."""
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a load writes, and the leaf made of it."""

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
                view = self._allocated().views[index]
                if not reachable(view):
                    view = torch.empty(view.shape, dtype=view.dtype, device="cpu")
                self._buffers[index] = view
            return self._buffers[index]

    def commit(self, index: int) -> None:
        """Copy host memory to where it belongs; the tensor's own memory is written already.

        A box without elements may be committed without a call of `buffer` before.
        """
        with self._lock:
            filled = self._buffers.pop(index, None)
            view = self._allocated().views[index]
        if filled is not None and not reachable(view):
            # Only in inference mode may a tensor made in it be written.
            with torch.inference_mode(view.is_inference()):
                view.copy_(filled)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one that requires gradients if the caller's does."""
        with self._lock:
            return self._allocated().finish()

    def _allocated(self) -> Memory:
        if self._memory is None:
            self._memory = self.allocate()
        return self._memory


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Give a new version to tensors that NumPy wrote without torch knowing.

    A backward pass under way must not take the new values for those it saved.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
