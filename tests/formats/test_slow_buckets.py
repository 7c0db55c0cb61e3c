"""A bucket that says too late what lies there is an error of the storage: nothing is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Answer, FaultyBucket, Request, Silence
from tests.support.servers import environment, faulty_s3, s3
from tests.support.time_limit import ALLOWANCE
from xckpt.core.manifest.own_keys import MANIFEST

__all__ = ["environment", "faulty_s3", "s3"]

pytestmark = pytest.mark.timeout(60)

TIMES: Final[dict[str, Any]] = {"timeout": 1.0, "retries": 0}
GRACE = 1.0 * ALLOWANCE
"""Seconds beyond the timeout."""

CALLS: Final[dict[str, Callable[[str], object]]] = {
    "load": lambda path: xckpt.load(path, options=xckpt.LoadOptions(**TIMES)),
    "load_into": lambda path: xckpt.load_into(
        path, {"w": np.zeros(3)}, options=xckpt.LoadOptions(**TIMES)
    ),
    "open": lambda path: xckpt.open(path, options=xckpt.LoadOptions(**TIMES)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_that_is_not_found_in_time(faulty_s3: FaultyBucket, call: str):
    def fault(request: Request) -> Silence | None:
        return None if MANIFEST in request.path else Silence()

    faulty_s3.fault = fault
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        CALLS[call](f"{faulty_s3.url}/model.safetensors")
    assert time.monotonic() - began < TIMES["timeout"] + GRACE


@pytest.mark.parametrize("call", CALLS)
def test_all_requests_have_one_time(faulty_s3: FaultyBucket, call: str):
    faulty_s3.fault = lambda request: Silence(0.6)
    began = time.monotonic()
    with pytest.raises(xckpt.StorageError, match="within the 1 s that the call may take"):
        CALLS[call](f"{faulty_s3.url}/model.safetensors")
    assert time.monotonic() - began < TIMES["timeout"] + 0.5 * ALLOWANCE


@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_that_may_not_be_listed(faulty_s3: FaultyBucket, call: str):
    def fault(request: Request) -> Answer | None:
        return None if MANIFEST in request.path else Answer(403, "AccessDenied")

    faulty_s3.fault = fault
    with pytest.raises(xckpt.NotACheckpointError, match="no committed checkpoint"):
        CALLS[call](f"{faulty_s3.url}/nothing")
