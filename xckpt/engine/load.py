"""The steps of a load, over a `Group`, a planner and a storage.

1. Every rank says with what arguments it loads: all must be equal
   (`xckpt.engine.ranks.compare`).
2. The coordinator reads the manifest, or finds another library's checkpoint. Broadcast: all ranks
   see the same one, through the same reader.
3. Every rank makes a local plan, and refuses targets that it cannot fill side by side
   (`xckpt.engine.shared_memory`). Gather.
4. The coordinator looks for leaves that are missing or that no rank asks for. Scatter.
5. Every rank checks that its plan fills every target (`xckpt.core.plan.load_checks`), reads and
   verifies. Gather, so that all succeed or all fail. Then the planner hands out the result.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`). If the error says that
another save has replaced the checkpoint, all ranks (which got the same error) go back to 2: 5
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
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.load_checks import check_sources
from xckpt.core.plan.reads.items import need_items
from xckpt.core.plan.save_checks import checked_plan, checked_plans
from xckpt.core.storage import PatientReader, SharesHost, StorageReader
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.ranks.alive import HEED_SECONDS
from xckpt.engine.ranks.group import Group, OperationGroup, operation
from xckpt.engine.ranks.load_plans import LoadPlanCodec, answer_to
from xckpt.engine.ranks.watch import Step, Watch, bytes_read
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.errors import CheckpointReplacedError, NotACheckpointError, XckptError

PREPARED: Final = "prepare_global_plan"
FIND = "read the manifest; nothing was loaded"
PLAN = "plan the load; nothing was loaded"
READ = "read; targets may be partly filled"
HAND_OVER = "give the objects their loaded states; targets may be partly filled"
PARTLY_FILLED = (
    "The state may hold loaded elements beside old ones: load into it again, from this or another "
    "checkpoint, before you use it."
)

logger: Final = logging.getLogger("xckpt")

OURS = ""
"""The format of a manifest that the load's own reader has read."""


@dataclass(slots=True)
class Restarts:
    """How often a load starts again because its checkpoint was replaced while it was read.

    A long load restarts a few times only, since the checkpoint may be replaced again and again; a
    short load of a checkpoint that is replaced all the time, more often.
    """

    SURE: ClassVar[int] = 5
    """Times, however long the load takes."""
    MOST: ClassVar[int] = 100
    """Times within `SECONDS` from its beginning."""
    SECONDS: ClassVar[float] = 60.0
    began: float = field(default_factory=monotonic)
    tries: int = 0

    def next_is_last(self) -> bool:
        """Count a try that begins; return whether it is the last one."""
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
        """On the coordinator, if there is no manifest: the format found there, if it is known."""
        ...

    def reader(self, format: str) -> StorageReader:
        """On every rank: the reader of the format that the coordinator has found."""
        ...


