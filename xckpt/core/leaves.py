"""What the core knows of a framework's leaf, and the doors through which adapters speak.

A planner never touches a framework. It asks `describe` for a `SourceLeaf` (to save) or `aim` for a
`TargetLeaf` (to load), and an adapter answers:

1. The surface registers each framework once, by module name (`register_adapter`).
2. A leaf is offered to the adapters whose framework is imported already: an object of a framework
   that was never imported cannot exist. NumPy comes last.
3. The first adapter that returns something owns the leaf; None means "not mine".

An array that is still in a file belongs to no framework: it is a `LazySource` and needs no adapter.

An object that keeps its own state (a model, an optimizer) is no leaf: `open_object` gives the
`ObjectState` in its place.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xckpt.core.boxes import Boxes
from xckpt.core.keys import KeyPath
from xckpt.core.metadata import Sharding
from xckpt.core.staged import Copyable, StagedLeaf

__all__ = [
    "Adapter",
    "LazySource",
    "ObjectState",
    "SourceLeaf",
    "TargetLeaf",
    "TransferringLeaf",
    "adapters",
    "aim",
    "as_described",
    "children",
    "copyable",
    "describe",
    "open_object",
    "pinned_memory",
    "register_adapter",
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
        >>> describe(leaf, "w") is leaf
        True
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

        For a kind that cannot be built over copies, `as_described` does.

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


_registered: dict[str, str] = {}
_loaded: dict[str, Adapter] = {}
_waiting: list[str] = []
"""Frameworks that were not imported when they were looked for."""
_present: tuple[Adapter, ...] = ()
_looking = threading.RLock()


def register_adapter(framework: str, module: str) -> None:
    """Have leaves of ``framework`` (a top-level module name) handled by the adapter ``module``."""
    _registered[framework] = module
    _waiting.append(framework)


def adapters() -> Sequence[Adapter]:
    """The adapters of the frameworks that this process has imported, in order of registration."""
    # Asked several times a leaf, so that a look at the few that are not there must do.
    for framework in _waiting:
        if framework in sys.modules:
            return _look_again()
    return _present


def _look_again() -> Sequence[Adapter]:
    """Load the adapters of frameworks that are there now."""
    global _present
    with _looking:
        for framework in list(_waiting):
            if framework in sys.modules:
                module = _registered[framework]
                _loaded[framework] = importlib.import_module(module)  # type: ignore[assignment]
                _waiting.remove(framework)
        found = (_loaded[framework] for framework in _registered if framework in _loaded)
        _present = tuple(dict.fromkeys(found))  # Two names may have one adapter.
        return _present


def describe(leaf: object, name: str) -> SourceLeaf | None:
    """The leaf as a `SourceLeaf`, or None if no adapter owns it.

    Raises:
        UnsupportedLeafError: an adapter owns it, but it cannot be saved.
    """
    if isinstance(leaf, LazySource | StagedLeaf):
        return leaf
    for adapter in adapters():
        source = adapter.describe(leaf, name)
        if source is not None:
            return source
    return None


def copyable(leaf: object, name: str) -> Copyable | None:
    """How to get a copy of a leaf that no longer changes, or None if no adapter owns it.

    Raises:
        UnsupportedLeafError: an adapter owns it, but it cannot be saved.
    """
    if isinstance(leaf, LazySource | StagedLeaf):
        return Copyable((), lambda copies: leaf)
    for adapter in adapters():
        found = adapter.copyable(leaf, name)
        if found is not None:
            return found
    return None


def as_described(source: SourceLeaf) -> Copyable:
    """How to get a `StagedLeaf`, which can stand for any leaf that can be described."""

    def rebuild(copies: Sequence[NDArray[np.generic]]) -> StagedLeaf:
        return StagedLeaf(
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
    return Copyable([to_numpy(source.data(index)) for index in range(count)], rebuild)


def pinned_memory(size: int) -> NDArray[np.uint8] | None:
    """Host memory that an accelerator can write directly; None if there is no accelerator."""
    for adapter in adapters():
        memory = adapter.pinned_memory(size)
        if memory is not None:
            return memory
    return None


def aim(like: object, name: str, *, in_place: bool) -> TargetLeaf | None:
    """The target that ``like`` stands for, or None if no adapter owns it.

    Raises:
        UnsupportedLeafError: an adapter owns it, but it cannot be loaded.
    """
    for adapter in adapters():
        target = adapter.aim(like, name, in_place=in_place)
        if target is not None:
            return target
    return None


def to_numpy(data: object) -> NDArray[np.generic]:
    """Any framework's tensor as a NumPy array that shares its memory where it can.

    Raises:
        TypeError: no adapter knows the type.
    """
    for adapter in adapters():
        array = adapter.to_numpy(data)
        if array is not None:
            return array
    raise TypeError(f"no adapter can read a {type(data).__module__}.{type(data).__qualname__}")


def to_writable_numpy(buffer: object) -> NDArray[np.generic] | None:
    """A writable NumPy view of a framework's buffer, or None if the host cannot reach it."""
    for adapter in adapters():
        array = adapter.to_writable_numpy(buffer)
        if array is not None:
            return array
    return None


def copy_into(buffer: object, data: NDArray[np.generic]) -> None:
    """Copy host data into a buffer that the host cannot reach.

    Raises:
        TypeError: no adapter knows the type.
    """
    for adapter in adapters():
        if adapter.copy_into(buffer, data):
            return
    raise TypeError(f"no adapter can write a {type(buffer).__module__}.{type(buffer).__qualname__}")


def open_object(node: object, name: str) -> ObjectState | None:
    """The state of an object that keeps its own, or None for any other.

    Raises:
        UnsupportedLeafError: its state is nothing that can be saved or loaded.
    """
    for adapter in adapters():
        state = adapter.open_object(node, name)
        if state is not None:
            return state
    return None


def children(node: object) -> tuple[str, list[tuple[str | int, object]]] | None:
    """What a framework's registered container holds, or None if it is no such container."""
    for adapter in adapters():
        found = adapter.children(node)
        if found is not None:
            return found
    return None
