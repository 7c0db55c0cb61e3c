"""The frameworks' doors, as the core sees them.

1. An `Adapter` knows one framework: which objects are its leaves, how to describe them, and what
   else of the framework a tree may hold. A subclass overrides what its framework has.
2. `Adapters` are those that a save or a load may need, as one value. A leaf belongs to the first
   adapter whose `owns` is true. Each question goes to one adapter, found by the leaf's class.
3. The engine makes that value (`xckpt.engine.adapters`).
"""

# An object that is an array or a container has elements of unknown type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    TargetPlace,
    TransferringLeaf,
)
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.text.arguments import named_class
from xckpt.errors import UnsupportedLeafError

Leaf = TypeVar("Leaf")
"""The classes of a framework's leaves."""
Children = tuple[str, Collection[tuple[str | int, object]]]
"""What a container holds: its kind, and a (key, child) pair for each child."""
Answer = TypeVar("Answer")

_BUILTIN = frozenset(
    (dict, OrderedDict, list, tuple, type(None), bool, int, float, complex, str, bytes)
)
"""Builtin types: no adapter is asked about their instances."""


class Adapter(Generic[Leaf]):
    """A framework's door. The defaults suit a framework whose leaves can only be saved."""

    leaves: tuple[type[Leaf], ...] = ()
    """The classes whose instances are this framework's leaves."""
    by_class = False  # whether an `owns` of its own says the same of all instances of a class

    def owns(self, leaf: object) -> bool:
        """Whether an object is this framework's: a leaf, or what a planner makes of one."""
        return isinstance(leaf, self.leaves)

    def describe(self, leaf: Leaf, name: str) -> SourceLeaf:
        """A leaf as a source.

        Raises:
            UnsupportedLeafError: it cannot be saved; names the leaf.
        """
        raise UnsupportedLeafError(f"{name}: {named_class(leaf)} cannot be saved")

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> TargetLeaf:
        """A target of the same shape, dtype, device and sharding as a leaf.

        ``in_place``: `TargetLeaf.buffer` gives the leaf's own memory (or copies into it at
        `TargetLeaf.commit`), and `TargetLeaf.result` gives the leaf itself.

        Raises:
            UnsupportedLeafError: it cannot be loaded (into); names the leaf.
        """
        raise UnsupportedLeafError(f"{name}: {named_class(like)} cannot be loaded")

    def like(self, stored: TensorStorageMetadata, name: str, place: TargetPlace) -> Leaf:
        """A target for a stored tensor, where the caller gives none; it takes no memory.

        Raises:
            UnsupportedLeafError: the framework cannot hold it; names the leaf.
        """
        raise UnsupportedLeafError(f"{name}: this framework makes no targets; give one")

    def prepared(self, likes: Mapping[str, object], metadata: Metadata) -> Mapping[str, object]:
        """The targets of a load, by name; those that are only a sharding get the stored shape."""
        return likes

    def memory_of(self, leaf: Leaf) -> object:
        """Equal for leaves that are all of the same memory, wherever; None if that is not known."""
        return None

    def copyable(self, leaf: Leaf, name: str) -> Copyable:
        """How to copy a leaf; by default the copy is a `HostSource`, which can stand for any leaf.

        Raises:
            UnsupportedLeafError: it cannot be saved; names the leaf.
        """
        return self.copyable_source(self.describe(leaf, name), name)

    def copyable_source(self, source: SourceLeaf, name: str = "") -> Copyable:
        """How to copy what `describe` gave."""
        count = len(source.boxes)
        if isinstance(source, TransferringLeaf):
            source.expect([1] * count)
        shards = [self._shard(source, index, name) for index in range(count)]
        return Copyable(shards, partial(HostSource.in_place_of, source))

    def _shard(self, source: SourceLeaf, index: int, name: str) -> NDArray[np.generic]:
        data: Any = source.data(index)  # NumPy's, or of this framework
        return data if isinstance(data, np.ndarray) else self.read(data, name)

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """A tensor as NumPy's, of a dtype of the format and any strides, its memory where it can.

        Raises:
            TypeError: it is not a tensor that can be read.
        """
        _cannot("read", data)

    def read(self, data: Leaf, name: str) -> NDArray[np.generic]:
        """`to_numpy` of a leaf, or of a part of it; ``name`` is for an error."""
        return self.to_numpy(data)

    def writable_numpy(self, buffer: Leaf) -> NDArray[np.generic] | None:
        """A writable NumPy view of a tensor; None if its memory cannot be reached from the host."""
        return None

    def copy_into(self, buffer: Leaf, data: NDArray[np.generic]) -> None:
        """Copy host data of the same shape and dtype into a tensor.

        Raises:
            TypeError: it is not a tensor that can be written.
        """
        _cannot("write", buffer)

    def pinned_memory(self, size: int) -> NDArray[np.uint8] | None:
        """Host memory that this framework's accelerator can write directly; None without one."""
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
        """Say why an object of this framework cannot be a leaf; called where no adapter owns it.

        Raises:
            UnsupportedLeafError: names the leaf and says what to do instead.
        """


class _Sources(Adapter[HostSource | LazySource]):
    """What a planner or a stager has described already, of any framework."""

    leaves: tuple[type[HostSource | LazySource], ...] = (HostSource, LazySource)

    def describe(self, leaf: HostSource | LazySource, name: str) -> SourceLeaf:
        return leaf

    def copyable(self, leaf: HostSource | LazySource, name: str) -> Copyable:
        return Copyable((), lambda copies: leaf)


