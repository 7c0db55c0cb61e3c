"""The content of `xckpt info` as plain values, which tables and JSON print.

1. `checkpoint_report` takes everything from the manifest; no data is read.
2. `tree_rows` lists containers and leaves in the saved order, each container with the sum of what
   is below it.
3. `parse_box` turns ``"0:100, 64:128"`` into a box, as NumPy would. `touched` is the box of whole
   chunks around the part of it that one zarr array holds; `reading` adds up all arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

import msgspec

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.geometry.grid import count_cells
from xckpt.core.manifest.entries import (
    BytesEntry,
    Entry,
    Manifest,
    ValueEntry,
    leaf_arrays,
)
from xckpt.core.metadata import Sharding
from xckpt.core.text.shown import readable_bytes
from xckpt.core.values import decode_value, shown_value


class ArrayReport(msgspec.Struct, frozen=True):
    """One zarr array of a leaf: all of it, or the box ``[offset, offset + shape)``."""

    path: str
    """Path relative to the zarr root group."""
    offset: Shape
    """First element of the box in the tensor."""
    shape: Shape
    """Elements of the box in each dimension."""
    chunk: Shape
    """Elements of a chunk in each dimension."""
    shard: Shape | None
    """Elements of a zarr shard, where several chunks are one object."""
    chunks: int
    """Number of chunks."""

    @property
    def box(self) -> Box:
        """The part of the tensor that the array holds."""
        return Box(self.offset, self.shape)


class SliceReport(msgspec.Struct, frozen=True):
    """What reading a slice costs, in bytes and chunks."""

    offset: Shape
    """First element of the slice."""
    shape: Shape
    """Elements of the slice in each dimension."""
    bytes_wanted: int
    """Bytes of the slice."""
    bytes_read: int
    """Stored bytes of the chunks that hold it, padding included."""
    chunks_read: int
    chunks: int
    """Chunks of the whole leaf."""


class LeafReport(msgspec.Struct, frozen=True):
    """One leaf of a checkpoint."""

    name: str
    kind: str
    """``tensor``, or ``value`` for a Python value or opaque bytes."""
    dtype: str
    """The format's dtype name, or a value's Python type."""
    shape: Shape | None
    """Global shape in elements; None for a value."""
    bytes: int
    """Bytes of all elements; 0 for a value that the manifest holds."""
    layout: str
    """``regular`` or ``pieces``; ``manifest`` for a value that the manifest holds."""
    arrays: tuple[ArrayReport, ...] = ()
    """The zarr arrays that hold it."""
    sharding: Sharding | None = None
    """The sharding that wrote it."""
    annotation: str = ""
    """What a tensor is to its framework beyond an array."""
    value: str | None = None
    """The `repr` of a value, if the manifest holds it or it was read."""
    reading: SliceReport | None = None
    """What reading a slice takes, if one was given."""

    @property
    def chunks(self) -> int:
        """Number of chunks in all arrays."""
        return sum(array.chunks for array in self.arrays)


class CheckpointReport(msgspec.Struct, frozen=True):
    """A checkpoint, with all of its leaves."""

    path: str
    tensors: int
    values: int
    bytes: int
    """Bytes that the elements take."""
    chunks: int
    user_metadata: object
    """What was passed to the save as ``metadata=``."""
    containers: Mapping[str, str]
    """Name -> kind of each container that is empty or not a plain dict."""
    leaves: tuple[LeafReport, ...]
    shared: int = 0
    """Bytes of local files that other checkpoints have too; of the whole checkpoint only."""


class TreeRow(msgspec.Struct, frozen=True):
    """A line of the tree: a container, or a leaf in it."""

    depth: int
    label: str
    """The last part of the name."""
    kind: str
    """A container's kind; empty for a leaf."""
    bytes: int
    chunks: int
    leaf: LeafReport | None
    """None for a container."""


def checkpoint_report(path: str, manifest: Manifest, shared: int = 0) -> CheckpointReport:
    """The report of a manifest: the checkpoint and each of its leaves."""
    leaves = tuple(map(_leaf_report, manifest.leaves))
    report = _summed(path, leaves, manifest.containers, manifest.user)
    return msgspec.structs.replace(report, shared=shared)


