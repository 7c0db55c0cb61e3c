"""Loading a part of a checkpoint: any planner, shown that part as if it were a checkpoint.

The planner plans as always, with the names that the leaves have in the part. In what it hands to
the engine, `PartPlanner` gives the items the names of the checkpoint, and takes them away again in
what the engine and the storage hand to the planner.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace

from xckpt.core.adapter import Adapters
from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import Metadata
from xckpt.core.part.selection import Selection
from xckpt.core.plan.items import LoadPlan, ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.reads.items import need_items, needs_no_items
from xckpt.core.plan.report import LoadReport


class PartPlanner(LoadPlanner):
    """Loads a part of a checkpoint as another planner says.

    Args:
        planner: sees the part alone.
        part: which it is.
    """

    def __init__(self, planner: LoadPlanner, part: Selection) -> None:
        self._planner = planner
        self._part = part

    def begin_load(self, *, in_place: bool) -> None:
        """Tell the planner what the load is."""
        self._planner.begin_load(in_place=in_place)
        self.in_place: bool = self._planner.in_place

    @property
    def targets(self) -> Mapping[str, TargetLeaf | None]:
        """The planner's, by the names that they have in the part."""
        return self._planner.targets

    def use_adapters(self, adapters: Adapters) -> None:
        """Hand the adapters on."""
        self.adapters = adapters
        self._planner.use_adapters(adapters)

    def set_up_planner(
        self,
        state_dict: Mapping[str, object] | None,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Hand on the target tree, and what the checkpoint says about the part.

        Raises:
            TreeMismatchError: the checkpoint has no such part.
        """
        assert metadata is not None
        self._planner.set_up_planner(state_dict, self._part.of(metadata), is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants to read of the part."""
        plan = self._planner.create_local_plan()
        # All names by which ranks ask are the checkpoint's: those travel as bits.
        return replace(self._outer(plan), names=tuple(map(self._part.outer, plan.names)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks' plans, as the planner adjusts them."""
        plans = self._planner.create_global_plan([*map(self._below, self._named(global_plan))])
        return [*map(self._outer, plans)]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The coordinator's plan, as the planner accepts it."""
        return self._outer(self._planner.finish_plan(self._below(central_plan)))

    def check_plan(self, plan: LoadPlan) -> None:
        """Have the planner check a finished plan."""
        self._planner.check_plan(self._below(plan))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Hand on the bytes of a value."""
        self._planner.load_bytes(_item(read_item, self._part.below), value)

    def resolve_tensor(self, read_item: ReadItem) -> object:
        """Where the planner wants an item's elements."""
        return self._planner.resolve_tensor(_item(read_item, self._part.below))

    def commit_tensor(self, read_item: ReadItem, tensor: object) -> None:
        """Tell the planner that an item's elements have landed."""
        self._planner.commit_tensor(_item(read_item, self._part.below), tensor)

    def report(self) -> LoadReport:
        """What became of the part's leaves, by the names that they have in it."""
        return self._planner.report()

    def result(self) -> object:
        """What the planner has loaded."""
        return self._planner.result()

    def _named(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plans that ask for leaves by the names that these have in the part."""
        alike = dict.fromkeys(plan.names for plan in plans)  # most ranks want the same
        below = {names: tuple(map(self._part.below, names)) for names in alike}
        return [replace(plan, names=below[plan.names]) for plan in plans]

    def _below(self, plan: LoadPlan) -> LoadPlan:
        return self._renamed(plan, self._part.below)

    def _outer(self, plan: LoadPlan) -> LoadPlan:
        return self._renamed(plan, self._part.outer)

    def _renamed(self, plan: LoadPlan, rename: Callable[[str], str]) -> LoadPlan:
        if not self._part.at:
            return plan
        return replace(plan, items=[_item(item, rename) for item in plan.items])


class _NamesPlanner(PartPlanner):
    """The same for a planner that looks at no items of all ranks' plans: these need not be sent."""

    @needs_no_items
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks' plans, as the planner adjusts them."""
        return self._planner.create_global_plan(self._named(global_plan))


def part_planner(planner: LoadPlanner, part: Selection) -> PartPlanner:
    """A planner that loads a part as another one says.

    Example:
        >>> from xckpt.core.plan.load import DefaultLoadPlanner
        >>> planner = part_planner(DefaultLoadPlanner(), Selection.asked("model"))
        >>> need_items(planner.create_global_plan)
        False
    """
    kind = PartPlanner if need_items(planner.create_global_plan) else _NamesPlanner
    return kind(planner, part)


def _item(item: ReadItem, rename: Callable[[str], str]) -> ReadItem:
    index = item.storage_index
    return replace(item, storage_index=replace(index, fqn=rename(index.fqn)))