class _Found(msgspec.Struct, array_like=True):
    """What the coordinator sends to every rank about the checkpoint."""

    format: str
    manifest: bytes
    last: bool
    """Whether the load must not restart if the checkpoint is replaced."""


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
        state_dict: the target tree, as this rank sees it; None for everything, as NumPy arrays,
            where it is not ``in_place``.
        storage_reader: where from.
        group: the ranks that load together.
        planner: what goes where.
        in_place: fill the targets themselves.
        others: finds what may be there in place of a checkpoint that ``storage_reader`` reads.
        watch: times the load, if there is a listener.
        arguments: those of the call that must be equal on all ranks, besides the reader's; name
            -> value in words.

    Raises:
        RanksFailedError: some rank failed (groups of several); targets may be partly filled.
        XckptError: the failure itself, in a group of one.
    """
    planner.use_adapters(loaded_adapters(group.rank))
    planner.begin_load(in_place=in_place)
    load = _Load(state_dict, storage_reader, planner, others, watch, arguments or {})
    call = "load_into" if in_place else "load"
    together = operation(group, call) if group.size > 1 else nullcontext()
    if isinstance(storage_reader, PatientReader) and isinstance(group, OperationGroup):
        # A rank that waits for a chunk names the silent rank before it counts as silent itself.
        storage_reader.patience = group.timeout - min(HEED_SECONDS, group.timeout / 8)
    if watch is not None:
        load.step, group = watch.step, watch.watched(group)
    with watch or nullcontext(), together:
        try:
            return load.run(group)
        except Exception as error:
            if planner.in_place and load.has_read:
                error.add_note(PARTLY_FILLED)
            raise


@dataclass(slots=True)
class _Load:
    """One rank's part in a load."""

    state_dict: Mapping[str, object] | None
    reader: StorageReader
    planner: LoadPlanner
    others: Callable[[], OtherFormats] | None
    watch: Watch | None
    arguments: Mapping[str, str]
    """The call's arguments, which must be equal on all ranks."""
    step: Step = nullcontext
    """The context of a step, by its name, which times it where there is a listener."""
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    restarts: Restarts = field(default_factory=Restarts)
    is_last: bool = True
    """Whether no try follows this one, by the coordinator's word."""
    has_read: bool = False
    """Whether this rank has begun to read, in this try or in one before."""
    in_place: bool = False
    """Whether some rank of several loads in place: its objects may refuse what they are given."""
    result: object = None
    """The planner's."""

    def run(self, group: Group) -> Loaded:
        """All steps, on all ranks; then the planner's result."""
        given = self.reader
        if group.size > 1:
            # Imported here: a load by one process compares nothing, and starts sooner.
            from xckpt.engine.ranks.compare import CALL, arguments_of, compare_ranks

            host = getattr(getattr(given, "options", None), "host", None)
            about = {CALL: "load"} | arguments_of(given) | dict(self.arguments)
            host_ranks = compare_ranks(group, about, host=host)
            if isinstance(given, SharesHost):
                given.host_ranks = host_ranks
        replaced: XckptError | None = None
        while True:
            try:
                if group.size == 1:
                    self.alone()
                else:
                    self.together(group)
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
        if self.in_place:
            all_reduce(group, HAND_OVER, self._finish, lambda _: b"")
        else:
            self.result = self.planner.result()
        return Loaded(self.metadata, self.result)

    def _finish(self) -> bytes:
        """Have the planner hand over what was loaded; an empty report."""
        self.result = self.planner.result()
        return b""

    def alone(self) -> None:
        """All steps in a row, without other ranks: the short way of a load by one process."""
        plan = self._wanted(self._find, 1, True)
        with self.step("share"):
            made = self.planner.create_global_plan([plan])
            plans = checked_plans(self.planner, made, LoadPlan, 1)
            plans = self.reader.prepare_global_plan(plans)
            (share,) = checked_plans(self.reader, plans, LoadPlan, 1, PREPARED)
        self._read(share)

    def together(self, group: Group) -> None:
        """Each step on all ranks, so that a failure of one is a failure of all."""
        found = _decode(broadcast(group, FIND, lambda: _encode(self._find())))
        is_coordinator = group.rank == group.coordinator
        codec = LoadPlanCodec()
        plan = partial(self._plan, found, group.size, is_coordinator, codec)
        share = reduce_scatter(group, PLAN, plan, self._share, codec)
        in_place = all_reduce(group, READ, partial(self._read, share), b"".join)
        self.in_place = bool(in_place)

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

    def _plan(
        self, found: _Found, ranks: int, is_coordinator: bool, codec: LoadPlanCodec
    ) -> LoadPlan:
        """What this rank wants to read, and how that travels."""
        plan = self._wanted(lambda: found, ranks, is_coordinator)
        planner, reader = self.planner, self.reader
        codec.stored = self.metadata.state_dict_metadata
        codec.sends_items = need_items(planner.create_global_plan, reader.prepare_global_plan)
        return plan

    def _wanted(self, find: Callable[[], _Found], ranks: int, is_coordinator: bool) -> LoadPlan:
        """What this rank wants to read of what is there."""
        found = find()
        self.is_last = found.last
        if found.format != OURS and self.others is not None and not is_coordinator:
            self.reader = self.others().reader(found.format)
        planner = self.planner
        with self.step("plan"):
            self.metadata = self.reader.set_up_storage_reader(found.manifest, ranks).described()
            found.manifest = b""  # its text may be long
            planner.set_up_planner(self.state_dict, self.metadata, is_coordinator)
            plan = checked_plan(planner, "create_local_plan", planner.create_local_plan(), LoadPlan)
            if ranks > 1:  # a rank alone checks its finished plan at once
                check_sources(plan, self.metadata)
            if planner.in_place:
                from xckpt.engine.shared_memory import check_memory  # few loads are in place

                check_memory(planner, plan, self.metadata, self.reader)
            return self.reader.prepare_local_plan(plan)

    def _share(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """What each rank has to read, as it is sent there."""
        with self.step("share"):
            made = self.planner.create_global_plan(plans)
            shares = checked_plans(self.planner, made, LoadPlan, len(plans))
            shares = self.reader.prepare_global_plan(shares)
            shares = checked_plans(self.reader, shares, LoadPlan, len(plans), PREPARED)
        return [answer_to(plan, share) for plan, share in zip(plans, shares, strict=True)]

    def _read(self, share: LoadPlan) -> bytes:
        """Read this rank's share; a report that is empty unless that was in place."""
        planner = self.planner
        try:
            with self.step("read"):
                plan = checked_plan(planner, "finish_plan", planner.finish_plan(share), LoadPlan)
                check_sources(plan, self.metadata)
                planner.check_plan(plan)
                if self.watch is not None:
                    self.watch.bytes = bytes_read(plan, self.metadata)
                self.has_read = True
                self.reader.read_data(plan, planner)
        finally:
            # Before the gather: a peer on this host may be waiting for a chunk from this rank.
            self.reader.close()
        return b"1" if planner.in_place else b""


def _was_replaced(error: XckptError) -> bool:
    """Whether some rank failed because the checkpoint was replaced; equal on all ranks.

    The other ranks may have failed because of that, each with an error of its own.
    """
    kind = CheckpointReplacedError
    causes = (failure.cause for failure in error.failures)
    return isinstance(error, kind) or kind.__name__ in causes
