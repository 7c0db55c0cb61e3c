"""Looking at many files of a folder, or of a bucket."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from xckpt.storage.foreign.paths import find_path, map_concurrently, reading_threads


def test_answers_come_in_their_order(tmp_path: Path) -> None:
    for path in (tmp_path, find_path("memory://anywhere")):
        assert map_concurrently(path, lambda n: n * n, range(100)) == [n * n for n in range(100)]


def test_only_a_bucket_is_asked_from_several_threads(tmp_path: Path) -> None:
    here = threading.get_ident()
    assert set(map_concurrently(tmp_path, lambda _: threading.get_ident(), range(9))) == {here}
    assert reading_threads(tmp_path) is None
    # Each waits for the other, so both are under way at once.
    meeting = threading.Barrier(2, timeout=20)
    assert sorted(
        map_concurrently(find_path("memory://any"), lambda _: meeting.wait(), range(2))
    ) == [0, 1]


def test_the_first_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        map_concurrently(find_path("memory://any"), lambda n: 1 // n, range(3))
