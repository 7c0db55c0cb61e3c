"""The part of a checkpoint that a load takes, and the framework of its arrays.

`PartialLoad.asked` refuses arguments that contradict each other; `PartialLoad.planner` makes the
default planner of the load, or wraps the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xckpt.core.leaf import TargetPlace
from xckpt.core.part.selection import Selection
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.new_leaves import NewLeaves, leaves_of, numpy_leaves
from xckpt.core.plan.report import Strictness
from xckpt.core.values import Deserialise
from xckpt.engine.adapters import framework_adapter

Patterns = str | Iterable[str]
"""One pattern of leaf names, or several."""


ALL: Final = Selection()


@dataclass(frozen=True, slots=True)
class PartialLoad:
    """What a load takes, and the framework of the arrays if there is no target tree."""

    part: Selection = ALL
    new_leaves: NewLeaves = numpy_leaves

    @classmethod
    def asked(
        cls,
        at: str,
        select: Patterns | None,
        framework: str | None = None,
        device: object = None,
        *,
        like: object = None,
        cast: bool = False,
    ) -> PartialLoad:
        """The request in the arguments of a load.

        Raises:
            TypeError: ``at`` or ``select`` is not text.
            ValueError: there is no such framework, or the arguments contradict each other.
            ImportError: the framework is not installed.
        """
        part = Selection.asked(at, select)
        if framework is None:
            if device is not None:
                raise ValueError("device= goes with framework=; like says its own devices")
            return cls(part)
        if like is not None:
            raise ValueError("give like or framework=, not both: like says which arrays it wants")
        if str(device) == "meta":
            targets = f"xckpt.open(path).like({framework!r}, device='meta') gives targets"
            raise ValueError(f"device='meta' has no memory to load into; {targets}")
        place = TargetPlace(device=device, cast=cast)
        return cls(part, leaves_of(framework_adapter(framework), lambda name: place))

    @property
    def everything(self) -> bool:
        """Whether a plain load of everything is asked for."""
        return self == PartialLoad()

    def arguments(self) -> dict[str, str]:
        """What was asked for, in words: all ranks must ask alike.

        Example:
            >>> PartialLoad.asked("model", "*.weight").arguments()
            {'at': "'model'", 'select': "['*.weight']"}
        """
        patterns = [pattern.text for pattern in self.part.patterns]
        return {"at": repr(self.part.at), "select": repr(patterns)}

    def planner(
        self,
        planner: LoadPlanner | None,
        like: object,
        strictness: Strictness,
        *,
        cast: bool,
        deserialise: Deserialise | None = None,
    ) -> LoadPlanner:
        """The planner of the load.

        Raises:
            ValueError: the caller's own planner would ignore the request.
        """
        part = self.part
        if planner is None:
            picks = part.picks if part.patterns else None
            planner = DefaultLoadPlanner(
                missing=strictness.missing,
                unexpected=strictness.unexpected,
                cast=cast,
                new_leaves=self.new_leaves,
                picks=picks,
                deserialise=deserialise,
            )
        elif self.new_leaves is not numpy_leaves or (part.patterns and like is not None):
            raise ValueError("framework=, and select= with like, do not work with your own planner")
        if part == ALL:
            return planner
        # Not on the plain way of a load.
        from xckpt.core.part.planner import part_planner

        return part_planner(planner, part)
