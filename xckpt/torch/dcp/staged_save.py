"""A save of DCP under way as one rank sees it, and the orders that a rank's plan carries."""

from __future__ import annotations

import uuid
import weakref

import msgspec
from torch.distributed import checkpoint as dcp

from xckpt.core.metadata import Metadata
from xckpt.core.struct_types import prepare_structs
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.storage.write_chunks import WriteOrders
from xckpt.torch.dcp.cached_plans import StagingPlace, forget_place
from xckpt.torch.dcp.failures import FailureWatch


class Orders(msgspec.Struct, array_like=True, frozen=True):
    """What a rank's plan carries; it must stay true as long as DCP may repeat the plan."""

    session: str
    """The process that coordinates."""
    place: StagingPlace
    """Where the save for which the plan was made is staged."""
    names: dict[str, str]
    """fqn -> leaf name."""
    writes: WriteOrders
    layout: bytes = b""
    """For the coordinator: the manifest, without what only a finished save knows."""


prepare_structs(Orders)


class StagedSave:
    """A save under way, as one rank sees it."""

    def __init__(self, writer: ZarrStorageWriter, rank: int) -> None:
        self.writer = writer
        self.rank = rank
        self.local = dcp.SavePlan([])
        """What this rank offers to write."""
        self.ranks = 0
        """How many ranks write; known to the coordinator alone."""
        self.place: StagingPlace | None = None
        """Where the save is staged; known to the coordinator alone."""
        self.metadata: Metadata | None = None
        self.names: dict[str, str] = {}
        self._watch = FailureWatch()
        self.abort = weakref.finalize(self, _abort, writer, self._watch)
        """Removes the staging, if there is one; happens by itself with the last reference."""

    def stage(self, ranks: int) -> StagingPlace:
        """Reserve a place to write to, on the coordinator."""
        self.ranks = ranks
        self.place = StagingPlace.of(uuid.uuid4().hex, self.writer.stage())
        if ranks > 1:
            self._watch.start(self.place.save, ranks, self.abort)
        return self.place


def _abort(writer: ZarrStorageWriter, watch: FailureWatch) -> None:
    watch.stop()
    forget_place(writer.target)
    writer.abort()
