"""Items and plans: what ranks agree on before bytes move.

To its user a plan is a sequence of items, one a box, as in torch's protocol. Inside, the items of a
save are columns, small on the wire (`xckpt.engine.ranks.wire`) and quick to merge: a `LeafTable`
describes each leaf once, and a `Block` for each number of dimensions holds leaf number, offsets and
sizes of the items as arrays. `WriteItems` is both behind the item sequence that planners see:

1. A plan that a planner made or changed item by item becomes columns (`WriteItems.of`).
2. Layers repeat, so columns may be of kinds: leaves whose boxes on a rank are the same.
3. An item is made when it is asked for, in the order of the leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Final, cast, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.geometry.box import Block, Box, Boxes, Shape
from xckpt.core.manifest.pieces import MAX_TENSOR_BYTES as MOST
from xckpt.core.metadata import MetadataIndex, Sharding, TensorProperties
from xckpt.core.problem import Problem
from xckpt.errors import PlanError


class WriteItemType(Enum):
    """What a write item holds."""

    TENSOR = auto()
    """A tensor that every rank has as one whole."""
    SHARD = auto()
    """A box of a sharded tensor."""
    BYTE_IO = auto()
    """Bytes: a Python value, or what a serialiser returned."""


class LoadItemType(Enum):
    """What a read item asks for."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """The tensor part of a write item."""

    chunk: Box
    """The box to write."""
    properties: TensorProperties
    size: tuple[int, ...]
    """Global shape of the tensor, elements."""
    sharding: Sharding | None = None
    """How the tensor was sharded, for the manifest."""
    annotation: str = ""
    """What the leaf is to its framework beyond an array, such as ``"prng_key:threefry2x32"``."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One box of one leaf to be written."""

    index: MetadataIndex
    type: WriteItemType
    tensor_data: TensorWriteData | None = None
    """None for bytes."""
    kind: str = ""
    """The Python type's name of a BYTE_IO item."""

    def tensor_storage_size(self) -> int | None:
        """Bytes of the whole tensor that the item is a box of; None for a value.

        Example:
            >>> data = TensorWriteData(Box((0, 0), (2, 8)), TensorProperties("float32"), (4, 8))
            >>> item = WriteItem(MetadataIndex("w", (0, 0)), WriteItemType.SHARD, data)
            >>> item.tensor_storage_size(), item.box_bytes
            (128, 64)
        """
        data = self.tensor_data
        return None if data is None else prod(data.size) * item_size(data.properties.dtype)

    @property
    def box_bytes(self) -> int:
        """Bytes of the item's box; 0 for a value."""
        data = self.tensor_data
        return 0 if data is None else data.chunk.elements * item_size(data.properties.dtype)


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One box to be copied from a stored array into one of this rank's buffers."""

    type: LoadItemType
    dest_index: MetadataIndex
    """The leaf, the wanted box's offset and its number among this rank's boxes of the leaf."""
    dest_offsets: tuple[int, ...]
    """Where the copy starts in the wanted box, elements."""
    storage_index: MetadataIndex
    """The leaf, the stored array's offset in the tensor and its number."""
    storage_offsets: tuple[int, ...]
    """Where the copy starts in the stored array, elements."""
    lengths: tuple[int, ...]
    """How much is copied per dimension, elements."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a rank can write; after the global step, what it has to write."""

    items: Sequence[WriteItem]
    storage_data: object = None
    """The storage's own, such as where it writes; MessagePack-able."""
    planner_data: object = None
    """A planner's own, merged by its `SavePlanner.create_global_plan`; MessagePack-able."""
    containers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The tree's containers; see `xckpt.core.tree`."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a rank wants to read."""

    items: Sequence[ReadItem]
    storage_data: object = None
    planner_data: object = None
    names: tuple[str, ...] = ()
    """Every leaf that the rank asks for, those without elements included."""
    problems: tuple[Problem, ...] = ()
    """Why this rank cannot do the load; the coordinator reports them."""
    left: tuple[str, ...] = ()
    """In the coordinator's answer: every leaf of the checkpoint that no rank asks for."""
    dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Leaf name -> the dtype that is wanted, where it need not be the stored one."""


class LeafRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a leaf is.

    Example:
        >>> LeafRow("w", dtype="int8", shape=(4,)).is_tensor, LeafRow("step", "int").is_tensor
        (True, False)
    """

    name: str
    kind: str = ""
    """A value's type name; empty for a tensor."""
    dtype: str = ""
    """Empty for a value, and where only a rank with shards knows it."""
    shape: Shape = ()
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the leaf is a tensor."""
        return not self.kind


LeafTable = tuple[LeafRow, ...]
"""What each leaf of a plan is, by its number."""
_NO_NUMBERS: Final = np.zeros(0, np.int64)


class WriteItems(Sequence[WriteItem]):
    """The items of a save as columns; items are made on demand.

    Args:
        table: what each leaf is.
        blocks: the boxes of each leaf, or of each kind of leaf.
        kinds: the kind of each leaf, (leaves,); None where the blocks are of leaves.

    Example:
        >>> data = TensorWriteData(Box((0,), (2,)), TensorProperties("int8"), (4,))
        >>> item = WriteItem(MetadataIndex("w", (0,)), WriteItemType.SHARD, data)
        >>> columns = WriteItems.of([item])
        >>> columns.table[0].name, list(columns) == [item]
        ('w', True)
    """

    __slots__ = ("_blocks", "_order", "kinds", "of_kinds", "table")

    def __init__(
        self, table: LeafTable, blocks: Iterable[Block], kinds: NDArray[np.int32] | None = None
    ) -> None:
        self.table: Final = table
        self.of_kinds: Final = tuple(blocks)
        self.kinds: Final = np.arange(len(table), dtype=np.int32) if kinds is None else kinds
        self._blocks = self.of_kinds if kinds is None else None
        self._order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The boxes of each leaf."""
        if self._blocks is None:
            self._blocks = tuple(block.of_leaves(self.kinds) for block in self.of_kinds)
        return self._blocks

    def __repr__(self) -> str:
        return f"<{len(self):,} items of {len(self.table):,} leaves to write>"

    @classmethod
    def of(cls, items: Iterable[WriteItem]) -> WriteItems:
        """The columns of items; the argument itself if it is columns already.

        Raises:
            PlanError: items of one leaf disagree on what the leaf is; all such leaves are listed.
        """
        if isinstance(items, WriteItems):
            return items
        numbers: dict[str, int] = {}
        firsts: list[WriteItem] = []
        columns: dict[int, tuple[list[int], list[tuple[Shape, Shape]]]] = {}
        problems: dict[str, str] = {}
        for item in items:
            number = numbers.setdefault(item.index.fqn, len(numbers))
            if number == len(firsts):
                firsts.append(item)
            problem = _item_problem(item, firsts[number])
            if problem:
                problems.setdefault(item.index.fqn, f"{item.index.fqn}: {problem}")
                continue
            box = item.tensor_data.chunk if item.tensor_data else Box((), ())
            leaf, pairs = columns.setdefault(len(box.offsets), ([], []))
            leaf.append(number)
            pairs.append((box.offsets, box.sizes))
        if problems:
            raise PlanError.listing("the items of a plan contradict each other", problems.values())
        blocks = [
            Block(np.array(leaf, np.int32), Boxes.of(pairs)) for leaf, pairs in columns.values()
        ]
        return cls(tuple(map(_row, firsts)), blocks)

    def __len__(self) -> int:
        counts = np.bincount(self.kinds, minlength=1)
        return sum(int(counts[block.leaf].sum()) for block in self.of_kinds)

    def __iter__(self) -> Iterator[WriteItem]:
        return self.chosen(slice(None))

    def chosen(self, numbers: slice | NDArray[np.int64]) -> Iterator[WriteItem]:
        """The items with these numbers, each made when its turn comes: they may be very many."""
        leaf, box = (column[numbers] for column in self._columns())
        boxes = [box for block in self.of_kinds for box in block.boxes] if len(leaf) else []
        alike: list[TensorWriteData | None] = [None] * len(boxes)
        for of, at in zip(leaf.data, box.data, strict=True):  # which make one at a time
            item = self._item(of, boxes[at], alike[at])
            alike[at] = item.tensor_data
            yield item

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of the box of each item, (n,); 0 of a value."""
        dtypes = {row.dtype for row in self.table}  # a value has none
        widths = {dtype: item_size(dtype) if dtype else 0 for dtype in dtypes}
        width = np.array([widths[row.dtype] for row in self.table], np.int64)
        leaf, box = self._columns()
        elements = np.concatenate([_NO_NUMBERS, *(block.boxes.elements for block in self.of_kinds)])
        return width[leaf] * elements[box]

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        if isinstance(index, slice):
            return list(self)[index]
        leaves, boxes = self._columns()
        leaf, number = int(leaves[index]), int(boxes[index])
        for block in self.of_kinds:
            if number < len(block.leaf):
                return self._item(leaf, block.boxes[number])
            number -= len(block.leaf)
        raise AssertionError("unreachable")

    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The leaf of each item, in leaf order, and the number of its box among all blocks'."""
        if self._order is None:
            leaves, boxes, before = [_NO_NUMBERS], [_NO_NUMBERS], 0
            for block in self.of_kinds:
                box, leaf = block.leaves(self.kinds)
                leaves.append(leaf)
                boxes.append(box + before)
                before += len(block.leaf)
            leaf = np.concatenate(leaves)
            order = np.argsort(leaf, kind="stable")
            self._order = leaf[order], np.concatenate(boxes)[order]
        return self._order

    def __add__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        """A list with more items, as of a list of items."""
        return [*self, *other]

    def __radd__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(cast(Sequence[object], other))

    def _item(self, leaf: int, box: Box, alike: TensorWriteData | None = None) -> WriteItem:
        """The item of a box; its data are ``alike``, which are of the same box, if these fit."""
        row = self.table[leaf]
        if row.kind:
            return WriteItem(MetadataIndex(row.name), WriteItemType.BYTE_IO, kind=row.kind)
        about = row.dtype, row.shape, row.sharding, row.annotation
        known = alike and (alike.properties.dtype, alike.size, alike.sharding, alike.annotation)
        if alike is None or known != about:
            alike = TensorWriteData(box, TensorProperties(row.dtype), *about[1:])
        kind = WriteItemType.SHARD if row.sharded else WriteItemType.TENSOR
        return WriteItem(MetadataIndex(row.name, box.offsets), kind, alike)


