"""A path at which each host has a disk of its own: nothing is committed, and the error says why."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, run_ranks
from tests.support.time_limit import ALLOWANCE
from xckpt import SaveOptions
from xckpt.core.plan.items import SavePlan
from xckpt.storage import write_checkpoint
from xckpt.storage.chunks.orders import WriteOrders
from xckpt.storage.commit import explain
from xckpt.storage.location import Location

OPTIONS = [SaveOptions(), SaveOptions(crc32c=True), SaveOptions(pack_bytes=1 << 16)]


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What rank 1 sees in place of ``tmp_path / "run"``: an empty folder."""
    place, orders_of = tmp_path / "other", write_checkpoint.orders_of
    place.mkdir()

    def seen(plan: SavePlan) -> WriteOrders:
        orders = orders_of(plan)
        assert orders.location.folder is not None
        if threading.current_thread().name != "rank 1":
            return orders
        elsewhere = Location.parse(place / orders.location.folder.name)
        return msgspec.structs.replace(orders, location=elsewhere)

    monkeypatch.setattr(write_checkpoint, "orders_of", seen)
    return place


def save(path: Path, options: SaveOptions) -> list[str]:
    """What each of two ranks raises; each has a leaf of its own."""

    def run(group: ThreadGroup) -> None:
        threading.current_thread().name = f"rank {group.rank}"
        state = {"both": 1, f"w{group.rank}": np.arange(6.0)}
        xckpt.save(path, state, group=group, options=options)

    return [str(outcome.error or "") for outcome in run_ranks(2, run)]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "crc32c", "packs"])
def test_a_disk_of_this_host_alone_is_refused(
    tmp_path: Path, other_disk: Path, options: SaveOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "LOOKS", (0.01,))
    (tmp_path / "run").mkdir()
    errors = save(tmp_path / "run" / "step", options)
    assert all("rank 1: StorageError" in each for each in errors)
    assert all("a disk that each host has of its own does not do" in each for each in errors)
    assert not xckpt.exists(tmp_path / "run" / "step")
    assert list(other_disk.rglob("*")) == []


def test_a_folder_that_is_seen_a_moment_later(tmp_path: Path, other_disk: Path) -> None:
    """Rank 1's disk shows the folder late, as a network disk may."""
    stop = threading.Event()

    def copy() -> None:
        while not stop.wait(0.05):
            for folder in tmp_path.glob(".step.saving-*"):
                (other_disk / folder.name).mkdir(exist_ok=True)

    copying = threading.Thread(target=copy)
    copying.start()
    began = time.monotonic()
    try:
        assert save(tmp_path / "step", SaveOptions()) == ["", ""]
    finally:
        stop.set()
        copying.join()
    assert time.monotonic() - began < 30 * ALLOWANCE
