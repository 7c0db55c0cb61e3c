"""The time of a call is one for all its places and parts, whichever request is not answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Fault, FaultyBucket, Request, Silence, never
from tests.support.servers import environment, faulty_s3, s3
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import convert
from xckpt.storage import ZarrStorageWriter
from xckpt.storage.budget import CLEANUP_SECONDS

__all__ = ["environment", "faulty_s3", "s3"]

pytestmark = pytest.mark.timeout(60)

TIMES: Final[dict[str, Any]] = {"timeout": 1.0, "retries": 0}
GRACE = 0.5 * ALLOWANCE
"""Seconds beyond the timeout: less than another part would add."""
STATE = {"w": np.ones((300, 300)), "b": np.zeros(3), "n": 1}


def _save(bucket: str, folder: Path) -> object:
    options = xckpt.SaveOptions(**TIMES)
    return xckpt.save(f"{bucket}/new", STATE, base=f"{bucket}/old", options=options)


def _copy(bucket: str, folder: Path) -> object:
    options = xckpt.LoadOptions(**TIMES)
    return xckpt.copy(f"{bucket}/old", f"{bucket}/new", options=options)


def _copy_out(bucket: str, folder: Path) -> object:
    return xckpt.copy(f"{bucket}/old", folder / "new", options=xckpt.LoadOptions(**TIMES))


def _delete(bucket: str, folder: Path) -> object:
    return xckpt.delete(f"{bucket}/old", options=xckpt.LoadOptions(**TIMES))


def _convert(bucket: str, folder: Path) -> object:
    return convert(f"{bucket}/old", f"{bucket}/new", options=xckpt.SaveOptions(**TIMES))


CALLS: Final = (_save, _copy, _copy_out, _delete, _convert)
AFTER: Final = [5, *(pytest.param(n, marks=pytest.mark.thorough) for n in (*range(5), 6, 8, 12))]


class Slower:
    """Requests are answered late, and from one on not at all."""

    def __init__(self, late: float, answered: int) -> None:
        self._late, self._left = late, answered

    def __call__(self, request: Request) -> Fault:
        self._left -= 1
        return Silence(self._late) if self._left >= 0 else Silence()


@pytest.mark.parametrize("answered", AFTER)
@pytest.mark.parametrize("call", CALLS)
def test_no_call_takes_longer(
    faulty_s3: FaultyBucket,
    tmp_path: Path,
    call: Callable[[str, Path], object],
    answered: int,
):
    bucket = f"{faulty_s3.url}/{tmp_path.name}"
    faulty_s3.fault = never
    xckpt.save(f"{bucket}/old", STATE)
    faulty_s3.fault = Slower(0.3, answered)
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        call(bucket, tmp_path)
    assert time.monotonic() - began < TIMES["timeout"] + GRACE


def test_a_conversion_that_writes_has_no_time_of_its_own(faulty_s3: FaultyBucket):
    """It had the whole time once more as soon as the place to write to was staged."""
    bucket = f"{faulty_s3.url}/late"
    faulty_s3.fault = never
    xckpt.save(f"{bucket}/old", STATE)
    faulty_s3.fault = Slower(0.2, 8)
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        convert(f"{bucket}/old", f"{bucket}/new", options=xckpt.SaveOptions(**TIMES))
    taken = time.monotonic() - began
    faulty_s3.fault = never
    assert taken < TIMES["timeout"] + CLEANUP_SECONDS + GRACE


@pytest.mark.parametrize(
    ("call", "late", "answered"),
    [
        (xckpt.CheckpointManager.reload, 0.4, 2),
        (xckpt.CheckpointManager.restore, 0.7, 1),
        (lambda run: run.restore_into(STATE), 0.7, 1),
    ],
)
def test_a_call_of_a_manager_has_one_time(
    faulty_s3: FaultyBucket,
    tmp_path: Path,
    call: Callable[[xckpt.CheckpointManager], object],
    late: float,
    answered: int,
):
    """Each request of its listing had the whole time, and then the load."""
    faulty_s3.fault = never
    root = f"{faulty_s3.url}/{tmp_path.name}"
    run = xckpt.CheckpointManager(root, load_options=xckpt.LoadOptions(**TIMES))
    run.save(0, STATE)
    run.wait()
    faulty_s3.fault = Slower(late, answered)
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        call(run)
    assert time.monotonic() - began < TIMES["timeout"] + GRACE
    faulty_s3.fault = never
    call(run)


def test_a_writer_that_saves_twice_has_time_for_each(faulty_s3: FaultyBucket):
    """The base is looked at once, with the first."""
    faulty_s3.fault = never
    old, new = f"{faulty_s3.url}/old", f"{faulty_s3.url}/new"
    xckpt.save(old, STATE)
    options = xckpt.SaveOptions(timeout=3.0, retries=0)
    writer = ZarrStorageWriter(new, overwrite=True, base=old, options=options)
    xckpt.save_state_dict(STATE, writer)
    time.sleep(3.0)
    xckpt.save_state_dict(STATE, writer)
    assert xckpt.load(new)["n"] == 1
