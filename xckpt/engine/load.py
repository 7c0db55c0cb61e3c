"""The steps of a load, over a `Group`, a planner and a storage.

1. Every rank says with what arguments it loads: all must be equal
   (`xckpt.engine.ranks.compare`).
2. The coordinator reads the manifest, or finds another library's checkpoint. Broadcast: all ranks
   see the same one, through the same reader.
3. Every rank makes a local plan. Gather.
4. The coordinator looks for leaves that are missing or that no rank asks for. Scatter.
5. Every rank checks that its plan fills every target (`xckpt.core.plan.load_checks`), reads and
   verifies. Gather, so that all succeed or all fail. Then the planner hands out the result.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`). If it says that
another save has replaced the checkpoint, all ranks go back to 2, for all have got the same error: 5
times, and up to 100 times in the first minute (`Restarts`). The coordinator says in 2 which try is
the last one. The planner is set up again for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.load_checks import check_sources
from xckpt.core.storage import PatientReader, SharesHost, StorageReader
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.ranks.group import CarefulGroup, Group, operation
from xckpt.engine.ranks.watch import Step, Watch, bytes_read
from xckpt.engine.ranks.wire import LoadPlanCodec
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.errors import CheckpointReplacedError, NotACheckpointError, XckptError

FIND = "read the manifest; nothing was loaded"
PLAN = "plan the load; nothing was loaded"
READ = "read; targets may be partly filled"

logger = logging.getLogger("xckpt")

OURS = ""
"""The format of a manifest that the load's own reader has read."""


@dataclass(slots=True)
class Restarts:
    """How often a load starts again because its checkpoint was replaced while it was read.

    One that takes long does so a few times, for it may be replaced for ever; a short one, of a
    checkpoint that is replaced all the time, more often.
    """

    SURE: ClassVar[int] = 5
    """Times, however long the load takes."""
    MOST: ClassVar[int] = 100
    """Times within `SECONDS` from its beginning."""
    SECONDS: ClassVar[float] = 60.0
    began: float = field(default_factory=monotonic)
    tries: int = 0

    def next_is_last(self) -> bool:
        """Count a try that begins; whether no other may follow it."""
        self.tries += 1
        late = monotonic() - self.began > self.SECONDS
        return self.tries > (self.SURE if late else self.MOST)


class Loaded(NamedTuple):
    """What a load returns."""

    metadata: Metadata
    """What the checkpoint says about itself, the same on every rank."""
    tree: object
    """What the planner made of it: see `LoadPlanner.result`."""


class OtherFormats(Protocol):
    """Other libraries' checkpoints at the path of a load."""

    def find(self) -> str | None:
        """The coordinator, where there is no manifest: the format that is there, if it is known."""
        ...

    def reader(self, format: str) -> StorageReader:
        """Every rank: the reader of the format that the coordinator has found."""
        ...


