"""The assertions of a mapping on the data, checked before anything is written.

Tied weights must be equal, pads and dropped constants must have their values. Each assertion names
two tensors as copies out of the source; both are made box by box and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from xckpt.convert.units.make import make_box
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.reads import hull
from xckpt.core.geometry.box import Box
from xckpt.errors import MappingError
from xckpt.formats.source import TensorSource
from xckpt.mapping.bundle import Assertion
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, restrict
from xckpt.mapping.traced import Traced
from xckpt.storage.budget import Pool

UNIT_BYTES = 1 << 23
"""Bytes of one side that are compared at a time."""

TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class _Asserted:
    """An assertion's tensor as a mapping of its own, so that it is cut as targets are."""

    traced: Traced
    sources: Mapping[str, TensorSpec]

    @property
    def targets(self) -> Mapping[str, TensorSpec]:
        return {TENSOR: self.traced.spec}

    def copies_into(self, name: str, box: Box) -> Sequence[StridedCopy]:
        return restrict(self.traced.copies, box)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A box of an assertion's tensor, to be compared with the same box of what is expected."""

    number: int
    """The assertion's, in the order in which they were given."""
    assertion: Assertion
    box: Box
    nbytes: int
    """Memory that both sides take."""


def check_assertions(
    assertions: Iterable[Assertion], source: TensorSource, *, memory_bytes: int
) -> None:
    """Read what assertions speak of, and compare.

    Raises:
        MappingError: the data are otherwise; names, for each assertion that fails, one range where.
    """
    problems = _problems(_comparisons(assertions, source), source, memory_bytes)
    if problems:
        raise MappingError.listing(
            "the data do not fulfil what the mapping asserts; nothing was written",
            [problems[number] for number in sorted(problems)],
        )


def _comparisons(assertions: Iterable[Assertion], source: TensorSource) -> Iterator[_Comparison]:
    """Every box that must be compared, cut along the chunks of the source."""
    for number, assertion in enumerate(assertions):
        asserted = _Asserted(assertion.tensor, source.specs)
        for unit in plan_units(asserted, source.chunks, UNIT_BYTES):
            for part in unit.parts:
                yield _Comparison(number, assertion, part.box, 2 * unit.nbytes)


def _problems(
    comparisons: Iterable[_Comparison], source: TensorSource, memory_bytes: int
) -> dict[int, str]:
    """Number of an assertion that fails -> where; compared in threads, within the memory."""
    problems: dict[int, str] = {}
    with Pool(threads=None, budget=memory_bytes) as pool:

        def compare(each: _Comparison) -> None:
            try:
                # One range of an assertion is enough.
                known = each.number in problems
                problem = "" if known else _difference(each.assertion, source, each.box)
            finally:
                pool.release(each.nbytes)
            if problem:
                problems.setdefault(each.number, problem)

        for each in comparisons:
            pool.reserve(each.nbytes)
            pool.submit(partial(compare, each))
    return problems


def _difference(assertion: Assertion, source: TensorSource, box: Box) -> str:
    """How a box differs from what is expected; empty if it does not."""
    sides: list[np.ndarray] = []
    for traced in (assertion.tensor, assertion.expected):
        made = make_box(source, traced.spec, restrict(traced.copies, box), box)
        sides.append(np.ascontiguousarray(made).reshape(-1).view(np.uint8))
    found, expected = sides
    if np.array_equal(found, expected):
        return ""
    item = len(found) // max(1, prod(box.sizes))
    places = np.argwhere((found != expected).reshape(*box.sizes, item).any(axis=-1))
    first, last = places.min(axis=0), places.max(axis=0)
    low = tuple((first + np.array(box.offsets, np.int64)).tolist())
    around = Box(low, tuple((last - first + 1).tolist()))
    count = f"{len(places):,} element differs" if len(places) == 1 else f"{len(places):,} differ"
    return f"{_source_range(assertion, around)}: {count}: {assertion.reason}"


def _source_range(assertion: Assertion, box: Box) -> str:
    """Where a box of an assertion's tensor lies in the source; the box itself if nowhere."""
    copies = [copy for copy in restrict(assertion.tensor.copies, box) if copy.source]
    if not copies:
        return str(box)
    name = copies[0].source
    read = hull([copy.source_box for copy in copies if copy.source == name])
    return f"{name}: {read}"
