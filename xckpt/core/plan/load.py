"""Planning a load: the protocol, the default planner, and the pure functions beneath.

1. ``set_up_planner``: flatten the target tree and find a `TargetLeaf` for each leaf.
2. ``create_local_plan``: `compare` target and checkpoint, and find the reads (`reads_of`).
3. ``create_global_plan``: what any rank misses, and what no rank wants, is one error, or as the
   caller's rules say (`xckpt.core.plan.report`).
4. ``finish_plan``: nothing by default. Then ``check_plan``: does it fill every target once?
5. ``load_bytes`` for values; ``resolve_tensor`` and ``commit_tensor`` around each box.
"""

from __future__ import annotations

import abc
import io
import threading
from collections.abc import Callable, Mapping

import numpy as np

from xckpt.core.adapter import NO_ADAPTERS, Adapters
from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.plan.alike import wanted_dtypes
from xckpt.core.plan.items import LoadPlan, ReadItem
from xckpt.core.plan.load_checks import target_problems
from xckpt.core.plan.new_leaves import NewLeaves, numpy_leaves
from xckpt.core.plan.reads.items import needs_no_items
from xckpt.core.plan.report import LoadReport, Severity, Strictness, reported
from xckpt.core.plan.stateful import LoadedObjects
from xckpt.core.plan.wanted import WantedLeaf, is_meta, loaded_leaves, reads_of
from xckpt.core.targets.assign import assign
from xckpt.core.targets.compare import compare, decide_load, opaque_differences, stands_for_nothing
from xckpt.core.targets.find import find_targets, with_names_of
from xckpt.core.targets.numbers import fill
from xckpt.core.text.arguments import wrong_argument
from xckpt.core.tree import FlatTree, flatten, rebuild, unflatten
from xckpt.core.values import Deserialise, decode_content
from xckpt.errors import PlanError


class LoadPlanner(abc.ABC):
    """How a load is planned; subclass `DefaultLoadPlanner` to change one step.

    Called in this order: `use_adapters`, `set_up_planner` and `create_local_plan` on every rank,
    `create_global_plan` on the coordinator, `finish_plan` on every rank, then `load_bytes`, or
    `resolve_tensor` and `commit_tensor` in pairs, for each item, from several threads.
    """

    adapters: Adapters = NO_ADAPTERS
    """What knows the frameworks' tensors."""

    in_place: bool = False
    """Whether this load fills the targets themselves instead of new ones like them."""

    always_in_place: bool = False
    """Whether every load does."""

    def begin_load(self, *, in_place: bool) -> None:
        """Learn what the load that begins is; the engine calls this first.

        Args:
            in_place: whether it fills the targets in any case, as `xckpt.load_into` does.
        """
        self.in_place = in_place or self.always_in_place or type(self).in_place

    @property
    def targets(self) -> Mapping[str, TargetLeaf | None]:
        """Leaf name -> its target; empty in a planner that does not say."""
        return {}

    def use_adapters(self, adapters: Adapters) -> None:
        """Take the adapters of the frameworks whose tensors the target tree may hold."""
        self.adapters = adapters

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the target tree and what the checkpoint says about itself."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """What this rank wants to read."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks' plans, perhaps adjusted."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Accept the coordinator's plan for this rank."""

    def check_plan(self, plan: LoadPlan) -> None:  # noqa: B027  # no duty of a planner
        """Refuse a finished plan that leaves something unfilled; called before anything is read.

        Raises:
            PlanError: lists what would be filled never or twice.
        """

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the bytes of a value."""

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> object:
        """Where an item's elements go: a tensor of exactly ``lengths``, of any framework."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """All elements are in what `resolve_tensor` returned; called once an item."""

    def whole_target(self, name: str) -> TargetLeaf | None:
        """The target of a leaf that is read as a whole, if the hooks may be skipped for it.

        Then neither `resolve_tensor` nor `commit_tensor` is called for it. By default both are.
        """
        return None

    def result(self) -> object:
        """What `xckpt.load` returns, once everything is committed; None for a planner in place."""
        return None

    def report(self) -> LoadReport:
        """What became of each leaf; empty in a planner that does not override this."""
        return LoadReport()


