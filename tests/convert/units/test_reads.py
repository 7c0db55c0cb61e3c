"""What is read: all that copies take, and their elements again after any cut."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tests.mapping.mappings import Case, cases
from tests.support.examples import examples
from xckpt.convert.mapped_reads import blocks, restrict_sources
from xckpt.convert.units.unit import DENSE, source_reads
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from xckpt.mapping.strided_copy import StridedCopy

Box = ChunkStorageMetadata


def _copies(case: Case) -> list[tuple[int, StridedCopy]]:
    resolved = case.mapping.resolve(case.source_specs, case.target_specs)
    return [
        (number, copy)
        for number, (name, spec) in enumerate(resolved.targets.items())
        for copy in resolved.copies_into(name, Box((0,) * len(spec.shape), spec.shape))
    ]


def _inside(inner: Box, outer: Box) -> bool:
    return all(
        b <= a and a + n <= b + m
        for a, n, b, m in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True)
    )


@given(cases())
@examples(60)
def test_each_copy_is_read_once_and_not_much_else(case: Case) -> None:
    copies = _copies(case)
    found = source_reads(copies)
    served = [entry for reading in found for entry in reading.copies]
    assert sorted(served, key=repr) == sorted((e for e in copies if e[1].source), key=repr)
    for reading in found:
        boxes = {copy.source_box for _, copy in reading.copies}
        assert all(_inside(box, reading.box) for box in boxes)
        wanted = sum(copy.elements for _, copy in reading.copies)
        apart = sum(prod(copy.source_box.sizes) for _, copy in reading.copies)
        assert prod(reading.box.sizes) <= max(DENSE * wanted, apart)


@given(cases(), st.data())
@examples(60)
def test_cut_copies_take_what_the_whole_ones_took(case: Case, data: st.DataObject) -> None:
    copies = [copy for _, copy in _copies(case) if copy.source]
    for reading in source_reads(enumerate(copies)):
        shape = case.source_specs[reading.name].shape
        axis = data.draw(st.integers(0, max(0, len(shape) - 1)))
        size = shape[axis] if shape else 1
        at = data.draw(st.integers(0, size))
        halves = [Box((0,) * len(shape), shape)]
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
        assert all(any(_inside(copy.source_box, half) for half in halves) for copy in cut)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 4096),
    st.data(),
)
@examples(60)
def test_blocks_cover_the_part_along_chunks(
    shape: list[int], target: int, data: st.DataObject
) -> None:
    whole = Boxes.whole(tuple(shape))
    grid = choose_grid(tuple(shape), 4, whole, GridOptions(target))
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    stored = TensorStorageMetadata(TensorProperties("float32"), tuple(shape), whole, grid)
    cut = list(blocks(stored, 0, Box(tuple(low), sizes)))
    pairs = [(_minus(box.offsets, low), box.sizes) for box in cut]
    assert cover_fault(sizes, Boxes.of(pairs, rank=len(shape))) is None
    chunk = grid.chunks[0]
    for box in cut:
        for at, begin, size in zip(box.offsets, low, chunk, strict=True):
            assert at == begin or at % int(size) == 0


def _minus(a: tuple[int, ...], b: list[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
