"""Whether Google's storage lists is seen beside the claim: a refusal looks like an empty list."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Answer, Faults, FaultyBucket, Request, never
from tests.support.servers import environment, faulty_gcs, gcs
from tests.support.stored import keys
from xckpt.core.manifest.own_keys import CLAIM, GENERATIONS
from xckpt.storage.commit.conditional import KeyClaim
from xckpt.storage.commit.folder import new_identity
from xckpt.storage.commit.staging import begin
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "faulty_gcs", "gcs"]

STATE = {"w": np.arange(200), "b": {"c": np.ones(9, np.float32)}, "step": 2}
PLAIN, PACKED = xckpt.SaveOptions(pack_bytes=0), xckpt.SaveOptions(pack_bytes=1 << 16)


@pytest.fixture
def url(faulty_gcs: FaultyBucket, request: pytest.FixtureRequest) -> str:
    faulty_gcs.fault = never
    return f"{faulty_gcs.url}/{re.sub(r'[^a-z0-9]', '-', request.node.name)}"


def unlisted(request: Request) -> Answer | None:
    return Answer(403, "AccessDenied") if request.listing else None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("options", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_save_writes_over_nothing_that_a_refused_listing_hides(
    faulty_gcs: FaultyBucket, url: str, options: xckpt.SaveOptions, overwrite: bool
) -> None:
    store = open_store(Location.parse(url))
    users = ["w/zarr.json", "w/c/0", "zarr.json", "xckpt.digests", "notes.txt"]
    for key in users:
        store.write(key, b"the user's").result()
    faulty_gcs.fault = unlisted
    faulty_gcs.seen.clear()
    with pytest.raises(xckpt.StorageError, match=r"may not list.*nothing was written"):
        xckpt.save(url, STATE, options=options, overwrite=overwrite)
    faulty_gcs.fault = never
    written = [request.path for request in faulty_gcs.seen if request.writes]
    assert len(written) == 2  # the claim, and that of a generation
    assert sum(len(request.content) for request in faulty_gcs.seen) < 1000
    assert keys(url) == sorted(users)
    assert {store.read(key).result().value for key in users} == {b"the user's"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_of_it_stays(url: str, overwrite: bool) -> None:
    begun = keys(url)
    xckpt.save(url, STATE, overwrite=overwrite)
    assert begun == [] and not any(key.startswith(GENERATIONS) for key in keys(url))
    there = keys(url)
    with pytest.raises(xckpt.CheckpointExistsError, match=r"holds a checkpoint already"):
        xckpt.save(url, STATE)
    assert keys(url) == there
    xckpt.save(url, STATE, overwrite=True)
    root = xckpt.open(url).manifest.root
    assert all(key.startswith(f"{root}/") for key in keys(url) if key != "xckpt.json")
    assert f"{root}/{CLAIM}" in keys(url)


def test_files_of_the_user_are_refused_and_left_as_they_are(url: str) -> None:
    open_store(Location.parse(url)).write("w/c/0", b"the user's").result()
    with pytest.raises(xckpt.CheckpointExistsError, match=r"is not empty"):
        xckpt.save(url, STATE)
    assert keys(url) == ["w/c/0"]


def stray(url: str) -> str:
    """What a save leaves that is killed while it looks at the place."""
    identity = new_identity()
    claim = KeyClaim.of(f"{GENERATIONS}/{identity}/{CLAIM}", identity)
    open_store(Location.parse(url)).write(claim.key, claim.text).result()
    return claim.key


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_save_leaves_what_no_save_minds_and_gc_removes(url: str, overwrite: bool) -> None:
    key = stray(url)
    xckpt.save(url, STATE, overwrite=overwrite)
    assert not xckpt.open(url).manifest.root  # it is as if nothing were there
    assert key in keys(url)
    xckpt.gc(url, older_than=0)
    assert key not in keys(url) and xckpt.open(url).verify() == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_beside_files_of_the_user_it_makes_none_of_them_ours(url: str, overwrite: bool) -> None:
    key, store = stray(url), open_store(Location.parse(url))
    for name in ("zarr.json", "w/c/0"):
        store.write(name, b"the user's").result()
    if overwrite:
        xckpt.save(url, STATE, overwrite=True)
        assert xckpt.open(url).verify() == []
    else:
        with pytest.raises(xckpt.CheckpointExistsError, match=r"is not empty"):
            xckpt.save(url, STATE)
    xckpt.gc(url, older_than=0)
    assert key not in keys(url)
    assert {store.read(name).result().value for name in ("zarr.json", "w/c/0")} == {b"the user's"}


def test_of_two_saves_that_look_at_a_time_one_goes_on(url: str) -> None:
    """Each lists what the other tries the bucket with."""
    key = stray(url)
    first = begin(Location.parse(url), overwrite=False)
    with pytest.raises(xckpt.CheckpointExistsError, match=r"has not committed|just begun"):
        begin(Location.parse(url), overwrite=False)
    first.abort()
    assert keys(url) == [key]


def test_of_saves_that_race_one_goes_on(url: str) -> None:
    for number in range(4):
        path, won, start = f"{url}/{number}", list[int](), threading.Barrier(4)

        def save(rank: int, path: str = path, won: list[int] = won, start: Any = start) -> None:
            start.wait()
            with contextlib.suppress(xckpt.CheckpointExistsError):
                xckpt.save(path, {"w": np.full(50, rank)}, options=PLAIN)
                won.append(rank)

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (rank,) = won
        assert (xckpt.load(path)["w"] == rank).all() and xckpt.open(path).verify() == []
        assert not any(key.startswith(GENERATIONS) for key in keys(path))


@pytest.mark.parametrize("overwrite", [False, True])
def test_where_nothing_can_be_deleted_the_save_is_whole_and_says_what_is_left(
    faulty_gcs: FaultyBucket, url: str, caplog: pytest.LogCaptureFixture, overwrite: bool
) -> None:
    """A bucket may keep every object for a time; a key that is not there can be deleted."""

    def kept(request: Request) -> Answer | None:
        return Answer(403, "retentionPolicyNotMet") if _deletes_a_claim(request) else None

    fault: Faults = kept
    faulty_gcs.fault = fault
    with caplog.at_level(logging.WARNING, "xckpt"):
        xckpt.save(url, STATE, overwrite=overwrite)
    faulty_gcs.fault = never
    (left,) = [key for key in keys(url) if key.startswith(GENERATIONS)]
    assert left in "".join(caplog.messages) and xckpt.open(url).verify() == []


def _deletes_a_claim(request: Request) -> bool:
    return request.deletes and request.path.endswith(CLAIM)