class DefaultLoadPlanner(LoadPlanner):
    """Loads a checkpoint into targets like the ones given.

    Its ``state_dict`` has the target of each leaf, by name: a leaf that a hook of a subclass puts
    there takes the target's place. So a subclass with tensor hooks may load into meta tensors.

    Args:
        strict: refuse missing and unexpected leaves; otherwise load what is shared.
        missing: what to do about leaves that the checkpoint lacks, whatever ``strict`` says.
        unexpected: what to do about leaves that no rank asks for, whatever ``strict`` says.
        cast: allow another dtype than the stored one.
        in_place: fill the targets themselves instead of new ones like them, in any load.
        new_leaves: makes the targets of a load without a target tree; NumPy arrays by default.
        deserialise: makes an object of bytes that a save's ``serialise`` gave; see `LoadOptions`.
        picks: which leaves of the target tree are loaded, by name; the others stay as they are.

    Raises:
        TypeError: another argument is of another type.
        ValueError: ``missing`` or ``unexpected`` is none of "error", "warn", "ignore".
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        missing: Severity | None = None,
        unexpected: Severity | None = None,
        cast: bool = False,
        in_place: bool = False,
        new_leaves: NewLeaves | None = None,
        picks: Callable[[str], bool] | None = None,
        deserialise: Deserialise | None = None,
    ) -> None:
        for name, flag in dict[str, object](strict=strict, cast=cast, in_place=in_place).items():
            if not isinstance(flag, bool | np.bool_):
                raise wrong_argument("DefaultLoadPlanner", name, "True or False", flag)
        functions = {"new_leaves": new_leaves, "picks": picks, "deserialise": deserialise}
        for name, given in functions.items():
            if given is not None and not callable(given):
                raise wrong_argument("DefaultLoadPlanner", name, "a function", given)
        self.strictness: Strictness = Strictness.of(strict, missing, unexpected)
        self.cast, self.in_place, self.always_in_place = cast, in_place, in_place
        self._new_leaves, self._picks = new_leaves or numpy_leaves, picks
        self._deserialise = deserialise
        self.metadata: Metadata = Metadata({})
        self.state_dict: dict[str, object] = {}
        self.is_coordinator: bool = False
        self._state: object = None
        self._objects = LoadedObjects(FlatTree(), self.metadata, NO_ADAPTERS)
        self._likes: Mapping[str, object] = {}
        self._wanted: dict[str, WantedLeaf | None] = {}
        """Leaf name -> what is wanted of it; None for a value."""
        self._untouched, self._tied = dict[str, object](), dict[str, str]()
        self._stored_names: Mapping[str, str] = {}
        """Leaf name -> its name in the checkpoint, where that is another one."""
        self._left: tuple[str, ...] = ()
        """Stored leaves that no rank wants."""
        self._lock = threading.Lock()
        self._fills_alone = False
        """Whether tensors are resolved and committed as here, once it is set up."""

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the target tree and find each leaf's target; None stands for NumPy arrays of all.

        Raises:
            UnsupportedLeafError: targets that cannot be loaded; all are listed by name.
        """
        assert metadata is not None
        flat = FlatTree() if state_dict is None else flatten(state_dict, self.adapters)
        self.metadata, self._stored_names = with_names_of(flat, metadata)
        self._state = state_dict
        self._objects = LoadedObjects(flat, self.metadata, self.adapters, in_place=self.in_place)
        self._likes = self._new_leaves(metadata) if state_dict is None else self._objects.likes
        self.state_dict = dict(self._likes)
        self.is_coordinator = is_coordinator
        self._fills_alone = all(map(self._is_default, ("resolve_tensor", "commit_tensor")))
        likes, picks, makes = self._likes, self._picks, self._deserialise is not None
        likes = likes if picks is None else {n: each for n, each in likes.items() if picks(n)}
        about, alone = (self.metadata, flat.containers, self.adapters), self._fills_alone
        found = find_targets(likes, *about, in_place=self._fills, deserialises=makes, ties=alone)
        self._wanted, self._untouched, self._tied = found.wanted, found.untouched, found.tied

    def _is_default(self, hook: str) -> bool:
        """Whether a hook is that of `DefaultLoadPlanner`."""
        return getattr(getattr(self, hook), "__func__", None) is getattr(DefaultLoadPlanner, hook)

    def _fills(self, name: str) -> bool:
        """Whether a leaf is filled itself; not a meta tensor to which hooks may give memory."""
        given = not self._fills_alone and not self._objects.flat.objects
        if given and is_meta(self._likes[name]):
            return False
        return self.in_place and name not in self._objects.fresh

    @property
    def targets(self) -> Mapping[str, TargetLeaf | None]:
        """Leaf name -> its target, once it is set up; None for a value."""
        return {name: wanted and wanted.target for name, wanted in self._wanted.items()}

    def create_local_plan(self) -> LoadPlan:
        """Read items for each wanted box and value that fits; the rest are the plan's problems."""
        strict = self.strictness.missing == "error"
        problems = compare(self.targets, self.metadata, self._likes, strict=strict, cast=self.cast)
        problems |= {} if self._deserialise else opaque_differences(self._likes, self.metadata)
        items = reads_of(self._wanted, self.metadata, problems)
        stored = self.metadata.state_dict_metadata
        nothing = stands_for_nothing(self._objects.flat.containers, self.metadata)
        names = (*self._wanted, *nothing, *(stored.keys() & self._untouched.keys()))
        items = items.renamed(self._stored_names) if self._stored_names else items
        listed = *problems.values(), *self._objects.problems
        dtypes = wanted_dtypes(self.targets) if self.cast else {}
        return LoadPlan(items, names=names, problems=listed, dtypes=dtypes)

    @needs_no_items
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse the load if any target does not fit, or as the caller's rules say.

        Raises:
            TreeMismatchError, PlanError: see `decide_load`.
        """
        return decide_load(global_plan, self.metadata, self.strictness)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The coordinator's plan as it is."""
        self._left = central_plan.left
        for wanted in self._wanted.values():
            if wanted is not None and wanted.missing and 0 in wanted.missing:
                wanted.commit_empty()
        return central_plan

    def check_plan(self, plan: LoadPlan) -> None:
        """Refuse a plan that does not fill each target and value exactly once.

        To skip a leaf, leave it out of the state dict in `set_up_planner`.

        Raises:
            PlanError: lists every range that would be filled never or twice.
        """
        stored = self.metadata.state_dict_metadata
        wanted = {
            name: leaf.boxes if leaf and isinstance(stored[name], TensorStorageMetadata) else None
            for name, leaf in self._wanted.items()
            if name in stored
        }
        if problems := target_problems(plan.items, wanted):
            fault = "the plan of this rank does not fill every target exactly once"
            raise PlanError.listing(fault, problems)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a Python value, or keep opaque bytes as they are; a number may fill an array.

        Raises:
            TreeMismatchError: the array's dtype cannot hold the number.
        """
        name = read_item.dest_index.fqn
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, BytesStorageMetadata)
        decoded = decode_content(name, stored.kind, value.getvalue(), self._deserialise)
        wanted = self._wanted[name]
        if wanted is None:
            self.state_dict[name] = decoded
        else:
            assert isinstance(decoded, int | float | complex)
            fill(wanted.target, decoded, name, self.adapters, cast=self.cast)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        """The part of the wanted box's buffer that the item fills.

        Raises:
            LeafTooLargeError: there is no memory for the buffer.
        """
        with self._lock:
            return self._wanted_by(read_item).memory(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """Count the item's elements; publish the box with the last of them.

        A ``tensor`` in other memory than `resolve_tensor` gives here is copied there first, so a
        planner may read elsewhere, and change the elements before it passes them on.

        Raises:
            PlanError: the box had all its elements before; ``tensor`` is of another shape or dtype.
        """
        wanted = self._wanted_by(read_item)
        if not self._fills_alone:
            wanted.bring(read_item, tensor, self.adapters)
        wanted.land(read_item, self._lock)

    def whole_target(self, name: str) -> TargetLeaf | None:
        """The target of a leaf, unless a hook of its tensors is another."""
        wanted = self._wanted[name] if self._fills_alone else None
        return wanted and wanted.target

    def _wanted_by(self, item: ReadItem) -> WantedLeaf:
        wanted = self._wanted[item.dest_index.fqn]
        assert wanted is not None
        return wanted

    def report(self) -> LoadReport:
        """What became of each leaf, as this rank sees it."""
        return reported(self.targets, self.metadata, self._left, self._tied, self._objects.cleared)

    def result(self) -> object:
        """The loaded tree; objects are filled in place, or else their state is in their place."""
        found = self._wanted, self.metadata
        loaded = loaded_leaves(self._likes, self.state_dict, *found, counted=not self._fills_alone)
        if self._state is None:
            return unflatten(loaded, self.metadata.containers)
        if self.in_place:
            whole = assign(self._state, loaded, self.adapters, keep=self._objects.flat.objects)
            self._objects.hand_over(loaded)
            return whole
        loaded |= {name: loaded[other] for name, other in self._tied.items()}
        states = self._objects.states(loaded)
        return rebuild(self._state, lambda name, like: loaded[name], self.adapters, finished=states)
