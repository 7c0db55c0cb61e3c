"""Parts of a trainer's checkpoint, loaded in place: each whole, others left."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from xckpt.api.load import load_into
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.mismatch import mismatch
from xckpt.core.plan.reads.items import needs_no_items
from xckpt.core.targets.compare import unexpected
from xckpt.core.text.printable import in_few
from xckpt.core.values import Deserialise
from xckpt.errors import TreeMismatchError, naming
from xckpt.options import LoadOptions

ADVICE: Final = "resume with the parts that were saved"


def load_parts(
    path: str, parts: Mapping[str, object], *, options: LoadOptions | None = None
) -> None:
    """Fill parts of a state; every process calls it.

    What the checkpoint has of a part that is filled, and the part does not take, is an error before
    anything is filled. If it has more parts of a list than the list, a warning names those that are
    left.

    Args:
        path: of the checkpoint.
        parts: name -> a part, or a list of parts.
        options: see `xckpt.load_into`.

    Raises:
        TreeMismatchError: a part does not fit the checkpoint.
        XckptError: as `xckpt.load_into`.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://parts", {"model": {"w": np.ones(2), "b": np.ones(1)}})
        >>> load_parts("memory://parts", {"model": {"w": np.zeros(2)}})
        Traceback (most recent call last):
        xckpt.errors.TreeMismatchError: memory://parts: the target does not fit the checkpoint: ...
          - model/b: in the checkpoint, but not wanted
    """
    planner = _PartsPlanner(path, parts, options and options.deserialise)
    left = load_into(path, parts, planner=planner, options=options).left
    other = {"/".join(name.split("/")[:2]): None for name in left if name.split("/")[0] in parts}
    if other:
        text = (
            f"{path} holds parts that this run lacks, and they were not loaded: {in_few([*other])}"
        )
        warnings.warn(text, UserWarning, stacklevel=2)


class _PartsPlanner(DefaultLoadPlanner):
    """Refuses what parts do not take of their own leaves, with all else that does not fit."""

    def __init__(
        self, path: str, parts: Mapping[str, object], deserialise: Deserialise | None
    ) -> None:
        super().__init__(unexpected="ignore", deserialise=deserialise)
        self._path, self._parts = path, parts

    @needs_no_items
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted = {name for names in {plan.names for plan in global_plan} for name in names}
        stored = self.metadata.state_dict_metadata
        lost = unexpected(name for name in stored if name not in wanted and self._is_lost(name))
        plans = [replace(plan, problems=(*plan.problems, *lost)) for plan in global_plan]
        try:
            return super().create_global_plan(plans)
        except TreeMismatchError as error:
            with naming(self._path):
                raise mismatch(error.problems, ADVICE) from None

    def _is_lost(self, name: str) -> bool:
        """Whether a leaf that is not wanted is in a part that is filled."""
        part, *below = name.split("/")
        there, number = self._parts.get(part), below[0] if below else ""
        is_another = isinstance(there, list) and number.isdecimal() and int(number) >= len(there)
        return part in self._parts and not is_another
