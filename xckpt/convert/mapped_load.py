"""Loading a checkpoint of another model, straight into targets of any sharding.

The mapping, resolved on the stored shapes, gives a checkpoint of the target model that nobody has
written; `MappedLoadPlanner` lets the default planner plan against that one. Then:

1. For each wanted box of a target, `source_reads` lists the boxes of stored tensors that it needs.
   They are cut along stored chunks: each cut is a read item, so that ranks of a host share their
   reads, and memory for what is in flight stays in the budget, as in any load.
2. An item is read into memory of its own, or straight into the target where the two lie alike.
3. When an item has landed, its copies take it to its places in the target.

A mapping speaks of tensors. Of the Python values those are loaded that both sides have, under one
name; others of the checkpoint are left out, and others of the target stay as they are.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.assertions import check_assertions
from xckpt.convert.conversion import cast_target, require_lossless
from xckpt.convert.make_unit import pieces, straight
from xckpt.convert.reads import SourceRead, blocks, hull, restrict_sources, source_reads
from xckpt.core.adapter import Adapters
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes, intersect
from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.names import join_keys, split_name
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.load_checks import stored_boxes
from xckpt.core.tree import FlatTree, flatten
from xckpt.core.values import value_kind
from xckpt.errors import LeafTooLargeError, MappingError, PlanError, UnsupportedLeafError
from xckpt.formats.source import TensorSource
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import by_mapping_name, keys_of, mapping_name
from xckpt.mapping.prove import problems_with
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, copy_elements
from xckpt.options import LoadOptions
from xckpt.storage.chunk import allocate

__all__ = ["MappedLoadPlanner"]

Array = NDArray[np.generic]


@dataclass(slots=True)
class _PendingRead:
    """What becomes of one read item."""

    copies: tuple[StridedCopy, ...]
    box: Box
    """What it reads, in elements of the stored tensor."""
    held: Array | None = None
    """Memory of its own, while it is read; None where it goes straight to the target."""


@dataclass(slots=True)
class _Target:
    """A wanted box of a target, while it is filled."""

    host: Array
    origin: tuple[int, ...]
    """The box's first element in the target."""
    beyond: object
    """The target's own memory, if the host cannot reach it; what `host` holds goes there."""


