"""Units cover every target exactly once, for any mapping, and read little besides what they use."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mapping.mappings import Case, cases
from tests.support.examples import examples
from xckpt.convert import Mapping, Rule, TensorSpec
from xckpt.convert.units.plan import plan_units
from xckpt.convert.units.unit import WorkUnit, source_reads
from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.geometry.grid import GridOptions, cells, choose_grid
from xckpt.errors import MappingError
from xckpt.mapping.operations import (
    Deinterleave,
    GroupedDeinterleave,
    Interleave,
    Operation,
    Rope,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from xckpt.mapping.resolve import ResolvedMapping

Shape = tuple[int, ...]


@pytest.mark.parametrize("pad", [10**12, 10**15, 10**18])
def test_a_pad_of_an_absurd_size_is_refused_at_once(pad: int) -> None:
    rule = Rule.from_document({"source": "w", "target": "v", "operations": [{"pad": pad}]})
    resolved = Mapping((rule,)).resolve({"w": TensorSpec((3, 4), "float32")})
    with pytest.raises(MappingError, match=r"of it for 'v': check the sizes in the rule that"):
        plan_units(resolved, lambda _: (3, 4), 1 << 20)


@given(cases(), st.integers(1, 4096), st.data())
@examples(30, 600)
def test_the_parts_cover_every_target_once(case: Case, size: int, data: st.DataObject) -> None:
    resolved = case.mapping.resolve(case.source_specs, case.target_specs)

    def drawn(shapes: dict[str, TensorSpec]) -> dict[str, Shape]:
        return {
            name: tuple(data.draw(st.integers(1, max(1, n))) for n in spec.shape)
            for name, spec in shapes.items()
        }

    source_chunks, target_chunks = drawn(case.source_specs), drawn(case.target_specs)
    units = plan_units(resolved, source_chunks.__getitem__, size, target_chunks.__getitem__)
    for name, spec in resolved.targets.items():
        boxes = [part.box for unit in units for part in unit.parts if part.name == name]
        pairs = [(box.offsets, box.sizes) for box in boxes]
        assert cover_fault(spec.shape, Boxes.of(pairs, rank=len(spec.shape))) is None
        for box in boxes:
            ends = zip(box.offsets, box.sizes, target_chunks[name], spec.shape, strict=True)
            assert all(
                low % chunk == 0 and ((low + n) % chunk == 0 or low + n == extent)
                for low, n, chunk, extent in ends
            )


WIDTH, LAYERS = 4096, 12
TURNED = Transpose((1, 0))


def rules(
    source: str | list[str], target: str | list[str], *operations: Operation, layers: bool = False
) -> Mapping:
    return Mapping([Rule(source, target, operations, {"l": (0, LAYERS)} if layers else None)])


def fetched(resolved: ResolvedMapping, units: list[WorkUnit], chunks: dict[str, Shape]) -> int:
    """Bytes of the chunks that units touch, each counted once a unit."""
    total = 0
    for unit in units:
        copies = [
            (number, copy)
            for number, part in enumerate(unit.parts)
            for copy in resolved.copies_into(part.name, part.box)
        ]
        touched: set[tuple[str, int]] = set()
        for reading in source_reads(copies):
            spec, chunk = resolved.sources[reading.name], chunks[reading.name]
            low = reading.box.offsets
            high = [a + n for a, n in zip(low, reading.box.sizes, strict=True)]
            numbers, boxes = cells(low, high, spec.shape, chunk)
            for number, box in zip(numbers.tolist(), boxes, strict=True):
                if (reading.name, number) not in touched:
                    touched.add((reading.name, number))
                    total += prod(box.sizes) * item_size(spec.dtype)
    return total


@pytest.mark.parametrize(
    "sources, mapping",
    [
        ({"w": (64000, WIDTH)}, rules("w", "v", TURNED)),
        ({"w": (WIDTH, WIDTH)}, rules("w", "v", Rope(to="halves", heads=32))),
        ({"w": (2 * WIDTH, WIDTH)}, rules("w", ["q", "kv"], Split((5632, 2560)), TURNED)),
        ({"w": (2 * WIDTH, WIDTH)}, rules("w", ["a", "b"], Deinterleave(2), TURNED)),
        ({"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)}, rules(["a", "b"], "w", Interleave(2))),
        (
            {"w": (10240, WIDTH)},
            rules(
                "w", ["q", "k", "v"], GroupedDeinterleave(groups=8, sizes=(1024, 128, 128)), TURNED
            ),
        ),
        (
            {f"l.{n}.w": (WIDTH, WIDTH) for n in range(LAYERS)},
            rules("l.{l}.w", "w", TURNED, Stack("l", axis=1), layers=True),
        ),
        (
            {"w": (WIDTH, LAYERS, WIDTH)},
            rules("w", "l.{l}.w", Unstack("l", axis=1), TURNED, layers=True),
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_are_read_once(sources: dict[str, Shape], mapping: Mapping, dtype: str) -> None:
    specs = {name: TensorSpec(shape, dtype) for name, shape in sources.items()}
    options = GridOptions(8 << 20)
    chunks: dict[str, Shape] = {}
    for name, spec in specs.items():
        grid = choose_grid(spec.shape, item_size(dtype), Boxes.whole(spec.shape), options)
        chunks[name] = tuple(grid.chunks[0].tolist())
    resolved = mapping.resolve(specs)
    units = plan_units(resolved, chunks.__getitem__, 16 << 20)
    size = sum(prod(spec.shape) * item_size(dtype) for spec in specs.values())
    assert sum(unit.target_bytes for unit in units) == size
    assert size <= fetched(resolved, units, chunks) <= 1.1 * size
    assert max(unit.nbytes for unit in units) <= 128 << 20
