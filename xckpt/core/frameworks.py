"""The doors through which the core speaks with the frameworks' adapters.

A planner never touches a framework. It asks `describe` for a `SourceLeaf` (to save) or `aim` for a
`TargetLeaf` (to load), and an adapter answers:

1. The surface registers each framework once, by module name (`register_adapter`).
2. A leaf is offered to the adapters whose framework is imported already: an object of a framework
   that was never imported cannot exist. NumPy comes last.
3. The first adapter that returns something owns the leaf; None means "not mine".
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xckpt.core.leaf import (
    Adapter,
    LazySource,
    ObjectState,
    SourceLeaf,
    TargetLeaf,
    TransferringLeaf,
)
from xckpt.core.staged import Copyable, StagedLeaf

__all__ = [
    "adapters",
    "aim",
    "as_described",
    "children",
    "copy_into",
    "copyable",
    "describe",
    "open_object",
    "pinned_memory",
    "register_adapter",
    "to_numpy",
    "to_writable_numpy",
]

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