def _row(item: WriteItem) -> LeafRow:
    """What an item says of its leaf."""
    data, name = item.tensor_data, item.index.fqn
    if data is None:
        return LeafRow(name, item.kind or "opaque")
    sharded = item.type is WriteItemType.SHARD
    dtype, shape = data.properties.dtype, tuple(data.size)
    return LeafRow(name, "", dtype, shape, sharded, data.sharding, data.annotation)


def _item_problem(item: WriteItem, first: WriteItem) -> str:
    """How an item contradicts the first of its leaf; empty if it does not."""
    data, other = item.tensor_data, first.tensor_data
    if data is None or other is None:
        if data is not other:
            return "one item is of a tensor, another of a Python value"
        return "" if item.kind == first.kind else f"kind {first.kind} and kind {item.kind}"
    if (dtype := data.properties.dtype) not in DTYPES:
        return f"dtype {dtype!r}, which is not a name that the format has, such as 'float16'"
    if not len(data.chunk.offsets) == len(data.chunk.sizes) == len(data.size):
        return f"a box of {len(data.chunk.sizes)} dimensions in a tensor of shape {data.size}"
    if max(map(abs, (*data.size, *data.chunk.offsets, *data.chunk.sizes)), default=0) > MOST:
        return f"a box {data.chunk} in a tensor of shape {data.size}, beyond any that is stored"
    if data.properties != other.properties:
        return f"dtype {other.properties.dtype} and dtype {data.properties.dtype}"
    if data.size != other.size:
        return f"shape {other.size} and shape {data.size}"
    if data.annotation != other.annotation:
        return f"annotation {other.annotation!r} and annotation {data.annotation!r}"
    return ""
