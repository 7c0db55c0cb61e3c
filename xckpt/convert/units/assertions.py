"""The assertions of a mapping on the data, checked before anything is written.

Tied weights must be equal, pads and dropped constants must have their values. Each assertion names
two tensors as copies out of the source; both are made box by box and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from xckpt.convert.units.make import make
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.unit import TargetPart, hull
from xckpt.core.geometry.box import Box
from xckpt.errors import MappingError
from xckpt.formats.source import TensorSource
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.strided_copy import restrict
from xckpt.mapping.trace import Assertion
from xckpt.storage.budget import Pool

UNIT_BYTES = 1 << 23
"""Bytes of one side that are compared at a time."""

TENSOR = "a tensor of which the mapping asserts something"
"""The name of both sides of an assertion."""


def check_assertions(
    assertions: Iterable[Assertion], source: TensorSource, *, memory_bytes: int
) -> None:
    """Read both sides of each assertion and compare, in threads, within the memory.

    Raises:
        MappingError: assertions fail; names one range for each.

    Example:
        >>> import xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.formats.xckpt import XckptSource
        >>> from xckpt.mapping.operations import Untie
        >>> _ = xckpt.save("memory://untied", {"a": np.zeros(3), "b": np.array([0.0, 0.0, 1.0])})
        >>> source = XckptSource("memory://untied")
        >>> resolved = Mapping([Rule(["a", "b"], "w", [Untie(2)])]).resolve(source.specs)
        >>> check_assertions(resolved.assertions, source, memory_bytes=1 << 20)
        Traceback (most recent call last):
        xckpt.errors.MappingError: the data do not fulfil what the mapping asserts; ...
          - b: [2, 3): 1 element differs: tied tensors must be equal (a + b -> w)
    """
    problems: dict[int, str] = {}
    with Pool(threads=None, budget=memory_bytes) as pool:

        def compare(number: int, sides: _Sides, part: TargetPart) -> None:
            # One range of an assertion is enough.
            problem = "" if number in problems else sides.difference(source, part)
            if problem:
                problems.setdefault(number, problem)

        for number, assertion in enumerate(assertions):
            sides = _Sides(assertion, source)
            # Cut along the chunks of the source, as targets are.
            for unit in plan_units(sides.actual, source.chunks, UNIT_BYTES):
                for part in unit.parts:
                    pool.submit(partial(compare, number, sides, part), 2 * unit.nbytes)
    if problems:
        raise MappingError.listing(
            "the data do not fulfil what the mapping asserts; nothing was written",
            [problems[number] for number in sorted(problems)],
        )


class _Sides:
    """An assertion's tensors, each as a mapping of its own that makes one target."""

    def __init__(self, assertion: Assertion, source: TensorSource) -> None:
        self.assertion = assertion
        self.actual, self.expected = (
            ResolvedMapping(source.specs, {TENSOR: tensor.spec}, {TENSOR: tensor.copies})
            for tensor in (assertion.tensor, assertion.expected)
        )

    def difference(self, source: TensorSource, part: TargetPart) -> str:
        """How a box differs from what is expected; empty if it does not."""
        actual, expected = (
            np.ascontiguousarray(*make(side, source, [part])).reshape(-1).view(np.uint8)
            for side in (self.actual, self.expected)
        )
        if np.array_equal(actual, expected):
            return ""
        box = part.box
        item = len(actual) // max(1, box.elements)
        places = np.argwhere((actual != expected).reshape(*box.sizes, item).any(axis=-1))
        first, last = places.min(axis=0), places.max(axis=0)
        around = Box(tuple(first.tolist()), tuple((last - first + 1).tolist()))
        where = _source_range(self.assertion, around.shifted(box.offsets))
        differ = "1 element differs" if len(places) == 1 else f"{len(places):,} differ"
        return f"{where}: {differ}: {self.assertion.reason}"


def _source_range(assertion: Assertion, box: Box) -> str:
    """Where a box of an assertion's tensor lies in the source; the box itself if nowhere."""
    copies = [copy for copy in restrict(assertion.tensor.copies, box) if not copy.is_constant]
    if not copies:
        return str(box)
    name = copies[0].source
    return f"{name}: {hull([copy.source_box for copy in copies if copy.source == name])}"
