"""torch's adapter: tensors, parameters, buffers and sharded tensors, to be saved or to be loaded.

1. A plain tensor is one box, the whole, and its memory is the tensor's own.
2. A sharded tensor goes to the module for its class (`_SPECIALISTS`). No class can have instances
   before its module is imported, and a specialist is imported only for tensors of its class.
3. Either way a source is boxes and views of local memory (`xckpt.torch.leaf`), and a target the
   same, to be filled (`xckpt.torch.target`).
4. A tensor without plain elements in memory is refused by name.
5. Modules, optimizers and all other objects with a ``state_dict`` stand for that dict
   (`xckpt.torch.stateful`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import Copyable, TargetPlace
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.copies import RebuildRecipe, plain_recipe, to_copyable
from xckpt.torch.leaf import (
    PLAIN,
    TensorLeaf,
    at_rest,
    check_readable,
    check_writable,
    from_numpy,
    is_strided,
    known_dtype,
    reachable,
    to_numpy,
    writable_numpy,
)
from xckpt.torch.stateful import DictState, keeps_state, open_object
from xckpt.torch.target import Memory, PlainTarget, TensorTarget

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _Specialist(Protocol):
    """A module for one class of sharded tensors."""

    def describe(self, leaf: torch.Tensor, name: str) -> TensorLeaf:
        """The tensor as a source."""
        ...

    def target_for(self, like: torch.Tensor, name: str, *, in_place: bool) -> TensorTarget:
        """A target like the tensor."""
        ...

    def rebuild_recipe(self, leaf: torch.Tensor) -> RebuildRecipe | None:
        """The tensor as plain tensors and the way back; None if there is no such way."""
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

JOINED: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
"""The dtypes that torch can copy everywhere; it has no copies of its packed ones."""
_as_tuple = cast("Callable[[torch.Size], tuple[int, ...]]", tuple)
_shape: Final = functools.lru_cache(maxsize=1024)(_as_tuple)
"""The shape of a tensor: one object for all that have it."""
MOST_JOINED: Final = 1 << 13
"""Tensors of up to this many elements are copied and read together."""


class TorchAdapter(Adapter[torch.Tensor]):
    """Tensors of any class, and objects with a ``state_dict``.

    Example:
        >>> leaf = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
        >>> source = ADAPTER.describe(leaf, "w")
        >>> source.shape, source.dtype, source.boxes, source.data(0).requires_grad
        ((2, 3), 'bfloat16', Boxes([0, 2) x [0, 3)), False)
        >>> target = ADAPTER.target_for(torch.empty(2, device="meta"), "w", in_place=False)
        >>> target.buffer(0)[:] = torch.tensor([1.0, 2.0])
        >>> target.commit(0)
        >>> target.result()
        tensor([1., 2.])
    """

    leaves: tuple[type[torch.Tensor], ...] = (torch.Tensor,)

    def describe(self, leaf: torch.Tensor, name: str) -> TensorLeaf:
        """A tensor (parameters and buffers too) or sharded tensor as a source.

        A plain tensor counts as held whole by every rank that names it.

        Raises:
            UnsupportedLeafError: it has no elements to read (``meta``, fake, sparse, quantised,
                nested, freed), is a DTensor with a ``Partial`` placement, or has a dtype that the
                format lacks.
        """
        specialist = _specialist(leaf)
        if specialist is not None:
            return specialist.describe(leaf, name)
        local = at_rest(leaf, name)
        check_readable(local, name)
        shape = _shape(leaf.shape)
        return TensorLeaf(shape, known_dtype(local.dtype, name), Boxes.whole(shape), (local,))

    def copyable(self, leaf: torch.Tensor, name: str) -> Copyable:
        """A tensor of the same class over copied memory; a `HostSource` if that cannot be built.

        Raises:
            UnsupportedLeafError: as for `describe`.
        """
        source, specialist, recipe = self.describe(leaf, name), _specialist(leaf), None
        if specialist is not None:
            recipe = specialist.rebuild_recipe(leaf)
        elif type(leaf) in PLAIN:
            recipe = plain_recipe(leaf, source.data(0))
        if recipe is None:
            return self.copyable_source(source, name)
        return to_copyable(recipe, source.dtype)

    def target_for(
        self, like: torch.Tensor, name: str, *, in_place: bool
    ) -> PlainTarget | TensorTarget:
        """A target like a tensor or sharded tensor.

        Not ``in_place``: new memory with the shape, dtype, strides, device, mesh and placements of
        ``like``, and ``requires_grad`` as ``like`` has it. The result is never an
        ``nn.Parameter``, even if ``like`` is one
        (``Module.load_state_dict(..., assign=True)`` makes parameters of it). A ``meta`` tensor
        gives one on the CPU, a ``meta`` DTensor one on its mesh's device.

        ``in_place``: the tensor's own memory, without copies if it is on the CPU, whatever its
        strides.

        Raises:
            UnsupportedLeafError: as for `describe`; or it is to be filled in place and is on the
                meta device, or is an ``expand``ed view several of whose elements share memory.
        """
        specialist = _specialist(like)
        if specialist is not None:
            return specialist.target_for(like, name, in_place=in_place)
        local = at_rest(like, name)
        if in_place:
            check_writable(local, name)
        shape, dtype = _shape(like.shape), known_dtype(local.dtype, name)
        if local is like or not in_place:
            return PlainTarget(shape, dtype, like, in_place)
        memory = Memory(like, (local.detach(),), (like,))
        return TensorTarget(shape, dtype, Boxes.whole(shape), lambda: memory, in_place=True)

    def memory_of(self, leaf: torch.Tensor) -> object:
        """The storage of a tensor or DTensor, ``meta`` too, and what it sees of it; or None."""
        local = getattr(leaf, "_local_tensor", leaf)
        if type(local) not in PLAIN or not is_strided(local):
            return None
        storage, place = local.untyped_storage(), (local.storage_offset(), local.stride())
        seen = storage._cdata, *place, _shape(local.shape), local.dtype
        if not hasattr(leaf, "placements"):
            return seen
        whole = cast("DTensor", leaf)
        return whole.device_mesh, whole.placements, _shape(whole.shape), seen

    def like(self, stored: TensorStorageMetadata, name: str, place: TargetPlace) -> torch.Tensor:
        """A target for a stored tensor: a tensor, or a DTensor on a mesh (`xckpt.torch.likes`)."""
        from xckpt.torch.likes import like

        return like(stored, name, place)

    def to_numpy(self, data: torch.Tensor) -> NDArray[np.generic]:
        """A tensor as a NumPy array: its own memory on the CPU, else a copy on the host."""
        return to_numpy(data)

    def joined(self, data: Sequence[torch.Tensor]) -> Iterator[NDArray[np.generic]]:
        """Small tensors of one dtype and device in one array; larger ones as they are."""
        small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in data:
            if tensor.numel() > MOST_JOINED or tensor.dtype not in JOINED:
                yield to_numpy(tensor)
            else:
                alike = small.setdefault((tensor.dtype, tensor.device), [])
                alike.append(tensor.reshape(-1))
        for tensors in small.values():
            yield to_numpy(torch.cat(tensors))

    def writable_numpy(self, buffer: torch.Tensor) -> NDArray[np.generic] | None:
        """A tensor's own memory, if it is on the CPU and holds the values as they are."""
        return writable_numpy(buffer) if reachable(buffer) else None

    def copy_into(self, buffer: torch.Tensor, data: NDArray[np.generic]) -> None:
        """Copy an array of the same shape and dtype into a tensor on any device.

        Raises:
            ValueError: shape or dtype differ.
        """
        source = from_numpy(data)
        if source.shape != buffer.shape or source.dtype != buffer.dtype:
            raise ValueError(
                f"cannot copy a {source.dtype} of shape {tuple(source.shape)} into a "
                f"{buffer.dtype} of shape {tuple(buffer.shape)}"
            )
        buffer.detach().copy_(source)

    def pinned_memory(self, size: int) -> NDArray[np.uint8] | None:
        """Page-locked host memory; None without an accelerator."""
        if not torch.accelerator.is_available():
            return None
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def open_object(self, node: object, name: str) -> DictState | None:
        """The state dict of an object that has one, or None.

        Raises:
            UnsupportedLeafError: ``state_dict`` does not return a dict.
        """
        return open_object(node, name)

    def refuse(self, leaf: object, name: str) -> None:
        """Refuse an object that keeps a state inside the state of another.

        Raises:
            UnsupportedLeafError: says what to save instead.
        """
        if keeps_state(leaf):
            raise UnsupportedLeafError(
                f"{name}: {named(type(leaf).__name__)} in the state of another object; call its "
                f"state_dict() there, and its load_state_dict() in the other's load_state_dict()"
            )


ADAPTER: Final = TorchAdapter()


def _specialist(tensor: torch.Tensor) -> _Specialist | None:
    if type(tensor) in PLAIN:
        return None
    for home, kind, module_name in _SPECIALISTS:
        module = sys.modules.get(home)
        if module is not None and isinstance(tensor, getattr(module, kind)):
            return _imported(module_name)
    return None


@functools.cache
def _imported(module_name: str) -> _Specialist:
    return cast(_Specialist, importlib.import_module(module_name))
