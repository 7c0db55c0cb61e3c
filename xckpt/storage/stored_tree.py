"""The leaves of an open checkpoint by name, and its sub-trees, without loading anything.

1. A `StoredTree` is what a checkpoint says about a part of itself, with names counted from there,
   and a function that gives a leaf of the checkpoint.
2. The name of a leaf gives its `StoredArray` or value, that of a container its `StoredTree`.
3. `StoredTree.like` has a framework's adapter make a target for each array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, TypeAlias, TypeVar, overload

from xckpt.core.dtypes import item_size
from xckpt.core.leaf import TargetPlace
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.near_names import no_such_name
from xckpt.core.part.selection import Selection, with_containers
from xckpt.core.plan.new_leaves import leaves_of
from xckpt.core.text.arguments import named
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import ShownLeaf, outline, total, tree_html
from xckpt.core.tree import unflatten
from xckpt.core.values import Value, shown_value
from xckpt.engine.adapters import framework_adapter
from xckpt.engine.limits import not_compiled
from xckpt.storage.stored_array import StoredArray

T = TypeVar("T")

Leaf: TypeAlias = StoredArray | Value
"""A leaf of an open checkpoint."""
ShardingRule: TypeAlias = Callable[[str, StoredArray], object]
"""A leaf's sharding, in the words of its framework, from its name and what is stored."""


