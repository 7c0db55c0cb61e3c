"""Load plans between ranks, as MessagePack: little that the other side does not know or look at.

1. Items travel in columns, and only to a coordinator whose planner may look at them
   (`needs_no_items`). They are decoded when it does.
2. What a planner has left as it was is not sent back (`answer_to`).
3. The leaves that a rank asks for are bits, one for each leaf of the checkpoint.
4. What does not fit, and the dtypes that are wanted, are mostly the same on all ranks: they travel
   compressed, and are decoded once.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Final, overload

import msgspec
import numpy as np

from xckpt.core.geometry.box import Box, Shape
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.reads.items import ReadItems, Row
from xckpt.core.problem import Problem
from xckpt.core.storage import sendable
from xckpt.engine.steps import BARE
from xckpt.errors import PlanError

_encode = msgspec.msgpack.Encoder().encode


class _Read(msgspec.Struct, array_like=True):
    """A `ReadItem` that is not all of an array, without the name that its column has."""

    type: int
    offset: Shape | None
    index: int | None
    dest_offsets: Shape
    stored: str | None
    """The leaf's name in the checkpoint, if that is another one."""
    stored_offset: Shape | None
    stored_index: int | None
    storage_offsets: Shape
    lengths: Shape

    @classmethod
    def of(cls, item: ReadItem) -> _Read:
        """What is sent of an item."""
        dest, stored = item.dest_index, item.storage_index
        name = None if stored.fqn == dest.fqn else stored.fqn
        wanted = dest.offset, dest.index, item.dest_offsets
        given = name, stored.offset, stored.index, item.storage_offsets
        return cls(item.type.value, *wanted, *given, item.lengths)

    def item(self, name: str) -> ReadItem:
        """The item that was sent."""
        dest = MetadataIndex(name, self.offset, self.index)
        leaf = name if self.stored is None else self.stored
        stored = MetadataIndex(leaf, self.stored_offset, self.stored_index)
        kind = LoadItemType(self.type)
        return ReadItem(kind, dest, self.dest_offsets, stored, self.storage_offsets, self.lengths)


class _Columns(msgspec.Struct, array_like=True):
    """`ReadItems` between processes."""

    names: list[str]
    rows: list[Shape | int | None]
    """As there, but in place of an item its number among ``reads``."""
    reads: list[_Read]

    @classmethod
    def of(cls, items: Sequence[ReadItem]) -> _Columns:
        """What is sent of items."""
        columns, reads, rows = ReadItems.of(items), list[_Read](), list[Shape | int | None]()
        for row in columns.rows:
            if isinstance(row, ReadItem):
                rows.append(len(reads))
                reads.append(_Read.of(row))
            else:
                rows.append(row)
        return cls(columns.names, rows, reads)

    def items(self) -> ReadItems:
        """The items that were sent."""
        pairs = zip(self.names, self.rows, strict=True)
        rows: list[Row] = [
            self.reads[row].item(name) if isinstance(row, int) else row for name, row in pairs
        ]
        return ReadItems(self.names, rows)


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
    """`_Columns`; nothing in an answer that leaves the rank's items as they are; or `_UNSENT`."""
    storage_data: object
    planner_data: object
    stored: bytes
    """A bit for each leaf of the checkpoint: whether the rank asks for it."""
    others: tuple[str, ...]
    """What else it asks for."""
    said: bytes
    """`_Said`, compressed; empty if there is nothing."""
    left: tuple[str, ...]


class _Said(msgspec.Struct, array_like=True):
    """What most ranks say alike, if they do."""

    problems: list[_Problem]
    dtypes: dict[str, str]


_decode_said = msgspec.msgpack.Decoder(_Said).decode
_decode_load_plan = msgspec.msgpack.Decoder(_LoadPlan).decode
_decode_items = msgspec.msgpack.Decoder(_Columns).decode


class _EncodedItems(Sequence[ReadItem]):
    """Read items that are decoded when they are first looked at: a coordinator rarely does."""

    __slots__ = ("_items", "raw")

    def __init__(self, raw: msgspec.Raw) -> None:
        self.raw = raw
        self._items: ReadItems | None = None

    def _decoded(self) -> ReadItems:
        if self.raw == _UNSENT:
            raise PlanError(
                "the planner of this load's coordinator looks at items that other ranks did not "
                "send; give all ranks the same planner and reader"
            )
        if self._items is None:
            self._items = _decode_items(self.raw).items()
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
_UNSENT: Final = msgspec.Raw(_encode(False))


