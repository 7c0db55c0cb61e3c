"""Plans of saves between ranks, as MessagePack.

1. A plan has the digest of its leaf table in the table's place: most ranks have the same table.
2. Columns travel as raw bytes. The kinds of leaves, small numbers, are `narrow`.
3. What many plans share (a table, kinds, a storage's data) is encoded once for all of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Block, Boxes
from xckpt.core.plan.items import LeafRow, LeafTable, SavePlan, WriteItems
from xckpt.core.storage import BriefData, CanBeBrief, sendable
from xckpt.engine.steps import BARE


class _SavePlan(msgspec.Struct, array_like=True):
    """A `SavePlan` between processes."""

    table: bytes
    """The digest of the leaf table."""
    kinds: msgspec.Raw
    """The kind of each leaf, `narrow`; see `WriteItems`."""
    blocks: list[tuple[int, bytes, bytes, bytes]]
    storage_data: msgspec.Raw
    planner_data: object
    containers: dict[str, str]
    is_brief: bool
    """Whether the storage's data are to be read with the table."""


_decode_plan = msgspec.msgpack.Decoder(_SavePlan).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode
_decode_table = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_row = msgspec.msgpack.Decoder(LeafRow).decode


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
        self._rows: dict[bytes, LeafRow] = {}
        """The rows of the tables that were learnt: most have nearly all rows of the others."""

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
            self.name_of(items.table),
            self._raw(items.kinds, partial(narrow, items.kinds)),
            blocks,
            self._brief(plan, items.table) if is_brief else self._raw(plan.storage_data),
            plan.planner_data,
            dict(plan.containers),
            is_brief,
        )
        return sendable(wire)

    def decode(self, data: bytes) -> SavePlan:
        """A plan from bytes whose leaf table is known; inverse of `encode`."""
        wire = _decode_plan(data)
        table = self.tables[wire.table]
        blocks = [_block(*columns) for columns in wire.blocks]
        storage_data: object = msgspec.msgpack.decode(wire.storage_data)
        kinds = bytes(wire.kinds)
        if kinds not in self._kinds:
            self._kinds[kinds] = widened(_decode_bytes(kinds))
        items = WriteItems(table, blocks, self._kinds[kinds])
        if wire.is_brief:
            storage_data = BriefData(storage_data, items.table)
        return SavePlan(items, storage_data, wire.planner_data, wire.containers)

    def name_of(self, table: LeafTable) -> bytes:
        """A table's digest, made once; from now on the digest stands for the table."""
        if id(table) not in self._names:
            name = _name(bytes(self._raw(table)))
            self.tables.setdefault(name, table)
            self._names[id(table)] = table, name
        return self._names[id(table)][1]

    def table_of(self, plan: SavePlan) -> bytes:
        """The leaf table of a plan, compressed, for a rank that may not know it."""
        table = bytes(self._raw(WriteItems.of(plan.items).table))
        return zlib.compress(table, level=1, wbits=BARE)

    def table_name(self, data: bytes) -> bytes:
        """The digest of the leaf table that an encoded plan refers to."""
        return _decode_plan(data).table

    def learn(self, table: bytes) -> None:
        """Remember a leaf table that was received."""
        content = zlib.decompress(table, wbits=BARE)
        name = _name(content)
        if name not in self.tables:
            self.tables[name] = tuple(map(self._row, map(bytes, _decode_table(content))))

    def _row(self, text: bytes) -> LeafRow:
        """A row of a table; equal rows are one object."""
        if text not in self._rows:
            self._rows[text] = _decode_row(text)
        return self._rows[text]

    def _brief(self, plan: SavePlan, table: LeafTable) -> msgspec.Raw:
        """The storage's data in the words of a table, encoded once for plans that are alike."""
        data = plan.storage_data
        assert isinstance(data, CanBeBrief)
        key = id(data), id(table)
        if key not in self._briefs:
            self._briefs[key] = data, table, msgspec.Raw(sendable(data.brief(table)))
        return self._briefs[key][2]

    def _raw(self, shared: object, content: Callable[[], object] | None = None) -> msgspec.Raw:
        """An object that many plans share, encoded once in the life of the codec."""
        known = self._encoded.get(id(shared))
        if known is None or known[0] is not shared:
            known = (shared, msgspec.Raw(sendable(content() if content else shared)))
            self._encoded[id(shared)] = known
        return known[1]


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


def narrow(numbers: NDArray[np.int32]) -> bytes:
    """The numbers, little-endian, behind a byte that says how many bytes each has.

    Example:
        >>> narrow(np.array([0, 1, -1], np.int32)), len(narrow(np.array([300], np.int32)))
        (b'\\x01\\x00\\x01\\xff', 3)
    """
    lowest, highest = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    width = np.min_scalar_type(min(lowest, -1 - highest)).itemsize
    return bytes([width]) + numbers.astype(f"<i{width}").tobytes()


def widened(data: bytes) -> NDArray[np.int32]:
    """The numbers of `narrow`.

    Example:
        >>> widened(narrow(np.array([-1, 300], np.int32))).tolist()
        [-1, 300]
    """
    return np.frombuffer(data, f"<i{data[0]}", offset=1).astype(np.int32)
