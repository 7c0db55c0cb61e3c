"""torch_xla's adapter: tensors on XLA devices, sharded or not, to be saved or to be loaded.

1. A leaf is ours if it is an `XLAShardedTensor`, a tensor on an XLA device, or `CpuShards`, which
   are such a tensor's shards on the host.
2. A source learns from the planner how often each box will be asked for. The first question for
   any of them fetches all shards, since torch_xla has no smaller transfer; each is let go after
   its last use, and replicas at once. A question more than was announced costs another transfer.
3. A target's buffers are host memory. The last commit publishes all of them together; until then
   the tensor is as it was. Only where shards have padding are they fetched before, to keep it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.frameworks import as_described
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.core.staged import Copyable
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.plain import known_dtype, plain
from xckpt.torch.xla.shards import (
    ShardLayout,
    fetch,
    global_tensor,
    is_wrapped,
    make,
    publish,
    wrap_like,
)
from xckpt.torch.xla.spec import stored_sharding

__all__ = [
    "CpuShards",
    "ShardSource",
    "ShardTarget",
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


class Shard(Protocol):
    """What is used of torch_xla's `XLAShard`."""

    data: torch.Tensor
    """On the host, padding included."""
    indices: object
    """A slice for each dimension, without padding; Ellipsis for the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuShards:
    """The shards of a tensor on an XLA device, copied to the host: what a stager keeps of it.

    A leaf like any tensor: it is saved as the tensor would have been.
    """

    shape: tuple[int, ...]
    """The global shape."""
    dtype: torch.dtype
    boxes: Boxes
    """The distinct boxes."""
    tensors: tuple[torch.Tensor, ...]
    """The elements of each box, on the host, without padding."""
    sharded: bool
    """False if every process holds the whole tensor."""
    sharding: Sharding | None

    @classmethod
    def of(cls, leaf: torch.Tensor, name: str = "") -> CpuShards:
        """Copy a tensor's shards to the host, in one transfer.

        Raises:
            UnsupportedLeafError: its shards are no boxes; names the leaf.
        """
        layout = ShardLayout.of(global_tensor(leaf), name)
        tensors = _unpadded(fetch(global_tensor(leaf), layout), layout)
        if not layout.annotated and leaf.device.type == "cpu":
            tensors = [tensor.clone() for tensor in tensors]
        return cls(
            tuple(leaf.shape),
            leaf.dtype,
            layout.boxes,
            # A part of a shard would keep the padding alive.
            tuple(tensor.contiguous() for tensor in tensors),
            not layout.whole,
            stored_sharding(leaf, layout),
        )

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], shape: Sequence[int]) -> CpuShards:
        """From what `XLAShardedTensor.local_shards` returned, and the global shape.

        Example:
            >>> from types import SimpleNamespace as Shard
            >>> rows = [torch.arange(4).reshape(2, 2), torch.tensor([[4, 5], [0, 0]])]
            >>> indices = [[slice(0, 2), slice(0, 2)], [slice(2, 3), slice(0, 2)]]
            >>> shards = [Shard(data=d, indices=i) for d, i in zip(rows, indices)]
            >>> staged = CpuShards.from_shards(shards, (3, 2))
            >>> staged.boxes, staged.tensors[1]
            (Boxes([0, 2) x [0, 2), [2, 3) x [0, 2)), tensor([[4, 5]]))
        """
        size = tuple(shape)
        data = [shard.data for shard in shards]
        if shards[0].indices is Ellipsis:
            return cls(size, data[0].dtype, Boxes.whole(size), (data[0],), False, None)
        indices = [cast("Sequence[slice]", shard.indices) for shard in shards]
        layout = ShardLayout.of_indices(size, (1,) * len(size), indices)
        tensors = tuple(_unpadded(data, layout))
        return cls(size, data[0].dtype, layout.boxes, tensors, True, None)


@dataclass(slots=True)
class ShardSource:
    """A tensor on an XLA device, or its shards on the host, to be saved."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes
    sharded: bool
    sharding: Sharding | None
    fetch: Callable[[], Sequence[torch.Tensor]]
    """One transfer: a tensor on the host for each box."""
    annotation: str = field(default="", init=False)
    _uses: list[int] = field(init=False)
    _held: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._uses = [1] * len(self.boxes)

    def expect(self, uses: Sequence[int]) -> None:
        """How often `data` will be called for each box."""
        with self._lock:
            self._uses = list(uses)
            self._held.clear()

    def data(self, index: int) -> torch.Tensor:
        """Box ``index`` on the host; released with the last use that was announced."""
        with self._lock:
            if index not in self._held:
                self._held = {
                    box: tensor
                    for box, tensor in enumerate(self.fetch())
                    if box == index or self._uses[box] > 0
                }
            self._uses[index] -= 1
            return self._held[index] if self._uses[index] > 0 else self._held.pop(index)


