"""What the coordinator and a rank say to each other about chunks to be written."""

from __future__ import annotations

import msgspec

from xckpt.core.manifest.entries import BytesEntry, ValueEntry, ZarrArray
from xckpt.core.struct_types import prepare_structs
from xckpt.storage.location import Location


class WriteOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator sends to a rank: where to write, and the arrays of its leaves."""

    location: Location
    """Where the root group is staged."""
    codecs: tuple[str, ...]
    """Those behind ``bytes``; the coordinator's for all ranks."""
    arrays: tuple[ZarrArray, ...]
    """Every array that the rank writes parts of, leaf by leaf."""


class WrittenArray(msgspec.Struct, array_like=True, gc=False):
    """The chunks of one array that a rank has written."""

    leaf: str
    number: int
    cells: bytes
    """Numbers of the chunks, int64."""
    digests: bytes
    """A digest for each, in the same order."""


class Written(msgspec.Struct, array_like=True):
    """What a rank reports."""

    arrays: list[WrittenArray]
    values: dict[str, ValueEntry | BytesEntry]


prepare_structs(WriteOrders, Written)
