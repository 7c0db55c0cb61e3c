"""Carrying out one rank's writes: each chunk digested and written from the caller's own memory.

`WriteOrders` come with the rank's plan; `Written` is its report (`xckpt.storage.chunks.orders`).

1. An item is resolved to a NumPy view, within the memory budget.
2. Its zarr chunks (or zarr shards: what needs a single writer) are its units. What a local file
   holds as it is goes there in slabs, each digested on its way (`write_plain`), in threads.
3. Any other unit's view goes to TensorStore, uncopied if it is in C order, and while TensorStore
   writes it the digest of each chunk in it is taken from the same memory. The thread that begins it
   waits, later, until it is durable: the caller's or, where there are processors for it, another
   (`Pool.alone`).
4. A small unit that is all of its chunk is written as a value under the chunk's key: a state has
   many of them, and opening an array for each would cost more than the rest.
5. The digests are reported.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Box, Boxes, BoxLookup
from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.entries import BytesEntry, ValueEntry, ZarrArray, leaf_arrays
from xckpt.core.plan.items import WriteItem
from xckpt.core.plan.save import SavePlanner
from xckpt.errors import PlanError
from xckpt.storage.array import SMALL_BYTES, digest_array, open_array, open_chunk, plain_bools
from xckpt.storage.budget import IN_FLIGHT, Pool, ProgressCounter
from xckpt.storage.chunks.orders import WriteOrders, Written, WrittenArray
from xckpt.storage.chunks.plain_files import is_leading, is_plain, stored_bytes, write_plain
from xckpt.storage.location import Location, answer, open_store, storage_errors

_Future: TypeAlias = "ts.WriteFutures | ts.Future[ts.KvStore.TimestampedStorageGeneration]"


@dataclass(slots=True)
class _Unit:
    """A part of an item that is written as one: a chunk, or a zarr shard of several."""

    array: ZarrArray
    number: int
    """Its number among the array's units, in C order."""
    box: Box
    """Its part of the array."""
    data: NDArray[np.generic]


@dataclass(slots=True)
class _Reservation:
    """The part of the budget that an item holds until its last unit is written."""

    pool: Pool
    size: int
    units: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def unit_done(self) -> None:
        with self.lock:
            self.units -= 1
            last = self.units == 0
        if last:
            self.pool.release(self.size)


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """A unit's write that was begun."""

    leaf: str
    nbytes: int
    written: _Future
    reservation: _Reservation | None