class _Found(msgspec.Struct, array_like=True):
    """What the coordinator tells every rank of what it has found."""

    format: str
    manifest: bytes
    last: bool
    """Whether the load must not start again, should the checkpoint be replaced."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Found).decode


def load_state(
    state_dict: Mapping[str, object] | None,
    storage_reader: StorageReader,
    *,
    group: Group,
    planner: LoadPlanner,
    in_place: bool = False,
    others: Callable[[], OtherFormats] | None = None,
    watch: Watch | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Loaded:
    """Load a checkpoint on all ranks of a group through the planner; collective.

    Args:
        state_dict: the target tree, as this rank sees it; None for everything, as NumPy arrays.
        storage_reader: where from.
        group: the ranks that load together.
        planner: what goes where.
        in_place: fill the targets themselves.
        others: finds what may be there in place of a checkpoint that ``storage_reader`` reads.
        watch: times the load, if there is a listener.
        arguments: of the call, in words: those that all ranks must give alike, beside the reader's.

    Raises:
        RanksFailedError: some rank failed (groups of several); targets may be partly filled.
        XckptError: the failure itself, in a group of one.
        TypeError: ``in_place``, but there is no state.
    """
    if in_place and state_dict is None:
        raise TypeError("there is nothing to load into: give the state that is to be filled")
    planner.use_adapters(loaded_adapters(group.rank))
    planner.begin_load(in_place=in_place)
    load = _Load(state_dict, storage_reader, planner, others, watch, arguments or {})
    together = operation(group) if group.size > 1 else nullcontext()
    if isinstance(storage_reader, PatientReader) and isinstance(group, CarefulGroup):
        storage_reader.patience = group.timeout
    if watch is None:
        with together:
            return load.run(group)
    load.step = watch.step
    with watch, together:
        return load.run(watch.watched(group))


@dataclass(slots=True)
class _Load:
    """One rank's part in a load."""

    state_dict: Mapping[str, object] | None
    reader: StorageReader
    planner: LoadPlanner
    others: Callable[[], OtherFormats] | None
    watch: Watch | None
    arguments: Mapping[str, str]
    """Of the call, which all ranks must give alike."""
    step: Step = nullcontext
    """The context of a step, by its name, which times it where there is a listener."""
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    restarts: Restarts = field(default_factory=Restarts)
    is_last: bool = True
    """Whether no try follows this one; as the coordinator says."""

    def run(self, group: Group) -> Loaded:
        """All steps, on all ranks; then what the planner made of it."""
        given = self.reader
        if group.size > 1:
            # A load by one process has no need of it.
            from xckpt.engine.ranks.compare import arguments_of, compare_ranks

            host = getattr(getattr(given, "options", None), "host", None)
            about = arguments_of(given) | dict(self.arguments)
            host_ranks = compare_ranks(group, about, host=host)
            if isinstance(given, SharesHost):
                given.host_ranks = host_ranks
        replaced: XckptError | None = None
        while True:
            try:
                metadata = self.alone() if group.size == 1 else self.together(group)
                break
            except NotACheckpointError as error:
                if replaced is None:
                    raise
                text = f"the checkpoint was deleted while it was read: {error}"
                raise CheckpointReplacedError(text) from replaced
            except XckptError as error:
                if self.is_last or not _was_replaced(error):
                    raise
                replaced = error
                logger.info("the checkpoint was replaced while it was read; loading the new one")
            finally:
                self.reader.close()
            self.reader = given
        return Loaded(metadata, self.planner.result())

    def alone(self) -> Metadata:
        """All steps in a row: there is no other rank to tell."""
        planner = self.planner
        found = self._find()
        self.is_last = found.last
        with self.step("plan"):
            metadata = self.reader.set_up_storage_reader(found.manifest, 1).described()
            del found  # the text of the manifest may be long
            planner.set_up_planner(self.state_dict, metadata, True)
            plan = self.reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self.reader.prepare_global_plan(planner.create_global_plan([plan]))
            plan = planner.finish_plan(plan)
            check_sources(plan, metadata)
            planner.check_plan(plan)
        with self.step("read"):
            if self.watch is not None:
                self.watch.bytes = bytes_read(plan, metadata)
            self.reader.read_data(plan, planner)
        return metadata

    def together(self, group: Group) -> Metadata:
        """Each step on all ranks, so that a failure of one is a failure of all."""
        found = _decode(broadcast(group, FIND, lambda: _encode(self._find())))
        self.is_last = found.last
        is_coordinator = group.rank == group.coordinator
        plan = partial(self._plan, found, group.size, is_coordinator)
        share = reduce_scatter(group, PLAN, plan, self._share, LoadPlanCodec())
        all_reduce(group, READ, partial(self._read, share), lambda _: b"")
        return self.metadata

    def _find(self) -> _Found:
        """The coordinator: the format and the manifest of what is there."""
        is_last = self.restarts.next_is_last()
        with self.step("find"):
            return _Found(*self._found(), is_last)

    def _found(self) -> tuple[str, bytes]:
        try:
            return OURS, self.reader.read_metadata()
        except NotACheckpointError:
            others = None if self.others is None else self.others()
            format = None if others is None else others.find()
            if others is None or format is None:
                raise
            self.reader = others.reader(format)
        return format, self.reader.read_metadata()

    def _plan(self, found: _Found, ranks: int, is_coordinator: bool) -> LoadPlan:
        """What this rank wants to read."""
        with self.step("plan"):
            return self._wanted(found, ranks, is_coordinator)

    def _wanted(self, found: _Found, ranks: int, is_coordinator: bool) -> LoadPlan:
        if found.format != OURS and self.others is not None and not is_coordinator:
            self.reader = self.others().reader(found.format)
        self.metadata = self.reader.set_up_storage_reader(found.manifest, ranks).described()
        self.planner.set_up_planner(self.state_dict, self.metadata, is_coordinator)
        plan = self.planner.create_local_plan()
        check_sources(plan, self.metadata)
        return self.reader.prepare_local_plan(plan)

    def _share(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """What each rank has to read."""
        with self.step("share"):
            return self.reader.prepare_global_plan(self.planner.create_global_plan(plans))

    def _read(self, share: LoadPlan) -> bytes:
        """Read this rank's share; an empty report."""
        try:
            with self.step("read"):
                plan = self.planner.finish_plan(share)
                check_sources(plan, self.metadata)
                self.planner.check_plan(plan)
                if self.watch is not None:
                    self.watch.bytes = bytes_read(plan, self.metadata)
                self.reader.read_data(plan, self.planner)
        finally:
            # Before the gather: a peer on this host may be waiting for a chunk from this rank.
            self.reader.close()
        return b""


def _was_replaced(error: XckptError) -> bool:
    """Whether some rank failed for a checkpoint that was replaced; equal on all ranks.

    Others may have failed in consequence, each in its own words.
    """
    kind = CheckpointReplacedError
    causes = (failure.cause for failure in error.failures)
    return isinstance(error, kind) or kind.__name__ in causes
