"""What is refused to a listing is refused to the caller: it is not taken for nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Answer, Faults, FaultyBucket, never
from tests.support.servers import environment, faulty_gcs, faulty_s3, gcs, s3
from xckpt.policies import EverySteps

__all__ = ["environment", "faulty_gcs", "faulty_s3", "gcs", "s3"]

STATE = {"w": np.arange(3.0)}


def run_at(root: str) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(root, save=EverySteps(1))


CALLS: dict[str, Callable[[str], Any]] = {
    "steps": lambda root: run_at(root).steps(),
    "next_step": lambda root: run_at(root).next_step,
    "restore": lambda root: run_at(root).restore(STATE, default=STATE),
    "gc": lambda root: xckpt.gc(root, older_than=0),
    "load": lambda root: xckpt.load(f"{root}/step-00000001"),
    "exists": lambda root: xckpt.exists(f"{root}/step-00000001"),
    "copy": lambda root: xckpt.copy(f"{root}/step-00000001", f"{root}/copy"),
    "delete": lambda root: xckpt.delete(f"{root}/step-00000001"),
}


def refusing(answer: Answer) -> Faults:
    return lambda request: answer


@pytest.fixture(params=["faulty_s3", "faulty_gcs"])
def server(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    server: FaultyBucket = request.getfixturevalue(request.param)
    server.fault = never
    yield server
    server.fault = never


@pytest.mark.parametrize("call", CALLS)
def test_refused_credentials_make_no_run_look_empty(server: FaultyBucket, call: str) -> None:
    """A training that has lost its permissions would have begun anew, and gc have found nothing."""
    root = f"{server.url}/refused-{call}"
    with run_at(root) as run:
        run.save(1, STATE)
    for answer in (Answer(401, "authError"), Answer(403, "forbidden")):
        server.fault = refusing(answer)
        with pytest.raises(xckpt.StorageError, match=f"{root}.*(credentials|forbidden)"):
            CALLS[call](root)
    server.fault = never
    assert [each.number for each in run_at(root).steps()] == [1]
    assert xckpt.gc(root, older_than=0) == []
