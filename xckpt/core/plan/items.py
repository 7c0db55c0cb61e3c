"""What ranks tell each other before bytes move: items to write, items to read, and plans of them.

To its user a plan is a sequence of items, one a box, as in torch's protocol. Inside, the items of
a save are columns: a `LeafTable` says once what each leaf is, and a `Block` for each number of
dimensions holds leaf number, offsets and sizes as arrays. An item is made when somebody looks at
it; a plan that a planner rewrote item by item is turned back into columns (`WriteItems.of`).

`encode_plan` and `decode_plan` carry a plan between processes as MessagePack, arrays as raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import MetadataIndex, Sharding, TensorProperties
from xckpt.errors import PlanError

__all__ = [
    "Block",
    "LeafTable",
    "LoadItemType",
    "LoadPlan",
    "ReadItem",
    "SavePlan",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "WriteItems",
    "decode_load_plan",
    "decode_plan",
    "encode_load_plan",
    "encode_plan",
]


class WriteItemType(Enum):
    """What a write item holds."""

    TENSOR = auto()
    """A tensor that every rank has as one whole."""
    SHARD = auto()
    """A box of a sharded tensor."""
    BYTE_IO = auto()
    """Bytes: a Python value or opaque."""


class LoadItemType(Enum):
    """What a read item wants."""

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
        """Bytes that the item's box takes in storage; None if it is not a tensor's.

        Example:
            >>> box = Box((0, 0), (2, 8))
            >>> data = TensorWriteData(box, TensorProperties("float32"), (4, 8))
            >>> item = WriteItem(MetadataIndex("w", (0, 0)), WriteItemType.SHARD, data)
            >>> item.tensor_storage_size()
            64
        """
        if self.tensor_data is None:
            return None
        return prod(self.tensor_data.chunk.sizes) * item_size(self.tensor_data.properties.dtype)


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


class LeafTable(msgspec.Struct, frozen=True, array_like=True):
    """What each leaf of a plan is: columns of equal length, described once for all items."""

    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """A value's type name; empty for a tensor."""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    sharded: tuple[bool, ...] = ()
    shardings: tuple[Sharding | None, ...] = ()
    annotations: tuple[str, ...] = ()
    contents: tuple[bytes, ...] = ()
    """A digest of an unsharded leaf's content where replicas are compared; empty otherwise."""

    def is_tensor(self, leaf: int) -> bool:
        """Whether leaf number ``leaf`` is a tensor."""
        return not self.kinds[leaf]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Items of tensors of one rank: entry i is box ``boxes[i]`` of leaf number ``leaf[i]``."""

    leaf: NDArray[np.int32]
    boxes: Boxes


class WriteItems(Sequence[WriteItem]):
    """The items of a save as columns; items are made on demand.

    Example:
        >>> data = TensorWriteData(
        ...     Box((0,), (2,)), TensorProperties("int8"), (4,))
        >>> item = WriteItem(MetadataIndex("w", (0,)), WriteItemType.SHARD, data)
        >>> columns = WriteItems.of([item])
        >>> columns.table.names, list(columns) == [item]
        (('w',), True)
    """

    __slots__ = ("blocks", "table")

    def __init__(self, table: LeafTable, blocks: Iterable[Block]) -> None:
        self.table = table
        self.blocks = tuple(blocks)

    @classmethod
    def of(cls, items: Iterable[WriteItem]) -> WriteItems:
        """Columns from items; themselves if they are columns already.

        Raises:
            PlanError: items of one leaf disagree on what the leaf is; all such leaves are listed.
        """
        if isinstance(items, WriteItems):
            return items
        numbers: dict[str, int] = {}
        rows: list[WriteItem] = []
        boxes: dict[int, tuple[list[int], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}
        problems: dict[str, str] = {}
        for item in items:
            number = numbers.setdefault(item.index.fqn, len(numbers))
            if number == len(rows):
                rows.append(item)
            problem = _item_problem(item, rows[number])
            if problem:
                problems[item.index.fqn] = f"{item.index.fqn}: {problem}"
                continue
            chunk = item.tensor_data.chunk if item.tensor_data else Box((), ())
            leaf, pairs = boxes.setdefault(len(chunk.offsets), ([], []))
            leaf.append(number)
            pairs.append((chunk.offsets, chunk.sizes))
        if problems:
            raise PlanError.listing("the items of a plan contradict each other", problems.values())
        blocks = [
            Block(np.array(leaf, np.int32), Boxes.of(pairs)) for leaf, pairs in boxes.values()
        ]
        return cls(_table_of(rows), blocks)

    def __len__(self) -> int:
        return sum(len(block.boxes) for block in self.blocks)

    def __iter__(self) -> Iterator[WriteItem]:
        made = [
            self._item(leaf, chunk)
            for block in self.blocks
            for leaf, chunk in zip(block.leaf.tolist(), block.boxes, strict=True)
        ]
        for place in self._order():
            yield made[place]

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        if isinstance(index, slice):
            return list(self)[index]
        place = self._order()[index]
        for block in self.blocks:
            if place < len(block.leaf):
                return self._item(int(block.leaf[place]), block.boxes[place])
            place -= len(block.leaf)
        raise AssertionError("unreachable")

    def _order(self) -> list[int]:
        """Places in the blocks one after the other, by leaf, whatever its number of dimensions."""
        leaves = [block.leaf for block in self.blocks]
        return np.argsort(np.concatenate(leaves), kind="stable").tolist() if leaves else []

    def __add__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        """A list with more items, as of a list of items."""
        return [*self, *other]

    def __radd__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def _item(self, leaf: int, chunk: Box) -> WriteItem:
        table = self.table
        if not table.is_tensor(leaf):
            index = MetadataIndex(table.names[leaf])
            return WriteItem(index, WriteItemType.BYTE_IO, kind=table.kinds[leaf])
        data = TensorWriteData(
            chunk,
            TensorProperties(table.dtypes[leaf]),
            table.shapes[leaf],
            table.shardings[leaf],
            table.annotations[leaf],
        )
        kind = WriteItemType.SHARD if table.sharded[leaf] else WriteItemType.TENSOR
        return WriteItem(MetadataIndex(table.names[leaf], chunk.offsets), kind, data)


def _item_problem(item: WriteItem, first: WriteItem) -> str:
    """Why an item cannot stand beside the first of its leaf in a table; empty if it can."""
    data, other = item.tensor_data, first.tensor_data
    if data is None or other is None:
        if data is not other:
            return "one item is of a tensor, another of a Python value"
        return "" if item.kind == first.kind else f"kind {first.kind} and kind {item.kind}"
    if not len(data.chunk.offsets) == len(data.chunk.sizes) == len(data.size):
        return f"a box of {len(data.chunk.sizes)} dimensions in a tensor of shape {data.size}"
    if data.properties != other.properties:
        return f"dtype {other.properties.dtype} and dtype {data.properties.dtype}"
    if data.size != other.size:
        return f"shape {other.size} and shape {data.size}"
    if data.annotation != other.annotation:
        return f"annotation {other.annotation!r} and annotation {data.annotation!r}"
    return ""


def _table_of(rows: Sequence[WriteItem]) -> LeafTable:
    """The leaf table of items, one of each leaf."""
    tensors = [row.tensor_data for row in rows]
    return LeafTable(
        names=tuple(row.index.fqn for row in rows),
        kinds=tuple("" if row.tensor_data else row.kind or "opaque" for row in rows),
        dtypes=tuple(data.properties.dtype if data else "" for data in tensors),
        shapes=tuple(tuple(data.size) if data else () for data in tensors),
        sharded=tuple(row.type is WriteItemType.SHARD for row in rows),
        shardings=tuple(data.sharding if data else None for data in tensors),
        annotations=tuple(data.annotation if data else "" for data in tensors),
        contents=(b"",) * len(rows),
    )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a rank offers to write, or is told to write."""

    items: Sequence[WriteItem]
    storage_data: object = None
    """The storage's own, such as where it writes; MessagePack-able."""
    planner_data: object = None
    """A planner's own, merged by its `create_global_plan`; MessagePack-able."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """The tree's containers; see `xckpt.core.tree`."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a rank wants to read."""

    items: Sequence[ReadItem]
    storage_data: object = None
    planner_data: object = None
    names: tuple[str, ...] = ()
    """Every leaf that the rank asks for, those without elements included."""
    problems: tuple[str, ...] = ()
    """Why the load cannot be done, as far as this rank can tell; the coordinator reports them."""


