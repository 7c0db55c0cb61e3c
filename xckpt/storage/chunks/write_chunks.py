"""Carrying out one rank's writes: each chunk digested and written from the caller's own memory.

`WriteOrders` come with the rank's plan; `Written` is its report (`xckpt.storage.chunks.orders`).

1. An item is resolved to a NumPy view, within the memory budget.
2. Its zarr chunks (or zarr shards: what needs a single writer) are its units
   (`xckpt.storage.chunks.units`). What a local file holds as it is goes there in slabs, each
   digested on its way (`write_plain`), in threads; small units many to a thread.
3. Any other unit's view goes to TensorStore, uncopied if it is in C order, and while TensorStore
   writes it the digest of each chunk is taken from the same memory: by the caller or, where there
   are processors for it, in threads (`Pool.alone`). The caller waits until it is durable.
4. A small unit that is all of its chunk is written as an object under the chunk's key: opening an
   array for each would cost more than all else. With an array's first chunk goes its zarr.json.
"""

from __future__ import annotations

import contextlib
import threading
from array import array as array_of
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, starmap
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import BytesEntry, ValueEntry, is_packed
from xckpt.core.plan.items import WriteItem
from xckpt.core.plan.save import SavePlanner
from xckpt.core.plan.save_checks import resolved
from xckpt.core.plan.wanted import Countdown
from xckpt.core.storage import SizedItems
from xckpt.errors import PlanError
from xckpt.storage.array import SMALL_BYTES, open_array, open_chunk, plain_bools
from xckpt.storage.budget import IN_FLIGHT, Pool, ProgressCounter, Reservation
from xckpt.storage.chunks.orders import WriteOrders, Written, WrittenValue
from xckpt.storage.chunks.unit_files import TOGETHER, documents_with, write_documents, write_unit
from xckpt.storage.chunks.units import (
    ArraysByLeaf,
    Taken,
    Unit,
    as_planned,
    digests,
    unit_boxes,
    value_units,
)
from xckpt.storage.location import Location, Writing, answer, open_store, storage_errors

if TYPE_CHECKING:
    from xckpt.storage.packs.write_packs import PackWrites

UnitWriting: TypeAlias = "ts.WriteFutures | Writing"


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A unit's write that was begun."""

    leaf: str
    nbytes: int
    written: tuple[UnitWriting, ...]
    reservation: Reservation | None

    def wait(self, where: Location) -> None:
        """Wait until it is durable, and give its part of the budget back."""
        with storage_errors(f"{where}: {self.leaf}"):
            try:
                for written in self.written:
                    answer(written, where)
            finally:
                if self.reservation is not None:
                    self.reservation.unit_done()


class _ChunkColumns:
    """The chunks written so far, in columns."""

    def __init__(self) -> None:
        self.numbers, self.digests, self.places = array_of("q"), bytearray(), array_of("Q")

    def content(self) -> tuple[bytes, bytes, bytes]:
        return self.numbers.tobytes(), bytes(self.digests), self.places.tobytes()


class _RankReport:
    """A rank's report while several threads add to it."""

    def __init__(self, draft: bytes) -> None:
        self._draft, self._tensors = draft, _ChunkColumns()
        self._values: dict[str, ValueEntry | BytesEntry] = {}
        self._long: dict[str, _ChunkColumns] = {}  # those of long values
        self._lock = threading.Lock()

    def note_value(self, entry: ValueEntry | BytesEntry) -> None:
        if entry.name in self._values:
            raise PlanError(f"{entry.name}: two items of this rank's plan write this value")
        self._values[entry.name] = entry
        if isinstance(entry, BytesEntry) and entry.size:
            self._long[entry.name] = _ChunkColumns()

    def note(
        self, array: ZarrArray, digests: Iterable[tuple[int, bytes]], place: Iterable[int] = ()
    ) -> None:
        """Note written chunks: number and digest of each, and the place of a packed one."""
        with self._lock:
            columns = self._long.get(array.leaf, self._tensors)
            for number, digest in digests:
                columns.numbers.append(array.first + number)
                columns.digests += digest
            columns.places.extend(place)

    def written(self, packs: list[bytes]) -> Written:
        """The report, with the names of the packs."""
        long = [WrittenValue(name, *columns.content()) for name, columns in self._long.items()]
        return Written(long, self._values, 0, "", self._draft, *self._tensors.content(), packs)


