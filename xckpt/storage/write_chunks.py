"""Carrying out one rank's writes: each chunk digested and written from the caller's own memory.

1. An item is resolved to a NumPy view, within the memory budget.
2. Its zarr chunks (or zarr shards: whatever needs a single writer) are its units. A unit's view
   goes to TensorStore, uncopied if it is in C order, and while TensorStore writes it the digest of
   each chunk in it is taken from the same memory.
3. A small unit that is all of its chunk is written as a value under the chunk's key: a state has
   many of them, and opening an array for each would cost more than the rest.
4. Whoever begins a unit waits, later, until it is durable: the caller's thread or, where there are
   processors for it, others (`Pool.alone`).
5. The digests are the rank's report (`Written`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.codec import BytesEntry, ValueEntry, ZarrArray
from xckpt.core.names import zarr_path
from xckpt.core.plan.items import WriteItem
from xckpt.core.plan.save import SavePlanner
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import PlanError
from xckpt.storage.array import open_array, open_chunk
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.errors import storage_errors
from xckpt.storage.integrity import digest_array
from xckpt.storage.location import Location, open_store

__all__ = ["ArrayOrder", "ChunkWrites", "WriteOrders", "Written", "WrittenArray"]

Shape = tuple[int, ...]
_Future: TypeAlias = "ts.WriteFutures | ts.Future[ts.KvStore.TimestampedStorageGeneration]"

SMALL_BYTES = 1 << 18
"""Items up to this size (bytes) are written without a thread of their own."""

MOST_STARTED = 256
"""Small writes in flight at a time."""


class ArrayOrder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A zarr array that a rank is to write parts of."""

    number: int
    offset: Shape
    shape: Shape
    chunk: Shape
    shard: Shape | None
    in_pieces: bool


class WriteOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator tells a rank: where to write, and the grids of its leaves."""

    driver: str
    path: str
    bucket: str
    codecs: tuple[str, ...]
    """Those behind ``bytes``; the coordinator's for all ranks."""
    arrays: dict[str, list[ArrayOrder]]

    @property
    def location(self) -> Location:
        """Where the root group is staged."""
        return Location(self.driver, self.path, self.bucket)


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


@dataclass(slots=True)
class _Unit:
    """A part of an item that is written as one: a chunk, or a zarr shard of several."""

    array: ZarrArray
    number: int
    """Its number among the array's units, in C order."""
    offsets: Shape
    """Its first element in the array."""
    data: NDArray[np.generic]


@dataclass(slots=True)
class _Prepared:
    """A tensor item whose data is at hand."""

    array: ZarrArray
    low: Shape
    """The item's first element in the array."""
    units: Sequence[tuple[int, Box]]
    """(number, box) of each."""
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