class _WirePlan(msgspec.Struct, array_like=True):
    """A `SavePlan` between processes."""

    table: msgspec.Raw
    blocks: list[tuple[int, bytes, bytes, bytes]]
    storage_data: msgspec.Raw
    planner_data: object
    containers: dict[str, str]


_encode = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(_WirePlan).decode
_decode_table = msgspec.msgpack.Decoder(LeafTable).decode


class PlanCodec:
    """Encodes and decodes plans, each distinct leaf table once.

    Example:
        >>> codec = PlanCodec()
        >>> codec.decode(codec.encode(SavePlan([], planner_data={"a": 1}))).planner_data
        {'a': 1}
    """

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[object, msgspec.Raw]] = {}
        self._tables: dict[bytes, LeafTable] = {}

    def encode(self, plan: SavePlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: planner_data or storage_data is nothing that MessagePack carries.
        """
        items = WriteItems.of(plan.items)
        blocks = [
            (b.boxes.rank, b.leaf.tobytes(), b.boxes.offsets.tobytes(), b.boxes.sizes.tobytes())
            for b in items.blocks
        ]
        wire = _WirePlan(
            self._raw(items.table),
            blocks,
            self._raw(plan.storage_data),
            plan.planner_data,
            dict(plan.containers),
        )
        return _sendable(wire)

    def decode(self, data: bytes) -> SavePlan:
        """A plan from bytes; inverse of `encode`."""
        wire = _decode_plan(data)
        raw = bytes(wire.table)
        if raw not in self._tables:
            self._tables[raw] = _decode_table(raw)
        blocks = [_block(*columns) for columns in wire.blocks]
        storage_data: object = msgspec.msgpack.decode(wire.storage_data)
        return SavePlan(
            WriteItems(self._tables[raw], blocks), storage_data, wire.planner_data, wire.containers
        )

    def _raw(self, shared: object) -> msgspec.Raw:
        """Encoded once for as long as the codec lives, since many plans share it."""
        known = self._encoded.get(id(shared))
        if known is None or known[0] is not shared:
            known = (shared, msgspec.Raw(_encode(shared)))
            self._encoded[id(shared)] = known
        return known[1]


def _sendable(wire: _WirePlan | _WireLoadPlan) -> bytes:
    try:
        return _encode(wire)
    except TypeError as error:
        raise TypeError(
            f"a plan's planner_data and storage_data must be what MessagePack carries: {error}"
        ) from error


def _block(rank: int, leaf: bytes, offsets: bytes, sizes: bytes) -> Block:
    numbers = np.frombuffer(leaf, np.int32)
    shape = (len(numbers), rank)
    return Block(
        numbers,
        Boxes(
            np.frombuffer(offsets, np.int64).reshape(shape),
            np.frombuffer(sizes, np.int64).reshape(shape),
        ),
    )


def encode_plan(plan: SavePlan) -> bytes:
    """One plan as bytes; see `PlanCodec`."""
    return PlanCodec().encode(plan)


def decode_plan(data: bytes) -> SavePlan:
    """One plan from bytes; see `PlanCodec`."""
    return PlanCodec().decode(data)


class _WireLoadPlan(msgspec.Struct, array_like=True):
    """A `LoadPlan` between processes."""

    items: msgspec.Raw
    storage_data: object
    planner_data: object
    names: tuple[str, ...]
    problems: tuple[str, ...]


_decode_load_plan = msgspec.msgpack.Decoder(_WireLoadPlan).decode
_decode_items = msgspec.msgpack.Decoder(list[ReadItem]).decode


class _EncodedItems(Sequence[ReadItem]):
    """Read items that are decoded only if somebody looks: a coordinator rarely does."""

    __slots__ = ("_items", "raw")

    def __init__(self, raw: msgspec.Raw) -> None:
        self.raw = raw
        self._items: list[ReadItem] | None = None

    def _decoded(self) -> list[ReadItem]:
        if self._items is None:
            self._items = _decode_items(self.raw)
        return self._items

    def __len__(self) -> int:
        return len(self._decoded())

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        return self._decoded()[index]

    def __add__(self, other: Iterable[ReadItem]) -> list[ReadItem]:
        return [*self, *other]

    def __radd__(self, other: Iterable[ReadItem]) -> list[ReadItem]:
        return [*other, *self]


def encode_load_plan(plan: LoadPlan) -> bytes:
    """A load plan as bytes.

    Raises:
        TypeError: planner_data or storage_data is nothing that MessagePack carries.
    """
    items = plan.items
    raw = items.raw if isinstance(items, _EncodedItems) else msgspec.Raw(_encode(list(items)))
    return _sendable(
        _WireLoadPlan(raw, plan.storage_data, plan.planner_data, plan.names, plan.problems)
    )


def decode_load_plan(data: bytes) -> LoadPlan:
    """A load plan from bytes; inverse of `encode_load_plan`."""
    wire = _decode_load_plan(data)
    return LoadPlan(
        _EncodedItems(wire.items), wire.storage_data, wire.planner_data, wire.names, wire.problems
    )
