"""Targets of a load by a mapping that share memory: they must be made of equal elements.

1. `MadeParts` reads the checkpoint that the mapping describes, so that `xckpt.engine.shared_memory`
   compares its tensors as those of any other.
2. Leaves that the same steps make of the same tensors are equal. The source is opened only if there
   are others to compare.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.make import fill
from xckpt.convert.units.unit import TargetPart
from xckpt.core.geometry.box import Box
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.engine.shared_memory import check_memory
from xckpt.formats.source import TensorSource
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.strided_copy import StridedCopy


def check_targets(
    planner: DefaultLoadPlanner,
    plan: LoadPlan,
    resolved: ResolvedMapping,
    names: Mapping[str, str],
    open_source: Callable[[], TensorSource],
) -> None:
    """Refuse a load in place whose targets share memory, but are made of different elements.

    Args:
        planner: has the targets, and plans a load of the checkpoint that the mapping describes.
        plan: what it reads.
        resolved: the mapping.
        names: leaf name -> mapping name, of the leaves that the mapping makes.
        open_source: opens the checkpoint that is there.

    Raises:
        UnsupportedLeafError: lists the pairs of targets, and says what to do about them.
    """
    with contextlib.ExitStack() as opened:

        @functools.cache
        def source() -> TensorSource:
            return opened.enter_context(contextlib.closing(open_source()))

        parts = MadeParts(resolved, names, source)
        check_memory(planner, plan, planner.metadata, parts, else_="load into one of them alone")


class MadeParts:
    """Parts of the leaves that a mapping makes; an `xckpt.core.storage.PartReader`.

    Args:
        resolved: the mapping.
        names: leaf name -> mapping name, of the leaves that it makes.
        source: the open checkpoint that it reads; called when the first part is read.

    Example:
        >>> import xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.formats.xckpt import XckptSource
        >>> from xckpt.mapping.operations import Transpose
        >>> _ = xckpt.save("memory://made-parts", {"w": np.arange(6).reshape(2, 3)})
        >>> source = XckptSource("memory://made-parts")
        >>> mapping = Mapping([Rule("w", "v", [Transpose((1, 0))])])
        >>> parts = MadeParts(mapping.resolve(source.specs), {"v": "v"}, lambda: source)
        >>> row = np.empty((1, 2), int)
        >>> parts.read_part("v", Box((2, 0), (1, 2)), row)
        >>> row
        array([[2, 5]])
    """

    def __init__(
        self,
        resolved: ResolvedMapping,
        names: Mapping[str, str],
        source: Callable[[], TensorSource],
    ) -> None:
        self._resolved = resolved
        self._names = names
        self._source = source

    def same_digests(self, one: str, other: str) -> bool:
        """Whether the same steps make two leaves of the same tensors."""
        return self._steps(one) == self._steps(other)

    def _steps(self, leaf: str) -> list[StridedCopy]:
        copies = self._resolved.copies[self._names[leaf]]
        return [replace(copy, target="", alias=False) for copy in copies]

    def read_part(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Make a box of a leaf, in memory of its sizes and the mapping's dtype.

        Raises:
            MappingError: a step makes numbers overflow or wrap around.
        """
        part = TargetPart(self._names[name], box)
        fill(self._resolved, self._source(), [part], [into])
