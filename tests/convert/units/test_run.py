"""How the units of a conversion are shared among ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.convert.units.run import share_units
from xckpt.convert.units.unit import WorkUnit


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 9))
@examples(100)
def test_each_unit_is_of_one_rank_and_none_has_much_more(sizes: list[int], ranks: int) -> None:
    units = [WorkUnit((), size, 0, number) for number, size in enumerate(sizes)]
    shares = [share_units(units, rank, ranks) for rank in range(ranks)]
    assert sorted((unit for share in shares for unit in share), key=lambda unit: unit.number) == (
        units
    )
    assert all(share == sorted(share, key=lambda unit: unit.number) for share in shares)
    heaviest = max(sum(unit.target_bytes for unit in share) for share in shares)
    assert heaviest <= sum(sizes) / ranks + max(sizes, default=0)
