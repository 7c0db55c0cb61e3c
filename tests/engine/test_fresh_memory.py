"""New memory: whatever is done to its pages keeps what they hold."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from xckpt.engine import fresh_memory
from xckpt.engine.fresh_memory import (
    CACHE_LINE,
    HUGE_PAGE,
    SMALLEST,
    fresh,
    offer,
    populate,
    use_huge_pages,
)

SIZES = [1, SMALLEST, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_a_region_begins_at_a_cache_line(size: int) -> None:
    region = fresh(size)
    assert region.shape == (size,) and region.flags.writeable
    assert region.ctypes.data % (HUGE_PAGE if size >= HUGE_PAGE else CACHE_LINE) == 0


@pytest.mark.parametrize("size", SIZES)
def test_pieces_anywhere_are_filled(size: int) -> None:
    """Pieces that share pages, in no order; other memory than `fresh` gives too."""
    for region in (fresh(size), np.empty(size, np.uint8)):
        ends = sorted({0, size // 7, size // 3, size // 2 + 1, size})
        pieces = [region[a:b] for a, b in pairwise(ends)]
        for number, piece in reversed(list(enumerate(pieces, 1))):
            populate(piece)
            piece.fill(number)
        for number, piece in enumerate(pieces, 1):
            assert (piece == number).all()


def test_threads_fill_one_region() -> None:
    region = fresh(16 * HUGE_PAGE)

    def work(start: int) -> None:
        for piece in region.reshape(16, -1)[start::2]:
            populate(piece)
            piece.fill(start + 1)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = region.reshape(8, 2, -1)
    assert (rows[:, 0] == 1).all()
    assert (rows[:, 1] == 2).all()


def test_a_system_that_refuses_advice_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "POPULATE_WRITE", 12345)
    monkeypatch.setattr(fresh_memory, "COLLAPSE", 12345)
    region = fresh(2 * HUGE_PAGE)
    populate(region)
    region.fill(3)
    use_huge_pages(region)
    assert (region == 3).all()


@pytest.mark.parametrize("size", [100, 3 * HUGE_PAGE + 77])
def test_pages_hold_what_they_held(size: int) -> None:
    region = fresh(size)
    use_huge_pages(region)
    values = np.arange(size, dtype=np.uint8)
    populate(region)
    np.copyto(region, values)
    populate(region)
    use_huge_pages(region)
    assert np.array_equal(region, values)
    offer(region)
    region[:] = values[::-1]
    assert np.array_equal(region, values[::-1])
