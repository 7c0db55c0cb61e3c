"""What a rank writes, cut into units: each a chunk, or a zarr shard of several, with one writer.

1. `ArraysByLeaf.holding` finds the zarr array that an item belongs to.
2. `as_planned` checks the item's data, and `unit_boxes` cuts its box along the grid of the array,
   or of its shards.
3. `digests` takes those of the chunks in a unit.
4. `value_entry` says how a value is stored: in the manifest, or as an array of bytes, whose units
   are `value_units`. `merged_values` are those of all ranks, as `merged_digests` are.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import BoxLookup
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.manifest.entries import (
    BytesEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    arrays,
    is_packed,
    leaf_arrays,
)
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.rules import chunks_of, count_chunks
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.core.values import ValueText
from xckpt.errors import PlanError
from xckpt.storage.array import DIGEST_BYTES, digest_array
from xckpt.storage.chunks.miswritten import miswritten, spelled
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.plain_files import are_plain, is_leading, is_plain

Entry = TensorEntry | ValueEntry | BytesEntry

SPELLED_OUT_BYTES = 4096
"""Values up to this long (bytes) are spelled out in the manifest; longer ones are arrays."""


@dataclass(slots=True)
class Unit:
    """A part of an item that is written as one: a chunk, or a zarr shard of several."""

    array: ZarrArray
    number: int
    """Its number among the array's units, in C order."""
    box: Box
    """Its part of the array."""
    data: NDArray[np.generic]

    @property
    def fills_chunk(self) -> bool:
        """Whether its elements are all that a chunk holds, without padding or a shard around it."""
        return self.array.shard is None and self.data.shape == self.array.chunk

    def is_plain(self, codecs: Sequence[str]) -> bool:
        """Whether its elements, chunk by chunk, are what a local file holds."""
        if self.array.shard is not None:
            return are_plain(codecs)
        return is_plain(self.array, codecs) and is_leading(self.data.shape, self.array.chunk)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its chunks among the array's, in C order."""
        if self.array.shard is None:
            return [self.number]
        array, box = self.array, self.box
        numbers, _ = cells(box.offsets, box.ends, array.shape, array.chunk)
        return numbers.tolist()


class ArraysByLeaf:
    """The zarr arrays that a rank writes to, found by what they hold."""

    def __init__(self, arrays: Iterable[ZarrArray]) -> None:
        self._whole: dict[str, ZarrArray] = {}
        """The array of each leaf that is no pieces, as most are."""
        self._pieces: dict[str, list[ZarrArray]] = {}
        self._lookups: dict[str, BoxLookup] = {}
        for array in arrays:
            if array.piece_of is None:
                self._whole[array.leaf] = array
            else:
                self._pieces.setdefault(array.leaf, []).append(array)

    def holding(self, item: WriteItem) -> ZarrArray:
        """The array that holds an item; a PlanError if there is none."""
        assert item.tensor_data is not None
        name, box = item.index.fqn, item.tensor_data.chunk
        array = self._whole.get(name)
        if array is not None:
            whole = array.shape == box.sizes and array.offset == box.offsets
            if whole or array.box.holds(box):
                return array
        arrays = self._pieces.get(name, [])
        if name not in self._lookups:
            boxes = [(array.offset, array.shape) for array in arrays]
            self._lookups[name] = BoxLookup(Boxes.of(boxes, rank=len(box.sizes)))
        number = self._lookups[name].holder(box)
        if number is None:
            raise PlanError(f"{name}: {box} lies in no array of the checkpoint")
        return arrays[number]


def value_entry(
    item: WriteItem, data: object, chunk_bytes: int
) -> tuple[ValueEntry | BytesEntry, bytes]:
    """A value's entry and content: spelled out, or an array of bytes if long or opaque.

    Raises:
        PlanError: what was resolved is no BytesIO.
    """
    name = item.index.fqn
    if not isinstance(data, io.BytesIO):
        what = type(data).__name__
        raise PlanError(f"{name}: resolve_data must return a BytesIO, not {what}")
    content, kind = data.getvalue(), data.kind if isinstance(data, ValueText) else item.kind
    if kind != "opaque" and len(content) <= SPELLED_OUT_BYTES:
        return ValueEntry(name, kind, content.decode("utf-8", "surrogatepass")), content
    return BytesEntry(name, kind, len(content), max(1, min(len(content), chunk_bytes))), content


