"""What a rank writes, cut into units: each a chunk, or a zarr shard of several, with one writer.

1. `ArraysByLeaf.holding` finds the zarr array that an item belongs to.
2. `as_planned` checks the item's data, and `unit_boxes` cuts its box along the grid of the array,
   or of its shards.
3. `digests` takes the digests of the chunks in a unit.
4. `value_units` are those of a long value's array of bytes; `merged_values` are the values of all
   ranks.
5. `merged_digests` puts the digests of all ranks into the manifest's order, those of many reports
   at once: they are sorted, so that neighbours stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import BoxLookup
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.manifest.entries import (
    BytesEntry,
    Entry,
    Manifest,
    TensorEntry,
    ValueEntry,
    arrays,
    leaf_arrays,
)
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.rules import count_chunks, count_leaf_chunks
from xckpt.core.manifest.write_counts import write_count_error, writers_in_words
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.plan.items import SavePlan, WriteItem
from xckpt.errors import PlanError
from xckpt.storage.array import DIGEST_BYTES, digest_array
from xckpt.storage.chunks.orders import WriteOrders, Written
from xckpt.storage.chunks.plain_files import are_plain, is_leading, is_plain

TOGETHER = 64
"""Reports whose digests are placed at once."""

Taken: TypeAlias = Sequence[tuple[int, bytes]]
"""Number and digest of each chunk of a unit; empty if they are not taken yet."""


@dataclass(slots=True)
class Unit:
    """A part of an item that is written at once: a chunk, or a zarr shard of several."""

    array: ZarrArray
    number: int
    """Its number among the array's units, in C order."""
    box: Box
    """Its part of the array."""
    data: NDArray[np.generic]
    item: WriteItem | None = None
    """What its elements come from; None for a value."""

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
    """The zarr arrays that a rank writes to, found by the boxes that they hold."""

    def __init__(self, arrays: Iterable[ZarrArray]) -> None:
        self._whole: dict[str, ZarrArray] = {}
        """The array of each leaf that is not in pieces, as most are not."""
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
        f"{name}: the value was written by {writers_in_words(ranks)}"
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
        first += count_leaf_chunks(leaf)


def merged_digests(
    manifest: Manifest, draft: Manifest, written: Sequence[Written]
) -> tuple[bytes, Placing]:
    """All digests in the manifest's order, and where the chunks of reports are there.

    Raises:
        PlanError: a chunk was written by no rank, or twice; all such arrays are listed.
    """
    placing = Placing(manifest, draft if len(written) > 1 else None)
    content = bytearray(placing.count * DIGEST_BYTES)
    digests = np.frombuffer(content, np.uint64).reshape(-1, 2)
    is_written = np.zeros(placing.count, np.bool_)
    total = 0
    for first in range(0, len(written), TOGETHER):
        some = written[first : first + TOGETHER]
        numbers = placing.numbers(some, first)
        taken = b"".join([*(report.digests for report in some), *_of_values(some)])
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        digests[numbers] = np.frombuffer(taken, np.uint64).reshape(-1, 2)[order]
        is_written[numbers] = True
        total += len(numbers)
    if total != placing.count or not is_written.all():
        raise write_count_error(
            arrays(manifest), [placing.numbers([each], rank) for rank, each in enumerate(written)]
        )
    return cast(bytes, content), placing  # not copied: a bytearray does all that bytes do here


def _of_values(reports: Iterable[Written]) -> Iterator[bytes]:
    return (value.digests for report in reports for value in report.long_values)


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
                    counts.append(count_leaf_chunks(leaf))
                    values += counts[-1]
        self._before = np.array(before, np.int64)
        """How many chunks of tensors are before each long value."""
        self._shift = np.cumsum(counts)
        self.count: Final = count_chunks(manifest)
        """How many chunks there are."""

    def numbers(self, reports: Sequence[Written], rank: int) -> NDArray[np.int64]:
        """The numbers in the manifest of the chunks of reports, those of long values last.

        Args:
            reports: what ranks have written, one after the other.
            rank: the first of these ranks.

        Raises:
            PlanError: a report is of other orders.
        """
        for at, report in enumerate(reports, rank):
            if not self._is_ours(report):
                raise PlanError(
                    f"rank {at} wrote by the orders of another plan; nothing is committed"
                )
        chunks = np.frombuffer(b"".join([report.chunks for report in reports]), np.int64)
        if len(self._before):
            chunks = chunks + self._shift[np.searchsorted(self._before, chunks, side="right")]
        of_values = [
            np.frombuffer(value.chunks, np.int64) + self._values[value.leaf]
            for report in reports
            for value in report.long_values
        ]
        return np.concatenate([chunks, *of_values]) if of_values else chunks

    def _is_ours(self, report: Written) -> bool:
        chunks = np.frombuffer(report.chunks, np.int64)
        if len(report.digests) != len(chunks) * DIGEST_BYTES:
            return False
        if not len(chunks):
            return True
        tensors = self.count - self._shift[-1]
        # As unsigned numbers, negative ones are too large.
        return report.draft == self._name and bool(chunks.view(np.uint64).max() < tensors)


def orders_for(
    plans: Sequence[SavePlan],
    orders: WriteOrders,
    planned: Manifest,
    with_base: Callable[[Sequence[WriteOrders]], list[WriteOrders]] | None,
) -> Sequence[object]:
    """The orders with arrays: those of each plan have all arrays that are not pieces, and its own
    pieces. ``with_base`` adds what they need to know about a base, if there is one.
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
