"""What the engine asks of a storage: two protocols, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan, SavePlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.save import SavePlanner

__all__ = ["StorageReader", "StorageWriter"]


@runtime_checkable
class StorageWriter(Protocol):
    """Writes a checkpoint. One writer serves one save at a time."""

    @property
    def storage_meta(self) -> object:
        """What planners need to know: `GridOptions` for those without their own, or None."""
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
        """Every rank, last, also after a failure: release what a peer might wait for."""
        ...
