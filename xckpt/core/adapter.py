"""The frameworks' doors, as the core sees them.

1. An `Adapter` knows one framework: which objects are its leaves, how to describe them, and what
   else of the framework a tree may hold. A subclass overrides what its framework has.
2. `Adapters` are those that a save or a load may need, as one value. A leaf belongs to the first
   whose `owns` is true, so each question goes to one adapter, found by the leaf's class.
3. The engine makes that value (`xckpt.engine.adapters`) and hands it to the planner. The core
   loads nothing.
"""

# An object that is a NumPy array has a shape and a dtype of unknown type.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.leaf import (
    Copyable,
    HostSource,
    LazySource,
    ObjectState,
    SourceLeaf,
    TargetLeaf,
    TransferringLeaf,
)
from xckpt.errors import UnsupportedLeafError

Leaf = TypeVar("Leaf")
"""What the leaves of a framework are."""
Children = tuple[str, list[tuple[str | int, object]]]
"""What a container holds: its kind, and a (key, child) pair for each child."""


class Adapter(Generic[Leaf]):
    """A framework's door. The defaults are those of a framework that has leaves to save only."""

    leaves: tuple[type[Leaf], ...] = ()
    """The classes whose instances are this framework's leaves."""

    def owns(self, leaf: object) -> bool:
        """Whether an object is this framework's: a leaf, or what a planner makes of one."""
        return isinstance(leaf, self.leaves)

    def describe(self, leaf: Leaf, name: str) -> SourceLeaf:
        """A leaf as a source.

        Raises:
            UnsupportedLeafError: it cannot be saved; names the leaf.
        """
        raise UnsupportedLeafError(f"{name}: a {_class_of(leaf)} cannot be saved")

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> TargetLeaf:
        """A target of the same shape, dtype, device and sharding as a leaf.

        ``in_place``: `TargetLeaf.buffer` gives the leaf's own memory (or copies into it at
        `TargetLeaf.commit`), and `TargetLeaf.result` gives the leaf itself.

        Raises:
            UnsupportedLeafError: it cannot be loaded (into); names the leaf.
        """
        raise UnsupportedLeafError(f"{name}: a {_class_of(like)} cannot be loaded")

    def copyable(self, leaf: Leaf, name: str) -> Copyable:
        """How to copy a leaf; by default the copy is a `HostSource`, which can stand for any leaf.

        Raises:
            UnsupportedLeafError: it cannot be saved; names the leaf.
        """
        return self.copyable_source(self.describe(leaf, name))

    def copyable_source(self, source: SourceLeaf) -> Copyable:
        """How to copy what `describe` gave."""

        def rebuild(copies: Sequence[NDArray[np.generic]]) -> HostSource:
            return HostSource(
                tuple(source.shape),
                source.dtype,
                source.boxes,
                tuple(copies),
                source.sharded,
                source.sharding,
                source.annotation,
            )

        count = len(source.boxes)
        if isinstance(source, TransferringLeaf):
            source.expect([1] * count)
        return Copyable([self._shard(source, index) for index in range(count)], rebuild)

    def _shard(self, source: SourceLeaf, index: int) -> NDArray[np.generic]:
        data: Any = source.data(index)  # NumPy's, or of this framework
        return data if isinstance(data, np.ndarray) else self.to_numpy(data)

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """A tensor of this framework as a NumPy array that shares its memory where it can.

        Any strides; the format's dtypes (ml_dtypes included).

        Raises:
            TypeError: it is no tensor that can be read.
        """
        _cannot("read", data)

    def writable_numpy(self, buffer: Leaf) -> NDArray[np.generic] | None:
        """A writable NumPy view of a tensor; None if its memory cannot be reached from the host."""
        return None

    def copy_into(self, buffer: Leaf, data: NDArray[np.generic]) -> None:
        """Copy host data of the same shape and dtype into a tensor.

        Raises:
            TypeError: it is no tensor that can be written.
        """
        _cannot("write", buffer)

    def pinned_memory(self, size: int) -> NDArray[np.uint8] | None:
        """``size`` bytes of host memory that an accelerator can write directly.

        None if this framework has no accelerator here.
        """
        return None

    def open_object(self, node: object, name: str) -> ObjectState | None:
        """The state of an object of this framework that keeps its own; None for any other.

        Raises:
            UnsupportedLeafError: its state is nothing that can be saved or loaded; names it.
        """
        return None

    def children(self, node: object) -> Children | None:
        """What a container holds that this framework registered; None for any other object."""
        return None

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A container like ``node`` with other children; None if this framework has none such."""
        return None

    def refuse(self, leaf: object, name: str) -> None:
        """Say why an object of this framework can be no leaf; called where no adapter owns it.

        Raises:
            UnsupportedLeafError: names the leaf and says what to do instead.
        """


def _none_more() -> tuple[Adapter[Any], ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters that a save or a load may need.

    Example:
        >>> import xckpt.numpy
        >>> adapters = Adapters((xckpt.numpy.ADAPTER,))
        >>> adapters.describe(np.zeros((2, 3), np.float32), "w").dtype
        'float32'
        >>> adapters.describe("text", "w") is None
        True
    """

    known: tuple[Adapter[Any], ...] = ()
    """In the order in which they are asked."""
    look_again: Callable[[], tuple[Adapter[Any], ...]] = _none_more
    """All that are loaded by now; asked about what no known adapter owns."""

    def owner(self, leaf: object) -> Adapter[Any] | None:
        """The adapter whose leaf an object is."""
        for adapter in self._all():
            if adapter.owns(leaf):
                return adapter
        return None

    def is_leaf(self, node: object) -> bool:
        """Whether a node of a tree is a tensor, and so neither a container nor a value."""
        return isinstance(node, HostSource | LazySource) or self.owner(node) is not None

    def describe(self, leaf: object, name: str) -> SourceLeaf | None:
        """The leaf as a `SourceLeaf`, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be saved.
        """
        if isinstance(leaf, HostSource | LazySource):
            return leaf
        adapter = self._owner_or_refusal(leaf, name)
        return None if adapter is None else adapter.describe(leaf, name)

    def copyable(self, leaf: object, name: str) -> Copyable | None:
        """How to copy a leaf, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be saved.
        """
        if isinstance(leaf, HostSource | LazySource):
            return Copyable((), lambda copies: leaf)
        adapter = self._owner_or_refusal(leaf, name)
        return None if adapter is None else adapter.copyable(leaf, name)

    def target_for(self, like: object, name: str, *, in_place: bool) -> TargetLeaf | None:
        """The target that ``like`` stands for, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be loaded.
        """
        adapter = self._owner_or_refusal(like, name)
        return None if adapter is None else adapter.target_for(like, name, in_place=in_place)

    def to_numpy(self, data: object) -> NDArray[np.generic]:
        """Any framework's tensor as a NumPy array that shares its memory where it can.

        Raises:
            TypeError: no adapter can read it.
        """
        if isinstance(data, np.ndarray):
            return data
        adapter = self.owner(data)
        return _cannot("read", data) if adapter is None else adapter.to_numpy(data)

    def writable_numpy(self, buffer: object) -> NDArray[np.generic] | None:
        """A writable NumPy view of any framework's tensor; None if the host cannot reach it."""
        if isinstance(buffer, np.ndarray):
            return buffer
        adapter = self.owner(buffer)
        return None if adapter is None else adapter.writable_numpy(buffer)

    def copy_into(self, buffer: object, data: NDArray[np.generic]) -> None:
        """Copy host data into a tensor that the host cannot reach.

        Raises:
            TypeError: no adapter can write it.
        """
        adapter = self.owner(buffer)
        if adapter is None:
            _cannot("write", buffer)
        adapter.copy_into(buffer, data)

    def pinned_memory(self, size: int) -> NDArray[np.uint8] | None:
        """Host memory that an accelerator can write directly; None if there is no accelerator."""
        return next(
            (memory for each in self.known if (memory := each.pinned_memory(size)) is not None),
            None,
        )

    def open_object(self, node: object, name: str) -> ObjectState | None:
        """The state of an object that keeps its own, or None for any other.

        Raises:
            UnsupportedLeafError: its state is nothing that can be saved or loaded.
        """
        states = (each.open_object(node, name) for each in self._all())
        return next((state for state in states if state is not None), None)

    def children(self, node: object) -> Children | None:
        """What a container holds that a framework registered, or None for any other node."""
        found = (each.children(node) for each in self._all())
        return next((children for children in found if children is not None), None)

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A registered container like ``node`` with other children, or None for any other node."""
        made = (each.rebuild(node, children) for each in self._all())
        return next((container for container in made if container is not None), None)

    def _all(self) -> Iterator[Adapter[Any]]:
        """Those known, then those loaded since."""
        yield from self.known
        yield from (each for each in self.look_again() if each not in self.known)

    def _owner_or_refusal(self, leaf: object, name: str) -> Adapter[Any] | None:
        adapter = self.owner(leaf)
        if adapter is None:
            for each in self._all():
                each.refuse(leaf, name)
        return adapter


NO_ADAPTERS: Final = Adapters()
"""Knows no framework: every object but a builtin container or value is unknown."""


def _cannot(verb: str, data: object) -> NoReturn:
    raise TypeError(f"no adapter can {verb} a {_class_of(data)}")


def _class_of(leaf: object) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
