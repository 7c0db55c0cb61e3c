"""torch's adapter: tensors, parameters, buffers and DTensors, to be saved or to be loaded.

1. `describe` and `aim` refuse by name what has no plain elements in memory (`_local`): sparse,
   quantised, nested and fake tensors, wrappers that torch cannot look through, freed storage.
2. A plain tensor is one box, the whole. A DTensor is the boxes of its local tensor
   (`xckpt.torch.dtensor`). Either way there is one local tensor, and each box is a view of it.
3. A source hands out those views. A target hands them out where NumPy can write them, and otherwise
   host memory of the box's size that `commit` copies into the view.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.buffers import format_dtype, from_numpy, reachable, writable_numpy
from xckpt.torch.buffers import to_numpy as tensor_to_numpy
from xckpt.torch.placements import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "TensorSource",
    "TensorTarget",
    "aim",
    "children",
    "copy_into",
    "describe",
    "rebuild",
    "to_numpy",
    "to_writable_numpy",
]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor or DTensor to be saved."""

    shape: tuple[int, ...]
    dtype: str
    local: torch.Tensor
    """This rank's elements, detached: a view of the caller's memory."""
    layout: Layout
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    @property
    def boxes(self) -> Boxes:
        """The whole of a plain tensor; of a DTensor the boxes that this rank holds."""
        return self.layout.boxes

    def data(self, index: int) -> torch.Tensor:
        """A view of the local tensor, on its own device."""
        return self.local[self.layout.views[index]]


@dataclass(slots=True)
class TensorTarget:
    """A tensor or DTensor to be loaded: new memory, or the caller's own."""

    shape: tuple[int, ...]
    dtype: str
    like: torch.Tensor
    layout: Layout
    in_place: bool
    annotation: str = field(default="", init=False)
    _filled: torch.Tensor | None = field(default=None, init=False)
    _local: torch.Tensor | None = field(default=None, init=False)
    _buffers: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def boxes(self) -> Boxes:
        """The whole of a plain tensor; of a DTensor the boxes that this rank holds."""
        return self.layout.boxes

    def buffer(self, index: int) -> torch.Tensor:
        """The tensor's own memory where NumPy can write it, else host memory of the box's sizes."""
        with self._lock:
            if index not in self._buffers:
                view = self._view(index)
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
            view = self._view(index)
        if filled is not None and not reachable(view):
            # Only in inference mode may a tensor made in it be written.
            with torch.inference_mode(view.is_inference()):
                view.copy_(filled)

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one that requires gradients if the caller's does."""
        with self._lock:
            filled = self._allocate()
        if not self.in_place:
            return filled.requires_grad_(self.like.requires_grad)
        if not filled.is_inference():
            # NumPy wrote behind torch's back: a backward pass under way must not take the new
            # values for the ones that it saved.
            torch.autograd.graph.increment_version(filled)
        return filled

    def _view(self, index: int) -> torch.Tensor:
        filled = self._allocate()
        if self._local is None:
            self._local = _local(filled, "")
        return self._local[self.layout.views[index]]

    def _allocate(self) -> torch.Tensor:
        if self._filled is None:
            self._filled = self.like if self.in_place else _empty_like(self.like)
        return self._filled


def describe(leaf: object, name: str) -> TensorSource | None:
    """A tensor (parameters and buffers too) or DTensor as a source.

    A plain tensor counts as held whole by every rank that names it.

    Raises:
        UnsupportedLeafError: it has no elements to read (``meta``, fake, sparse, quantised, nested,
            freed), is a DTensor with a ``Partial`` placement, or has a dtype that the format lacks.

    Example:
        >>> source = describe(torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True), "w")
        >>> source.shape, source.dtype, source.boxes, source.data(0).requires_grad
        ((2, 3), 'bfloat16', Boxes([0, 2) x [0, 3)), False)
    """
    if not isinstance(leaf, torch.Tensor):
        _refuse_holders(leaf, name)
        return None
    local = _local(leaf, name)
    if local.is_meta:
        raise UnsupportedLeafError(
            f"{name}: a tensor on the meta device has no elements to save; give it memory and "
            f"values first (nn.Module.to_empty and an initialisation), or leave it out"
        )
    _check_storage(local, name)
    shape, dtype, held = tuple(leaf.shape), _dtype(local, name), _layout(leaf, name)
    distributed = _as_dtensor(leaf)
    if distributed is None:
        return TensorSource(shape, dtype, local, held)
    from xckpt.torch.dtensor import sharding

    return TensorSource(shape, dtype, local, held, True, sharding(distributed))


