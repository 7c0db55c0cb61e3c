"""Plans and reports between ranks, as MessagePack; arrays travel as raw bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import msgspec
import numpy as np

from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.plan.items import Block, LeafTable, LoadPlan, ReadItem, SavePlan, WriteItems
from xckpt.core.problem import Problem
from xckpt.engine.steps import Codec


class _SavePlan(msgspec.Struct, array_like=True):
    """A `SavePlan` between processes."""

    table: msgspec.Raw
    blocks: list[tuple[int, bytes, bytes, bytes]]
    storage_data: msgspec.Raw
    planner_data: object
    containers: dict[str, str]


class _Reports:
    """Carries ranks' reports of what they wrote; they arrive as plain lists, dicts and bytes."""

    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder().decode


REPORTS: Codec[object] = _Reports()

_encode = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(_SavePlan).decode
_decode_table = msgspec.msgpack.Decoder(LeafTable).decode


class SavePlanCodec:
    """Encodes and decodes the plans of one save, each distinct leaf table once.

    Example:
        >>> codec = SavePlanCodec()
        >>> codec.decode(codec.encode(SavePlan([], planner_data={"a": 1}))).planner_data
        {'a': 1}
    """

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[object, msgspec.Raw]] = {}
        self._tables: dict[bytes, LeafTable] = {}

    def encode(self, plan: SavePlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: MessagePack cannot carry planner_data or storage_data.
        """
        items = WriteItems.of(plan.items)
        blocks = [
            (b.boxes.rank, b.leaf.tobytes(), b.boxes.offsets.tobytes(), b.boxes.sizes.tobytes())
            for b in items.blocks
        ]
        wire = _SavePlan(
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
        """An object that many plans share, encoded once in the life of the codec."""
        known = self._encoded.get(id(shared))
        if known is None or known[0] is not shared:
            known = (shared, msgspec.Raw(_encode(shared)))
            self._encoded[id(shared)] = known
        return known[1]


def _sendable(wire: _SavePlan | _LoadPlan) -> bytes:
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
    """A `Problem` between processes; the coordinator knows whose it is."""

    leaf: str | None
    box: tuple[Shape, Shape] | None
    kind: str
    text: str
    line: str

    @classmethod
    def of(cls, problem: Problem | str) -> _Problem:
        """What is sent of a problem; a planner of one's own may give plain lines."""
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
    storage_data: object
    planner_data: object
    names: tuple[str, ...]
    problems: list[_Problem]
    left: tuple[str, ...]
    dtypes: dict[str, str]


_decode_load_plan = msgspec.msgpack.Decoder(_LoadPlan).decode
_decode_items = msgspec.msgpack.Decoder(list[ReadItem]).decode


class _EncodedItems(Sequence[ReadItem]):
    """Read items that are decoded when they are first looked at: a coordinator rarely does."""

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


class LoadPlanCodec:
    """Encodes and decodes load plans."""

    def encode(self, plan: LoadPlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: MessagePack cannot carry planner_data or storage_data.
        """
        items = plan.items
        problems = [_Problem.of(problem) for problem in plan.problems]
        raw = items.raw if isinstance(items, _EncodedItems) else msgspec.Raw(_encode(list(items)))
        named = plan.names, problems, plan.left, dict(plan.dtypes)
        return _sendable(_LoadPlan(raw, plan.storage_data, plan.planner_data, *named))

    def decode(self, data: bytes) -> LoadPlan:
        """A plan from bytes; inverse of `encode`."""
        wire = _decode_load_plan(data)
        items = _EncodedItems(wire.items)
        problems = tuple(each.problem() for each in wire.problems)
        named = wire.names, problems, wire.left, wire.dtypes
        return LoadPlan(items, wire.storage_data, wire.planner_data, *named)
