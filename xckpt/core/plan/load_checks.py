"""What a load must not do: leave a target unfilled, or read what is not there.

The default planner's plans are right by construction, but every hook of it can be overridden, and a
target that keeps stale values silently is the worst that a load can do. So before anything is read:

1. `check_sources` holds each item against the stored arrays: it must lie in one.
2. `target_problems` holds all items against what is wanted: each box must be filled exactly once,
   each value read once. Most boxes are filled by one item; only the others need box algebra.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from xckpt.core.geometry.box import Box, Boxes, Shape, tuples
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.reads.items import ReadItems, Row
from xckpt.errors import PlanError


def check_sources(plan: LoadPlan, metadata: Metadata) -> None:
    """Refuse a plan that reads what the checkpoint does not have.

    Raises:
        PlanError: lists each item that does.
    """
    problems = list(source_problems(plan.items, metadata))
    if problems:
        raise PlanError.listing("the plan reads what the checkpoint does not have", problems)


def source_problems(items: Iterable[ReadItem], metadata: Metadata) -> Iterator[str]:
    """A line for each item that reads what the checkpoint does not have.

    Example:
        >>> from xckpt.core.metadata import MetadataIndex
        >>> index = MetadataIndex("step")
        >>> item = ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())
        >>> list(source_problems([item], Metadata({})))
        ['step: an item reads it, but it is not in the checkpoint']
    """
    arrays: dict[str, Sequence[Box]] = {}
    wholes: dict[str, list[tuple[Shape, Shape]]] = {}
    """Offsets and sizes of the arrays: most are read as a whole."""
    columns = ReadItems.of(items)
    for number, (leaf, row) in enumerate(zip(columns.names, columns.rows, strict=True)):
        known = metadata.state_dict_metadata.get(leaf)
        if isinstance(row, tuple) and _is_one(known, row):  # as most are
            continue
        item = columns[number]
        name = item.storage_index.fqn
        stored = metadata.state_dict_metadata.get(name)
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if stored is None:
            yield f"{name}: an item reads it, but it is not in the checkpoint"
        elif is_tensor != (item.type is LoadItemType.TENSOR):
            what = "a tensor" if is_tensor else "a Python value"
            yield f"{name}: an item of type {item.type.name} reads it, but it is {what}"
        elif isinstance(stored, TensorStorageMetadata) and not _reads_all(item, stored):
            if name not in wholes:
                boxes = tuples(stored.arrays.offsets), tuples(stored.arrays.sizes)
                wholes[name] = list(zip(*boxes, strict=True))
            if _reads_piece(item, wholes[name]):
                continue
            if name not in arrays:
                arrays[name] = list(stored.arrays)
            problem = _source_problem(item, arrays[name])
            if problem:
                yield f"{name}: an item reads {problem}"


def _is_one(stored: object, sizes: Shape) -> bool:
    """Whether a leaf is one array of these sizes."""
    is_tensor = isinstance(stored, TensorStorageMetadata)
    return is_tensor and stored.size == sizes and len(stored.chunks) == 1 and all(sizes)


def _reads_all(item: ReadItem, stored: TensorStorageMetadata) -> bool:
    """Whether an item reads the whole of what is one array; most do, and it is quickly seen."""
    index = item.storage_index
    return (
        _is_all(item.storage_offsets, item.lengths, stored.size)
        and all(stored.size)
        and not index.index
        and not any(index.offset or ())
        and len(stored.chunks) == 1
    )


def _reads_piece(item: ReadItem, arrays: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether an item reads the whole of an array of several."""
    index, number = item.storage_index, item.storage_index.index or 0
    return (
        0 <= number < len(arrays)
        and (index.offset, item.lengths) == arrays[number]
        and _is_all(item.storage_offsets, item.lengths, arrays[number][1])
        and all(item.lengths)
    )


def _is_all(offsets: Shape, lengths: Shape, sizes: Shape) -> bool:
    return lengths == sizes and len(offsets) == len(sizes) and not any(offsets)


def _source_problem(item: ReadItem, arrays: Sequence[Box]) -> str:
    """What an item reads that is not in the array that it names; empty if all of it is."""
    index, start, lengths = item.storage_index, item.storage_offsets, item.lengths
    number = index.index or 0
    if not 0 <= number < len(arrays):
        return f"array {number} of {len(arrays)}"
    array = arrays[number]
    if index.offset is not None and tuple(index.offset) != array.offsets:
        return (
            f"the array at {tuple(index.offset)}, but number {number} is at "
            f"{array.offsets}; storage_index must have the index of its array"
        )
    if not len(start) == len(lengths) == len(array.sizes):
        return (
            f"a tensor of {len(array.sizes)} dimensions, but its storage_offsets "
            f"have {len(start)} and its lengths {len(lengths)}"
        )
    try:
        box = Box(tuple(start), tuple(lengths)).shifted(array.offsets)
    except (TypeError, ValueError) as error:
        return f"what is not a range of its array: {error}"
    fits = min(lengths, default=1) > 0 and array.holds(box)
    return "" if fits else f"{box}, which is not in {array}"


