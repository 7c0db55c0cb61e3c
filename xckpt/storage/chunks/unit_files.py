"""A unit as local files: its elements, and the zarr.json that goes with the first of an array.

`DocumentWrites` are what the coordinator writes besides: the zarr.json of groups and side files.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice

from xckpt.core.manifest.entries import EDITION, DocumentTree, Entry, array_document
from xckpt.storage.budget import IN_FLIGHT, Pool
from xckpt.storage.chunks.orders import BaseOrders
from xckpt.storage.chunks.plain_files import stored_bytes, write_file, write_plain
from xckpt.storage.chunks.units import Unit
from xckpt.storage.location import Location, Writing, answer, open_store, storage_errors

TOGETHER = 32
"""Small files that a thread writes in a row: handing one over takes as long as writing it."""


def documents_with(unit: Unit, codecs: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """(key, content) of what goes with a unit: with the first of an array its zarr.json."""
    if unit.number == 0:
        yield f"{unit.array.path}/zarr.json", array_document(unit.array, codecs, EDITION)


def write_documents(documents: Iterable[tuple[str, bytes]], location: Location) -> None:
    """Write (key, content) to local files."""
    within, synced = location.path, not location.unsynced
    for key, content in documents:
        write_file(f"{within}/{key}", [content], within=within, synced=synced)


def write_unit(unit: Unit, location: Location) -> list[bytes]:
    """Write a unit to its local file; the digest of each chunk in it."""
    array, within, synced = unit.array, location.path, not location.unsynced
    path, nbytes = f"{within}/{array.key(unit.box.offsets)}", stored_bytes(array)
    if array.shard is None:
        return [write_plain(path, unit.data, nbytes, within=within, synced=synced)]
    from xckpt.storage.chunks.shards.files import write_shard

    return write_shard(path, unit.data, array, within=within, synced=synced)


class DocumentWrites:
    """Documents and side files that the coordinator writes.

    Args:
        target: where the save goes, for errors.
        location: where it is staged.
        tree: makes the documents.
        base: finds those of a base in a folder, which are shared.
    """

    def __init__(
        self,
        target: Location,
        location: Location,
        tree: DocumentTree,
        base: BaseOrders | None = None,
    ) -> None:
        self._target, self._location, self._tree = target, location, tree
        self._base = base
        self._under_way: deque[Writing] = deque()

    def begin(self, leaves: Iterable[Entry], pool: Pool | None = None) -> None:
        """Start writing what goes with no chunk of these leaves; no more after one has failed.

        Raises:
            StorageError: the storage refused.
        """
        self._begin(self._unshared(self._tree.add(leaves)), pool)

    def begin_last(self, leaves: Iterable[Entry], side_files: Iterable[tuple[str, bytes]]) -> None:
        """Start writing what goes with the last leaves, the root's document, and side files."""
        documents = [*self._tree.add(leaves), ("zarr.json", self._tree.root())]
        self._begin(chain(self._unshared(documents), side_files))

    def _unshared(self, documents: Iterable[tuple[str, bytes]]) -> Iterable[tuple[str, bytes]]:
        """The documents that have to be written; the others are shared."""
        if self._base is None:
            return documents
        from xckpt.storage.base.documents import unshared_of_coordinator

        return unshared_of_coordinator(documents, self._base, self._target, self._location)

    def _begin(self, contents: Iterable[tuple[str, bytes]], pool: Pool | None = None) -> None:
        if pool is not None and self._target.driver == "file":
            rest = iter(contents)
            while some := list(islice(rest, TOGETHER)):
                pool.submit(partial(self._write_files, some))
            return
        store = open_store(self._location)
        with storage_errors(self._target):
            for key, content in contents:
                if len(self._under_way) >= IN_FLIGHT:
                    answer(self._under_way.popleft(), self._target)
                self._under_way.append(store.write(key, content))

    def _write_files(self, contents: Iterable[tuple[str, bytes]]) -> None:
        """Write files of a local folder, in a thread."""
        with storage_errors(self._target):
            write_documents(contents, self._location)

    def wait(self) -> None:
        """Wait until all are durable.

        Raises:
            StorageError: the storage refused.
        """
        with storage_errors(self._target):
            while self._under_way:
                answer(self._under_way[0], self._target)
                self._under_way.popleft()

    def close(self) -> None:
        """After a failure: wait for those under way; they will be removed."""
        for write in self._under_way:
            with contextlib.suppress(Exception):
                answer(write, self._target)