def value_units(entry: BytesEntry, content: bytes) -> Iterator[Unit]:
    """The units of the array that holds a long value."""
    (array,) = leaf_arrays(entry)
    data = np.frombuffer(content, np.uint8)
    for number, start in enumerate(range(0, entry.size, entry.chunk)):
        part = data[start : start + entry.chunk]
        yield Unit(array, number, Box((start,), part.shape), part)


def as_planned(item: WriteItem, data: NDArray[np.generic]) -> NDArray[np.generic]:
    """An item's data on the host, little-endian.

    Raises:
        PlanError: they are not of the planned dtype and sizes.
    """
    assert item.tensor_data is not None
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    if data.shape != chunk.sizes or dtype_name(data.dtype) != dtype:
        raise PlanError(
            f"{item.index.fqn}: {dtype} of shape {chunk.sizes} was planned, but resolve_data "
            f"returned {data.dtype} of shape {data.shape}"
        )
    return data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("="))


def unit_boxes(item: WriteItem, array: ZarrArray, place: Box) -> list[tuple[int, Box]]:
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


def digests(unit: Unit, data: NDArray[np.generic]) -> list[tuple[int, bytes]]:
    """(number, digest) of each chunk in a unit."""
    array, box = unit.array, unit.box
    if array.shard is None:
        return [(unit.number, digest_array(data))]
    numbers, chunks = cells(box.offsets, box.ends, array.shape, array.chunk)
    return [
        (number, digest_array(np.asarray(data[chunk.slices(box.offsets)], order="C")))
        for number, chunk in zip(numbers.tolist(), chunks, strict=True)
    ]


def merged_values(
    metadata: Metadata, written: Sequence[Written]
) -> dict[str, ValueEntry | BytesEntry]:
    """The entries of all values, from the ranks' reports in rank order.

    Raises:
        PlanError: a value was written by no rank or by several, or is not in the metadata.
    """
    writers: dict[str, list[int]] = {
        name: []
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, BytesStorageMetadata)
    }
    problems: list[str] = []
    for rank, report in enumerate(written):
        for name in report.values:
            if name in writers:
                writers[name].append(rank)
            else:
                problems.append(f"{name}: rank {rank} wrote it, but the plan has no such value")
    problems += [
        f"{name}: the value was written by {spelled(ranks)}"
        for name, ranks in writers.items()
        if len(ranks) != 1
    ]
    if problems:
        raise PlanError.listing("the planner's items do not write every value once", problems)
    return {name: written[rank].values[name] for name, [rank] in writers.items()}


def leaf_firsts(manifest: Manifest) -> Iterator[tuple[Entry, int]]:
    """The leaves, and the number of each one's first digest."""
    first = 0
    for leaf in manifest.leaves:
        yield leaf, first
        first += chunks_of(leaf)


def merged_digests(
    manifest: Manifest, draft: Manifest, written: Sequence[Written]
) -> tuple[bytes, list[NDArray[np.int64]]]:
    """All digests in the manifest's order, and for each report the numbers of its chunks there.

    Raises:
        PlanError: a chunk was written by no rank, or twice; all such arrays are listed.
    """
    placing = Placing(manifest, draft if len(written) > 1 else None)
    digests = np.zeros((placing.count, DIGEST_BYTES), np.uint8)
    times = np.zeros(placing.count, np.uint32)
    written_by: list[NDArray[np.int64]] = []
    for rank, report in enumerate(written):
        numbers = placing.numbers(report, rank)
        taken = b"".join([*(value.digests for value in report.long_values), report.digests])
        digests[numbers] = np.frombuffer(taken, np.uint8).reshape(-1, DIGEST_BYTES)
        written_by.append(numbers)
        np.add.at(times, numbers, 1)
    if not (times == 1).all():
        raise PlanError.listing(
            "the planner's items do not write every chunk exactly once",
            miswritten(arrays(manifest), times, written_by),
        )
    return digests.tobytes(), written_by


