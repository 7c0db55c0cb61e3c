"""Do the ranks of a load want each leaf in one dtype?

Another dtype than the stored one is an error without ``cast``. With ``cast``, all ranks must want
the same dtype of a leaf: a tensor has one dtype. So the ranks say which they want.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xckpt.core.leaf import TargetLeaf
from xckpt.core.plan.items import LoadPlan
from xckpt.core.problem import Problem
from xckpt.errors import PlanError, ranks_in_words


def wanted_dtypes(targets: Mapping[str, TargetLeaf | None]) -> dict[str, str]:
    """Leaf name -> the dtype of its target; without values and targets of any dtype."""
    return {name: leaf.dtype for name, leaf in targets.items() if leaf is not None and leaf.dtype}


def check_alike(plans: Sequence[LoadPlan]) -> None:
    """Refuse a load whose ranks want a leaf in different dtypes.

    Raises:
        PlanError: lists each such leaf with the ranks.

    Example:
        >>> check_alike([LoadPlan([], dtypes={"w": dtype}) for dtype in ("int8", "int8", "int32")])
        Traceback (most recent call last):
        ...
        xckpt.errors.PlanError: the ranks want leaves in different dtypes; give each the same
          - w: wanted as int8 on ranks 0, 1, but as int32 on rank 2
    """
    first = plans[0].dtypes
    if all(plan.dtypes is first or plan.dtypes == first for plan in plans):
        return
    wanted: dict[str, dict[str, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for name, dtype in plan.dtypes.items():
            wanted.setdefault(name, {}).setdefault(dtype, []).append(rank)
    problems = [_problem(name, ranks) for name, ranks in wanted.items() if len(ranks) > 1]
    if problems:
        raise PlanError.listing(
            "the ranks want leaves in different dtypes; give each the same", problems
        )


def _problem(name: str, wanted: Mapping[str, Sequence[int]]) -> Problem:
    each = [f"as {dtype} on {ranks_in_words(ranks)}" for dtype, ranks in wanted.items()]
    return Problem(name, kind="dtype", text=f"wanted {', but '.join(each)}")
