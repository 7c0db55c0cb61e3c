"""Loading a checkpoint of another model, straight into targets of any sharding.

The mapping, resolved on the stored shapes, describes a checkpoint of the target model that does not
exist. A `DefaultLoadPlanner` plans a load of that one, each wanted box as one read of an imagined
tensor. `MappedLoadPlanner` replaces these reads:

1. `source_reads` lists the boxes of stored tensors that a wanted box needs. They are cut along
   stored chunks: each cut is a read item, so that ranks of a host share their reads, and the memory
   in flight stays in the budget, as in any load.
2. An item is read into memory of its own, or straight into the target where both have one order.
3. When an item has landed, its copies take its elements to their places in the target
   (`xckpt.convert.mapped_reads`). When a box is full, the default planner publishes it.

A mapping speaks of tensors. Python values are loaded where both sides have them under one name.
Leaves of one side alone are treated as in any load: a value that the target lacks, and a stored
tensor that no rule takes, are unexpected; a target that no rule makes is missing.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from xckpt.convert.conversion import cast_target, require_lossless
from xckpt.convert.mapped_checks import check_targets
from xckpt.convert.mapped_reads import MappedRead, TargetBox, stored_reads
from xckpt.convert.units.assertions import check_assertions
from xckpt.convert.units.unit import source_reads
from xckpt.core.adapter import Adapters
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box, Boxes
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
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.reads.items import needs_no_items
from xckpt.core.plan.report import LoadReport, Strictness
from xckpt.core.targets.compare import decide_load
from xckpt.core.tree import FlatTree, flatten
from xckpt.core.values import value_kind
from xckpt.errors import MappingError, PlanError, UnsupportedLeafError
from xckpt.formats.source import TensorSource
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import by_mapping_name, described_specs, keys_of, mapping_name
from xckpt.mapping.prove import problems_with
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy
from xckpt.options import LoadOptions


class MappedLoadPlanner(LoadPlanner):
    """Loads a checkpoint through a mapping into targets like the ones given.

    Args:
        mapping: how stored tensors become targets.
        open_source: opens the source a second time, to check the mapping's assertions, and targets
            that share memory.
        strictness: what to do about leaves that the mapping does not make and the checkpoint lacks,
            and about leaves of the checkpoint that are neither taken nor wanted.
        cast: allow another dtype than the mapping's.
        allow_lossy: allow lossy steps of the mapping.
        rank: this process's, of ``ranks`` that share the checks.
        ranks: how many there are.
        options: memory.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.mapping.operations import Transpose
        >>> _ = xckpt.save("memory://to-map", {"fc.weight": np.arange(6).reshape(2, 3)})
        >>> mapping = Mapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))])])
        >>> like = {"fc": {"kernel": np.empty((3, 2), int)}}
        >>> state = xckpt.load("memory://to-map", like, mapping=mapping)  # by such a planner
        >>> state["fc"]["kernel"].tolist()
        [[0, 3], [1, 4], [2, 5]]
    """

    def __init__(
        self,
        mapping: LeafMapping,
        open_source: Callable[[], TensorSource],
        *,
        strictness: Strictness,
        cast: bool = False,
        allow_lossy: bool = False,
        rank: int = 0,
        ranks: int = 1,
        options: LoadOptions | None = None,
    ) -> None:
        self.mapping = mapping
        self.strictness: Final = strictness
        self.cast = cast
        self.allow_lossy = allow_lossy
        self.options: Final = options or LoadOptions()
        self._open_source = open_source
        self._ranks = rank, ranks
        self._targets = DefaultLoadPlanner()
        self._stored = Metadata({})
        self._stored_names: Mapping[str, str] = {}
        self._names: Mapping[str, str] = {}
        self._resolved = ResolvedMapping({}, {}, {})
        self._reads: dict[ReadItem, MappedRead] = {}
        self._constants: list[tuple[TargetBox, tuple[StridedCopy, ...]]] = []

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Resolve the mapping on the stored shapes, and find a target for each leaf of the tree.

        Raises:
            MappingError: the mapping does not fit, or is lossy or assumes what is not allowed.
            UnsupportedLeafError: targets that cannot be loaded; all are listed by name.
        """
        assert metadata is not None
        flat = FlatTree() if state_dict is None else flatten(state_dict, self.adapters)
        likes = by_mapping_name(flat.leaves)
        self._stored = metadata
        self._stored_names = by_mapping_name(metadata.state_dict_metadata)
        self._reads, self._constants = {}, []
        self._resolved = self._resolve(_specs(likes, flat, self.adapters) if likes else None)
        self._names = {
            likes.get(name, join_keys(keys_of(name))): name for name in self._resolved.targets
        }
        self._targets = DefaultLoadPlanner(
            missing=self.strictness.missing,
            unexpected=self.strictness.unexpected,
            cast=self.cast,
            in_place=self.in_place,
            deserialise=self.options.deserialise,
        )
        self._targets.use_adapters(self.adapters)
        self._targets.set_up_planner(state_dict, self._imagined(likes), is_coordinator)

    def _imagined(self, likes: Mapping[str, str]) -> Metadata:
        """The metadata of the checkpoint that the mapping describes: each tensor in one box.

        Args:
            likes: mapping name -> leaf name, of the target's leaves.
        """
        imagined: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for leaf, name in self._names.items():
            spec = self._resolved.targets[name]
            boxes = Boxes.whole(spec.shape)
            imagined[leaf] = TensorStorageMetadata(TensorProperties(spec.dtype), spec.shape, boxes)
        for name, leaf in self._stored_names.items():
            described = self._stored.state_dict_metadata[leaf]
            made = name in self._resolved.targets
            if not made and isinstance(described, BytesStorageMetadata):
                imagined[likes.get(name, leaf)] = described
        return Metadata(imagined, user_metadata=self._stored.user_metadata)

    def _resolve(self, wanted: Mapping[str, TensorSpec] | None) -> ResolvedMapping:
        """The mapping on the stored shapes."""
        self.mapping.require_accepted()
        resolved = self.mapping.resolve(described_specs(self._stored), wanted)
        all_used = self.strictness.unexpected == "error"
        if problems := problems_with(resolved, resolved.targets, all_used=all_used):
            raise MappingError.listing("the mapping does not fit the checkpoint", problems)
        if not self.allow_lossy:
            require_lossless(resolved, (self.cast and wanted) or {})
        return resolved

    def create_local_plan(self) -> LoadPlan:
        """Read items for what each wanted box needs, along the stored chunks.

        Raises:
            MappingError: an assertion of the mapping fails in the data.
            UnsupportedLeafError: targets share memory, but different elements are to fill them.
        """
        rank, ranks = self._ranks
        if assertions := self._resolved.assertions[rank::ranks]:
            with contextlib.closing(self._open_source()) as source:
                check_assertions(assertions, source, memory_bytes=self.options.memory_bytes)
        plan = self._targets.create_local_plan()
        if self.in_place:
            check_targets(self._targets, plan, self._resolved, self._names, self._open_source)
        targets = self._targets.targets
        items: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = mapping_name(split_name(item.storage_index.fqn))
                items.append(replace(item, storage_index=MetadataIndex(self._stored_names[name])))
            else:
                items += self._reads_for(item, targets[item.dest_index.fqn])
        return replace(plan, items=items)

    def _reads_for(self, item: ReadItem, target: TargetLeaf | None) -> list[ReadItem]:
        """The read items that fill a wanted box; each is remembered with its copies."""
        name = self._names[item.dest_index.fqn]
        copies = self._resolved.copies_into(name, Box(item.storage_offsets, item.lengths))
        before = self._resolved.targets[name].dtype
        after = target.dtype or before if target else before
        if before != after:
            copies = tuple(cast_target(copy, before, after) for copy in copies)
        box = TargetBox(self._targets, item, after)
        if constants := tuple(copy for copy in copies if copy.is_constant):
            self._constants.append((box, constants))
        items: list[ReadItem] = []
        for source_read in source_reads(enumerate(copies)):
            leaf = self._stored_names[source_read.name]
            for read_item, read in stored_reads(leaf, self._tensor(leaf), box, source_read):
                known = self._reads.setdefault(read_item, read)
                if known is read:
                    items.append(read_item)
                else:
                    known.copies += read.copies
        return items

    def _tensor(self, leaf: str) -> TensorStorageMetadata:
        stored = self._stored.state_dict_metadata[leaf]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    @needs_no_items
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse the load if any target does not fit, or as the caller's rules say."""
        unused = [self._stored_names[name] for name in self._resolved.unused]
        return decide_load(global_plan, self._targets.metadata, self.strictness, unused)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The coordinator's plan as it is; constants are filled in."""
        finished = self._targets.finish_plan(central_plan)
        for box, constants in self._constants:
            box.fill(constants)
        return finished

    def check_plan(self, plan: LoadPlan) -> None:
        """Refuse a plan that does not read what this rank planned, each item once.

        Raises:
            PlanError: lists what would be read never or twice.
        """
        read = Counter(item for item in plan.items if item.type is LoadItemType.TENSOR)
        problems = [
            f"{item.dest_index.fqn}: {Box(item.storage_offsets, item.lengths)} of "
            f"{item.storage_index.fqn} would be read {read[item]} times"
            for item in {**self._reads, **read}
            if read[item] != (item in self._reads)
        ]
        if problems:
            raise PlanError.listing("the plan of this rank does not read what it needs", problems)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a Python value, or keep opaque bytes as they are."""
        index = replace(read_item.storage_index, fqn=read_item.dest_index.fqn)
        self._targets.load_bytes(replace(read_item, storage_index=index), value)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        """Where an item's elements go: their place in the target, or memory of the item's own.

        Raises:
            LeafTooLargeError: there is no memory for the target.
        """
        leaf = read_item.storage_index.fqn
        dtype = numpy_dtype(self._tensor(leaf).properties.dtype)
        return self._reads[read_item].resolve(leaf, dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """Copy an item's elements to their places; publish the box with the last of them."""
        self._reads[read_item].commit()

    def report(self) -> LoadReport:
        """What became of each leaf; see `DefaultLoadPlanner.report`."""
        return self._targets.report()

    def result(self) -> object:
        """The loaded tree; see `DefaultLoadPlanner.result`."""
        return self._targets.result()


def _specs(likes: Mapping[str, str], flat: FlatTree, adapters: Adapters) -> dict[str, TensorSpec]:
    """Mapping name -> shape and element type of the tensors of a target tree."""
    specs: dict[str, TensorSpec] = {}
    for name, leaf in likes.items():
        like = flat.leaves[leaf]
        with contextlib.suppress(UnsupportedLeafError):
            target = None if value_kind(like) else adapters.target_for(like, leaf, in_place=False)
            if target is not None and target.dtype:
                specs[name] = TensorSpec(tuple(target.shape), target.dtype)
    return specs