def answer_to(plan: LoadPlan, share: LoadPlan) -> LoadPlan:
    """What the coordinator sends to a rank for its share: not the items if they are the rank's own.

    Args:
        plan: as it came from the rank.
        share: what a planner has made of it.
    """
    return replace(share, items=_AS_SENT, names=()) if share.items is plan.items else share


class LoadPlanCodec:
    """Encodes and decodes load plans: first a rank's own, and then the answer to it.

    Args:
        stored: the names of the checkpoint's leaves, equal on all ranks.

    Example:
        >>> codec, coordinator = LoadPlanCodec(["w"]), LoadPlanCodec(["w"])
        >>> came = coordinator.decode(codec.encode(LoadPlan(ReadItems(["w"], [(4, 2)]))))
        >>> answer = coordinator.encode(answer_to(came, replace(came, left=("b",))))
        >>> codec.decode(answer).items[0].lengths, codec.decode(answer).left
        ((4, 2), ('b',))
    """

    def __init__(self, stored: Collection[str] = ()) -> None:
        self.stored = stored
        self.sends_items = True
        """Whether a rank's own plan is sent with its items."""
        self._own: LoadPlan | None = None
        self._asked: dict[tuple[str, ...], _Asked] = {(): (b"", ())}
        self._names: dict[_Asked, tuple[str, ...]] = {}
        self._said: dict[bytes, tuple[tuple[Problem, ...], dict[str, str]]] = {b"": ((), {})}
        self._last_said: tuple[object, object, bytes] = (), {}, b""

    def encode(self, plan: LoadPlan) -> bytes:
        """A plan as bytes.

        Raises:
            TypeError: MessagePack cannot carry planner_data or storage_data.
        """
        is_own = self._own is None
        self._own = self._own or plan
        items = plan.items
        if isinstance(items, _EncodedItems):
            raw = items.raw
        elif is_own and not self.sends_items:
            raw = _UNSENT
        else:
            raw = msgspec.Raw(_encode(_Columns.of(items)))
        names = tuple(plan.names)
        if names not in self._asked:
            self._asked[names] = _asked(names, self.stored)
        named = *self._asked[names], self._said_of(plan), plan.left
        return sendable(_LoadPlan(raw, plan.storage_data, plan.planner_data, *named))

    def _said_of(self, plan: LoadPlan) -> bytes:
        """The problems and dtypes of a plan; those of the plan before are often the same."""
        if not plan.problems and not plan.dtypes:
            return b""
        problems, dtypes, said = self._last_said
        if problems is not plan.problems or dtypes is not plan.dtypes:
            content = _encode(_Said([*map(_Problem.of, plan.problems)], dict(plan.dtypes)))
            said = zlib.compress(content, level=1, wbits=BARE)
            self._last_said = plan.problems, plan.dtypes, said
        return said

    def decode(self, data: bytes | memoryview) -> LoadPlan:
        """A plan from bytes; inverse of `encode`, except that stored names come first."""
        wire = _decode_load_plan(data)
        items: Sequence[ReadItem] = _EncodedItems(wire.items)
        asked = wire.stored, wire.others
        if asked not in self._names:
            bits = np.unpackbits(np.frombuffer(wire.stored, np.uint8)).tolist()
            self._names[asked] = (*compress(self.stored, bits), *wire.others)
        names = self._names[asked]
        if wire.items == _NOTHING and self._own is not None:
            items, names = self._own.items, self._own.names
        if wire.said not in self._said:
            said = _decode_said(zlib.decompress(wire.said, wbits=BARE))
            self._said[wire.said] = tuple(each.problem() for each in said.problems), said.dtypes
        problems, dtypes = self._said[wire.said]
        named = names, problems, wire.left, dtypes
        return LoadPlan(items, wire.storage_data, wire.planner_data, *named)


_Asked = tuple[bytes, tuple[str, ...]]
"""Names as they are sent; most ranks send the same."""


def _asked(names: Sequence[str], stored: Collection[str]) -> _Asked:
    asked, known = set(names), set(stored)
    bits = np.packbits(np.array([name in asked for name in stored], np.bool_))
    return bits.tobytes(), tuple(name for name in names if name not in known)
