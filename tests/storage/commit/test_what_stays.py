"""Whatever is removed, other checkpoints and the user's files below the same place stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, gcs, new_place, s3
from xckpt.storage.commit.folder import ClaimText
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "gcs", "s3"]

CLAIMED = msgspec.json.encode(ClaimText("elsewhere", 1, "0" * 16))
STATE = {"m": {"w": np.arange(6.0)}, "step": 1}


@pytest.fixture(params=["folder", "memory", "s3", "gcs"])
def place(request: pytest.FixtureRequest) -> str:
    return new_place(request)


def contents(place: str) -> dict[str, bytes]:
    """Key -> content of all that is below a place."""
    store = open_store(Location.parse(place))
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def collect(place: str) -> None:
    assert all(left.removed for left in xckpt.gc(place, older_than=0))


def delete(place: str) -> None:
    with contextlib.suppress(xckpt.NotACheckpointError):
        xckpt.delete(place)


def overwrite(place: str) -> None:
    xckpt.save(place, STATE, overwrite=True)


def fail(place: str) -> None:
    """A save that fails in its midst, after it was tried to go on where a dead one was."""

    def raise_it(progress: xckpt.Progress) -> None:
        raise RuntimeError(progress)

    options = xckpt.SaveOptions(progress=raise_it)
    with pytest.raises(Exception, match="Progress"):
        xckpt.save(place, STATE, overwrite=True, options=options)


@pytest.mark.parametrize("call", [collect, delete, overwrite, fail])
@pytest.mark.parametrize("left", ["a claim", "an unreadable manifest"])
def test_other_checkpoints_below_stay(place: str, left: str, call: Callable[[str], None]) -> None:
    """What a killed save has left is known by its shape, and so does another checkpoint look."""
    xckpt.save(f"{place}/step-1", STATE)
    xckpt.save(f"{place}/deep/er/step-2", STATE)
    steps = contents(place)
    mark = {"a claim": "xckpt.saving", "an unreadable manifest": "xckpt.json"}[left]
    content = CLAIMED if left == "a claim" else b"{"
    for key, value in {mark: content, "w/zarr.json": b"{}", "w/c/0": b"mine"}.items():
        open_store(Location.parse(place)).write(key, value).result()
    call(place)
    there = contents(place)
    assert {key: there.get(key) for key in steps} == steps
    assert call not in (collect, overwrite) or left != "a claim" or "w/c/0" not in there
