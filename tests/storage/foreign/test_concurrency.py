"""Looking at many files of a folder, or of a bucket."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures.thread import _global_shutdown_lock  # type: ignore[attr-defined]
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from xckpt.errors import CorruptCheckpointError, ManifestError, UnsafePickleError, XckptError
from xckpt.storage.foreign.concurrency import map_named, reading_threads
from xckpt.storage.foreign.paths import find_path


def numbers(count: int) -> Iterator[tuple[str, int]]:
    return ((f"item {n}", n) for n in range(count))


def test_answers_come_in_their_order(tmp_path: Path) -> None:
    for path in (tmp_path, find_path("memory://anywhere")):
        assert map_named(path, lambda n: n * n, numbers(100)) == [n * n for n in range(100)]


def test_only_a_bucket_is_asked_from_several_threads(tmp_path: Path) -> None:
    here = threading.get_ident()
    assert set(map_named(tmp_path, lambda _: threading.get_ident(), numbers(9))) == {here}
    assert reading_threads(tmp_path) is None
    # Each waits for the other, so both are under way at once.
    meeting = threading.Barrier(2, timeout=20)
    assert sorted(map_named(find_path("memory://any"), lambda _: meeting.wait(), numbers(2))) == [
        0,
        1,
    ]


def test_a_handler_of_signals_may_have_come_while_an_executor_starts_a_thread() -> None:
    """Executors hold a lock of the process then, which the handler would wait for without end."""
    bucket, read = find_path("memory://any"), list[int]()
    reader = threading.Thread(target=lambda: read.extend(map_named(bucket, abs, numbers(3))))
    with _global_shutdown_lock:
        reader.start()
        reader.join(10)
        assert read == [0, 1, 2]
    reader.join()


def test_an_error_that_is_no_fault_of_an_item_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        map_named(find_path("memory://any"), lambda n: 1 // n, numbers(3))


@pytest.mark.parametrize("place", ["local", "memory://any"])
def test_all_faults_of_the_worst_kind_are_listed(tmp_path: Path, place: str) -> None:
    faults: list[XckptError] = [
        CorruptCheckpointError("cut"),
        ManifestError("odd"),
        UnsafePickleError("os.system"),
        ManifestError.listing("two", ["a", "b"]),
    ]

    def fail(number: int) -> None:
        raise faults[number]

    path = tmp_path if place == "local" else find_path(place)
    with pytest.raises(UnsafePickleError, match="cannot be read") as caught:
        map_named(path, fail, numbers(4))
    assert caught.value.problems == ("item 2: os.system",)
    faults[2] = CorruptCheckpointError("cut too")
    with pytest.raises(ManifestError, match="cannot be read") as listed:
        map_named(path, fail, numbers(4))
    assert listed.value.problems == ("item 1: odd", "item 3: a", "item 3: b")


def test_what_a_refused_item_has_read_is_forgotten(tmp_path: Path) -> None:
    """Its error's traceback would hold that in a cycle, which a collector may never look at."""
    read: list[weakref.ref[NDArray[np.uint8]]] = []

    def fail(number: int) -> None:
        content = np.zeros(number, np.uint8)
        read.append(weakref.ref(content))
        raise ManifestError("odd")

    with pytest.raises(ManifestError):
        map_named(tmp_path, fail, numbers(3))
    assert [each() for each in read] == [None] * 3
