"""The messages between the coordinator and a rank about chunks to be written.

A report has columns, not an object for each array: a chunk of a tensor is numbered as in the draft
of the manifest, where the first of each array is known from the orders (`ZarrArray.first`). For a
value it has the entry (`value_entry`): its text, or an array of bytes.
"""

from __future__ import annotations

import io
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import BytesEntry, ValueEntry
from xckpt.core.plan.items import LeafTable, WriteItem
from xckpt.core.struct_types import prepare_structs
from xckpt.core.values import ValueText
from xckpt.errors import PlanError
from xckpt.storage.budget import Access
from xckpt.storage.location import Location

SPELLED_OUT_BYTES = 4096
"""Values up to this long (bytes) stand in the manifest as text; longer ones are arrays."""


class BaseOrders(msgspec.Struct, array_like=True, frozen=True):
    """The checkpoint whose unchanged chunks a save shares, as the coordinator has found it."""

    folder: str
    """Where its manifest is: an absolute path, or a URL."""
    root: str
    """Its root group, relative to that."""
    manifest: bytes
    """An identity of its manifest, different for each save to the same path."""
    firsts: tuple[int, ...]
    """For each array of the orders the number of its first digest there; -1 if the base lacks
    it."""
    places: tuple[int, ...] = ()
    """For each array of the orders the number of its first place there; -1 if it is not packed."""
    packs: int = 0
    """How many packs it has."""
    inline_places: bytes = b""
    """Its table of places, if that stands in its manifest."""
    tables: tuple[int, str, int, str] = (0, "", 0, "")
    """How many digests it has and the digest of their file, in hex; the same of its places."""
    verify: bool = False
    """Whether a chunk is read before it is shared."""
    digests: bytes = b""
    """Its file of digests in a bucket, if that is so short that ranks need not read it, too."""


class WriteOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator sends to a rank: where to write, and the arrays of its leaves."""

    location: Location
    """Where the root group is staged."""
    codecs: tuple[str, ...]
    """Those behind ``bytes``; the coordinator's for all ranks."""
    arrays: tuple[ZarrArray, ...]
    """Every array that the rank writes parts of, leaf by leaf."""
    base: BaseOrders | None = None
    """What unchanged chunks are shared with."""
    draft: bytes = b""
    """In a group of several ranks, the name of the draft of the manifest that numbers the
    chunks."""
    pack_bytes: int = 0
    """Arrays with chunks of up to this many bytes lie in packs."""

    def brief(self, table: LeafTable) -> object:
        """The orders for a rank that knows its leaves."""
        from xckpt.storage.chunks.columns import brief, parted

        return brief(self, parted(self.arrays), table)

    def place(self) -> dict[str, object]:
        """Where the save is staged, as a `Location`: the fields that differ from the defaults."""
        access = self.location.access
        place = _unlike(self.location, Location("", ""))
        # The time of the storage's last answer means nothing to other processes.
        more = _unlike(access, Access(heard=access.heard))
        return {**place, "access": more} if more else place


def _unlike(one: Location | Access, other: Location | Access) -> dict[str, object]:
    """The fields that differ from those of another, by name."""
    names = [field.name for field in fields(one) if field.compare]
    return {
        name: getattr(one, name) for name in names if getattr(one, name) != getattr(other, name)
    }


if TYPE_CHECKING:
    Column = bytes | memoryview
else:
    Column = memoryview
    """Received, a part of the message: the reports of many ranks are long together."""


class WrittenValue(msgspec.Struct, array_like=True, gc=False):
    """The chunks of a long value that a rank has written."""

    leaf: str
    chunks: bytes
    """Their numbers, int64."""
    digests: bytes
    """A digest for each, in the same order."""
    places: bytes = b""
    """A place for each in the packs of the report, if they are packed."""


class Written(msgspec.Struct, array_like=True):
    """What a rank reports."""

    long_values: list[WrittenValue]
    values: dict[str, ValueEntry | BytesEntry]
    shared: int = 0
    """Bytes of elements that were not written because they are shared with the base."""
    unshared: str = ""
    """Why equal chunks were written nevertheless, if any were."""
    draft: bytes = b""
    """The draft of the numbers below; see `WriteOrders`."""
    chunks: Column = b""
    """The chunks of tensors: their numbers in the draft, int64."""
    digests: Column = b""
    """A digest for each of ``chunks``."""
    places: Column = b""
    """A place for each of ``chunks`` that lies in a pack."""
    packs: list[bytes] = []
    """The names of the packs that the rank has written."""


prepare_structs(WriteOrders, Written)


def value_entry(
    item: WriteItem, data: object, chunk_bytes: int
) -> tuple[ValueEntry | BytesEntry, bytes]:
    """A value's entry and content: its text, or an array of bytes if long or opaque.

    Raises:
        PlanError: the planner has resolved it to something other than a BytesIO.
    """
    name = item.index.fqn
    if not isinstance(data, io.BytesIO):
        what = type(data).__name__
        raise PlanError(f"{name}: resolve_data must return a BytesIO, not {what}")
    content, kind = data.getvalue(), data.kind if isinstance(data, ValueText) else item.kind
    if kind != "opaque" and len(content) <= SPELLED_OUT_BYTES:
        return ValueEntry(name, kind, content.decode("utf-8", "surrogatepass")), content
    return BytesEntry(name, kind, len(content), max(1, min(len(content), chunk_bytes))), content