class ChunkWrites:
    """The writes of one rank."""

    def __init__(
        self,
        orders: WriteOrders,
        planner: SavePlanner,
        progress: ProgressCounter,
        where: Location,
    ) -> None:
        self.orders = orders
        self.codecs = orders.codecs
        self.planner = planner
        self.progress = progress
        self.where = where
        # What lies in memory is what was written, not a copy: it must not be the caller's.
        self._lets_go = where.driver != "memory"
        self._root = open_store(orders.location)
        self._opened: dict[tuple[str, int], ts.TensorStore] = {}
        self._digests: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        self._values: dict[str, ValueEntry | BytesEntry] = {}
        self._begun: deque[_UnderWay] = deque()
        self._under_way: dict[int, _UnderWay] = {}
        self._lock = threading.Lock()

    def write_tensors(
        self, items: Sequence[WriteItem], pool: Pool, meanwhile: Callable[[], None]
    ) -> None:
        """Write tensor items, and do something else while TensorStore is busy with the first.

        The largest come first, so that TensorStore has work while the small ones are prepared.

        Raises:
            PlanError: an item does not fit its grid, or its data does not fit the item.
            StorageError: the storage refused.
        """
        sized = [(item.tensor_storage_size() or 0, item) for item in items]
        small = [item for size, item in sized if 0 < size <= SMALL_BYTES]
        large = deque(sorted((-size, n) for n, (size, _) in enumerate(sized) if size > SMALL_BYTES))
        while large and pool.has_room(-large[0][0]) and not pool.failed:
            self._submit(items[large.popleft()[1]], pool)
        meanwhile()
        for item in small:
            if not pool.failed:
                self._submit(item, pool)
        while large and not pool.failed:
            self._submit(items[large.popleft()[1]], pool)

    def _submit(self, item: WriteItem, pool: Pool) -> None:
        """Begin an item's units, within the budget; what it takes is given back with the last."""
        size = item.tensor_storage_size() or 0
        while self._begun and not pool.has_room(size):
            self._wait(self._begun.popleft())
        pool.reserve(size)
        prepared = self._prepare(item)
        reservation = _Reservation(pool, size, len(prepared.units))
        for unit in self._cut(prepared):
            if size > SMALL_BYTES and not pool.alone:
                pool.submit(partial(self._begin_and_wait, unit, reservation))
            else:
                self._begun.append(self._begin(unit, reservation))

    def _prepare(self, item: WriteItem) -> _Prepared:
        """Find an item's units, and resolve its data."""
        array, low = self._array_of(item)
        return _Prepared(array, low, _units(item, array, low), self._resolve(item))

    def write_value(self, entry: ValueEntry | BytesEntry, content: bytes) -> None:
        """Note a value; its content, unless the entry spells it out, becomes an array of bytes.

        Raises:
            PlanError: the value was written already.
        """
        if entry.name in self._values:
            raise PlanError(f"{entry.name}: two items of this rank's plan write this value")
        self._values[entry.name] = entry
        if isinstance(entry, BytesEntry) and entry.size:
            order = ArrayOrder(0, (0,), (entry.size,), (entry.chunk,), None, False)
            array = _zarr_array(entry.name, "uint8", order)
            data = np.frombuffer(content, np.uint8)
            self.progress.expect(entry.size)
            for number, start in enumerate(range(0, entry.size, entry.chunk)):
                part = data[start : start + entry.chunk]
                self._begun.append(self._begin(_Unit(array, number, (start,), part), None))

    def finish(self) -> Written:
        """Wait for every small write, and report."""
        while self._begun:
            self._wait(self._begun.popleft())
        return Written(
            [
                WrittenArray(
                    leaf,
                    number,
                    np.array([cell for cell, _ in found], np.int64).tobytes(),
                    b"".join(digest for _, digest in found),
                )
                for (leaf, number), found in self._digests.items()
            ],
            self._values,
        )

    def drain(self) -> None:
        """Wait, after a failure, for what is under way: it would write on into what is removed."""
        with self._lock:
            under_way = list(self._under_way.values())
        for each in under_way:
            with contextlib.suppress(ValueError):
                each.written.result()

    def _is_content(self, unit: _Unit) -> bool:
        """Whether a unit's elements in C order are what is stored, neither padded nor encoded."""
        array = unit.array
        return not self.codecs and array.shard is None and unit.data.shape == array.chunk

    def _begin(self, unit: _Unit, reservation: _Reservation | None) -> _UnderWay:
        """Start a unit's write, from the caller's memory if that is in C order, and digest it."""
        data = np.asarray(unit.data, order="C")
        if data.dtype == np.bool_:
            data = _plain_bools(data)
        with storage_errors(f"{self.where}: {unit.array.leaf}"):
            written = self._write(unit, data)
        under_way = _UnderWay(unit.array.leaf, data.nbytes, written, reservation)
        with self._lock:
            self._under_way[id(under_way)] = under_way
        found = _digests(unit, data)
        with self._lock:
            self._digests.setdefault((unit.array.leaf, unit.array.number), []).extend(found)
        return under_way

    def _write(self, unit: _Unit, data: NDArray[np.generic]) -> _Future:
        array = unit.array
        if self._is_content(unit) and data.nbytes <= SMALL_BYTES:
            # Opening an array to say so costs more than the rest of a small leaf.
            return self._root.write(array.key(unit.offsets), data.tobytes())
        if self._is_content(unit) and 1 in data.shape:
            run = open_chunk(self._root, array, unit.offsets)
            return run.write(data.reshape(-1), can_reference_source_data_indefinitely=self._lets_go)
        store = self._open(array)
        if data.shape != array.shape:
            region = zip(unit.offsets, data.shape, strict=True)
            store = store[tuple(slice(o, o + n) for o, n in region)]
        return store.write(data, can_reference_source_data_indefinitely=self._lets_go)

    def _wait(self, under_way: _UnderWay) -> None:
        """Wait until a unit is durable."""
        try:
            with storage_errors(f"{self.where}: {under_way.leaf}"):
                under_way.written.result()
        finally:
            if under_way.reservation is not None:
                under_way.reservation.unit_done()
        with self._lock:
            del self._under_way[id(under_way)]
        self.progress.add(under_way.nbytes)

    def _begin_and_wait(self, unit: _Unit, reservation: _Reservation) -> None:
        self._wait(self._begin(unit, reservation))

    def _cut(self, prepared: _Prepared) -> list[_Unit]:
        """The units' views of an item's data."""
        array, low, data = prepared.array, prepared.low, prepared.data
        if len(prepared.units) == 1:
            number, box = prepared.units[0]
            return [_Unit(array, number, box.offsets, data)]
        units: list[_Unit] = []
        for number, box in prepared.units:
            start = [b - a for b, a in zip(box.offsets, low, strict=True)]
            region = tuple(slice(s, s + n) for s, n in zip(start, box.sizes, strict=True))
            units.append(_Unit(array, number, box.offsets, data[region]))
        return units

    def _array_of(self, item: WriteItem) -> tuple[ZarrArray, Shape]:
        """The zarr array that holds an item, and the item's offset in it."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        for order in self.orders.arrays.get(name, ()):
            low = tuple(a - b for a, b in zip(box.offsets, order.offset, strict=True))
            ends = (a + n for a, n in zip(low, box.sizes, strict=True))
            if all(a >= 0 for a in low) and all(
                e <= s for e, s in zip(ends, order.shape, strict=True)
            ):
                return _zarr_array(name, item.tensor_data.properties.dtype, order), low
        raise PlanError(f"{name}: {box} lies in no array of the checkpoint")

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


def _units(item: WriteItem, array: ZarrArray, low: Shape) -> Sequence[tuple[int, Box]]:
    """(number, box) of the units of an array that an item consists of.

    Raises:
        PlanError: a unit reaches beyond the item, so another rank would write it as well.
    """
    assert item.tensor_data is not None
    box = item.tensor_data.chunk
    unit = array.shard or array.chunk
    if box.sizes == array.shape and all(n <= u for n, u in zip(box.sizes, unit, strict=True)):
        return [(0, Box(low, box.sizes))]
    high = tuple(a + n for a, n in zip(low, box.sizes, strict=True))
    numbers, units = cells(low, high, array.shape, unit)
    beyond = (units.offsets < np.array(low)).any() or (units.ends > np.array(high)).any()
    if beyond:
        raise PlanError(
            f"{item.index.fqn}: {box} is to be written by this rank, "
            f"but shares a chunk with another; a planner must keep to the grid's chunks"
        )
    return list(zip(numbers.tolist(), units, strict=True))


def _digests(unit: _Unit, data: NDArray[np.generic]) -> list[tuple[int, bytes]]:
    """(number, digest) of each chunk in a unit."""
    if unit.array.shard is None:
        return [(unit.number, digest_array(data))]
    high = tuple(a + n for a, n in zip(unit.offsets, data.shape, strict=True))
    numbers, inner = cells(unit.offsets, high, unit.array.shape, unit.array.chunk)
    found: list[tuple[int, bytes]] = []
    for number, cell in zip(numbers.tolist(), inner, strict=True):
        start = [a - b for a, b in zip(cell.offsets, unit.offsets, strict=True)]
        part = data[tuple(slice(s, s + n) for s, n in zip(start, cell.sizes, strict=True))]
        found.append((number, digest_array(np.asarray(part, order="C"))))
    return found


def _plain_bools(data: NDArray[np.generic]) -> NDArray[np.generic]:
    """Bools whose bytes are 0 and 1: others can stand in memory, but not in a zarr array."""
    raw = data.view(np.uint8)
    return raw != 0 if raw.size and raw.max() > 1 else data


def _zarr_array(name: str, dtype: str, order: ArrayOrder) -> ZarrArray:
    path = zarr_path(name)
    return ZarrArray(
        name,
        order.number,
        f"{path}/{order.number}" if order.in_pieces else path,
        dtype,
        order.offset,
        order.shape,
        order.chunk,
        order.shard,
        0,
    )
