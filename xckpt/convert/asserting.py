"""What a mapping takes for granted of the data, checked before anything is written.

Tied weights must be equal, pads and dropped constants must have their values. Each assertion names
two tensors as copies out of the source; both are made box by box and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock

import numpy as np

from xckpt.convert.bundles import Assertion
from xckpt.convert.copies import StridedCopy, restrict
from xckpt.convert.making import make_box
from xckpt.convert.readings import hull
from xckpt.convert.sources import TensorSource
from xckpt.convert.tensors import TensorSpec
from xckpt.convert.tracing import Traced
from xckpt.convert.units import Part, plan_units
from xckpt.core.boxes import interval
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.errors import MappingError
from xckpt.storage.pool import Pool

__all__ = ["check_assertions"]

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

    def copies_into(self, name: str, box: ChunkStorageMetadata) -> Sequence[StridedCopy]:
        return restrict(self.traced.copies, box)


def check_assertions(
    assertions: Iterable[Assertion], source: TensorSource, *, memory_bytes: int
) -> None:
    """Read what assertions speak of, and compare.

    Raises:
        MappingError: the data are otherwise; names, for each assertion that fails, one range where.
    """
    problems: dict[int, str] = {}
    lock = Lock()

    def check(number: int, assertion: Assertion, part: Part) -> None:
        with lock:
            if number in problems:
                return
        problem = _difference(assertion, source, part.box)
        if problem:
            with lock:
                problems.setdefault(number, problem)

    with Pool(threads=None, budget=memory_bytes) as pool:
        for number, assertion in enumerate(assertions):
            asserted = _Asserted(assertion.tensor, source.specs)
            for unit in plan_units(asserted, source.chunks, UNIT_BYTES):
                size = 2 * unit.nbytes
                for part in unit.parts:
                    pool.reserve(size)

                    def task(
                        number: int = number,
                        assertion: Assertion = assertion,
                        part: Part = part,
                        size: int = size,
                    ) -> None:
                        try:
                            check(number, assertion, part)
                        finally:
                            pool.release(size)

                    pool.submit(task)
    if problems:
        raise MappingError.listing(
            "the data are not what the mapping takes for granted; nothing was written",
            [problems[number] for number in sorted(problems)],
        )


def _difference(assertion: Assertion, source: TensorSource, box: ChunkStorageMetadata) -> str:
    """How a box differs from what is expected; empty if it does not."""
    sides: list[np.ndarray] = []
    for traced in (assertion.tensor, assertion.expected):
        made = make_box(source, traced.spec, restrict(traced.copies, box), box)
        sides.append(np.ascontiguousarray(made).reshape(-1).view(np.uint8))
    found, expected = sides
    if np.array_equal(found, expected):
        return ""
    item = len(found) // max(1, prod(box.sizes))
    differs = (found != expected).reshape(*box.sizes, item).any(axis=-1)
    places = np.argwhere(differs)
    low = (places.min(axis=0) + np.array(box.offsets, np.int64)).tolist()
    sizes = (places.max(axis=0) - places.min(axis=0) + 1).tolist()
    around = ChunkStorageMetadata(tuple(low), tuple(sizes))
    copies = [copy for copy in restrict(assertion.tensor.copies, around) if copy.source]
    count = f"{len(places):,} element differs" if len(places) == 1 else f"{len(places):,} differ"
    if not copies:
        return f"{interval(low, sizes)}: {count}: {assertion.reason}"
    name = copies[0].source
    read = hull([copy.source_box for copy in copies if copy.source == name])
    return f"{name}: {interval(read.offsets, read.sizes)}: {count}: {assertion.reason}"