class Placing:
    """Where the chunks of reports are in a manifest, which has long values between the tensors.

    Args:
        manifest: with all leaves.
        draft: has the tensors, whose chunks reports number; None where they do not name it.
    """

    def __init__(self, manifest: Manifest, draft: Manifest | None) -> None:
        self._name = b""
        if draft is not None:
            from xckpt.storage.chunks.columns import draft_name

            self._name = draft_name(draft)
        self._values: dict[str, int] = {}
        """The first digest of each long value."""
        before, counts, values = list[int](), [0], 0
        if any(isinstance(leaf, BytesEntry) for leaf in manifest.leaves):
            for leaf, first in leaf_firsts(manifest):
                if isinstance(leaf, BytesEntry):
                    self._values[leaf.name] = first
                    before.append(first - values)
                    counts.append(chunks_of(leaf))
                    values += counts[-1]
        self._before = np.array(before, np.int64)
        """How many chunks of tensors are before each long value."""
        self._shift = np.cumsum(counts)
        self.count = count_chunks(manifest)
        """How many chunks there are."""

    def numbers(self, written: Written, rank: int) -> NDArray[np.int64]:
        """The number of each chunk of a report in the manifest.

        Raises:
            PlanError: the report is of other orders.
        """
        chunks = np.frombuffer(written.chunks, np.int64)
        is_ours = written.draft == self._name or len(chunks) == 0
        tensors = self.count - self._shift[-1]
        if not is_ours or chunks.min(initial=0) < 0 or chunks.max(initial=-1) >= tensors:
            raise PlanError(
                f"rank {rank} wrote by the orders of another plan; nothing is committed"
            )
        of_tensors = chunks + self._shift[np.searchsorted(self._before, chunks, side="right")]
        of_values = (
            np.frombuffer(value.chunks, np.int64) + self._values[value.leaf]
            for value in written.long_values
        )
        return np.concatenate([*of_values, of_tensors])


def orders_for(
    plans: Sequence[SavePlan],
    orders: WriteOrders,
    planned: Manifest,
    with_base: Callable[[Sequence[WriteOrders]], list[WriteOrders]] | None,
) -> Sequence[object]:
    """The orders with arrays: each plan's are all that are no pieces, and its own pieces.

    ``with_base`` adds what they have to know of a base, if there is one.
    """
    whole: list[ZarrArray] = []
    cuts: dict[str, tuple[Pieces, int]] = {}
    for leaf, first in leaf_firsts(planned):
        if isinstance(leaf, TensorEntry) and leaf.pieces is not None:
            cuts[leaf.name] = leaf.pieces, first
        else:
            whole += leaf_arrays(leaf, first)
    orders = msgspec.structs.replace(orders, arrays=tuple(whole))
    if len(plans) > 1:
        from xckpt.storage.chunks.columns import draft_name

        orders = msgspec.structs.replace(orders, draft=draft_name(planned))
    if cuts:
        from xckpt.storage.chunks.piece_orders import orders_in_columns, with_pieces

        if len(plans) > 1 and with_base is None:
            return orders_in_columns(plans, orders, cuts)
        given = [with_pieces(plan, orders, cuts) for plan in plans]
    else:
        given = [orders] * len(plans)
    return given if with_base is None else with_base(given)


def value_arrays(manifest: Manifest) -> Iterator[ZarrArray]:
    """The arrays of long values; of packed ones only that they are."""
    for leaf in manifest.leaves:
        if isinstance(leaf, BytesEntry):
            for array in leaf_arrays(leaf):
                packed = is_packed(array, manifest.pack_bytes)
                yield msgspec.structs.replace(array, place=0) if packed else array