def target_problems(
    items: Iterable[ReadItem], wanted: Mapping[str, Sequence[Box] | None]
) -> list[str]:
    """A line for each target that the items do not fill exactly once.

    Args:
        items: a rank's read items; those for leaves that are not in ``wanted`` do not count.
        wanted: leaf name -> the boxes wanted, numbered as `ReadItem.dest_index` does; None for a
            Python value.

    Example:
        >>> target_problems([], {"w": [Box((4,), (2,))], "step": None})
        ['w: [4, 6) is wanted, but no item reads it', 'step: wanted, but no item reads it']
    """
    columns = ReadItems.of(items)
    by_leaf = _by_leaf(columns)
    faults: list[str] = []
    for name, boxes in wanted.items():
        numbers = by_leaf.get(name, ())
        if boxes is not None and _is_box(boxes, [columns.rows[n] for n in numbers]):  # as most are
            continue
        kind = LoadItemType.BYTE_IO if boxes is None else LoadItemType.TENSOR
        here = [item for n in numbers if (item := columns[n]).type is kind]
        if boxes is not None:
            if not (len(here) == len(boxes) == 1 and _fills_all(here[0], 0, boxes[0])):
                faults += [f"{name}: {problem}" for problem in _box_problems(boxes, here)]
            continue
        if len(here) != 1:
            what = f"{len(here)} items read it" if here else "wanted, but no item reads it"
            faults.append(f"{name}: {what}")
    return faults


def _by_leaf(items: ReadItems) -> dict[str, Sequence[int]]:
    """Leaf name -> the numbers of its items."""
    numbers: dict[str, Sequence[int]] = {}
    several: dict[str, list[int]] = {}
    for number, name in enumerate(items.names):
        if name in several:
            several[name].append(number)
        elif name in numbers:
            numbers[name] = several[name] = [*numbers[name], number]
        else:
            numbers[name] = (number,)
    return numbers


def _is_box(boxes: Sequence[Box], rows: Sequence[Row]) -> bool:
    """Whether one box is wanted, and one item reads a leaf of its sizes as a whole."""
    if len(boxes) != 1 or len(rows) != 1 or not isinstance(rows[0], tuple):
        return False
    return boxes is Boxes.whole(rows[0]) or boxes[0].sizes == rows[0]


def _box_problems(boxes: Sequence[Box], items: Sequence[ReadItem]) -> Iterator[str]:
    by_box: dict[int | None, list[ReadItem]] = {}
    for item in items:
        by_box.setdefault(item.dest_index.index, []).append(item)
    for number, box in enumerate(boxes):
        here = by_box.get(number, [])
        if not (len(here) == 1 and _fills_all(here[0], number, box)):
            yield from _cover_problem(box, here)
    for number in by_box:
        if number is None or not 0 <= number < len(boxes):
            yield f"an item fills box {number}, but {len(boxes)} are wanted, numbered from 0"


def _fills_all(item: ReadItem, number: int, box: Box) -> bool:
    """Whether an item fills the whole of a box, as most do."""
    return item.dest_index.index == number and _is_all(item.dest_offsets, item.lengths, box.sizes)


def _cover_problem(box: Box, items: Sequence[ReadItem]) -> Iterator[str]:
    rank = len(box.sizes)
    for item in items:
        offsets, lengths = item.dest_offsets, item.lengths
        if not len(offsets) == len(lengths) == rank:
            yield (
                f"an item fills a box of {rank} dimensions, but its dest_offsets have "
                f"{len(offsets)} and its lengths {len(lengths)}"
            )
            return
        for low, length, size in zip(offsets, lengths, box.sizes, strict=True):
            if not 0 <= low <= low + length <= size and 0 not in lengths:
                part = Box(offsets, lengths).shifted(box.offsets)
                yield f"an item fills {part}, beyond the box {box} wanted"
                return
    filled = Boxes.of([(item.dest_offsets, item.lengths) for item in items], rank=rank)
    fault = cover_fault(box.sizes, filled)
    if fault is None:
        return
    where = fault.box.shifted(box.offsets)
    if fault.kind == "gap":
        yield f"{where} is wanted, but no item reads it"
    else:
        yield f"{where} is filled by two items"
