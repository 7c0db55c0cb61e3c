"""The reads of a load by a mapping: what is cut along stored chunks is still all there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.convert.units.test_unit import copies_of
from tests.mapping.mappings import Case, cases
from tests.support.examples import examples
from xckpt.convert.mapped_reads import restrict_sources
from xckpt.convert.units.unit import source_reads
from xckpt.core.geometry.box import Box


@given(cases(), st.data())
@examples(60)
def test_cut_copies_take_what_the_whole_ones_took(case: Case, data: st.DataObject) -> None:
    copies = [copy for _, copy in copies_of(case) if not copy.is_constant]
    for reading in source_reads(enumerate(copies)):
        shape = case.source_specs[reading.name].shape
        axis = data.draw(st.integers(0, max(0, len(shape) - 1)))
        size = shape[axis] if shape else 1
        at = data.draw(st.integers(0, size))
        halves = [Box.whole(shape)]
        if shape:
            halves = [
                Box(
                    tuple(low if d == axis else 0 for d in range(len(shape))),
                    tuple(high - low if d == axis else n for d, n in enumerate(shape)),
                )
                for low, high in ((0, at), (at, size))
                if high > low
            ]
        mine = [copy for _, copy in reading.copies]
        cut = [copy for half in halves for copy in restrict_sources(mine, half)]
        assert sum(copy.elements for copy in cut) == sum(copy.elements for copy in mine)
        assert all(copy.arithmetic in {whole.arithmetic for whole in mine} for copy in cut)
        assert all(any(half.holds(copy.source_box) for half in halves) for copy in cut)