def holdings(report: CheckpointReport) -> str:
    """One line: how many leaves, bytes and chunks a checkpoint holds.

    Example:
        >>> whole = ArrayReport("w", (0,), (4,), (2,), None, 2)
        >>> tensor = LeafReport("w", "tensor", "int8", (4,), 4, "regular", (whole,))
        >>> holdings(CheckpointReport("ckpt", 1, 0, 4, 2, None, {}, (tensor,)))
        '1 tensor, 4 B in 2 chunks'
    """
    leaves = counted(report.tensors, "tensor")
    if report.values:
        leaves += f" and {counted(report.values, 'value')}"
    shared = f", {readable_bytes(report.shared)} shared" if report.shared else ""
    return f"{leaves}, {readable_bytes(report.bytes)} in {counted(report.chunks, 'chunk')}{shared}"


def narrowed(report: CheckpointReport, name: str) -> CheckpointReport | None:
    """The part of a report below the leaf or container ``name``; None if there is none.

    Example:
        >>> leaves = [LeafReport(n, "value", "int", None, 0, "manifest") for n in ("a/b", "c")]
        >>> part = narrowed(CheckpointReport("ckpt", 0, 2, 0, 0, None, {}, tuple(leaves)), "a")
        >>> part.values, part.leaves[0].name
        (1, 'a/b')
    """

    def inside(other: str) -> bool:
        return other == name or other.startswith(f"{name}/")

    leaves = tuple(leaf for leaf in report.leaves if inside(leaf.name))
    if not leaves and name not in report.containers:
        return None
    around = path_of(name)
    containers = {n: kind for n, kind in report.containers.items() if inside(n) or n in around}
    return _summed(report.path, leaves, containers, report.user_metadata)


def _summed(
    path: str, leaves: tuple[LeafReport, ...], containers: Mapping[str, str], user_metadata: object
) -> CheckpointReport:
    tensors = sum(leaf.kind == "tensor" for leaf in leaves)
    return CheckpointReport(
        path,
        tensors,
        len(leaves) - tensors,
        sum(leaf.bytes for leaf in leaves),
        sum(leaf.chunks for leaf in leaves),
        user_metadata,
        containers,
        leaves,
    )


def _leaf_report(leaf: Entry) -> LeafReport:
    if isinstance(leaf, ValueEntry):
        value = shown_value(decode_value(leaf.type, leaf.value))
        return LeafReport(leaf.name, "value", leaf.type, None, 0, "manifest", value=value)
    parts = tuple(
        ArrayReport(array.path, array.offset, array.shape, array.chunk, array.shard, array.count)
        for array in leaf_arrays(leaf)
    )
    if isinstance(leaf, BytesEntry):
        return LeafReport(leaf.name, "value", leaf.type, None, leaf.size, "regular", parts)
    return LeafReport(
        leaf.name,
        "tensor",
        leaf.dtype,
        leaf.shape,
        prod(leaf.shape) * item_size(leaf.dtype),
        "regular" if leaf.pieces is None else "pieces",
        parts,
        leaf.sharding,
        leaf.annotation,
    )


