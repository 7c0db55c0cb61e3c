"""A unit as local files: its elements, and the zarr.json that goes with the first of an array."""

from __future__ import annotations

from collections.abc import Iterator

from xckpt.core.manifest.entries import EDITION, array_document
from xckpt.storage.chunks.plain_files import stored_bytes, write_file, write_plain
from xckpt.storage.chunks.units import Unit
from xckpt.storage.location import Location


def documents_with(unit: Unit, codecs: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """(key, content) of what goes with a unit: with the first of an array its zarr.json."""
    if unit.number == 0:
        yield f"{unit.array.path}/zarr.json", array_document(unit.array, codecs, EDITION)


def write_documents(unit: Unit, location: Location, codecs: tuple[str, ...]) -> None:
    """Write what goes with a unit to local files."""
    within, synced = location.path, not location.unsynced
    for key, content in documents_with(unit, codecs):
        write_file(f"{within}/{key}", [content], within=within, synced=synced)


def write_unit(unit: Unit, location: Location) -> list[bytes]:
    """Write a unit to its local file; the digest of each chunk in it."""
    array, within, synced = unit.array, location.path, not location.unsynced
    path, nbytes = f"{within}/{array.key(unit.box.offsets)}", stored_bytes(array)
    if array.shard is None:
        return [write_plain(path, unit.data, nbytes, within=within, synced=synced)]
    from xckpt.storage.chunks.shards.files import write_shard

    return write_shard(path, unit.data, array, within=within, synced=synced)
