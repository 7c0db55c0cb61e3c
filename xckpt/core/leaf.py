"""Leaves as the core sees them, whatever framework they come from.

1. A tensor to be saved is a `SourceLeaf`: a global shape and the boxes that this process holds.
   `HostSource` is one over NumPy arrays, `LazySource` one that is read from a file when it is
   written.
2. A tensor to be loaded is a `TargetLeaf`: the boxes wanted, and where their elements go.
3. An object that keeps its own state (a model, an optimizer) is not a leaf: an `ObjectState` stands
   in its place.
4. A leaf that is copied for an asynchronous save is a `Copyable`: the memory that may change, and
   how to build the same leaf over copies of that memory.

An adapter (`xckpt.core.adapter`) makes them of what its framework has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.spread import Spread
from xckpt.core.metadata import Sharding
from xckpt.core.names import KeyPath


class _TensorLeaf(Protocol):
    """What is known of a tensor on either side."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        ...

    @property
    def dtype(self) -> str:
        """The format's name of the element type.

        Empty for a source if only a process with shards knows it, for a target if any will do.
        """
        ...

    @property
    def boxes(self) -> Boxes:
        """The boxes of the shards that this process can read, or wants; each once.

        A shard that several local devices hold appears once. No two boxes of a source overlap.
        """
        ...

    @property
    def annotation(self) -> str:
        """What the leaf is, or will be, beyond an array (``"prng_key:threefry2x32"``).

        Empty for most: a plain array, or a target for anything.
        """
        ...


@runtime_checkable
class SourceLeaf(_TensorLeaf, Protocol):
    """A tensor to be saved, as one process sees it: a global shape and the local shards.

    Example:
        >>> leaf = HostSource((3,), "int8", Boxes.whole((3,)), (np.zeros(3, np.int8),))
        >>> isinstance(leaf, SourceLeaf), leaf.boxes, leaf.sharded
        (True, Boxes([0, 3)), False)
    """

    @property
    def sharded(self) -> bool:
        """False if every process that names the leaf holds the whole of it (a plain tensor)."""
        ...

    @property
    def sharding(self) -> Sharding | None:
        """The sharding, for the manifest."""
        ...

    def data(self, index: int) -> object:
        """Shard ``index`` of `boxes`, of exactly that box's sizes: NumPy's or the framework's type.

        Lazy, idempotent and thread-safe; a view of the caller's memory where that is possible.
        `Adapters.to_numpy` reads it.
        """
        ...


