"""What a unit reads: all that its copies take, once, and little else."""

from __future__ import annotations

from hypothesis import given

from tests.mapping.mappings import Case, cases
from tests.support.examples import examples
from xckpt.convert.units.unit import DENSE, source_reads
from xckpt.core.geometry.box import Box
from xckpt.mapping.strided_copy import StridedCopy


def copies_of(case: Case) -> list[tuple[int, StridedCopy]]:
    resolved = case.mapping.resolve(case.source_specs, case.target_specs)
    return [
        (number, copy)
        for number, (name, spec) in enumerate(resolved.targets.items())
        for copy in resolved.copies_into(name, Box.whole(spec.shape))
    ]


@given(cases())
@examples(60)
def test_each_copy_is_read_once_and_not_much_else(case: Case) -> None:
    copies = copies_of(case)
    found = source_reads(copies)
    served = [entry for reading in found for entry in reading.copies]
    assert sorted(served, key=repr) == sorted((e for e in copies if not e[1].is_constant), key=repr)
    for reading in found:
        boxes = {copy.source_box for _, copy in reading.copies}
        assert all(reading.box.holds(box) for box in boxes)
        wanted = sum(copy.elements for _, copy in reading.copies)
        apart = sum(copy.source_box.elements for _, copy in reading.copies)
        assert reading.box.elements <= max(DENSE * wanted, apart)