def aim(like: object, name: str, *, in_place: bool) -> TensorTarget | None:
    """A target like a tensor or DTensor.

    Not ``in_place``: new memory with the shape, dtype, strides, device, mesh and placements of
    ``like``, and ``requires_grad`` as ``like`` has it. The result is never an ``nn.Parameter``,
    even if ``like`` is one (``Module.load_state_dict(..., assign=True)`` makes parameters of it).
    A ``meta`` tensor gives one on the CPU, a ``meta`` DTensor one on its mesh's device.

    ``in_place``: the tensor's own memory, without copies if it is on the CPU, whatever its strides.

    Raises:
        UnsupportedLeafError: as for `describe`; or it is to be filled in place and is on the meta
            device, or is an ``expand``ed view several of whose elements are one in memory.

    Example:
        >>> target = aim(torch.empty(2, device="meta"), "w", in_place=False)
        >>> target.buffer(0)[:] = torch.tensor([1.0, 2.0])
        >>> target.commit(0)
        >>> target.result()
        tensor([1., 2.])
    """
    if not isinstance(like, torch.Tensor):
        _refuse_holders(like, name)
        return None
    local = _local(like, name)
    if in_place:
        _check_writable(local, name)
    return TensorTarget(tuple(like.shape), _dtype(local, name), like, _layout(like, name), in_place)


def to_numpy(data: object) -> NDArray[np.generic] | None:
    """A tensor as a NumPy array: its own memory on the CPU, else a copy on the host."""
    return tensor_to_numpy(data) if isinstance(data, torch.Tensor) else None


def to_writable_numpy(buffer: object) -> NDArray[np.generic] | None:
    """A tensor's own memory, if it is on the CPU and holds the values as they are."""
    if not isinstance(buffer, torch.Tensor) or not reachable(buffer):
        return None
    return writable_numpy(buffer)


def copy_into(buffer: object, data: NDArray[np.generic]) -> bool:
    """Copy an array of the same shape and dtype into a tensor on any device.

    Raises:
        ValueError: shape or dtype differ.
    """
    if not isinstance(buffer, torch.Tensor):
        return False
    source = from_numpy(data)
    if source.shape != buffer.shape or source.dtype != buffer.dtype:
        raise ValueError(
            f"cannot copy a {source.dtype} of shape {tuple(source.shape)} into a {buffer.dtype} "
            f"of shape {tuple(buffer.shape)}"
        )
    buffer.detach().copy_(source)
    return True


def children(node: object) -> None:
    """torch registers no containers: state dicts are plain ones."""
    return


def rebuild(node: object, children: list[object]) -> None:
    """torch registers no containers."""
    return


def _as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The tensor if it is a DTensor; without their module, which takes long to import, none is."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return cast("DTensor", tensor)


def _layout(tensor: torch.Tensor, name: str) -> Layout:
    distributed = _as_dtensor(tensor)
    if distributed is None:
        return Layout.whole(tensor.shape)
    from xckpt.torch.dtensor import layout

    return layout(distributed, name)