class StoredTree(Mapping[str, "Leaf | StoredTree"]):
    """The leaves below a name of a checkpoint, named from there: array or Python value.

    Iteration gives leaf names. The name of a container is not an item, but indexing by it gives the
    `StoredTree` below it.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://tree", {"model": {"w": np.ones(3), "depth": 2}, "step": 7})
        >>> model = xckpt.open("memory://tree")["model"]
        >>> list(model), model.array("w").shape, model.value("depth")
        (['w', 'depth'], (3,), 2)
    """

    def __init__(self, read: Callable[[str], Leaf], metadata: Metadata, where: str) -> None:
        self.metadata: Metadata = metadata
        """What the checkpoint says about these leaves."""
        self._read = read
        self._where = where
        self._trees: dict[str, StoredTree] = {}  # those that were asked for

    @cached_property
    def tree(self) -> object:
        """The saved containers, with a stored array or value for each leaf; made once."""
        return unflatten({name: self._read(name) for name in self}, self.metadata.containers)

    @cached_property
    def _nodes(self) -> dict[str, None]:
        return with_containers([*self.metadata.state_dict_metadata, *self.metadata.containers])

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        """Container -> the leaves and containers right in it."""
        found: dict[str, list[str]] = {}
        for name in self._nodes:
            found.setdefault(name.rpartition("/")[0], []).append(name)
        return found

    @cached_property
    def _order(self) -> dict[str, int]:
        """The place of each leaf, and of each container that is not a plain dict, among them."""
        names = (*self.metadata.state_dict_metadata, *self.metadata.containers)
        return {name: place for place, name in enumerate(names)}

    def __reduce__(self) -> tuple[object, ...]:
        return StoredTree, (self._read, self.metadata, self._where)  # without what was made of it

    def __contains__(self, name: object) -> bool:
        return name in self.metadata.state_dict_metadata or name in self._nodes

    @not_compiled
    def __getitem__(self, name: str) -> Leaf | StoredTree:
        """The leaf of a name, or the sub-tree of a container's.

        Raises:
            KeyError: there is neither; the message has the nearest names.
        """
        if name in self.metadata.state_dict_metadata:
            return self._read(name)
        if name not in self._nodes:
            raise KeyError(no_such_name(name, self._nodes, self._where))
        if name not in self._trees:
            self._trees[name] = self._below(name)
        return self._trees[name]

    def _below(self, name: str) -> StoredTree:
        """The sub-tree of a container."""
        part = Selection(name)
        return StoredTree(
            partial(_read_inner, self._read, part),
            part.of(self._inside(name) if name else self.metadata),
            f"{self._where}: {name or 'the root'}",
        )

    def _inside(self, name: str) -> Metadata:
        """What the checkpoint says about a container and what is in it."""
        names = [name]
        for each in names:  # which grows
            names += self._children.get(each, ())
        names = sorted(filter(self._order.__contains__, names), key=self._order.__getitem__)
        stored, kinds = self.metadata.state_dict_metadata, self.metadata.containers
        return replace(
            self.metadata,
            state_dict_metadata={each: stored[each] for each in names if each in stored},
            containers={each: kinds[each] for each in names if each in kinds},
        )

    @overload
    def get(self, key: str, /) -> Leaf | StoredTree | None: ...
    @overload
    def get(self, key: str, /, default: Leaf | StoredTree | T) -> Leaf | StoredTree | T: ...
    def get(self, key: str, /, default: object = None) -> object:
        """What indexing gives, or ``default``; the names near a missing one are not looked for."""
        return self[key] if key in self else default  # noqa: SIM401  # it would call itself

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self._where)}: {total(self._shown())}>"

    def __str__(self) -> str:
        return "\n  ".join([repr(self), *outline(self._shown())])

    def _repr_html_(self) -> str:
        return tree_html(self._where, self._shown())

    def _shown(self) -> list[ShownLeaf]:
        return [_shown(name, leaf) for name, leaf in self.metadata.state_dict_metadata.items()]

    def array(self, name: str) -> StoredArray:
        """The array of a name.

        Raises:
            KeyError: there is no such leaf.
            TypeError: it is a Python value or a container.
        """
        leaf = self[name]
        if not isinstance(leaf, StoredArray):
            raise TypeError(f"{printable(self._where)}: {name!r} is {_what(leaf)}, not an array")
        return leaf

    def value(self, name: str) -> Value:
        """The Python value of a name.

        Raises:
            KeyError: there is no such leaf.
            TypeError: it is an array or a container.
        """
        leaf = self[name]
        if isinstance(leaf, StoredArray | StoredTree):
            what = f"{name!r} is {_what(leaf)}"
            raise TypeError(f"{printable(self._where)}: {what}, not a Python value")
        return leaf

    def like(
        self,
        framework: str,
        *,
        device: object = None,
        mesh: object = None,
        sharding: object | ShardingRule = None,
        cast: bool = False,
    ) -> Any:  # noqa: ANN401  # a tree like the one that was saved
        """A tree of targets for `xckpt.load`, which take no memory.

        Args:
            framework: ``"torch"``, ``"jax"`` or ``"numpy"``.
            device: where each tensor is, as for `xckpt.load`.
            mesh: a ``jax.sharding.Mesh`` or torch ``DeviceMesh``: each tensor has the sharding that
                wrote it, whatever framework that was; its axes are found by name and may have other
                sizes. What was not sharded is whole on each device.
            sharding: of every tensor, in place of the stored one: a JAX ``Sharding``, a
                ``PartitionSpec`` or torch placements on ``mesh``; or a function that takes a leaf
                name and a `StoredArray` and returns one, or None for the stored one.
            cast: see `xckpt.load`.

        Returns:
            The saved containers with a target for each array, and None for each Python value.

        Raises:
            UnsupportedLeafError: the framework has no such dtype; all such leaves are listed.
            ValueError: no such framework or device, or the mesh lacks an axis.
            TypeError: an argument is not of the framework.

        Example:
            >>> import numpy as np, xckpt
            >>> _ = xckpt.save("memory://like", {"w": np.ones((4, 2), np.float32), "step": 7})
            >>> xckpt.open("memory://like").like("jax")
            {'w': ShapeDtypeStruct(shape=(4, 2), dtype=float32), 'step': None}
        """

        def place(name: str) -> TargetPlace:
            chosen = sharding(name, self.array(name)) if callable(sharding) else sharding
            return TargetPlace(device, mesh, chosen, cast)

        likes = leaves_of(framework_adapter(framework), place)(self.metadata)
        return unflatten(likes, self.metadata.containers)


def _read_inner(read: Callable[[str], Leaf], part: Selection, inner: str) -> Leaf:
    return read(part.outer(inner))


def _shown(name: str, leaf: TensorStorageMetadata | BytesStorageMetadata) -> ShownLeaf:
    if isinstance(leaf, BytesStorageMetadata):
        return ShownLeaf(name, leaf.kind, 0)
    nbytes = prod(leaf.size) * item_size(leaf.properties.dtype)
    return ShownLeaf(name, f"{leaf.properties.dtype} {tuple(leaf.size)}", nbytes)


def _what(leaf: Leaf | StoredTree) -> str:
    if isinstance(leaf, StoredTree):
        return "a container"
    if isinstance(leaf, StoredArray):
        return f"{named(leaf.dtype_name)} array of shape {leaf.shape}"
    return f"the {type(leaf).__name__} {shown_value(leaf):.40}"