def parse_box(text: str, shape: Sequence[int]) -> Box:
    """The box of a slice that is written as text.

    Args:
        text: ``start:stop`` or a position for each dimension, separated by commas; either end may
            be left out or count from the end, and dimensions not given are whole.
        shape: the tensor's, elements.

    Raises:
        ValueError: the text is no such slice, or does not fit the shape.

    Example:
        >>> parse_box("0:100, -64:", (50257, 768))
        Box(offsets=(0, 704), sizes=(100, 64))
        >>> parse_box("7", (10, 4))
        Box(offsets=(7, 0), sizes=(1, 4))
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > len(shape):
        given = counted(len(parts), "dimension")
        raise ValueError(f"{text!r} is a slice of {given}, but the tensor has {len(shape)}")
    parts += [":"] * (len(shape) - len(parts))
    ranges = [
        _range(part, d, size) for d, (part, size) in enumerate(zip(parts, shape, strict=True))
    ]
    return Box(tuple(part.start for part in ranges), tuple(map(len, ranges)))


def _range(text: str, dimension: int, size: int) -> range:
    start, colon, stop = text.partition(":")
    try:
        low = int(start) if start.strip() or not colon else None
        high = int(stop) if stop.strip() else None
    except ValueError:
        message = f"{text!r} is not a slice of dimension {dimension}; write it as 0:100, 5 or :"
        raise ValueError(message) from None
    if colon:
        return range(size)[low:high]
    assert low is not None
    if not -size <= low < size:
        raise ValueError(f"{low} is outside dimension {dimension}, which has {size} elements")
    return range(low % size, low % size + 1)


def touched(array: ArrayReport, box: Box) -> Box | None:
    """The whole chunks of an array that a box meets, in the tensor's elements; None if none.

    Example:
        >>> touched(ArrayReport("w", (10,), (20,), (8,), None, 3), Box((0,), (19,)))
        Box(offsets=(10,), sizes=(16,))
    """
    part = box.meets(array.box)
    if part is None:
        return None
    chunks = part.relative_to(array.offset).whole_chunks(array.chunk, array.shape)
    return chunks.shifted(array.offset)


def reading(leaf: LeafReport, box: Box) -> SliceReport:
    """What reading a box of a tensor takes: a chunk is read whole, padding included.

    Example:
        >>> whole = ArrayReport("w", (0,), (10,), (4,), None, 3)
        >>> leaf = LeafReport("w", "tensor", "int8", (10,), 10, "regular", (whole,))
        >>> found = reading(leaf, Box((3,), (2,)))
        >>> found.chunks_read, found.bytes_read, found.bytes_wanted
        (2, 8, 2)
    """
    assert leaf.shape is not None
    elements = prod(leaf.shape)
    item_bytes = leaf.bytes // elements if elements else 0
    chunks = stored = 0
    for array in leaf.arrays:
        around = touched(array, box)
        if around is not None:
            count = count_cells(around.sizes, array.chunk)
            chunks += count
            stored += count * prod(array.chunk)
    wanted = box.elements * item_bytes
    return SliceReport(box.offsets, box.sizes, wanted, stored * item_bytes, chunks, leaf.chunks)


def tree_rows(leaves: Sequence[LeafReport], containers: Mapping[str, str]) -> Iterator[TreeRow]:
    """Containers and leaves, each container before what it holds, siblings in the saved order.

    Example:
        >>> leaves = [LeafReport(n, "value", "int", None, 0, "manifest") for n in ("a/0", "b")]
        >>> [(row.depth, row.label, row.kind) for row in tree_rows(leaves, {"a": "list"})]
        [(0, 'a', 'list'), (1, '0', ''), (0, 'b', '')]
    """
    by_name = {leaf.name: leaf for leaf in leaves}
    rank: dict[str, int] = {}
    size: defaultdict[str, int] = defaultdict(int)
    chunks: defaultdict[str, int] = defaultdict(int)
    for name in (*by_name, *filter(None, containers)):
        leaf = by_name.get(name)
        count = leaf.chunks if leaf else 0
        for node in path_of(name):
            rank.setdefault(node, len(rank))
            size[node] += leaf.bytes if leaf else 0
            chunks[node] += count
    for name in sorted(rank, key=lambda name: [rank[node] for node in path_of(name)]):
        leaf = by_name.get(name)
        yield TreeRow(
            name.count("/"),
            name.rpartition("/")[2],
            "" if leaf else containers.get(name, "dict"),
            size[name],
            chunks[name],
            leaf,
        )


def path_of(name: str) -> list[str]:
    """The containers around a node, outermost first, and the node.

    Example:
        >>> path_of("opt/0/mu")
        ['opt', 'opt/0', 'opt/0/mu']
    """
    return list(accumulate(name.split("/"), "{}/{}".format))


def counted(count: int, what: str) -> str:
    """A number and its noun, in the plural if need be.

    Example:
        >>> counted(1, "chunk"), counted(1000, "chunk")
        ('1 chunk', '1,000 chunks')
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