def _local(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The elements that this process holds, outside autograd and at rest.

    Raises:
        UnsupportedLeafError: they are not plain elements in memory.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedLeafError(
            f"{name}: a lazy parameter has no shape yet; run the module's first forward pass before"
        )
    distributed = _as_dtensor(tensor)
    if distributed is not None:
        from xckpt.torch.dtensor import local_tensor

        tensor = local_tensor(distributed)
    wait = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor has it, a tensor has not
    local = tensor if wait is None else wait()
    for unfit, advice in _FAULTS:
        if unfit(local):
            raise UnsupportedLeafError(f"{name}: {advice}")
    return local.detach()


def _empty_like(like: torch.Tensor) -> torch.Tensor:
    """New memory like a tensor's, real even where ``like`` is on the meta device.

    For a DTensor torch keeps all that the placements do not say (the order of the cuts).
    """
    if not like.is_meta:
        return torch.empty_like(like, requires_grad=False)
    distributed = _as_dtensor(like)
    device = "cpu" if distributed is None else distributed.device_mesh.device_type
    return torch.empty_like(like, device=device, requires_grad=False)


def _refuse_holders(leaf: object, name: str) -> None:
    """Say what to save instead of an object that holds tensors but is none."""
    if isinstance(leaf, torch.nn.Module | torch.optim.Optimizer):
        raise UnsupportedLeafError(
            f"{name}: a {type(leaf).__name__} is no tensor; save and load its state_dict() instead"
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    plain = getattr(torch.Tensor, "__torch_dispatch__", None)
    return getattr(type(tensor), "__torch_dispatch__", None) is not plain


_FAULTS: tuple[tuple[Callable[[torch.Tensor], bool], str], ...] = (
    (
        lambda tensor: type(tensor).__name__ == "FakeTensor",
        "a FakeTensor has no elements; use a tensor on the meta device where only the shape counts",
    ),
    (
        lambda tensor: tensor.is_nested,
        "a nested tensor has rows of several lengths; store its values() and offsets() instead, "
        "or to_padded_tensor()",
    ),
    (
        lambda tensor: tensor.is_quantized,
        "a quantised tensor; store its int_repr(), q_scale() and q_zero_point() instead, "
        "or dequantize() it",
    ),
    (
        lambda tensor: tensor.layout is not torch.strided,
        "a sparse or otherwise packed tensor; store its indices and values, or to_dense(), instead",
    ),
    (
        _is_wrapper,
        "a tensor subclass that defines its own operations, so that its memory need not hold "
        "its elements; store the plain tensors inside it, or convert it to a DTensor",
    ),
)
"""What makes a tensor unfit, and what to do about it; the first that holds is reported."""


def _dtype(local: torch.Tensor, name: str) -> str:
    dtype = format_dtype(local.dtype)
    if dtype is None:
        raise UnsupportedLeafError(
            f"{name}: dtype {local.dtype} cannot be stored; convert it first "
            f"(complex32 to complex64, packed types to uint8 by .view)"
        )
    return dtype


def _check_storage(local: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose memory was taken away (FSDP frees unsharded parameters so)."""
    if local.device.type not in ("cpu", "cuda") or local.numel() == 0:
        return
    steps = zip(local.shape, local.stride(), strict=True)
    last = local.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if local.untyped_storage().nbytes() < (last + 1) * local.element_size():
        raise UnsupportedLeafError(
            f"{name}: the storage of this tensor of shape {tuple(local.shape)} was freed; save the "
            f"sharded parameter instead, or gather it before the save"
        )


def _check_writable(local: torch.Tensor, name: str) -> None:
    if local.is_meta:
        raise UnsupportedLeafError(
            f"{name}: a tensor on the meta device has no memory to load into; "
            f"use xckpt.load, which returns a new tensor, or Module.to_empty first"
        )
    _check_storage(local, name)
    steps = zip(local.shape, local.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise UnsupportedLeafError(
            f"{name}: several elements of this expanded tensor of shape {tuple(local.shape)} and "
            f"strides {local.stride()} are one in memory; load into a clone() of it"
        )
