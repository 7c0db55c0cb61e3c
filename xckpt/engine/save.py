"""The steps of a save, over a `Group`, a planner and a storage.

1. Every rank: describe the state and make a local plan. Gather.
2. The coordinator: make the global plan and check it against its metadata
   (`xckpt.core.plan.save_checks`); the storage says where each rank writes. Scatter.
3. Every rank: finish the plan and write. Gather.
4. The coordinator: check what was written and commit. Broadcast the metadata. With several ranks
   `xckpt.engine.write_together` has the last two steps.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`), and nothing is
committed. A save first waits for the saves in the background (`xckpt.engine.in_flight`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from xckpt.core.geometry.spread import Processes
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.alone.known import KnownPlans
from xckpt.core.plan.items import SavePlan
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.core.plan.save_checks import check_finished, check_shares, checked_plan, checked_plans
from xckpt.core.storage import (
    CommitKnowingWriter,
    OwnOrdersWriter,
    PlanCachingWriter,
    SharesHost,
    StorageWriter,
    TypedReportsWriter,
    as_sent,
    place,
)
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.ranks.group import (
    Group,
    KeptPlans,
    NumberedGroup,
    OwnPlan,
    PlanCachingGroup,
    operation,
)
from xckpt.engine.ranks.watch import Step, Watch, bytes_written
from xckpt.errors import CheckpointExistsError, PlanError
from xckpt.options import SaveOptions

if TYPE_CHECKING:
    from xckpt.engine.ranks.plans import KnownCommit

PLAN = "plan the save; nothing was committed"
COMMITTED = (
    "This came after the commit: the checkpoint is there, whole, although the call did not end."
)


def save_state(
    state: object,
    writer: StorageWriter,
    *,
    group: Group,
    planner: SavePlanner,
    metadata: JSONValue = None,
    failure: BaseException | None = None,
    watch: Watch | None = None,
    call: str = "save",
) -> Metadata:
    """Save a state on all ranks of a group; collective.

    Args:
        state: the tree to save, as this rank sees it.
        writer: where to.
        group: the ranks that save together.
        planner: how to divide the work.
        metadata: the caller's own, JSON values; the coordinator's is stored.
        failure: why this rank cannot save, if it cannot; the first step raises it, on all ranks.
        watch: times the save, if there is a listener.
        call: what the caller calls, one of `CALLS`.

    Returns:
        The metadata of the committed checkpoint, the same on every rank.

    Raises:
        RanksFailedError: some rank failed (groups of several); nothing is committed.
        XckptError: the failure itself, in a group of one.
    """
    is_coordinator = group.rank == group.coordinator
    save = _Save(state, writer, planner, metadata, is_coordinator, failure, watch, call)
    together = operation(group, call) if group.size > 1 else nullcontext()
    ranks = group
    if group.size > 1 and isinstance(group, NumberedGroup):
        save.processes = group.processes
    if watch is not None:
        save.step, group = watch.step, watch.watched(group)
    with watch or nullcontext(), together:
        # Not before the call has begun: to ask for the plans connects the ranks.
        if ranks.size > 1 and isinstance(ranks, PlanCachingGroup):
            save.kept = ranks.kept_plans
        return save.run(group)


class Reports:
    """Carries the ranks' reports of their writes.

    They arrive as plain lists, dicts and bytes; or as what the storage's writer says
    (`TypedReportsWriter`), which need not copy the bytes of many ranks. A rank may have none: None.

    Example:
        >>> reports = Reports(object())
        >>> reports.decode(reports.encode((1, b"digest")))
        [1, b'digest']
    """

    def __init__(self, writer: object) -> None:
        kind = writer.report_type if isinstance(writer, TypedReportsWriter) else object
        self.encode: Final = msgspec.msgpack.Encoder().encode
        self.decode: Final = msgspec.msgpack.Decoder(kind | None).decode


@dataclass(slots=True)
class _Save:
    """What a rank does in the steps of one save."""

    state: object
    writer: StorageWriter
    planner: SavePlanner
    user_metadata: JSONValue
    is_coordinator: bool
    failure: BaseException | None
    watch: Watch | None
    call: str
    step: Step = nullcontext
    """The context of a step, by its name, which times it where there is a listener."""
    kept: KeptPlans | None = None
    """The plans of earlier saves of this group."""
    processes: Processes | None = None
    """The framework's numbers of the ranks, if it has numbered them."""
    rank: int = 0
    is_set_up: bool = False
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    """What will be committed; only the coordinator knows it."""

    def run(self, group: Group) -> Metadata:
        """All steps, on all ranks."""
        self.rank = group.rank
        try:
            if group.size > 1:
                self._compare(group)
            share, known = self._share(group)
            write = partial(self.write, share)
            commit = partial(self.writer.finish, self.metadata)
            if known is not None:
                commit = partial(known.finish, self.writer, self.metadata)
            if self.watch is not None:
                commit = partial(self.watch.run, "commit", commit)
            answer = self._write_all(group, write, commit)
            if known is not None:
                return known.committed(answer)
            return self.writer.committed_metadata(answer)
        except BaseException as error:
            self.writer.abort()
            if group.size == 1 or not isinstance(error, Exception):  # an interrupt is read, too
                self._note_commit(error)
            raise

    def _write_all(
        self,
        group: Group,
        write: Callable[[], object],
        commit: Callable[[list[object]], bytes],
    ) -> bytes:
        """Write and commit, on all ranks; the coordinator's answer."""
        reports = Reports(self.writer)
        if group.size == 1:
            return commit([reports.decode(reports.encode(write()))])
        from xckpt.engine.write_together import write_together

        commit = partial(self._committing, commit)  # the other ranks read what a failure says
        about = self.writer, self.metadata
        return write_together(group, *about, write, commit, reports, self.step)

    def _committing(self, commit: Callable[[list[object]], bytes], results: list[object]) -> bytes:
        """Commit; a failure says so if the checkpoint is there all the same."""
        try:
            return commit(results)
        except Exception as error:
            self._note_commit(error)
            raise

    def _note_commit(self, error: BaseException) -> None:
        if isinstance(error, CheckpointExistsError):
            return  # what is there is another save's, whose manifest may be equal
        if isinstance(self.writer, CommitKnowingWriter) and self.writer.is_committed():
            error.add_note(COMMITTED)

    def _compare(self, group: Group) -> None:
        # Imported here: a save by one process compares nothing, and starts sooner.
        from xckpt.engine.ranks.compare import CALL, arguments_of, compare_ranks

        options = getattr(self.writer, "options", None)
        compares = not isinstance(options, SaveOptions) or options.compare_replicas is not False
        arguments = {CALL: self.call} | arguments_of(self.writer)
        adapters = loaded_adapters(self.rank)
        host_ranks = compare_ranks(
            group, arguments, lambda: self._set_up().replicas() if compares else (), adapters
        )
        if isinstance(self.writer, SharesHost):
            self.writer.host_ranks = host_ranks

    def _share(self, group: Group) -> tuple[SavePlan, KnownCommit | None]:
        """This rank's share, and what will be committed if all ranks know that already."""
        if group.size == 1:
            (share,) = self.plan_globally([as_sent(self.plan_locally())])
            return as_sent(share), None
        # Imported here: a save by one process plans alone, and starts sooner.
        from xckpt.engine.ranks.plans import Planning, plan_together

        planning = Planning(
            self.plan_locally,
            self.plan_globally,
            lambda: self.metadata,
            self._plan_again,
            self._plan_key(),
            self._known_plans,
            self._plan_alone,
        )
        return plan_together(group, PLAN, planning, self.kept)

    def _plan_key(self) -> bytes | None:
        """What the shares depend on besides the ranks' plans; None if they must not be kept."""
        options = getattr(self.writer, "options", None)
        if not isinstance(options, SaveOptions) or not isinstance(self.writer, PlanCachingWriter):
            return None
        planned_by = self.planner.lasting_key()
        if planned_by is None or not self.writer.lasting:
            return None
        return repr((planned_by, options.layout)).encode()

    def _known_plans(self, plan: SavePlan) -> KnownPlans | None:
        """All ranks' plans, if this rank knows them and its storage can order its own writes."""
        if self.processes is None or not isinstance(self.writer, OwnOrdersWriter):
            return None
        return self.planner.known_plans(plan, self.rank, self.processes)

    def _plan_alone(self, known: KnownPlans) -> OwnPlan | None:
        """This rank's share, made from all ranks' plans, with its orders; and the whole."""
        assert isinstance(self.writer, OwnOrdersWriter)
        with self.step("plan"):
            made = known.share()
            return made and OwnPlan(*self.writer.prepare_own_plan(*made), made[1])

    def _plan_again(self, metadata: Metadata, share: SavePlan) -> object:
        """On the coordinator: where to write the shares of an earlier save's plan."""
        with self.step("plan"):
            metadata = replace(metadata, user_metadata=self.user_metadata)
            # What each rank writes is kept; no orders are needed for it.
            nothing = [replace(share, items=())]
            (again,), self.metadata = self.writer.prepare_global_plan(nothing, metadata)
            return place(again)

    def plan_locally(self) -> SavePlan:
        """What this rank can write."""
        with self.step("describe"):
            self._set_up()
            self.writer.set_up_storage_writer(self.is_coordinator)
            plan = self.planner.create_local_plan()
            plan = checked_plan(self.planner, "create_local_plan", plan, SavePlan)
            return self.writer.prepare_local_plan(plan)

    def _set_up(self) -> SavePlanner:
        """Have the planner take the state, once."""
        if self.failure is not None:
            raise self.failure
        if not self.is_set_up:
            self.planner.use_adapters(loaded_adapters(self.rank, saves=True))
            about = self.writer.storage_meta(), self.is_coordinator
            call_set_up_planner(self.planner, self.state, *about)
            self.is_set_up = True
        return self.planner

    def plan_globally(self, plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
        """What each rank has to write, and where."""
        with self.step("plan"):
            made: object = self.planner.create_global_plan(list(plans))
            match made:
                case (shares, Metadata() as metadata):
                    shares = checked_plans(self.planner, shares, SavePlan, len(plans))
                case _:
                    name = type(self.planner).__name__
                    raise PlanError(f"{name}.create_global_plan must return (plans, metadata)")
            check_shares(shares, metadata)
            metadata = replace(metadata, user_metadata=self.user_metadata)
            shares, self.metadata = self.writer.prepare_global_plan(shares, metadata)
            return checked_plans(self.writer, shares, SavePlan, len(plans), "prepare_global_plan")

    def write(self, share: SavePlan) -> object:
        """Write this rank's share; return the report."""
        with self.step("write"):
            plan = checked_plan(
                self.planner, "finish_plan", self.planner.finish_plan(share), SavePlan
            )
            check_finished(share, plan)
            if self.watch is not None:
                self.watch.bytes = bytes_written(plan)
            written = self.writer.write_data(plan, self.planner)
            if self.watch is not None:
                self.watch.shared = getattr(self.writer, "shared_bytes", 0)
            return written


def call_set_up_planner(
    planner: SavePlanner, state: object, storage_meta: object, coordinates: bool
) -> None:
    """Call ``set_up_planner``; one that takes two arguments, as torch's did, gets no metadata."""
    hook: Callable[..., None] = planner.set_up_planner
    planner.storage_meta = storage_meta
    try:
        inspect.signature(hook).bind(state, storage_meta, coordinates)
    except TypeError:
        hook(state, coordinates)
    else:
        hook(state, storage_meta, coordinates)


def default_planner(options: SaveOptions) -> SavePlanner:
    """The planner of a save whose caller names none.

    Example:
        >>> type(default_planner(SaveOptions())).__name__
        'DefaultSavePlanner'
    """
    return DefaultSavePlanner(
        compare_replicas=options.compare_replicas is True, serialise=options.serialise
    )
