"""Tensors that a load fills.

1. A plain tensor is a `PlainTarget`: one box, in its own memory or in that of a new tensor.
2. Any other is a `TensorTarget`, which allocates its `Memory` when the first box is asked for.
3. A view that NumPy can write is handed out as it is. For any other, `buffer` gives host memory of
   the box's sizes, and `commit` copies it into the view.
4. Tensors that NumPy has written are new versions of themselves to autograd (`mark_changed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import Extent
from xckpt.torch.leaf import reachable

_MAKING = threading.RLock()
"""Held by plain targets, which have no locks of their own, while memory is made."""


class PlainTarget(msgspec.Struct, eq=False, gc=False):
    """A plain tensor to be loaded: one box.

    There are many, so each is one object only, which the garbage collector does not track.
    """

    shape: tuple[int, ...]
    dtype: str
    leaf: torch.Tensor
    """The caller's tensor; replaced by a new one like it, unless this is filled in place."""
    in_place: bool
    _is_made: bool = False
    _host: torch.Tensor | None = None
    """Host memory of a tensor that NumPy cannot write."""

    @property
    def annotation(self) -> str:
        """Empty: it is an array."""
        return ""

    @property
    def boxes(self) -> Boxes:
        """The whole."""
        return Boxes.whole(self.shape)

    def extent(self, index: int) -> Extent | None:
        """Where the caller's own tensor is."""
        return extent(self.leaf) if self.in_place else None

    def buffer(self, index: int) -> torch.Tensor:
        """The tensor's own memory where NumPy can write it, else host memory of its sizes.

        Outside autograd, so that a planner's hook may write it.
        """
        tensor = self._filled()
        if reachable(tensor):
            return tensor.detach() if tensor.requires_grad else tensor
        with _MAKING:
            if self._host is None:
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return self._host

    def commit(self, index: int) -> None:
        """Copy host memory to where it belongs; the tensor's own memory is written already."""
        filled, self._host = self._host, None
        if filled is not None:
            _copy(self._filled().detach(), filled)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one that requires gradients if the caller's does."""
        tensor = self._filled()
        if self.in_place:
            mark_changed((tensor,))
        return tensor

    def _filled(self) -> torch.Tensor:
        if not self.in_place:
            with _MAKING:
                if not self._is_made:
                    new = empty_like(self.leaf).requires_grad_(self.leaf.requires_grad)
                    self.leaf, self._is_made = new, True
        return self.leaf


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """New memory like a tensor's, on the CPU where that is on the meta device; no gradients."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return torch.empty_like(tensor, device=device, requires_grad=False)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a load writes, and the leaf that it belongs to."""

    leaf: torch.Tensor
    """The caller's tensor, or a new one."""
    views: Sequence[torch.Tensor]
    """The local memory of each box, outside autograd, of that box's sizes."""
    changed: Sequence[torch.Tensor] = ()
    """The caller's tensors that are new versions of themselves when all boxes are filled."""


@dataclass(slots=True)
class TensorTarget:
    """A tensor of any kind to be loaded: new memory, or the caller's own; boxes of it."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes
    allocate: Callable[[], Memory]
    """Called once, at the first box or at `result`."""
    in_place: bool = False
    """Whether it gives the caller's own memory."""
    annotation: str = field(default="", init=False)
    _memory: Memory | None = field(default=None, init=False)
    _buffers: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def extent(self, index: int) -> Extent | None:
        """Where a box of the caller's own tensor is."""
        if not self.in_place:
            return None
        with self._lock:
            return extent(self._allocated().views[index])

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
            _copy(view, filled)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one that requires gradients if the caller's does."""
        with self._lock:
            memory = self._allocated()
        mark_changed(memory.changed)
        return memory.leaf

    def _allocated(self) -> Memory:
        if self._memory is None:
            self._memory = self.allocate()
        return self._memory


def extent(tensor: torch.Tensor) -> Extent | None:
    """Where a tensor's elements are; None on devices whose addresses say nothing."""
    if not (tensor.is_cpu or tensor.is_cuda):
        return None
    item = tensor.element_size()
    strides = tuple(map(item.__mul__, tensor.stride()))  # no call of Python's: there are many
    signs = tensor.dtype.is_complex and tensor.is_conj(), tensor.is_neg()
    return Extent(tensor.data_ptr(), tensor.shape, strides, item, *signs)


def _copy(view: torch.Tensor, filled: torch.Tensor) -> None:
    """Copy host memory into a tensor outside autograd."""
    # Only in inference mode may a tensor made in it be written.
    with torch.inference_mode(view.is_inference()):
        view.copy_(filled)


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Give a new version to tensors that NumPy wrote without torch knowing.

    A backward pass under way must not take the new values for those it saved.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