class MappedLoadPlanner(DefaultLoadPlanner):
    """Loads what a mapping makes of a checkpoint into targets like the ones given.

    Args:
        mapping: how stored tensors become targets.
        open_source: opens what is loaded once more, to check what the mapping takes for granted.
        strict: refuse missing and unexpected leaves; otherwise load what is shared.
        cast: allow another dtype than the mapping's.
        in_place: fill the targets themselves.
        allow_lossy: allow steps of the mapping that do not bring every value back.
        rank: this process's, of ``ranks`` that share the checks.
        ranks: how many there are.
        options: memory.
    """

    def __init__(
        self,
        mapping: LeafMapping,
        open_source: Callable[[], TensorSource],
        *,
        strict: bool = True,
        cast: bool = False,
        in_place: bool = False,
        allow_lossy: bool = False,
        rank: int = 0,
        ranks: int = 1,
        options: LoadOptions | None = None,
    ) -> None:
        super().__init__(strict=strict, cast=cast, in_place=in_place)
        self.mapping = mapping
        self.allow_lossy = allow_lossy
        self.options = options or LoadOptions()
        self._open_source = open_source
        self._ranks = rank, ranks
        self._stored = Metadata({})
        self._stored_names: Mapping[str, str] = {}
        self._names: dict[str, str] = {}
        self._resolved = ResolvedMapping({}, {}, {})
        self._items: dict[ReadItem, _PendingRead] = {}
        self._constants: dict[tuple[str, int], list[StridedCopy]] = {}
        self._targets: dict[tuple[str, int], _Target] = {}
        self._filling = threading.RLock()

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Resolve the mapping on the stored shapes, and find a target for each leaf of the tree.

        Raises:
            MappingError: the mapping does not fit, or is lossy without leave.
            UnsupportedLeafError: targets that cannot be loaded; all are listed by name.
        """
        assert metadata is not None
        flat = FlatTree() if state_dict is None else flatten(state_dict, self.adapters)
        self._stored = metadata
        self._stored_names = by_mapping_name(metadata.state_dict_metadata)
        likes = by_mapping_name(flat.leaves)
        self._items, self._constants, self._targets = {}, {}, {}
        self._resolved = resolved = self._resolve(likes, flat)
        made = {name: likes.get(name, join_keys(keys_of(name))) for name in resolved.targets}
        self._names = {leaf: name for name, leaf in made.items()}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, leaf in made.items():
            spec = resolved.targets[name]
            properties = TensorProperties(spec.dtype)
            described[leaf] = TensorStorageMetadata(properties, spec.shape, Boxes.whole(spec.shape))
        for name, leaf in self._stored_names.items():
            value = metadata.state_dict_metadata[leaf]
            told = name in likes or state_dict is None
            if isinstance(value, BytesStorageMetadata) and name not in resolved.targets and told:
                described[likes.get(name, leaf)] = value
        self._set_up(state_dict, flat, Metadata(described, user=metadata.user))
        values = [name for name, wanted in self._wanted.items() if wanted.target is None]
        self._kept = frozenset(values) - described.keys()

    def _resolve(self, likes: Mapping[str, str], flat: FlatTree) -> ResolvedMapping:
        sources = {
            name: TensorSpec(tuple(stored.size), stored.properties.dtype)
            for name, leaf in self._stored_names.items()
            if isinstance(stored := self._stored.state_dict_metadata[leaf], TensorStorageMetadata)
        }
        wanted = None if not likes else _specs(likes, flat, self.adapters)
        resolved = self.mapping.resolve(sources, wanted)
        if self.strict:
            problems = problems_with(resolved, resolved.targets)
            if problems:
                raise MappingError.listing("the mapping does not fit the checkpoint", problems)
        if not self.allow_lossy:
            require_lossless(resolved)
        return resolved

    def create_local_plan(self) -> LoadPlan:
        """Read items for what each wanted box needs, along the stored chunks.

        Raises:
            MappingError: the data are not what the mapping takes for granted.
        """
        self._check_assertions()
        plan = super().create_local_plan()
        items: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = mapping_name(split_name(item.storage_index.fqn))
                index = MetadataIndex(self._stored_names[name])
                items.append(replace(item, storage_index=index))
        for leaf, wanted in self._wanted.items():
            # Only leaves that fit have boxes.
            if wanted.target is not None and wanted.boxes:
                items += self._reads(leaf, wanted.target)
        return replace(plan, items=items)

    def _check_assertions(self) -> None:
        rank, ranks = self._ranks
        mine = self._resolved.assertions[rank::ranks]
        if mine:
            source = self._open_source()
            try:
                check_assertions(mine, source, memory_bytes=self.options.memory_bytes)
            finally:
                source.close()

    def _reads(self, leaf: str, target: TargetLeaf) -> list[ReadItem]:
        """The read items of a leaf; each is remembered with its copies."""
        name = self._names[leaf]
        made = self._resolved.targets[name].dtype
        found: list[ReadItem] = []
        for number, box in enumerate(target.boxes):
            copies = self._resolved.copies_into(name, box)
            if target.dtype not in ("", made):
                copies = tuple(cast_target(copy, made, target.dtype) for copy in copies)
            index = MetadataIndex(leaf, box.offsets, number)
            self._constants[leaf, number] = [copy for copy in copies if not copy.source]
            for reading in source_reads(enumerate(copies)):
                for item, work in self._cut(index, reading):
                    known = self._items.setdefault(item, work)
                    if known is work:
                        found.append(item)
                    else:
                        known.copies += work.copies
        return found

    def _cut(
        self, index: MetadataIndex, reading: SourceRead
    ) -> Iterator[tuple[ReadItem, _PendingRead]]:
        """The items of a box of a stored tensor: one for each block that it needs."""
        leaf = self._stored_names[reading.name]
        stored = self._stored.state_dict_metadata[leaf]
        assert isinstance(stored, TensorStorageMetadata)
        arrays = stored_boxes(stored)
        wanted = Boxes.of([(reading.box.offsets, reading.box.sizes)])
        copies = [copy for _, copy in reading.copies]
        for number, part in zip(*intersect(wanted, arrays)[1:], strict=True):
            origin = arrays[int(number)].offsets
            for block in blocks(stored, int(number), part):
                taken = restrict_sources(copies, block)
                if not taken:
                    continue
                box = hull([copy.source_box for copy in taken])
                item = ReadItem(
                    LoadItemType.TENSOR,
                    index,
                    (0,) * len(index.offset or ()),
                    MetadataIndex(leaf, origin, int(number)),
                    _minus(box.offsets, origin),
                    box.sizes,
                )
                yield item, _PendingRead(taken, box)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The coordinator's plan as it is; constants are filled in."""
        for (leaf, number), copies in self._constants.items():
            if copies:
                target = self._target(leaf, number)
                for copy in copies:
                    for piece in pieces(copy):
                        copy_elements(piece, None, target.host, target_origin=target.origin)
                missing = self._wanted[leaf].boxes[number]
                missing.missing -= sum(copy.elements for copy in copies)
                if missing.missing == 0:
                    self._bring(leaf, number)
        return super().finish_plan(central_plan)

    def check_plan(self, plan: LoadPlan) -> None:
        """Refuse a plan that does not read what this rank planned, each item once.

        Raises:
            PlanError: lists what would be read never or twice.
        """
        read = Counter(item for item in plan.items if item.type is LoadItemType.TENSOR)
        problems = [
            f"{item.dest_index.fqn}: {Box(item.storage_offsets, item.lengths)} of "
            f"{item.storage_index.fqn} would be read {read[item]} times"
            for item in {**self._items, **read}
            if read[item] != (item in self._items)
        ]
        if problems:
            raise PlanError.listing("the plan of this rank does not read what it needs", problems)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a Python value, or keep opaque bytes as they are."""
        index = replace(read_item.storage_index, fqn=read_item.dest_index.fqn)
        super().load_bytes(replace(read_item, storage_index=index), value)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        """Where an item's elements go: their place in the target, or memory of the item's own.

        Raises:
            LeafTooLargeError: there is no memory for the target.
        """
        work = self._items[read_item]
        number = read_item.dest_index.index
        assert number is not None
        target = self._target(read_item.dest_index.fqn, number)
        stored = self._stored.state_dict_metadata[read_item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        dtype = numpy_dtype(stored.properties.dtype)
        if len(work.copies) == 1:
            place = straight(work.copies[0], work.box, target.host, target.origin)
            if place is not None and place.dtype == dtype and _in_order(place):
                return place
        work.held = allocate(work.box.sizes, dtype, read_item.storage_index.fqn)
        return work.held

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """Copy an item's elements to their places; publish the box with the last of them."""
        work = self._items[read_item]
        leaf, number = read_item.dest_index.fqn, read_item.dest_index.index
        assert number is not None
        if work.held is not None:
            target = self._target(leaf, number)
            for copy in work.copies:
                for piece in pieces(copy):
                    copy_elements(
                        piece,
                        work.held,
                        target.host,
                        source_origin=work.box.offsets,
                        target_origin=target.origin,
                    )
            work.held = None
        wanted = self._wanted[leaf]
        with self._filling:
            progress = wanted.boxes[number]
            progress.missing -= sum(copy.elements for copy in work.copies)
            done = progress.missing == 0
        if done:
            self._bring(leaf, number)
            assert wanted.target is not None
            wanted.target.commit(number)

    def _target(self, leaf: str, number: int) -> _Target:
        """The memory of a wanted box, resolved once."""
        with self._filling:
            found = self._targets.get((leaf, number))
            if found is None:
                found = self._targets[leaf, number] = self._resolve_target(leaf, number)
            return found

    def _resolve_target(self, leaf: str, number: int) -> _Target:
        target = self._wanted[leaf].target
        assert target is not None
        box = target.boxes[number]
        try:
            buffer = target.buffer(number)
        except MemoryError as error:
            raise LeafTooLargeError(
                f"{leaf or 'the root'}: no memory for it; load it sharded ({error})"
            ) from error
        host = self.adapters.writable_numpy(buffer)
        if host is not None:
            return _Target(host, box.offsets, None)
        dtype = target.dtype or self._resolved.targets[self._names[leaf]].dtype
        return _Target(allocate(box.sizes, numpy_dtype(dtype), leaf), box.offsets, buffer)

    def _bring(self, leaf: str, number: int) -> None:
        """Bring a full box to memory that the host cannot reach."""
        with self._filling:
            target = self._targets.pop((leaf, number))
        if target.beyond is not None:
            self.adapters.copy_into(target.beyond, target.host)


def _specs(likes: Mapping[str, str], flat: FlatTree, adapters: Adapters) -> dict[str, TensorSpec]:
    """What the tensors of a target tree are."""
    found: dict[str, TensorSpec] = {}
    for name, leaf in likes.items():
        like = flat.leaves[leaf]
        with contextlib.suppress(UnsupportedLeafError):
            target = None if value_kind(like) else adapters.target_for(like, leaf, in_place=False)
            if target is not None and target.dtype:
                found[name] = TensorSpec(tuple(target.shape), target.dtype)
    return found


def _in_order(place: Array) -> bool:
    """Whether NumPy copies into an array as it lies, in whole rows."""
    steps = [abs(step) for size, step in zip(place.shape, place.strides, strict=True) if size > 1]
    return steps == sorted(steps, reverse=True) and (not steps or steps[-1] == place.itemsize)


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
