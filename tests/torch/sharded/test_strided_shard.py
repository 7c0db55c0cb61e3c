"""The way this torch cuts a ``_StridedShard`` is known, for any sizes, parts and factors."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from xckpt.core.geometry.placements import Cut, literal, striped
from xckpt.torch.sharded.strided_shard import strided_rows


def test_the_default_device_does_not_matter() -> None:
    strided_rows.cache_clear()
    with torch.device("meta"):
        assert strided_rows() in (literal, striped)


PARTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3)


@given(st.integers(0, 40), PARTS)
def test_torch_cuts_so(size: int, parts_and_factors: list[tuple[int, int]]) -> None:
    for coordinate in product(*(range(parts) for parts, _ in parts_and_factors)):
        rows = torch.arange(size)
        cuts = [
            Cut(parts, part, factor)
            for (parts, factor), part in zip(parts_and_factors, coordinate, strict=True)
        ]
        for cut in cuts:
            placement = _StridedShard(0, split_factor=cut.factor)
            rows = placement._split_tensor(rows, cut.parts, with_padding=False)[0][cut.part]
        held = [row for lo, hi in strided_rows()(size, cuts) for row in range(lo, hi)]
        assert held == rows.tolist()
