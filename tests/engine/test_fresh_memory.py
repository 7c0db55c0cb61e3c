"""New memory: which pages it takes, and that whatever is done to them keeps what they hold."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from xckpt.engine import fresh_memory
from xckpt.engine.fresh_memory import (
    HUGE_PAGE,
    SMALLEST,
    TRIAL,
    FirstTouch,
    ask_huge_pages,
    fresh,
    join_pages,
    offer,
)


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("huge", "small"), [(1.0, 3.0), (3.0, 1.0)])
def test_the_cheaper_size_of_pages_is_taken(huge: float, small: float) -> None:
    region = fresh(2 * TRIAL)
    clock = Clock()
    touch = FirstTouch(region, clock)
    taken = {True: 0, False: 0}
    piece = region[:HUGE_PAGE]
    while min(taken.values()) < TRIAL:
        chosen = touch.prefers_huge_pages()
        seconds = huge if chosen else small
        touch.fill(piece, lambda seconds=seconds: setattr(clock, "now", clock.now + seconds))
        taken[chosen] += piece.nbytes
    assert max(taken.values()) <= TRIAL + piece.nbytes
    assert touch.prefers_huge_pages() == (huge < small)


def test_a_size_that_becomes_dear_is_given_up() -> None:
    region = fresh(TRIAL)
    clock = Clock()
    touch = FirstTouch(region, clock)
    for _ in range(2):
        seconds = 1.0 if touch.prefers_huge_pages() else 2.0
        touch.fill(region, lambda seconds=seconds: setattr(clock, "now", clock.now + seconds))
    assert touch.prefers_huge_pages()
    touch.fill(region, lambda: setattr(clock, "now", clock.now + 9))
    assert not touch.prefers_huge_pages()


@pytest.mark.parametrize("size", [1, SMALLEST, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 12345])
def test_pieces_anywhere_are_filled(size: int) -> None:
    """Pieces that share pages, in no order; other memory than `fresh` gives too."""
    for region in (fresh(size), np.empty(size, np.uint8)):
        touch = FirstTouch(region)
        ends = sorted({0, size // 7, size // 3, size // 2 + 1, size})
        pieces = [region[a:b] for a, b in pairwise(ends)]
        for number, piece in reversed(list(enumerate(pieces, 1))):
            touch.fill(piece, lambda piece=piece, number=number: piece.fill(number))
        for number, piece in enumerate(pieces, 1):
            assert (piece == number).all()


def test_threads_fill_one_region() -> None:
    region = fresh(16 * HUGE_PAGE)
    touch = FirstTouch(region)

    def work(start: int) -> None:
        for piece in region.reshape(16, -1)[start::2]:
            touch.fill(piece, lambda piece=piece: piece.fill(start + 1))

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
    FirstTouch(region).fill(region, lambda: region.fill(3))
    join_pages(region)
    assert (region == 3).all()


@pytest.mark.parametrize("size", [100, 3 * HUGE_PAGE + 77])
def test_joined_pages_hold_what_they_held(size: int) -> None:
    region = fresh(size)
    ask_huge_pages(region)
    values = np.arange(size, dtype=np.uint8)
    FirstTouch(region).fill(region, lambda: np.copyto(region, values))
    join_pages(region)
    assert np.array_equal(region, values)
    offer(region)
    region[:] = values[::-1]
    assert np.array_equal(region, values[::-1])
