"""Tells ranks that reuse a cached plan where this save is staged, and fills in plans left out.

With ``DefaultSavePlanner(enable_plan_caching=True)`` DCP sends no plan where nothing has changed: a
rank writes by the plan of an earlier save, which cannot know where this save is staged. So:

1. A plan names the process that coordinates (`SESSION`, chosen once by each process).
2. When the coordinator sends no plans, it names the place (`name_place`) in the store through which
   all ranks have met, under its session and the checkpoint's path, before the ranks go on.
3. A rank that is about to write looks there first (`find_place`). If nothing is there, its plan is
   a new one.
4. The coordinator removes the entry when the save is over (`forget_place`). Until then it begins no
   other such save to that path, so that no rank ever finds the place of another save.

In a global plan, each plan that has not changed is replaced by an empty one that is not ``usable``.
`whole_plans` decides:

1. All plans are usable: nothing was left out.
2. Some are: a leaf's grid depends on all ranks' boxes, so all ranks get their plans again.
3. None is: every rank has its plan, with orders that still hold, and there is nothing to send;
   unless the save that made these plans failed before it could send them. The coordinator sees that
   by its own local plan, which is usable then, or has noted it (`note_unsent`).

The plans left out are in DCP's cache itself. It has no public names, and is touched here only.
Should plans be taken for delivered that are not, the commit finds that they don't fit the metadata.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
from torch.distributed import checkpoint as dcp

from xckpt.core.struct_types import prepare_structs
from xckpt.errors import CheckpointExistsError, PlanError
from xckpt.storage.location import Location
from xckpt.torch.dcp.failures import shared_store

SESSION: Final = uuid.uuid4().hex
"""This process, as a coordinator of saves."""

_named: set[str] = set()
_lock = threading.Lock()


class StagingPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where a save is staged, and a name for the save itself."""

    save: str
    driver: str
    path: str
    bucket: str

    @classmethod
    def of(cls, save: str, location: Location) -> StagingPlace:
        """The place of a save that is staged at ``location``."""
        return cls(save, location.driver, location.path, location.bucket)

    @property
    def location(self) -> Location:
        """Where the root group is staged."""
        return Location(self.driver, self.path, self.bucket)


prepare_structs(StagingPlace)


def name_place(target: Location, place: StagingPlace) -> None:
    """Tell the other ranks where this process stages its save to ``target``.

    Raises:
        CheckpointExistsError: another save by cached plans to the same path is under way.
    """
    with _lock:
        if str(target) in _named:
            raise CheckpointExistsError(
                f"{target}: another save with cached plans is under way here; wait for it"
            )
        _named.add(str(target))
    store = shared_store()
    if store is not None:
        store.set(_key(SESSION, target), msgspec.json.encode(place).decode())


def find_place(session: str, target: Location) -> StagingPlace | None:
    """Where the process ``session`` stages its save to ``target``; None if it named no place."""
    store = shared_store()
    key = _key(session, target)
    if store is None or not store.check([key]):
        return None
    return msgspec.json.decode(store.get(key), type=StagingPlace)


def forget_place(target: Location) -> None:
    """Take back what `name_place` has said, if it has."""
    with _lock:
        if str(target) not in _named:
            return
        store = shared_store()
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the others may have gone, store and all
                store.delete_key(_key(SESSION, target))
        _named.discard(str(target))


def _key(session: str, target: Location) -> str:
    return f"xckpt/{session}/{target}"


_unsent: set[str] = set()
"""The cache's keys of plans that some rank has not got."""


def whole_plans(
    plans: Sequence[dcp.SavePlan], local: dcp.SavePlan, rank: int
) -> Sequence[dcp.SavePlan] | None:
    """All ranks' plans, or None if every rank has its own from an earlier save.

    Args:
        plans: what the planner would send.
        local: the coordinator's own local plan.
        rank: the coordinator's rank.

    Raises:
        PlanError: plans were left out that cannot be found.
    """
    usable = [_is_usable(plan) for plan in plans]
    if all(usable):
        return plans
    keys = _keys_of(plans)
    if any(usable):
        if len(keys) != 1:
            raise PlanError(
                "the planner sends only those plans that have changed since an earlier save, and "
                "the others cannot be found; save with enable_plan_caching=False"
            )
    elif _is_usable(local):
        gathered = _cache("all_plans")
        keys = [key for key in keys if gathered[key][rank].items == local.items]
    elif len(keys) != 1 or keys[0] not in _unsent:
        return None
    if not keys:
        return None
    _unsent.discard(keys[0])
    return _cache("global_plan")[keys[0]]


def note_unsent(plans: Sequence[dcp.SavePlan]) -> None:
    """A save has failed before all ranks could get these plans."""
    if any(_is_usable(plan) for plan in plans):
        _unsent.update(_keys_of(plans))


def _keys_of(plans: Sequence[dcp.SavePlan]) -> list[str]:
    """Under which keys of the cache the plans may be; one, as soon as one of them is usable."""
    return [
        key
        for key, cached in _cache("global_plan").items()
        if len(cached) == len(plans)
        and all(
            new.items is old.items
            for new, old in zip(plans, cached, strict=True)
            if _is_usable(new)
        )
    ]


def _is_usable(plan: dcp.SavePlan) -> bool:
    return getattr(plan, "usable", True)


def _cache(name: str) -> dict[str, list[dcp.SavePlan]]:
    return getattr(dcp.SavePlanner, f"_cached_{name}", {})