class ChunkWrites:
    """The writes of one rank, within a budget of memory."""

    def __init__(
        self,
        orders: WriteOrders,
        planner: SavePlanner,
        progress: ProgressCounter,
        where: Location,
        memory_bytes: int,
    ) -> None:
        self.codecs, self.planner = orders.codecs, planner
        self.progress, self.where = progress, where
        # The memory driver keeps written memory without a copy: it must not be the caller's.
        self._may_keep, self._is_local = where.driver != "memory", where.driver == "file"
        self._location = orders.location
        self._root = open_store(replace(orders.location, access=where.access))
        self._arrays = ArraysByLeaf(orders.arrays)
        self._opened: dict[tuple[str, int], ts.TensorStore] = {}
        self._pack_bytes, self._report = orders.pack_bytes, _RankReport(orders.draft)
        self._in_threads = self._is_local and not self.codecs
        self._together = TOGETHER if orders.location.unsynced else 1
        self._unsent: list[tuple[Unit, Reservation]] = []  # for a thread, with the next ones
        self._begun: deque[UnderWay] = deque()  # those that the caller waits for
        self._under_way: set[UnderWay] = set()  # all of them
        self._packs, self.memory_bytes = _pack_writes(self._root, orders, where, memory_bytes)
        """The packs, and the rest of the budget."""

    def begin_largest(self, items: SizedItems, pool: Pool) -> Iterator[tuple[int, WriteItem]]:
        """Begin to write the largest tensor items, as far as the budget goes; returns the others.

        Values and empty tensors, which have no bytes, are neither. TensorStore is busy with these
        while the small ones, which come next, need this thread.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused.
        """
        (large, small), begun = items.by_size(SMALL_BYTES), 0
        for size, item in items.chosen(large):
            if pool.failed or not pool.has_room(size):
                break
            self._submit(size, item, pool)
            begun += 1
        return items.chosen(np.concatenate([small, large[begun:]]))

    def write_tensors(self, items: Iterable[tuple[int, WriteItem]], pool: Pool) -> None:
        """Begin to write tensor items, within the budget; raises as `begin_largest`."""
        for size, item in items:
            if pool.failed:
                break
            self._submit(size, item, pool)
        self._send(pool)

    def _submit(self, size: int, item: WriteItem, pool: Pool) -> None:
        """Begin an item's units, within the budget; its bytes are released with the last unit."""
        packed = self._is_packed(array := self._arrays.holding(item))
        if packed and size <= SMALL_BYTES:
            for unit in item_units(item, array, self.planner):
                self._pack(unit)  # the pack copies it at once: it need not wait for the budget
            return
        while self._begun and (len(self._begun) >= IN_FLIGHT or not pool.has_room(size)):
            self._wait(self._begun.popleft())
        if self._unsent and not pool.has_room(size):
            self._send(pool)
        while not pool.reserve(size, unless=self._begun.__len__):
            self._wait(self._begun.popleft())
        units = item_units(item, array, self.planner)
        reservation = Reservation(pool, size, Countdown(len(units)))
        for unit in units:
            if packed:
                self._pack(unit)
                reservation.unit_done()
            elif self._in_threads and not pool.single:
                self._unsent.append((unit, reservation))
                if size > SMALL_BYTES or len(self._unsent) >= self._together:
                    self._send(pool)
            elif self._is_local and unit.is_plain(self.codecs):
                self._write_file(unit, reservation)
            elif size > SMALL_BYTES and not pool.alone:
                pool.submit(partial(self._begin_in_thread, unit, reservation, pool))
            else:
                self._begun.append(self._begin(unit, reservation))

    def _begin_in_thread(self, unit: Unit, reservation: Reservation, pool: Pool) -> None:
        """Begin a unit's write; the caller waits, so that more are under way than threads."""
        self._begun.append(self._begin(unit, reservation))
        pool.release(0)  # the caller may wait for room

    def _send(self, pool: Pool) -> None:
        """Have a thread write the units that wait for one."""
        if self._unsent:
            pool.submit(partial(self._write_units, self._unsent))
            self._unsent = []

    def _write_units(self, units: list[tuple[Unit, Reservation]]) -> None:
        for unit, reservation in units:
            if self._is_local and unit.is_plain(self.codecs):
                self._write_file(unit, reservation)
            else:
                self._wait(self._begin(unit, reservation))

    def write_value(self, entry: ValueEntry | BytesEntry, content: bytes) -> None:
        """Note a new value; its content becomes an array of bytes unless the entry holds it."""
        self._report.note_value(entry)
        if isinstance(entry, BytesEntry) and entry.size:
            self.progress.expect(entry.size)
            for unit in value_units(entry, content):
                if self._is_packed(unit.array):
                    self._pack(unit)
                else:
                    self._begun.append(self._begin(unit, None))

    def _is_packed(self, array: ZarrArray) -> bool:
        return self._packs is not None and is_packed(array, self._pack_bytes)

    def _pack(self, unit: Unit) -> None:
        """Append a unit of a packed array to this rank's packs."""
        assert self._packs is not None
        place, digest = self._packs.add(unit.data)
        self._report.note(unit.array, [(unit.number, digest)], place)
        self.progress.add(unit.data.nbytes)

    def finish(self) -> Written:
        """`report` and `wait`."""
        written = self.report()
        self.wait()
        return written

    def report(self) -> Written:
        """The report of what is written once `wait` has returned."""
        return self._report.written(self._packs.flush() if self._packs else [])

    def wait(self) -> None:
        """Wait for every small write."""
        while self._begun:
            self._wait(self._begun.popleft())
        if self._packs is not None:
            self._packs.wait()

    def close(self) -> None:
        """After a failure: wait for the writes under way; their folder will be removed."""
        if self._packs is not None:
            self._packs.close()
        writes = tuple(self._under_way)  # a thread may have just begun another
        for written in chain.from_iterable(write.written for write in writes):
            with contextlib.suppress(Exception):
                answer(written, self.where)

    def _write_file(self, unit: Unit, reservation: Reservation) -> None:
        """Write a unit to its file, as durably as the orders say."""
        try:
            with storage_errors(f"{self.where}: {unit.array.leaf}"):
                written = self._write_plain(unit)
                write_documents(self._documents(unit), self._location)
        finally:
            reservation.unit_done()
        self._report.note(unit.array, written)
        self.progress.add(unit.data.nbytes)

    def _documents(self, unit: Unit) -> Iterable[tuple[str, bytes]]:
        return documents_with(unit, self.codecs)

    def _write_plain(self, unit: Unit) -> Iterable[tuple[int, bytes]]:
        """Write the elements of a unit to its file; number and digest of each chunk in it."""
        return zip(unit.numbers, write_unit(unit, self._location), strict=True)

    def _begin(self, unit: Unit, reservation: Reservation | None, taken: Taken = ()) -> UnderWay:
        """Begin a unit's write, from the caller's memory if that is in C order, and digest it."""
        data = plain_bools(np.asarray(unit.data, order="C"))
        with storage_errors(f"{self.where}: {unit.array.leaf}"):
            written = self._write(unit, data), *starmap(self._root.write, self._documents(unit))
        under_way = UnderWay(unit.array.leaf, data.nbytes, written, reservation)
        self._under_way.add(under_way)
        self._report.note(unit.array, taken or digests(unit, data))
        return under_way

    def _write(self, unit: Unit, data: NDArray[np.generic]) -> UnitWriting:
        array, keep = unit.array, self._may_keep
        is_content = not self.codecs and unit.fills_chunk
        if is_content and data.nbytes <= SMALL_BYTES:
            return self._root.write(array.key(unit.box.offsets), data.tobytes())
        if is_content and 1 in data.shape:
            run = open_chunk(self._root, array, unit.box.offsets)
            return run.write(data.reshape(-1), can_reference_source_data_indefinitely=keep)
        store = self._open(array)
        if data.shape != array.shape:
            store = store[unit.box.slices()]
        return store.write(data, can_reference_source_data_indefinitely=keep)

    def _wait(self, under_way: UnderWay) -> None:
        """Wait until a unit is durable."""
        under_way.wait(self.where)
        self._under_way.remove(under_way)
        self.progress.add(under_way.nbytes)

    def _open(self, array: ZarrArray) -> ts.TensorStore:
        key = (array.leaf, array.number)
        if key not in self._opened:
            self._opened[key] = open_array(self._root, array, self.codecs)
        return self._opened[key]


def item_units(item: WriteItem, array: ZarrArray, planner: SavePlanner) -> list[Unit]:
    """The units that an item consists of, with views of its data."""
    assert item.tensor_data is not None
    data, box = as_planned(item, resolved(planner, item)), item.tensor_data.chunk
    place = box.relative_to(array.offset) if any(array.offset) else box
    if box.sizes == array.shape == array.unit:  # as most are
        return [Unit(array, 0, place, data, item)]
    boxes = unit_boxes(item, array, place)
    return [Unit(array, n, box, data[box.slices(place.offsets)], item) for n, box in boxes]


def _pack_writes(
    root: ts.KvStore, orders: WriteOrders, where: Location, memory_bytes: int
) -> tuple[PackWrites | None, int]:
    """The packs of a rank, and the memory that is left; most saves by few leaves have none."""
    if not orders.pack_bytes:
        return None, memory_bytes
    from xckpt.storage.packs.write_packs import PackWrites

    packs = PackWrites(root, orders, where, memory_bytes)
    return packs, memory_bytes - packs.memory_bytes
