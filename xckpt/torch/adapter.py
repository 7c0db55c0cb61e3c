"""torch's adapter: tensors, parameters, buffers and sharded tensors, to be saved or to be loaded.

1. A plain tensor is one box, the whole, and its memory is the tensor's own.
2. A sharded tensor goes to the module for its class (`_SPECIALISTS`). No class can have instances
   before its module is imported, and none of these modules is imported for other tensors' sake.
3. Either way a source is boxes and views of local memory (`xckpt.torch.sources`), and a target the
   same, to be filled (`xckpt.torch.targets`).
4. What has no plain elements in memory is refused by name (`xckpt.torch.plain`).
5. Modules, optimizers and whatever else has a ``state_dict`` stand for it (`xckpt.torch.stateful`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.frameworks import as_described
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.staged import Copyable
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.buffers import from_numpy, reachable, writable_numpy
from xckpt.torch.buffers import to_numpy as tensor_to_numpy
from xckpt.torch.copies import Anew, pinned_memory, plain_anew, to_copyable
from xckpt.torch.plain import check_readable, check_writable, known_dtype, plain
from xckpt.torch.sources import TensorSource
from xckpt.torch.stateful import keeps_state, open_object
from xckpt.torch.targets import Memory, TensorTarget, mark_changed

__all__ = [
    "TensorSource",
    "TensorTarget",
    "aim",
    "children",
    "copy_into",
    "copyable",
    "describe",
    "open_object",
    "pinned_memory",
    "rebuild",
    "to_numpy",
    "to_writable_numpy",
]


class _Specialist(Protocol):
    """A module for one class of sharded tensors."""

    def describe(self, leaf: torch.Tensor, name: str) -> TensorSource:
        """The tensor as a source."""
        ...

    def aim(self, like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
        """A target like the tensor."""
        ...

    def anew(self, leaf: torch.Tensor) -> Anew | None:
        """The tensor as plain tensors and the way back; None if it cannot be built anew."""
        ...


_SPECIALISTS: Final = (
    ("torch.distributed.tensor", "DTensor", "xckpt.torch.sharded.dtensor"),
    (
        "torch.distributed._shard.sharded_tensor",
        "ShardedTensor",
        "xckpt.torch.sharded.sharded_tensor",
    ),
)
"""Where a class of sharded tensors is defined, its name, and the module that knows it."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Classes that no specialist can claim: nearly all leaves of nearly all states."""


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
        _refuse_objects(leaf, name)
        return None
    specialist = _specialist(leaf)
    if specialist is not None:
        return specialist.describe(leaf, name)
    local = plain(leaf, name)
    check_readable(local, name)
    shape = tuple(leaf.shape)
    return TensorSource(shape, known_dtype(local.dtype, name), Boxes.whole(shape), (local,))


def copyable(leaf: object, name: str) -> Copyable | None:
    """A tensor of the same class over copied memory, or its description if there is no such way.

    Raises:
        UnsupportedLeafError: as for `describe`.
    """
    if not isinstance(leaf, torch.Tensor):
        _refuse_objects(leaf, name)
        return None
    specialist = _specialist(leaf)
    if specialist is None and type(leaf) in _PLAIN:
        local = plain(leaf, name)
        check_readable(local, name)
        return to_copyable(plain_anew(leaf, local), known_dtype(local.dtype, name))
    source = describe(leaf, name)
    assert source is not None
    found = None if specialist is None else specialist.anew(leaf)
    return as_described(source) if found is None else to_copyable(found, source.dtype)


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
        _refuse_objects(like, name)
        return None
    specialist = _specialist(like)
    if specialist is not None:
        return specialist.aim(like, name, in_place=in_place)
    local = plain(like, name)
    if in_place:
        check_writable(local, name)
    shape = tuple(like.shape)
    return TensorTarget(
        shape,
        known_dtype(local.dtype, name),
        Boxes.whole(shape),
        lambda: _own(like, local) if in_place else _new(like),
    )


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


def _specialist(tensor: torch.Tensor) -> _Specialist | None:
    if type(tensor) in _PLAIN:
        return None
    for home, kind, ours in _SPECIALISTS:
        module = sys.modules.get(home)
        if module is not None and isinstance(tensor, getattr(module, kind)):
            return cast(_Specialist, importlib.import_module(ours))
    return None


def _own(like: torch.Tensor, local: torch.Tensor) -> Memory:
    def finish() -> torch.Tensor:
        mark_changed([like])
        return like

    return Memory((local,), finish)


def _new(like: torch.Tensor) -> Memory:
    """New memory like a tensor's, real even where ``like`` is on the meta device."""
    device = torch.device("cpu") if like.is_meta else like.device
    made = torch.empty_like(like, device=device, requires_grad=False)
    return Memory((plain(made, ""),), lambda: made.requires_grad_(like.requires_grad))


def _refuse_objects(leaf: object, name: str) -> None:
    """Say what to save instead of an object that keeps a state, in the state of another."""
    if keeps_state(leaf):
        raise UnsupportedLeafError(
            f"{name}: a {type(leaf).__name__} in the state of another object; call its "
            f"state_dict() there, and its load_state_dict() in the other's load_state_dict()"
        )
