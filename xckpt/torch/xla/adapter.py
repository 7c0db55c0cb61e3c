"""torch_xla's adapter: tensors on XLA devices, sharded or not, to be saved or to be loaded.

1. The leaves are each `XLAShardedTensor`, each tensor on an XLA device, and `CpuShards`, which are
   such a tensor's shards on the host: made here, or from what torch_xla's own stager makes.
2. A source learns from the planner how often each box will be read. The first read of any of them
   fetches all shards, since torch_xla has no smaller transfer; each is released after its last
   use, and replicas at once. Each read beyond the announced count transfers again.
3. A target's buffers are host memory. The last commit publishes all of them together; until then
   the tensor is as it was. Shards with padding are fetched before, to keep the padding.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import Copyable
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER as TORCH
from xckpt.torch.leaf import TensorLeaf, known_dtype, plain
from xckpt.torch.xla import CpuShards
from xckpt.torch.xla.shards import (
    ShardLayout,
    fetch,
    global_tensor,
    is_on_xla,
    make,
    publish,
    unpadded,
    wrap_like,
)
from xckpt.torch.xla.spec import stored_sharding


@dataclass(slots=True)
class ShardSource:
    """A tensor on an XLA device to be saved."""

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
        """Box ``index`` on the host; released with the last announced use."""
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
    _new: torch.Tensor | None = field(default=None, init=False)
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
            if self._new is None:
                self._publish()  # no box, no commit
            assert self._new is not None
            return wrap_like(self._new, self.like)

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
        # The whole; else that of devices which hold padding alone.
        shard = new(layout.shard, dtype=self.like.dtype, device="cpu")
        self._shards = [shard] * (1 if layout.whole else layout.devices)
        for devices in () if layout.whole else layout.holders:
            shard = new(layout.shard, dtype=self.like.dtype, device="cpu")
            for device in devices:
                self._shards[device] = shard

    def _publish(self) -> None:
        self._allocate()
        layout, shards = self.layout, self._shards
        for devices, view in () if layout.whole else zip(layout.holders, layout.views, strict=True):
            first = shards[devices[0]]
            for device in devices[1:]:
                if shards[device] is not first:
                    shards[device][view] = first[view]
        if self.in_place:
            publish(self.like, layout, shards)
        else:
            self._new = make(self.like, layout, shards)
        self._shards = []


def _is_staged(leaf: object) -> bool:
    """Whether a leaf is shards on the host: `CpuShards`, or those that torch_xla's stager makes."""
    helpers = sys.modules.get("torch_xla.experimental.distributed_checkpoint._helpers")
    return isinstance(leaf, CpuShards) or (
        helpers is not None and isinstance(leaf, helpers._CpuShards)
    )


def _staged_shards(leaf: object) -> CpuShards:
    """Shards on the host (`_is_staged`) as `CpuShards`."""
    if isinstance(leaf, CpuShards):
        return leaf
    shards: Any = leaf
    return CpuShards.from_shards(shards.shards, shards.global_shape)


Leaf = torch.Tensor | CpuShards


class XlaAdapter(Adapter[Leaf]):
    """Tensors on XLA devices, and their shards on the host."""

    def owns(self, leaf: object) -> bool:
        """Whether a leaf is a tensor on an XLA device, or shards of one on the host."""
        return _is_staged(leaf) or (isinstance(leaf, torch.Tensor) and is_on_xla(leaf))

    def describe(self, leaf: Leaf, name: str) -> ShardSource | TensorLeaf:
        """A tensor on an XLA device, or its shards on the host, as a source.

        Raises:
            UnsupportedLeafError: its dtype cannot be stored, or its shards are not boxes; names the
                leaf.
        """
        if not isinstance(leaf, torch.Tensor):
            staged = _staged_shards(leaf)
            return TensorLeaf(
                staged.shape,
                known_dtype(staged.dtype, name),
                staged.boxes,
                staged.tensors,
                staged.sharded,
                staged.sharding,
            )
        tensor = plain(global_tensor(leaf), name)
        layout = ShardLayout.of(tensor, name)
        return ShardSource(
            tuple(leaf.shape),
            known_dtype(leaf.dtype, name),
            layout.boxes,
            not layout.whole,
            stored_sharding(leaf, layout),
            lambda: unpadded(fetch(tensor, layout), layout),
        )

    def copyable(self, leaf: Leaf, name: str) -> Copyable:
        """A tensor's shards, fetched in one transfer; shards on the host are copied.

        Raises:
            UnsupportedLeafError: as for `describe`.
        """
        source = self.describe(leaf, name)
        if not isinstance(leaf, torch.Tensor):
            return self.copyable_source(source, name)
        fetched = CpuShards.of(leaf, name)
        return Copyable((), lambda copies: fetched)

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> ShardTarget:
        """A target like a tensor on an XLA device.

        Not ``in_place``: a new tensor of the same shape, dtype and sharding, an `XLAShardedTensor`
        if ``like`` is one.

        Raises:
            UnsupportedLeafError: as for `describe`; or ``like`` are `CpuShards`, which are no
                target.
        """
        if not isinstance(like, torch.Tensor):
            raise UnsupportedLeafError(
                f"{name}: CpuShards are a copy to be saved; load into the tensor that they came "
                f"from"
            )
        layout = ShardLayout.of(plain(global_tensor(like), name), name)
        return ShardTarget(known_dtype(like.dtype, name), like, layout, in_place)

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """A tensor, fetched to the host as a whole; a box of a source is on the host already.

        Raises:
            TypeError: `CpuShards`, which are several tensors.
        """
        return TORCH.to_numpy(data) if isinstance(data, torch.Tensor) else super().to_numpy(data)

    def writable_numpy(self, buffer: Leaf) -> NDArray[np.generic] | None:
        """A tensor's own memory where the host can reach it; not on an XLA device."""
        return TORCH.writable_numpy(buffer) if isinstance(buffer, torch.Tensor) else None

    def copy_into(self, buffer: Leaf, data: NDArray[np.generic]) -> None:
        """Copy an array of the same shape and dtype into a tensor on an XLA device.

        Raises:
            TypeError: `CpuShards`, which are not a target.
            ValueError: shape or dtype differ.
        """
        if isinstance(buffer, torch.Tensor):
            TORCH.copy_into(buffer, data)
        else:
            super().copy_into(buffer, data)


ADAPTER: Final = XlaAdapter()
