"""A load survives an overwrite: it starts again from the new checkpoint, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, run_ranks
from xckpt.engine.load import Restarts
from xckpt.storage.read_checkpoint import ZarrStorageReader


def state(number: int) -> dict[str, Any]:
    return {"w": np.full((64, 64), number), "v": np.full(40_000, number), "step": number}


def number_of(loaded: dict[str, Any]) -> int:
    numbers = {int(n) for leaf in loaded.values() for n in np.unique(np.asarray(leaf))}
    assert len(numbers) == 1
    return numbers.pop()


@pytest.fixture(params=["file", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    where = str(tmp_path / "a") if request.param == "file" else f"memory://{tmp_path.name}"
    xckpt.save(where, state(0))
    return where


def before_reading(monkeypatch: pytest.MonkeyPatch, overwrite: Callable[[int], object]) -> None:
    """Call ``overwrite`` with 0, 1, ... whenever a reader is about to read data."""
    real, called = ZarrStorageReader.read_data, 0

    def read(reader: ZarrStorageReader, plan: Any, planner: Any) -> None:
        nonlocal called
        called += 1
        overwrite(called - 1)
        real(reader, plan, planner)

    monkeypatch.setattr(ZarrStorageReader, "read_data", read)


def save(path: str, number: int) -> None:
    xckpt.save(path, state(number), overwrite=True, group=xckpt.LocalGroup())


def test_a_load_starts_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before_reading(monkeypatch, lambda n: save(path, n + 1) if n < 3 else None)
    assert number_of(xckpt.load(path)) == 3
    into = state(-1)
    xckpt.load_into(path, into)
    assert number_of(into) == 3


@pytest.mark.parametrize("seconds, most", [(60.0, 8), (0.0, Restarts.SURE)])
def test_not_for_ever(
    path: str, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    monkeypatch.setattr(Restarts, "MOST", 8)
    monkeypatch.setattr(Restarts, "SECONDS", seconds)
    reads: list[int] = []
    before_reading(monkeypatch, lambda n: (reads.append(n), save(path, n + 1)))
    with pytest.raises(xckpt.CheckpointReplacedError, match="was replaced or removed while"):
        xckpt.load(path)
    assert len(reads) == most + 1


def test_a_leaf_that_the_new_one_lacks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(n: int) -> None:
        xckpt.save(path, {"step": 1}, overwrite=True)

    before_reading(monkeypatch, overwrite)
    with pytest.raises(xckpt.TreeMismatchError, match="v: "):
        xckpt.load(path, state(-1))


def test_damage_is_no_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xckpt.save(tmp_path / "a", state(0))
    reads: list[int] = []
    before_reading(monkeypatch, reads.append)
    (tmp_path / "a" / "w" / "c" / "0" / "0").write_bytes(b"x" * 64 * 64 * 8)
    with pytest.raises(xckpt.CorruptCheckpointError):
        xckpt.load(tmp_path / "a")
    assert reads == [0]


AGAIN = "load into it again"


def notes_of(call: Callable[[], object]) -> str:
    with pytest.raises(xckpt.XckptError) as raised:
        call()
    return "\n".join(getattr(raised.value, "__notes__", ()))


def test_an_error_says_that_the_state_is_partly_filled(tmp_path: Path) -> None:
    path, into = tmp_path / "a", state(-1)
    xckpt.save(path, state(0))
    (path / "v" / "c" / "0").write_bytes(b"x" * 40_000 * 8)
    assert AGAIN not in notes_of(lambda: xckpt.load(path))
    assert AGAIN not in notes_of(lambda: xckpt.load_into(path, {"w": into["w"]}))
    assert number_of(into) == -1  # no leaf is read before all are checked
    assert AGAIN in notes_of(lambda: xckpt.load_into(path, into))


def test_it_says_so_where_the_checkpoint_was_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"other": np.arange(3)}
    before_reading(monkeypatch, lambda _: xckpt.save(path, other, overwrite=True))
    assert AGAIN in notes_of(lambda: xckpt.load_into(path, state(-1)))


@pytest.mark.parametrize("share", [True, False])
def test_all_ranks_alike(path: str, monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    """The first read of the second rank sees another checkpoint than that of the first one."""
    options = xckpt.LoadOptions(share_reads=share)
    real, replaced = ZarrStorageReader.read_data, False

    def load(group: ThreadGroup) -> int:
        return number_of(xckpt.load(path, state(-1), group=group, options=options))

    def read(reader: ZarrStorageReader, plan: Any, planner: Any) -> None:
        nonlocal replaced
        if not replaced:
            replaced = True
            save(path, 7)
        real(reader, plan, planner)

    monkeypatch.setattr(ZarrStorageReader, "read_data", read)
    outcomes = run_ranks(3, load)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.result for outcome in outcomes] == [7] * 3


def test_an_open_checkpoint_says_it_plainly(path: str) -> None:
    stored = xckpt.open(path)["w"]
    assert isinstance(stored, xckpt.StoredArray)
    save(path, 1)
    with pytest.raises(xckpt.CheckpointReplacedError, match="open it again to read what is there"):
        stored[:]
