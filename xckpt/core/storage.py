"""What the engine asks of a storage: a writer and a reader, in the order of the calls.

`PlainStorageWriter` implements the hooks that most writers leave as they are, and `SizedItems` are
the items of a plan as a writer goes through them, the largest first. The other protocols are what a
storage may be able to do besides; the engine looks for each where it can use it. `as_sent` gives a
plan as another process would have it, `url_parts` says which paths are URLs, and `absolute` makes
a local one mean the same in another working folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Int64s
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LeafTable, LoadPlan, SavePlan, WriteItem, WriteItems
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.save import SavePlanner
from xckpt.errors import PathError, StorageError

_SLIP = re.compile("(s3|gs|memory|hf|https?):/?(?!/)")  # it would be a local path


@runtime_checkable
class StorageWriter(Protocol):
    """Writes a checkpoint. One writer serves one save at a time."""

    def storage_meta(self) -> object:
        """Every rank, before planning: `GridOptions` for planners without their own, or None."""
        ...

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Every rank, before its local plan is made."""
        ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Every rank: adjust the plan that goes to the coordinator."""
        ...

    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        """The coordinator: reserve a place; each plan's ``storage_data`` says where to write."""
        ...

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> object:
        """Every rank: write the plan's items; returns what `finish` needs (MessagePack-able)."""
        ...

    def finish(self, metadata: Metadata, results: Sequence[object]) -> bytes:
        """The coordinator: check what all ranks wrote and commit; returns the manifest."""
        ...

    def committed_metadata(self, manifest: bytes) -> Metadata:
        """Every rank: what the committed manifest says."""
        ...

    def abort(self) -> None:
        """Every rank, after a failure anywhere: nothing is committed, remove what was written."""
        ...


@runtime_checkable
class SharesHost(Protocol):
    """A writer or reader whose memory is a part of its host's."""

    host_ranks: int
    """Ranks of the save or load on a host, at most."""


@runtime_checkable
class TypedReportsWriter(Protocol):
    """A writer whose reports are of one type, which MessagePack decodes."""

    report_type: type


@runtime_checkable
class CommitKnowingWriter(Protocol):
    """A writer whose coordinator can tell, after a failure, whether it has committed before it."""

    def is_committed(self) -> bool:
        """Whether the checkpoint is there all the same; asked after a failure."""
        ...


@runtime_checkable
class EarlyReportsWriter(Protocol):
    """A writer whose ranks may report what they have written before it is durable.

    What follows from all reports is then written beside it.
    """

    def report_early(self) -> bool:
        """Every rank, before `write_data`: whether it reports early, if `settle` is called then.

        The answer is the same on all ranks.
        """
        ...

    def follow(self, metadata: Metadata, results: Sequence[object]) -> None:
        """The coordinator: begin to write what follows from all reports; `finish` gets them too."""
        ...

    def settle(self) -> None:
        """Every rank, then: wait until what it has begun to write is durable."""
        ...


@runtime_checkable
class PlanCachingWriter(Protocol):
    """A writer whose orders last: an equal plan gets the same orders, except for the place."""

    lasting: bool


@runtime_checkable
class OwnOrdersWriter(Protocol):
    """A writer whose orders each rank can make alone, except for the place."""

    def prepare_own_plan(self, plan: SavePlan, metadata: Metadata) -> tuple[SavePlan, Metadata]:
        """Every rank: the plan with the orders that the coordinator would give it, as `BriefData`.

        And what `StorageWriter.committed_metadata` will say, without the caller's own metadata and
        without values whose kind turns out to be another than planned.

        Args:
            plan: this rank's share of the global plan.
            metadata: of the whole.
        """
        ...


class PlainStorageWriter:
    """The first hooks of a `StorageWriter` that leaves plans to the planner.

    Example:
        >>> PlainStorageWriter(GridOptions(chunk_bytes=1 << 20)).storage_meta().shard_bytes
        0
    """

    host_ranks = 1
    """Ranks of the save on a host, at most: they share its memory."""

    def __init__(self, grid: GridOptions) -> None:
        self._grid = grid

    def storage_meta(self) -> GridOptions:
        """Target sizes of chunks and zarr shards, for planners without their own."""
        return self._grid

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing: a place is reserved once the global plan is known to be sound."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan


