"""Plans and reports between ranks, as MessagePack; arrays travel as raw bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Block, Box, Boxes, Shape
from xckpt.core.plan.items import (
    LeafTable,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItems,
)
from xckpt.core.plan.reads.items import ReadItems, Row
from xckpt.core.problem import Problem
from xckpt.core.storage import BriefData, CanBeBrief
from xckpt.engine.steps import Codec


class _SavePlan(msgspec.Struct, array_like=True):
    """A `SavePlan` between processes."""

    table: bytes
    """The digest of the leaf table."""
    kinds: msgspec.Raw
    """The kind of each leaf, int32; see `WriteItems`."""
    blocks: list[tuple[int, bytes, bytes, bytes]]
    storage_data: msgspec.Raw
    planner_data: object
    containers: dict[str, str]
    is_brief: bool
    """Whether the storage's data are to be read with the table."""


class _Reports:
    """Carries the ranks' reports of their writes; they arrive as plain lists, dicts and bytes."""

    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder().decode


REPORTS: Codec[object] = _Reports()

_encode = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(_SavePlan).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode
_decode_table = msgspec.msgpack.Decoder(LeafTable).decode


def _name(table: bytes) -> bytes:
    return hashlib.blake2b(table, digest_size=16).digest()


class SavePlanCodec:
    """Encodes and decodes the plans of one save.

    A plan travels with a digest in place of its leaf table, which other ranks may know already.
    `table_of` gives the table to a rank that does not, and `learn` takes it there.

    Example:
        >>> codec = SavePlanCodec()
        >>> codec.decode(codec.encode(SavePlan([], planner_data={"a": 1}))).planner_data
        {'a': 1}
    """

    def __init__(self) -> None:
        self._briefs: dict[tuple[int, int], tuple[object, object, msgspec.Raw]] = {}
        self._encoded: dict[int, tuple[object, msgspec.Raw]] = {}
        self.tables: dict[bytes, LeafTable] = {}
        """The leaf tables that are known, by their digests."""
        self._names: dict[int, tuple[LeafTable, bytes]] = {}
        """Id of each table that was encoded -> the table, which keeps the id, and its digest."""
        self._kinds: dict[bytes, NDArray[np.int32]] = {}

    def encode(self, plan: SavePlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: MessagePack cannot carry planner_data or storage_data.
        """
        items = WriteItems.of(plan.items)
        blocks = [
            (b.boxes.rank, b.leaf.tobytes(), b.boxes.offsets.tobytes(), b.boxes.sizes.tobytes())
            for b in items.of_kinds
        ]
        is_brief = isinstance(plan.storage_data, CanBeBrief)
        wire = _SavePlan(
            self._name_of(items.table),
            self._raw(items.kinds, items.kinds.tobytes),
            blocks,
            self._brief(plan, items.table) if is_brief else self._raw(plan.storage_data),
            plan.planner_data,
            dict(plan.containers),
            is_brief,
        )
        return _sendable(wire)

    def decode(self, data: bytes) -> SavePlan:
        """A plan from bytes whose leaf table is known; inverse of `encode`."""
        wire = _decode_plan(data)
        table = self.tables[wire.table]
        blocks = [_block(*columns) for columns in wire.blocks]
        storage_data: object = msgspec.msgpack.decode(wire.storage_data)
        kinds = bytes(wire.kinds)
        if kinds not in self._kinds:
            self._kinds[kinds] = np.frombuffer(_decode_bytes(kinds), np.int32)
        items = WriteItems(table, blocks, self._kinds[kinds])
        if wire.is_brief:
            storage_data = BriefData(storage_data, items.table)
        return SavePlan(items, storage_data, wire.planner_data, wire.containers)

    def _name_of(self, table: LeafTable) -> bytes:
        """A table's digest, made once; from now on the digest stands for the table."""
        if id(table) not in self._names:
            name = _name(bytes(self._raw(table)))
            self.tables.setdefault(name, table)
            self._names[id(table)] = table, name
        return self._names[id(table)][1]

    def table_of(self, plan: SavePlan) -> bytes:
        """The leaf table of a plan, for a rank that may not know it."""
        return bytes(self._raw(WriteItems.of(plan.items).table))

    def table_name(self, data: bytes) -> bytes:
        """The digest of the leaf table that an encoded plan refers to."""
        return _decode_plan(data).table

    def learn(self, table: bytes) -> None:
        """Remember a leaf table that was received."""
        self.tables.setdefault(_name(table), _decode_table(table))

    def _brief(self, plan: SavePlan, table: LeafTable) -> msgspec.Raw:
        """The storage's data in the words of a table, encoded once for plans that are alike."""
        data = plan.storage_data
        assert isinstance(data, CanBeBrief)
        key = id(data), id(table)
        if key not in self._briefs:
            self._briefs[key] = data, table, msgspec.Raw(_encode(data.brief(table)))
        return self._briefs[key][2]

    def _raw(self, shared: object, content: Callable[[], object] | None = None) -> msgspec.Raw:
        """An object that many plans share, encoded once in the life of the codec."""
        known = self._encoded.get(id(shared))
        if known is None or known[0] is not shared:
            known = (shared, msgspec.Raw(_encode(content() if content else shared)))
            self._encoded[id(shared)] = known
        return known[1]


def as_sent(plan: SavePlan) -> SavePlan:
    """A plan as another process would have it: items in columns, and foreign data of plain types.

    Raises:
        TypeError: MessagePack cannot carry planner_data or storage_data.

    Example:
        >>> as_sent(SavePlan([], planner_data={"a": (1, 2)})).planner_data
        {'a': [1, 2]}
    """
    data = plan.storage_data
    ours = data if isinstance(data, CanBeBrief) else None
    storage_data, planner_data = msgspec.msgpack.decode(
        _sendable((None if ours else data, plan.planner_data))
    )
    items = WriteItems.of(plan.items)
    return SavePlan(items, ours or storage_data, planner_data, dict(plan.containers))


def _sendable(wire: object) -> bytes:
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


class _Problem(msgspec.Struct, array_like=True):
    """A `Problem` between processes; the coordinator knows the rank that sent it."""

    leaf: str | None
    box: tuple[Shape, Shape] | None
    kind: str
    text: str
    line: str

    @classmethod
    def of(cls, problem: Problem | str) -> _Problem:
        """What is sent of a problem; a caller's own planner may give plain lines."""
        known = Problem.of(problem)
        box = known.box and (known.box.offsets, known.box.sizes)
        return cls(known.leaf, box, known.kind, known.text, str(known))

    def problem(self) -> Problem:
        """The problem that was sent."""
        box = self.box and Box(*self.box)
        return Problem(self.leaf, box, None, self.kind, self.text, self.line)


class _LoadPlan(msgspec.Struct, array_like=True):
    """A `LoadPlan` between processes."""

    items: msgspec.Raw
    """The columns of `ReadItems`; nothing in an answer that leaves the rank's items as they are."""
    storage_data: object
    planner_data: object
    names: tuple[str, ...]
    problems: list[_Problem]
    left: tuple[str, ...]
    dtypes: dict[str, str]


_decode_load_plan = msgspec.msgpack.Decoder(_LoadPlan).decode
_decode_items = msgspec.msgpack.Decoder(tuple[list[str], list[Row]]).decode


class _EncodedItems(Sequence[ReadItem]):
    """Read items that are decoded when they are first looked at: a coordinator rarely does."""

    __slots__ = ("_items", "raw")

    def __init__(self, raw: msgspec.Raw) -> None:
        self.raw = raw
        self._items: ReadItems | None = None

    def _decoded(self) -> ReadItems:
        if self._items is None:
            self._items = ReadItems(*_decode_items(self.raw))
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


_NOTHING: Final = msgspec.Raw(_encode(None))
_AS_SENT: Final = _EncodedItems(_NOTHING)


def answer_to(plan: LoadPlan, share: LoadPlan) -> LoadPlan:
    """What the coordinator sends to a rank for its share: not the items if they are the rank's own.

    Args:
        plan: as it came from the rank.
        share: what a planner has made of it.
    """
    return replace(share, items=_AS_SENT, names=()) if share.items is plan.items else share


class LoadPlanCodec:
    """Encodes and decodes load plans: first a rank's own, and then the answer to it.

    Example:
        >>> codec, coordinator = LoadPlanCodec(), LoadPlanCodec()
        >>> came = coordinator.decode(codec.encode(LoadPlan(ReadItems(["w"], [(4, 2)]))))
        >>> answer = coordinator.encode(answer_to(came, replace(came, left=("b",))))
        >>> codec.decode(answer).items[0].lengths, codec.decode(answer).left
        ((4, 2), ('b',))
    """

    def __init__(self) -> None:
        self._own: LoadPlan | None = None

    def encode(self, plan: LoadPlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: MessagePack cannot carry planner_data or storage_data.
        """
        self._own = self._own or plan
        items = plan.items
        problems = [_Problem.of(problem) for problem in plan.problems]
        raw = items.raw if isinstance(items, _EncodedItems) else _columns(items)
        named = plan.names, problems, plan.left, dict(plan.dtypes)
        return _sendable(_LoadPlan(raw, plan.storage_data, plan.planner_data, *named))

    def decode(self, data: bytes | memoryview) -> LoadPlan:
        """A plan from bytes; inverse of `encode`."""
        wire = _decode_load_plan(data)
        items: Sequence[ReadItem] = _EncodedItems(wire.items)
        if wire.items == _NOTHING and self._own is not None:
            items, wire.names = self._own.items, self._own.names
        problems = tuple(each.problem() for each in wire.problems)
        named = wire.names, problems, wire.left, wire.dtypes
        return LoadPlan(items, wire.storage_data, wire.planner_data, *named)


def _columns(items: Sequence[ReadItem]) -> msgspec.Raw:
    columns = ReadItems.of(items)
    return msgspec.Raw(_encode((columns.names, columns.rows)))