class _Arrays:
    """The zarr arrays that a rank writes to, found by what they hold."""

    def __init__(self, arrays: Iterable[ZarrArray]) -> None:
        self._by_leaf = by_leaf(arrays)
        self._lookups: dict[str, BoxLookup] = {}

    def holding(self, item: WriteItem) -> ZarrArray:
        """The array that holds an item; a PlanError if there is none."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        arrays = self._by_leaf.get(name, [])
        if len(arrays) == 1 and arrays[0].box.holds(box):
            return arrays[0]
        if name not in self._lookups:
            boxes = [(array.offset, array.shape) for array in arrays]
            self._lookups[name] = BoxLookup(Boxes.of(boxes, rank=len(box.sizes)))
        number = self._lookups[name].holder(box)
        if number is None:
            raise PlanError(f"{name}: {box} lies in no array of the checkpoint")
        return arrays[number]


class ChunkWrites:
    """The writes of one rank."""

    def __init__(
        self, orders: WriteOrders, planner: SavePlanner, progress: ProgressCounter, where: Location
    ) -> None:
        self.codecs = orders.codecs
        self.planner = planner
        self.progress = progress
        self.where = where
        # The memory driver keeps what is written without a copy: it must not be the caller's.
        self._may_keep = where.driver != "memory"
        self._location = orders.location
        self._root = open_store(replace(orders.location, access=where.access))
        self._arrays = _Arrays(orders.arrays)
        self._opened: dict[tuple[str, int], ts.TensorStore] = {}
        self._digests: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        self._values: dict[str, ValueEntry | BytesEntry] = {}
        self._begun: deque[_UnderWay] = deque()
        """Those that the caller waits for."""
        self._under_way: set[_UnderWay] = set()
        """All of them."""
        self._lock = threading.Lock()

    def begin_largest(self, items: Iterable[WriteItem], pool: Pool) -> list[WriteItem]:
        """Begin to write the largest tensor items, as far as the budget goes; returns the others.

        Values and empty tensors have no bytes, and are neither.
        TensorStore has work with these while the small ones, which come next, need this thread.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused.
        """
        sized = [(item.tensor_storage_size() or 0, item) for item in items]
        small = [item for size, item in sized if 0 < size <= SMALL_BYTES]
        large = [(size, item) for size, item in sized if size > SMALL_BYTES]
        waiting = deque(sorted(large, key=itemgetter(0), reverse=True))
        while waiting and pool.has_room(waiting[0][0]) and not pool.failed:
            self._submit(waiting.popleft()[1], pool)
        return [*small, *(item for _, item in waiting)]

    def write_tensors(self, items: Iterable[WriteItem], pool: Pool) -> None:
        """Begin to write tensor items, within the budget; raises as `begin_largest`."""
        for item in items:
            if not pool.failed:
                self._submit(item, pool)

    def _submit(self, item: WriteItem, pool: Pool) -> None:
        """Begin an item's units, within the budget; its bytes are released with the last unit."""
        size = item.tensor_storage_size() or 0
        while self._begun and (len(self._begun) >= IN_FLIGHT or not pool.has_room(size)):
            self._wait(self._begun.popleft())
        pool.reserve(size)
        units = self._units(item)
        reservation = _Reservation(pool, size, len(units))
        for unit in units:
            if self._is_plain_file(unit):
                if pool.single:
                    self._write_file(unit, reservation)
                else:
                    pool.submit(partial(self._write_file, unit, reservation))
            elif size > SMALL_BYTES and not pool.alone:
                pool.submit(lambda unit=unit: self._wait(self._begin(unit, reservation)))
            else:
                self._begun.append(self._begin(unit, reservation))

    def _units(self, item: WriteItem) -> list[_Unit]:
        """The units that an item consists of, with views of its data."""
        array = self._arrays.holding(item)
        assert item.tensor_data is not None
        place = item.tensor_data.chunk.relative_to(array.offset)
        boxes = _unit_boxes(item, array, place)
        data = self._resolve(item)
        return [_Unit(array, n, box, data[box.slices(place.offsets)]) for n, box in boxes]

    def write_value(self, entry: ValueEntry | BytesEntry, content: bytes) -> None:
        """Note a value; its content, unless the entry spells it out, becomes an array of bytes.

        Raises:
            PlanError: the value was written already.
        """
        if entry.name in self._values:
            raise PlanError(f"{entry.name}: two items of this rank's plan write this value")
        self._values[entry.name] = entry
        if isinstance(entry, BytesEntry) and entry.size:
            (array,) = leaf_arrays(entry)
            data = np.frombuffer(content, np.uint8)
            self.progress.expect(entry.size)
            for number, start in enumerate(range(0, entry.size, entry.chunk)):
                part = data[start : start + entry.chunk]
                unit = _Unit(array, number, Box((start,), part.shape), part)
                self._begun.append(self._begin(unit, None))

    def finish(self) -> Written:
        """Wait for every small write, and report."""
        while self._begun:
            self._wait(self._begun.popleft())
        return Written(
            [
                WrittenArray(
                    leaf,
                    number,
                    np.array([cell for cell, _ in digests], np.int64).tobytes(),
                    b"".join(digest for _, digest in digests),
                )
                for (leaf, number), digests in self._digests.items()
            ],
            self._values,
        )

    def close(self) -> None:
        """After a failure: wait for the writes under way; their folder will be removed."""
        for write in tuple(self._under_way):  # a thread may have just begun another
            with contextlib.suppress(Exception):
                answer(write.written, self.where)

    def _is_content(self, unit: _Unit) -> bool:
        """Whether a unit's elements in C order are what is stored, neither padded nor encoded."""
        plain = not self.codecs and unit.array.shard is None
        return plain and unit.data.shape == unit.array.chunk

    def _is_plain_file(self, unit: _Unit) -> bool:
        """Whether they are what is stored in a local file, first of all."""
        return (
            unit.data.nbytes > SMALL_BYTES
            and self._location.driver == "file"
            and is_plain(unit.array, self.codecs)
            and is_leading(unit.data.shape, unit.array.chunk)
        )

    def _write_file(self, unit: _Unit, reservation: _Reservation) -> None:
        """Write a unit to its file, until it is as durable as the orders say."""
        array = unit.array
        path = f"{self._location.path}/{array.key(unit.box.offsets)}"
        try:
            with storage_errors(f"{self.where}: {array.leaf}"):
                synced = not self._location.unsynced
                digest = write_plain(path, unit.data, stored_bytes(array), synced=synced)
        finally:
            reservation.unit_done()
        self._note(unit, [(unit.number, digest)])
        self.progress.add(unit.data.nbytes)

    def _note(self, unit: _Unit, digests: list[tuple[int, bytes]]) -> None:
        """Keep the digests of a unit's chunks for the report."""
        with self._lock:
            self._digests.setdefault((unit.array.leaf, unit.array.number), []).extend(digests)

    def _begin(self, unit: _Unit, reservation: _Reservation | None) -> _UnderWay:
        """Start a unit's write, from the caller's memory if that is in C order, and digest it."""
        data = plain_bools(np.asarray(unit.data, order="C"))
        with storage_errors(f"{self.where}: {unit.array.leaf}"):
            written = self._write(unit, data)
        under_way = _UnderWay(unit.array.leaf, data.nbytes, written, reservation)
        self._under_way.add(under_way)
        self._note(unit, _digests(unit, data))
        return under_way

    def _write(self, unit: _Unit, data: NDArray[np.generic]) -> _Future:
        array, keep = unit.array, self._may_keep
        if self._is_content(unit) and data.nbytes <= SMALL_BYTES:
            # Opening an array costs more than the rest of a small leaf.
            return self._root.write(array.key(unit.box.offsets), data.tobytes())
        if self._is_content(unit) and 1 in data.shape:
            run = open_chunk(self._root, array, unit.box.offsets)
            return run.write(data.reshape(-1), can_reference_source_data_indefinitely=keep)
        store = self._open(array)
        if data.shape != array.shape:
            store = store[unit.box.slices()]
        return store.write(data, can_reference_source_data_indefinitely=keep)

    def _wait(self, under_way: _UnderWay) -> None:
        """Wait until a unit is durable."""
        try:
            with storage_errors(f"{self.where}: {under_way.leaf}"):
                answer(under_way.written, self.where)
        finally:
            if under_way.reservation is not None:
                under_way.reservation.unit_done()
        self._under_way.remove(under_way)
        self.progress.add(under_way.nbytes)

    def _resolve(self, item: WriteItem) -> NDArray[np.generic]:
        """An item's data on the host, little-endian, of exactly the planned dtype and sizes."""
        assert item.tensor_data is not None
        data = self.planner.adapters.to_numpy(self.planner.resolve_data(item))
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        if data.shape != chunk.sizes or dtype_name(data.dtype) != dtype:
            raise PlanError(
                f"{item.index.fqn}: {dtype} of shape {chunk.sizes} was planned, but resolve_data "
                f"returned {data.dtype} of shape {data.shape}"
            )
        return data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("="))

    def _open(self, array: ZarrArray) -> ts.TensorStore:
        key = (array.leaf, array.number)
        if key not in self._opened:
            self._opened[key] = open_array(self._root, array, self.codecs)
        return self._opened[key]


