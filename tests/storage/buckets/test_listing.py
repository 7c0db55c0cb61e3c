"""What is refused to a listing is refused to the caller: it is not taken for nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Answer, Fault, Faults, FaultyBucket, Request, never
from tests.support.gcs_server import PAGE
from tests.support.servers import environment, faulty_bucket, faulty_gcs, faulty_s3, gcs, s3
from xckpt.policies import EverySteps
from xckpt.storage.buckets.listing import listed
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "faulty_bucket", "faulty_gcs", "faulty_s3", "gcs", "s3"]

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


@pytest.mark.parametrize("call", CALLS)
def test_refused_credentials_make_no_run_look_empty(faulty_bucket: FaultyBucket, call: str) -> None:
    """A training that has lost its permissions would have begun anew, and gc have found nothing."""
    root = f"{faulty_bucket.url}/refused-{call}"
    with run_at(root) as run:
        run.save(1, STATE)
    for answer in (Answer(401, "authError"), Answer(403, "forbidden")):
        faulty_bucket.fault = refusing(answer)
        with pytest.raises(xckpt.StorageError, match=f"{root}.*(credentials|forbidden)"):
            CALLS[call](root)
    faulty_bucket.fault = never
    assert [each.number for each in run_at(root).steps()] == [1]
    assert xckpt.gc(root, older_than=0) == []


class Pages:
    """Answers the pages of all listings, by their number among them."""

    def __init__(self, answer: Answer, refused: Callable[[int], bool]) -> None:
        self._answer, self._refused = answer, refused
        self.count = 0

    def __call__(self, request: Request) -> Fault:
        if not request.listing:
            return None
        self.count += 1
        return self._answer if self._refused(self.count) else None


@pytest.mark.parametrize(
    "status", [401, *(pytest.param(each, marks=pytest.mark.thorough) for each in (400, 403))]
)
@pytest.mark.parametrize("page", [1, 2, 3])
def test_a_page_that_is_refused_hides_no_step(
    faulty_gcs: FaultyBucket, status: int, page: int
) -> None:
    """Where the credentials expire between two pages, the newest steps were gone, and no error."""
    faulty_gcs.fault = never
    root = f"{faulty_gcs.url}/pages-{status}-{page}"
    state = {f"w{number}": np.arange(3.0) for number in range(PAGE)}
    with run_at(root) as run:
        run.save(1, state)
        run.save(2, state)
    faulty_gcs.fault = Pages(Answer(status, "authError"), lambda number: number == page)
    assert [each.number for each in run_at(root).steps()] == [1, 2]
    faulty_gcs.fault = Pages(Answer(status, "authError"), lambda number: number >= page)
    if page > 1:  # of all listings, and nothing else, is not seen
        with pytest.raises(xckpt.StorageError, match=f"{root}: the bucket does not list"):
            run_at(root).latest()


def test_keys_that_are_deleted_while_they_are_listed(faulty_gcs: FaultyBucket) -> None:
    """Others are listed, once."""
    faulty_gcs.fault = never
    where = Location.parse(f"{faulty_gcs.url}/shrinking")
    store = open_store(where)
    keys = [f"{number:03}" for number in range(2 * PAGE + 5)]
    for key in keys:
        store.write(key, b"x").result()
    left = len(keys)

    def delete(request: Request) -> Fault:
        nonlocal left
        if request.listing and left > PAGE:
            left -= 1
            there = faulty_gcs.fault
            faulty_gcs.fault = never
            store.write(keys[left], None).result()
            faulty_gcs.fault = there
        return None

    faulty_gcs.fault = delete
    found = listed(store, where)
    faulty_gcs.fault = never
    assert sorted(set(found)) == sorted(found)
    assert {key.encode() for key in keys[:left]} <= set(found)
