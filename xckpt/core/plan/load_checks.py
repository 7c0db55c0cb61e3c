"""What the plan of a load may not do: leave a target unfilled, or read what is not there.

The default planner's plans are right by construction, but every hook of it can be overridden, and a
target that keeps stale values silently is the worst that a load can do. So before anything is read:

1. `source_problems` holds each item against the stored arrays: it must lie in one.
2. `target_problems` holds all items against what is wanted: each box must be filled exactly once,
   each value read once. Most boxes are filled by one item; only the others need box algebra.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.errors import PlanError

Regions = list[tuple[Shape, Shape]]
"""(offsets, lengths) of what items fill of a box."""


def stored_boxes(stored: TensorStorageMetadata) -> Boxes:
    """The box that each array of a stored tensor holds."""
    boxes = stored.chunks if stored.grid is None else stored.grid.arrays
    if isinstance(boxes, Boxes):
        return boxes
    return Boxes.of([(box.offsets, box.sizes) for box in boxes], rank=len(stored.size))


def check_sources(plan: LoadPlan, metadata: Metadata) -> None:
    """Refuse a plan that reads what the checkpoint does not have.

    Raises:
        PlanError: lists each item that does.
    """
    problems = source_problems(plan.items, metadata)
    if problems:
        raise PlanError.listing("the plan reads what the checkpoint does not have", problems)


def source_problems(items: Iterable[ReadItem], metadata: Metadata) -> list[str]:
    """A line for each item that reads what the checkpoint does not have.

    Example:
        >>> from xckpt.core.metadata import MetadataIndex
        >>> index = MetadataIndex("step")
        >>> item = ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())
        >>> source_problems([item], Metadata({}))
        ['step: an item reads it, but it is not in the checkpoint']
    """
    arrays: dict[str, list[Box]] = {}
    faults: list[str] = []
    for item in items:
        name = item.storage_index.fqn
        stored = metadata.state_dict_metadata.get(name)
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if stored is None:
            faults.append(f"{name}: an item reads it, but it is not in the checkpoint")
        elif is_tensor != (item.type is LoadItemType.TENSOR):
            what = "a tensor" if is_tensor else "a Python value"
            faults.append(f"{name}: an item of type {item.type.name} reads it, but it is {what}")
        elif isinstance(stored, TensorStorageMetadata) and not _reads_all(item, stored):
            if name not in arrays:
                arrays[name] = list(stored_boxes(stored))
            problem = _source_problem(item, arrays[name])
            if problem:
                faults.append(f"{name}: {problem}")
    return faults


def _reads_all(item: ReadItem, stored: TensorStorageMetadata) -> bool:
    """Whether an item reads the whole of what is one array; most do, and it is quickly seen."""
    index = item.storage_index
    return (
        item.lengths == stored.size
        and all(stored.size)
        and not index.index
        and not any(item.storage_offsets)
        and not any(index.offset or ())
        and len(item.storage_offsets) == len(stored.size)
        and len(stored.chunks) == 1
    )


def _source_problem(item: ReadItem, arrays: Sequence[Box]) -> str:
    """How an item does not lie in the array that it names; empty if it does."""
    index = item.storage_index
    number = index.index or 0
    if not 0 <= number < len(arrays):
        return f"an item reads array {number} of {len(arrays)}"
    array = arrays[number]
    if index.offset is not None and tuple(index.offset) != array.offsets:
        return (
            f"an item reads the array at {tuple(index.offset)}, but number {number} is at "
            f"{array.offsets}; storage_index must have the index of its array"
        )
    start, lengths = item.storage_offsets, item.lengths
    if not len(start) == len(lengths) == len(array.sizes):
        return (
            f"an item reads a tensor of {len(array.sizes)} dimensions, but its storage_offsets "
            f"have {len(start)} and its lengths {len(lengths)}"
        )
    for low, length, size in zip(start, lengths, array.sizes, strict=True):
        if low < 0 or length < 1 or low + length > size:
            where = Box(tuple(array.offsets), tuple(lengths)).shifted(start)
            return f"an item reads {where}, which is not in {array}"
    return ""


def target_problems(
    items: Iterable[ReadItem], wanted: Mapping[str, Sequence[Box] | None]
) -> list[str]:
    """A line for each target that the items do not fill exactly once.

    Args:
        items: a rank's read items; those for leaves that are not in ``wanted`` don't count.
        wanted: leaf name -> the boxes wanted, numbered as `ReadItem.dest_index` does; None for a
            Python value.

    Example:
        >>> target_problems([], {"w": [Box((4,), (2,))], "step": None})
        ['w: [4, 6) is wanted, but no item reads it', 'step: wanted, but no item reads it']
    """
    values: dict[str, int] = {}
    tensors: dict[str, list[ReadItem]] = {}
    for item in items:
        name = item.dest_index.fqn
        if item.type is LoadItemType.BYTE_IO:
            values[name] = values.get(name, 0) + 1
        else:
            tensors.setdefault(name, []).append(item)
    faults: list[str] = []
    for name, boxes in wanted.items():
        if boxes is None:
            count = values.get(name, 0)
            if count != 1:
                what = f"{count} items read it" if count else "wanted, but no item reads it"
                faults.append(f"{name}: {what}")
        else:
            problems = _box_problems(boxes, tensors.get(name, ()))
            faults.extend(f"{name}: {problem}" for problem in problems)
    return faults


def _box_problems(boxes: Sequence[Box], items: Sequence[ReadItem]) -> Iterator[str]:
    if len(boxes) == len(items) == 1 and _fills_all(items[0], 0, boxes[0]):
        return
    filled: dict[int | None, list[ReadItem]] = {}
    for item in items:
        filled.setdefault(item.dest_index.index, []).append(item)
    for number, box in enumerate(boxes):
        here = filled.get(number, [])
        if not (len(here) == 1 and _fills_all(here[0], number, box)):
            yield from _cover_problem(box, [(item.dest_offsets, item.lengths) for item in here])
    for number in filled:
        if number is None or not 0 <= number < len(boxes):
            yield f"an item fills box {number}, but {len(boxes)} are wanted, numbered from 0"


def _fills_all(item: ReadItem, number: int, box: Box) -> bool:
    """Whether an item fills the whole of a box, as most do."""
    offsets = item.dest_offsets
    return (
        item.lengths == box.sizes
        and item.dest_index.index == number
        and not any(offsets)
        and len(offsets) == len(box.sizes)
    )


def _cover_problem(box: Box, regions: Regions) -> Iterator[str]:
    rank = len(box.sizes)
    for offsets, lengths in regions:
        if not len(offsets) == len(lengths) == rank:
            yield (
                f"an item fills a box of {rank} dimensions, but its dest_offsets have "
                f"{len(offsets)} and its lengths {len(lengths)}"
            )
            return
    fault = cover_fault(box.sizes, Boxes.of(regions, rank=rank))
    if fault is None:
        return
    where = fault.box.shifted(box.offsets)
    if fault.kind == "gap":
        yield f"{where} is wanted, but no item reads it"
    elif fault.kind == "overlap":
        yield f"{where} is filled by two items"
    else:
        yield f"an item fills {where}, beyond the box {box} wanted"
