"""What the core knows of a framework's leaf, and what a framework's adapter answers.

A tensor to be saved is a `SourceLeaf`, one to be loaded a `TargetLeaf`. An `Adapter` makes them of
what its framework has (`xckpt.core.frameworks` asks it). An array that is still in a file belongs
to no framework: it is a `LazySource` and needs no adapter.

An object that keeps its own state (a model, an optimizer) is no leaf: an `ObjectState` stands in
its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.core.names import KeyPath
from xckpt.core.staged import Copyable

__all__ = [
    "Adapter",
    "LazySource",
    "ObjectState",
    "SourceLeaf",
    "TargetLeaf",
    "TransferringLeaf",
]


@runtime_checkable
class SourceLeaf(Protocol):
    """A tensor to be saved, as one process sees it: a global shape and the local shards."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        ...

    @property
    def dtype(self) -> str:
        """The format's name of the element type; empty if only a process with shards knows it."""
        ...

    @property
    def boxes(self) -> Boxes:
        """The boxes of the shards that this process can read, without doubles.

        A shard that several local devices hold appears once. No two overlap.
        """
        ...

    @property
    def sharded(self) -> bool:
        """False if every process that names the leaf holds the whole of it (a plain tensor)."""
        ...

    @property
    def sharding(self) -> Sharding | None:
        """The sharding, for the manifest."""
        ...

    @property
    def annotation(self) -> str:
        """What the leaf is beyond an array (``"prng_key:threefry2x32"``); empty for most."""
        ...

    def data(self, index: int) -> object:
        """Shard ``index`` of `boxes`, of exactly that box's sizes, as the adapter likes it.

        Lazy, idempotent and thread-safe; a view of the caller's memory where that is possible.
        `Adapter.to_numpy` of the same adapter reads it.
        """
        ...


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
    """A source whose data costs a transfer that it would like to make only once.

    `DefaultSavePlanner.finish_plan` tells it what will be asked; a planner that tells nothing, or
    that asks more often, gets the same data at the cost of another transfer.
    """

    def expect(self, uses: Sequence[int]) -> None:
        """How often `data` will be called for each of `boxes`, from now on."""
        ...


@runtime_checkable
class TargetLeaf(Protocol):
    """A tensor to be loaded: which boxes are wanted, and where each goes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        ...

    @property
    def dtype(self) -> str:
        """The format's name of the element type wanted; empty if nothing is, and any will do."""
        ...

    @property
    def boxes(self) -> Boxes:
        """The boxes wanted, each once."""
        ...

    @property
    def annotation(self) -> str:
        """What the leaf shall be beyond an array; empty where anything will do."""
        ...

    def buffer(self, index: int) -> object:
        """Where box ``index`` is to be written: memory in the framework's own type or NumPy's.

        The same object for each call until `commit`; allocated no earlier than the first call.
        """
        ...

    def commit(self, index: int) -> None:
        """All elements of buffer ``index`` are there: publish it (to a device, say) and let it go.

        Called exactly once a box, from any thread.
        """
        ...

    def result(self) -> object:
        """The loaded leaf; called once, after every box was committed."""
        ...


@runtime_checkable
class ObjectState(Protocol):
    """What an object that keeps its own state has given away, to be saved or to be loaded."""

    @property
    def tree(self) -> Mapping[str | int, object]:
        """The state, as the object gave it: containers of leaves, no more of such objects."""
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


class Adapter(Protocol):
    """A framework's door. A module that has these functions is one."""

    def describe(self, leaf: object, name: str) -> SourceLeaf | None:
        """The leaf as a source, or None if it is not of this framework.

        Raises:
            UnsupportedLeafError: it is of this framework, but cannot be saved; names the leaf.
        """
        ...

    def copyable(self, leaf: object, name: str) -> Copyable | None:
        """How to get a leaf of the same kind that no longer changes; None if not this framework's.

        For a kind that cannot be built over copies, `xckpt.core.frameworks.as_described` does.

        Raises:
            UnsupportedLeafError: it is of this framework, but cannot be saved; names the leaf.
        """
        ...

    def pinned_memory(self, size: int) -> NDArray[np.uint8] | None:
        """``size`` bytes of host memory that an accelerator can write directly.

        None if this framework has no accelerator here.
        """
        ...

    def aim(self, like: object, name: str, *, in_place: bool) -> TargetLeaf | None:
        """A target of the same shape, dtype, device and sharding, or None if not this framework's.

        ``in_place``: `buffer` gives the leaf's own memory (or copies into it at `commit`), and
        `result` gives the leaf itself.

        Raises:
            UnsupportedLeafError: it cannot be loaded (into); names the leaf.
        """
        ...

    def to_numpy(self, data: object) -> NDArray[np.generic] | None:
        """What `SourceLeaf.data` returned as a NumPy array that shares its memory where it can.

        None if it is not of this framework. Any strides; the format's dtypes (ml_dtypes included).
        """
        ...

    def to_writable_numpy(self, buffer: object) -> NDArray[np.generic] | None:
        """A writable NumPy view of what `TargetLeaf.buffer` returned.

        None if it is not of this framework, or if its memory cannot be reached from the host.
        """
        ...

    def copy_into(self, buffer: object, data: NDArray[np.generic]) -> bool:
        """Copy host data into a buffer that `to_writable_numpy` cannot reach; False if not ours."""
        ...

    def open_object(self, node: object, name: str) -> ObjectState | None:
        """The state of an object that keeps its own, or None if it is none that this one knows.

        Raises:
            UnsupportedLeafError: its state is nothing that can be saved or loaded; names it.
        """
        ...

    def children(self, node: object) -> tuple[str, list[tuple[str | int, object]]] | None:
        """(kind, (key, child) pairs) of a container that this framework registered, else None."""
        ...

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A container like ``node`` with other children; None if this framework has none such."""
        ...