@dataclass(slots=True)
class ShardTarget:
    """A tensor on an XLA device to be loaded: a new one, or the caller's own."""

    dtype: str
    like: torch.Tensor
    layout: ShardLayout
    in_place: bool
    annotation: str = field(default="", init=False)
    _shards: list[torch.Tensor] = field(default_factory=list, init=False)
    _committed: int = field(default=0, init=False)
    _made: torch.Tensor | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.like.shape)

    @property
    def boxes(self) -> Boxes:
        """The distinct boxes of the local devices."""
        return self.layout.boxes

    def buffer(self, index: int) -> torch.Tensor:
        """The box's part of a shard on the host."""
        with self._lock:
            self._allocate()
            return self._shards[self._holder(index)][self.layout.views[index]]

    def commit(self, index: int) -> None:
        """Publish all shards with the last of the boxes."""
        with self._lock:
            self._committed += 1
            if self._committed == len(self.boxes):
                self._publish()

    def result(self) -> torch.Tensor:
        """The caller's tensor, or a new one of the same kind and sharding."""
        if self.in_place:
            return self.like
        with self._lock:
            if self._made is None:
                self._publish()  # no box, no commit
            assert self._made is not None
            return wrap_like(self._made, self.like)

    def _holder(self, index: int) -> int:
        return 0 if self.layout.whole else self.layout.holders[index][0]

    def _allocate(self) -> None:
        """Host memory of all shards; several devices that hold one box share it."""
        if self._shards:
            return
        layout = self.layout
        if self.in_place and layout.padded:
            self._shards = fetch(global_tensor(self.like), layout)
            return
        new = torch.zeros if layout.padded else torch.empty
        if layout.whole:
            self._shards = [new(layout.shard, dtype=self.like.dtype)]
            return
        shards = {
            device: shard
            for devices in layout.holders
            for shard in [new(layout.shard, dtype=self.like.dtype)]
            for device in devices
        }
        nothing = new(layout.shard, dtype=self.like.dtype)
        self._shards = [shards.get(device, nothing) for device in range(layout.devices)]

    def _publish(self) -> None:
        self._allocate()
        layout, shards = self.layout, self._shards
        if not layout.whole:
            for devices, view in zip(layout.holders, layout.views, strict=True):
                for device in devices[1:]:
                    if shards[device] is not shards[devices[0]]:
                        shards[device][view] = shards[devices[0]][view]
        if self.in_place:
            publish(self.like, layout, shards)
        else:
            self._made = make(self.like, layout, shards)
        self._shards = []


def describe(leaf: object, name: str) -> ShardSource | None:
    """A tensor on an XLA device, or `CpuShards`, as a source; None if it is neither.

    Raises:
        UnsupportedLeafError: its dtype cannot be stored, or its shards are no boxes; names the
            leaf.
    """
    staged = _staged(leaf)
    if staged is not None:
        return ShardSource(
            staged.shape,
            known_dtype(staged.dtype, name),
            staged.boxes,
            staged.sharded,
            staged.sharding,
            lambda: staged.tensors,
        )
    if not isinstance(leaf, torch.Tensor) or not _is_ours(leaf):
        return None
    tensor = plain(global_tensor(leaf), name)
    layout = ShardLayout.of(tensor, name)
    return ShardSource(
        tuple(leaf.shape),
        known_dtype(leaf.dtype, name),
        layout.boxes,
        not layout.whole,
        stored_sharding(leaf, layout),
        lambda: _unpadded(fetch(tensor, layout), layout),
    )


def copyable(leaf: object, name: str) -> Copyable | None:
    """A tensor's shards, fetched in one transfer; those that are fetched already are copied.

    Raises:
        UnsupportedLeafError: as for `describe`.
    """
    source = describe(leaf, name)
    if source is None:
        return None
    if _staged(leaf) is not None:
        return as_described(source)
    fetched = CpuShards.of(cast(torch.Tensor, leaf), name)
    return Copyable((), lambda copies: fetched)


def pinned_memory(size: int) -> None:
    """torch_xla fetches into memory of its own."""
    return


def aim(like: object, name: str, *, in_place: bool) -> ShardTarget | None:
    """A target like a tensor on an XLA device; None if it is none.

    Not ``in_place``: a new tensor of the same shape, dtype and sharding, an `XLAShardedTensor` if
    ``like`` is one.

    Raises:
        UnsupportedLeafError: as for `describe`; or ``like`` are `CpuShards`, which are no target.
    """
    if _staged(like) is not None:
        raise UnsupportedLeafError(
            f"{name}: CpuShards are a copy to be saved; load into the tensor that they came from"
        )
    if not isinstance(like, torch.Tensor) or not _is_ours(like):
        return None
    layout = ShardLayout.of(plain(global_tensor(like), name), name)
    return ShardTarget(known_dtype(like.dtype, name), like, layout, in_place)


def to_numpy(data: object) -> None:
    """Data are tensors on the host: torch's adapter reads them."""
    return


def to_writable_numpy(buffer: object) -> None:
    """Buffers are tensors on the host: torch's adapter writes them."""
    return


def copy_into(buffer: object, data: NDArray[np.generic]) -> bool:
    """Buffers are tensors on the host: torch's adapter writes them."""
    return False


def open_object(node: object, name: str) -> None:
    """torch's adapter knows the objects that keep a state."""
    return


def children(node: object) -> None:
    """torch_xla registers no containers."""
    return


def rebuild(node: object, children: list[object]) -> None:
    """torch_xla registers no containers."""
    return


def _staged(leaf: object) -> CpuShards | None:
    """A leaf that is shards on the host: ours, or those that torch_xla's own stager makes."""
    if isinstance(leaf, CpuShards):
        return leaf
    theirs = sys.modules.get("torch_xla.experimental.distributed_checkpoint._helpers")
    if theirs is None or not isinstance(leaf, theirs._CpuShards):
        return None
    given: Any = leaf
    return CpuShards.from_shards(given.shards, given.global_shape)


def _is_ours(leaf: torch.Tensor) -> bool:
    return "torch_xla" in sys.modules and (leaf.device.type == "xla" or is_wrapped(leaf))


def _unpadded(shards: Sequence[torch.Tensor], layout: ShardLayout) -> list[torch.Tensor]:
    """The elements of each box; of those that hold it, the first one's."""
    if layout.whole:
        return list(shards)
    return [
        shards[devices[0]][view] for devices, view in zip(layout.holders, layout.views, strict=True)
    ]