class HostSource(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor to be saved that is in host memory as NumPy arrays.

    There may be very many: the garbage collector, which would look at each again and again, does
    not know of them.

    Example:
        >>> leaf = HostSource((3,), "int8", Boxes.whole((3,)), (np.zeros(3, np.int8),))
        >>> leaf.data(0)
        array([0, 0, 0], dtype=int8)
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes
    shards: Sequence[NDArray[np.generic]]
    """The elements of each box."""
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""
    spread: Callable[[], Spread | None] | None = None
    """Where the boxes of all processes are, if this one knows it."""
    is_apart: bool = False
    """Whether other processes may hold another tensor of its name, as of a pipeline stage."""

    @classmethod
    def in_place_of(
        cls,
        source: SourceLeaf,
        shards: Sequence[NDArray[np.generic]],
        spread: Callable[[], Spread | None] | None = None,
    ) -> HostSource:
        """A source that says the same as any other, over these elements of its boxes."""
        return cls(
            shape=tuple(source.shape),
            dtype=source.dtype,
            boxes=source.boxes,
            shards=tuple(shards),
            sharded=source.sharded,
            sharding=source.sharding,
            annotation=source.annotation,
            spread=spread,
            is_apart=getattr(source, "is_apart", False),
        )

    def data(self, index: int) -> NDArray[np.generic]:
        """The elements of box ``index``."""
        return self.shards[index]


@dataclass(frozen=True, slots=True, eq=False)
class LazySource:
    """A tensor to be saved that is in no framework's memory: it is read when it is written.

    Example:
        >>> leaf = LazySource((4,), "int8", Boxes.whole((4,)), lambda box: np.zeros(4, np.int8))
        >>> leaf.data(0)
        array([0, 0, 0, 0], dtype=int8)
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes
    """The boxes that this process is to read."""
    read: Callable[[int], NDArray[np.generic]]
    """Box ``index`` of `boxes` as a NumPy array; lazy, idempotent and thread-safe."""
    sharded: bool = True
    sharding: Sharding | None = None
    annotation: str = ""

    def data(self, index: int) -> NDArray[np.generic]:
        """What `read` returns."""
        return self.read(index)


@runtime_checkable
class TransferringLeaf(SourceLeaf, Protocol):
    """A source whose data costs a transfer, to be made only once.

    `DefaultSavePlanner.finish_plan` announces how often `data` will be called. A planner that does
    not, or that calls it more often, gets the same data at the cost of another transfer.
    """

    def expect(self, uses: Sequence[int]) -> None:
        """How often `data` will be called for each of `boxes`, from now on."""
        ...


@runtime_checkable
class TargetLeaf(_TensorLeaf, Protocol):
    """A tensor to be loaded: which boxes are wanted, and where each goes."""

    def buffer(self, index: int) -> object:
        """The memory that box ``index`` is written to, in the framework's own type or NumPy's.

        The same memory for each call until `commit`; allocated no earlier than the first call.
        Called by several threads at once, for one box, too: chunks of it come by all of them.
        """
        ...

    def commit(self, index: int) -> None:
        """Publish buffer ``index`` (to a device, say) and release it: all its elements are there.

        Called exactly once a box, from any thread.
        """
        ...

    def result(self) -> object:
        """The loaded leaf; called once, after every box was committed."""
        ...


class Extent(NamedTuple):
    """Where in memory the elements of a box are, on whatever device.

    A target that can fill the caller's own memory has a method ``extent(index)``, which says where
    box ``index`` is; None where the load makes the memory, or addresses tell nothing.

    Example:
        >>> Extent(800, (2, 3), (-24, 8), 8).range()
        (776, 824)
    """

    start: int
    """The address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next, in each dimension."""
    item: int
    """Bytes of an element."""
    conjugated: bool = False
    """Whether the memory holds the conjugates of the elements: torch has only noted that down."""
    negated: bool = False
    """The same, of the elements with the other sign."""

    def range(self) -> tuple[int, int]:
        """The lowest address, and the one behind the highest."""
        low, shape, strides, item, *_ = self  # quicker than by their names: there are many
        high = low + item
        for size, step in zip(shape, strides):  # noqa: B905  # slower with strict
            if step < 0:
                low += (size - 1) * step
            else:
                high += (size - 1) * step
        return low, high


@runtime_checkable
class ObjectState(Protocol):
    """The state of an object that keeps its own, to be saved or to be loaded."""

    @property
    def tree(self) -> Mapping[str | int, object]:
        """The state, as the object gave it: containers of leaves, no more of such objects."""
        ...

    @property
    def clears(self) -> Collection[str]:
        """Keys of `tree`: an empty dict stored there takes the place of all that the object has.

        Under any other key, what the object has and the checkpoint lacks is a missing leaf.
        """
        ...

    @property
    def replaces(self) -> bool:
        """Whether `load` takes new tensors in place of the object's, which are then not filled."""
        ...

    @property
    def opaque(self) -> Collection[str | int]:
        """Keys of `tree` under which the object takes whatever it gave once, of any form."""
        ...

    @property
    def lengths(self) -> Mapping[KeyPath, tuple[int, str]]:
        """Lists of `tree` that the object takes in one length alone -> that, and what they hold."""
        ...

    def like(self, keys: KeyPath, shape: tuple[int, ...], dtype: str) -> object:
        """A target for a stored tensor that `tree` has no place for.

        Args:
            keys: where in the state it belongs.
            shape: the stored tensor's global shape.
            dtype: the format's name of its element type.
        """
        ...

    def load(self, tree: object) -> None:
        """Hand a loaded state to the object."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RemotePart:
    """Elements that NumPy cannot reach where they are: on an accelerator, say."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    start: Callable[[NDArray[np.generic]], object]
    """Begin to copy the elements into host memory of this shape and dtype, in C order."""
    wait: Callable[[], object]
    """Return when the copies begun are complete."""


Part = NDArray[np.generic] | RemotePart
"""Memory that may change: the host's, of any strides, or a device's."""


@dataclass(frozen=True, slots=True, eq=False)
class Copyable:
    """How to make a copy of a leaf that no longer changes."""

    parts: Sequence[Part]
    """The memory to copy; none where nothing can change the leaf."""
    rebuild: Callable[[Sequence[NDArray[np.generic]]], object]
    """The same leaf over copies of the parts; on the host a copy may have the part's strides."""


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """Where a framework is to put the tensors that a load makes; fields are of its own types."""

    device: object = None
    """A device, or its name; None for the framework's usual one."""
    mesh: object = None
    """Devices with named axes, over which the sharding that wrote a tensor is laid again."""
    sharding: object = None
    """The sharding of every tensor, in place of the one that wrote it."""
    cast: bool = False
    """Whether a dtype that the framework has switched off may become another."""