_SOURCES: Final = _Sources()


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
    look_again: Callable[[], tuple[Adapter[Any], ...]] = tuple
    """All adapters that are loaded by now; asked about what no known adapter owns."""
    _owners: dict[type, Adapter[Any]] = field(default_factory=dict, repr=False, compare=False)
    """Who owns all instances of a class."""

    def owner(self, leaf: object) -> Adapter[Any] | None:
        """The adapter whose leaf an object is."""
        if type(leaf) in self._owners:  # as of most leaves
            return self._owners[type(leaf)]
        asked = _SOURCES, *self.known
        for number, adapter in enumerate(asked, 1):
            if adapter.owns(leaf):
                if all(map(_owns_by_class, asked[:number])):
                    self._owners[type(leaf)] = adapter
                return adapter
        return next((each for each in self._all() if each.owns(leaf)), None)

    def is_leaf(self, node: object) -> bool:
        """Whether a node of a tree is a tensor, and so neither a container nor a value."""
        return self.owner(node) is not None

    def describe(self, leaf: object, name: str) -> SourceLeaf | None:
        """The leaf as a `SourceLeaf`, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be saved.
        """
        adapter = self._owner_or_refusal(leaf, name)
        return None if adapter is None else adapter.describe(leaf, name)

    def copyable(self, leaf: object, name: str) -> Copyable | None:
        """How to copy a leaf, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be saved.
        """
        adapter = self._owner_or_refusal(leaf, name)
        return None if adapter is None else adapter.copyable(leaf, name)

    def target_for(self, like: object, name: str, *, in_place: bool) -> TargetLeaf | None:
        """The target that ``like`` stands for, or None if no adapter owns it.

        Raises:
            UnsupportedLeafError: an adapter owns it, but it cannot be loaded.
        """
        adapter = self._owner_or_refusal(like, name)
        return None if adapter is None else adapter.target_for(like, name, in_place=in_place)

    def to_numpy(self, data: object, name: str) -> NDArray[np.generic]:
        """A leaf, or a part of it, as a NumPy array that shares its memory where it can.

        Raises:
            TypeError: no adapter can read it.
        """
        if isinstance(data, np.ndarray):
            return data
        adapter = self.owner(data)
        return _cannot("read", data) if adapter is None else adapter.read(data, name)

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
        return _first(each.pinned_memory(size) for each in self.known)

    def open_object(self, node: object, name: str) -> ObjectState | None:
        """The state of an object that keeps its own, or None for any other.

        Raises:
            UnsupportedLeafError: its state is nothing that can be saved or loaded.
        """
        if type(node) in _BUILTIN or self.is_leaf(node):
            return None
        return _first(each.open_object(node, name) for each in self._all())

    def open_container(self, node: object) -> Children | None:
        """A container's kind and (key, child) pairs, or None for a leaf.

        Example:
            >>> NO_ADAPTERS.open_container({"a": 1}), NO_ADAPTERS.open_container(5)
            (('dict', dict_items([('a', 1)])), None)
        """
        if isinstance(node, Mapping):
            # A framework may have registered a mapping of its own (flax's FrozenDict, nnx.State).
            registered = None if type(node) in _BUILTIN else self._registered(node)
            return registered or ("dict", dict(node.items()).items())  # a list would keep tuples
        if isinstance(node, list):
            return "list", list(enumerate(node))
        if isinstance(node, tuple):
            fields = getattr(type(node), "_fields", None)
            if fields is None:
                return "tuple", list(enumerate(node))
            kind = f"namedtuple:{type(node).__name__}:{','.join(fields)}"
            return kind, list(zip(fields, node, strict=True))
        if node is None or isinstance(node, bool | int | float | complex | str | bytes):
            return None
        return None if self.is_leaf(node) else self._registered(node)

    def _registered(self, node: object) -> Children | None:
        return _first(each.children(node) for each in self._all())

    def rebuild(self, node: object, children: list[object]) -> object | None:
        """A registered container like ``node`` with other children, or None for any other node."""
        return _first(each.rebuild(node, children) for each in self._all())

    def _all(self) -> Iterator[Adapter[Any]]:
        """Those known, then those loaded since."""
        yield _SOURCES
        yield from self.known
        yield from (each for each in self.look_again() if each not in self.known)

    def _owner_or_refusal(self, leaf: object, name: str) -> Adapter[Any] | None:
        if type(leaf) in _BUILTIN:
            return None
        adapter = self.owner(leaf)
        if adapter is None:
            for each in self._all():
                each.refuse(leaf, name)
        return adapter


NO_ADAPTERS: Final = Adapters()
"""Knows no framework: every object but a builtin container or value is unknown."""


def _owns_by_class(adapter: Adapter[Any]) -> bool:
    """Whether an adapter owns all instances of a class or none."""
    usual = all(type(each).__instancecheck__ is type.__instancecheck__ for each in adapter.leaves)
    return usual if type(adapter).owns is Adapter[Any].owns else adapter.by_class


def _first(answers: Iterable[Answer | None]) -> Answer | None:
    return next((answer for answer in answers if answer is not None), None)


def _cannot(verb: str, data: object) -> NoReturn:
    raise TypeError(f"no adapter can {verb} {named_class(data)}")