def by_leaf(arrays: Iterable[ZarrArray]) -> dict[str, list[ZarrArray]]:
    """Leaf name -> its arrays."""
    leaves: dict[str, list[ZarrArray]] = {}
    for array in arrays:
        leaves.setdefault(array.leaf, []).append(array)
    return leaves


def _unit_boxes(item: WriteItem, array: ZarrArray, place: Box) -> list[tuple[int, Box]]:
    """(number, box) of the units of an array that an item at ``place`` in it consists of.

    Raises:
        PlanError: a unit reaches beyond the item, so another rank would write it as well.
    """
    assert item.tensor_data is not None
    one = all(size <= unit for size, unit in zip(place.sizes, array.unit, strict=True))
    if one and place.sizes == array.shape:
        return [(0, place)]
    numbers, units = cells(place.offsets, place.ends, array.shape, array.unit)
    beyond = (units.offsets < np.array(place.offsets)) | (units.ends > np.array(place.ends))
    if beyond.any():
        raise PlanError(
            f"{item.index.fqn}: this rank has to write {item.tensor_data.chunk}, which shares "
            f"a chunk with another box; a planner must keep to the grid's chunks"
        )
    return list(zip(numbers.tolist(), units, strict=True))


def _digests(unit: _Unit, data: NDArray[np.generic]) -> list[tuple[int, bytes]]:
    """(number, digest) of each chunk in a unit."""
    array, box = unit.array, unit.box
    if array.shard is None:
        return [(unit.number, digest_array(data))]
    numbers, chunks = cells(box.offsets, box.ends, array.shape, array.chunk)
    return [
        (number, digest_array(np.asarray(data[chunk.slices(box.offsets)], order="C")))
        for number, chunk in zip(numbers.tolist(), chunks, strict=True)
    ]