class SizedItems:
    """The items of a plan and the bytes of each; of columns an item is made when its turn comes.

    Example:
        >>> from xckpt.core.metadata import MetadataIndex
        >>> from xckpt.core.plan.items import WriteItemType
        >>> items = SizedItems([WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)])
        >>> items.sizes, next(items.chosen(np.array([0])))[1].index.fqn
        (array([0]), 'step')
    """

    sizes: Int64s
    """Bytes of the box of each, (n,); 0 of a value."""

    def __init__(self, items: Sequence[WriteItem]) -> None:
        self._items = items
        if isinstance(items, WriteItems):
            self.sizes = items.sizes()
        else:
            self.sizes = np.array([item.box_bytes for item in items], np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def by_size(self, small: int) -> tuple[Int64s, Int64s]:
        """The numbers of the items above a size in bytes, the largest first, and of those up to it.

        An item without bytes is in neither.
        """
        large = np.flatnonzero(self.sizes > small)
        large = large[np.argsort(-self.sizes[large], kind="stable")]
        return large, np.flatnonzero((self.sizes > 0) & (self.sizes <= small))

    def chosen(self, numbers: Int64s) -> Iterator[tuple[int, WriteItem]]:
        """The bytes of the items with these numbers, and the items, in their order."""
        items = self._items
        if isinstance(items, WriteItems):
            chosen = items.chosen(numbers)
        else:
            chosen = (items[number] for number in numbers.data)
        return zip(self.sizes[numbers].data, chosen, strict=True)


@runtime_checkable
class StorageReader(Protocol):
    """Reads a checkpoint. One reader serves one load at a time."""

    def read_metadata(self) -> bytes:
        """The coordinator: the checkpoint's manifest, as it is sent to every rank."""
        ...

    def set_up_storage_reader(self, manifest: bytes, ranks: int) -> Metadata:
        """Every rank: take the manifest that the coordinator read; ``ranks`` load together."""
        ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank: adjust the plan that goes to the coordinator."""
        ...

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The coordinator: adjust all plans."""
        ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Every rank: read and verify the plan's items."""
        ...

    def close(self) -> None:
        """Every rank, last, also after a failure, maybe twice: release what a peer may wait for."""
        ...


@runtime_checkable
class PatientReader(Protocol):
    """A reader that waits for other ranks itself."""

    patience: float
    """Seconds that a silent rank is waited for."""


@runtime_checkable
class PartReader(Protocol):
    """A reader that can be asked for parts of stored tensors before a load."""

    def same_digests(self, one: str, other: str) -> bool:
        """Whether digests show that two stored tensors are equal; False also where none tell."""
        ...

    def read_part(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a stored tensor, verified, into memory of its sizes and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class BriefData:
    """A storage's own data for a rank, without what the rank's leaf table says already."""

    content: object
    """What `CanBeBrief.brief` has made, after its way between the ranks."""
    table: LeafTable
    """The leaf table of the rank's share."""
    place: object = None
    """If the data are those of an earlier save: what `CanBeBrief.place` says about this save."""


@runtime_checkable
class CanBeBrief(Protocol):
    """A storage's data for a rank that can be shortened by what its leaf table says."""

    def brief(self, table: LeafTable) -> object:
        """What travels to a rank that knows the table; there it becomes `BriefData`."""
        ...

    def place(self) -> object:
        """The part that differs in each save, even if the plan is the same."""
        ...


def url_parts(path: str) -> tuple[str, str] | None:
    """The scheme of a URL and what comes after ``://``; None for a local path.

    Raises:
        PathError: a slash of the URL is lost, as `pathlib.Path` loses it.

    Example:
        >>> url_parts("s3://bucket/run/7"), url_parts("/data/ckpt")
        (('s3', 'bucket/run/7'), None)
    """
    scheme, separator, rest = path.partition("://")
    if separator and "/" not in scheme:
        return scheme, rest
    if _SLIP.match(path):
        raise PathError(f"{path}: a URL has two slashes, as in s3://bucket/path")
    return None


def absolute(path: str) -> str:
    """A local path from the root on; StorageError if it is relative to a deleted folder."""
    try:
        found = os.path.abspath(os.path.expanduser(path))
        return found[1:] if found.startswith("//") else found  # which TensorStore refuses
    except FileNotFoundError:
        text = f"{path}: the working folder was deleted; give an absolute path"
        raise StorageError(text) from None


def place(share: SavePlan) -> object:
    """Where a rank writes by the plan of an earlier save; see `CanBeBrief.place`."""
    assert isinstance(share.storage_data, CanBeBrief)
    return share.storage_data.place()


def as_sent(plan: SavePlan) -> SavePlan:
    """A plan as another process would have it: items in columns, and foreign data of plain types.

    Raises:
        TypeError: MessagePack cannot carry planner_data or storage_data.

    Example:
        >>> as_sent(SavePlan([], planner_data={"a": (1, 2)})).planner_data
        {'a': [1, 2]}
    """
    data = plan.storage_data
    ours = data if isinstance(data, CanBeBrief) else None
    storage_data, planner_data = msgspec.msgpack.decode(
        sendable((None if ours else data, plan.planner_data))
    )
    items = WriteItems.of(plan.items)
    return SavePlan(items, ours or storage_data, planner_data, dict(plan.containers))


def sendable(wire: object) -> bytes:
    """A plan as bytes; a TypeError if a planner's or a storage's own data cannot travel."""
    try:
        return msgspec.msgpack.encode(wire)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"a plan's planner_data and storage_data must be what MessagePack carries: {error}"
        ) from error
