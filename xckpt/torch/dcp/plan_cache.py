"""What DCP's plan cache leaves out of a global plan, put back in where it is needed.

With ``DefaultSavePlanner(enable_plan_caching=True)`` a plan that has not changed is replaced by an
empty one that is not ``usable``, and its rank takes the last one that it got (`whole_plans`):

1. All plans are usable: nothing was left out.
2. Some are: a leaf's grid depends on all ranks' boxes, so all ranks get their plans anew.
3. None is: every rank has its plan, with orders that still hold, and there is nothing to send;
   unless the save that made these plans failed before it could send them. The coordinator sees that
   by its own local plan, which is usable then, or has noted it (`note_unsent`).

The plans left out are in the cache itself. It has no public names, and is touched here only. Should
plans be taken for delivered that are not, the commit finds that they don't fit the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import checkpoint as dcp

from xckpt.errors import PlanError

__all__ = ["note_unsent", "whole_plans"]

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
