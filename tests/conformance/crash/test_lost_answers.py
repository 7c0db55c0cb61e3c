"""A store may do what it is asked and fail to say so: nothing committed is lost by that."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import xckpt
from tests.conformance.crash.holding import Holding
from tests.support.stored import keys, step_at
from xckpt.storage.commit.staging import begin
from xckpt.storage.location import Location, open_store

OLD, NEW = {"w": np.arange(20), "step": 1}, {"w": np.arange(30), "step": 2}
MANIFEST, CLAIM = "xckpt.json", "xckpt.saving"
OTHERS = [pytest.param(key, marks=pytest.mark.thorough) for key in ("zarr.json", "xckpt.digests")]
"""Written without a condition, as the chunk "0" is."""
AGAIN, NOT_AGAIN = 503, 400
"""What TensorStore answers by asking again, and what it takes for the last word."""
_numbers = itertools.count()


@pytest.fixture
def url(bucket: Holding) -> str:
    return f"{bucket.url}/{next(_numbers)}"


@pytest.mark.parametrize("key", [CLAIM, MANIFEST, "0", *OTHERS])
def test_a_save_whose_answer_is_lost_asks_again(bucket: Holding, url: str, key: str) -> None:
    bucket.lost[key] = [AGAIN]
    xckpt.save(url, NEW)
    assert bucket.lost[key] == []
    assert step_at(url) == 2 and CLAIM in keys(url)


@pytest.mark.parametrize("key", [MANIFEST, "0", *OTHERS])
def test_an_overwrite_whose_answer_is_lost_asks_again(bucket: Holding, url: str, key: str) -> None:
    xckpt.save(url, OLD)
    bucket.lost[key] = [AGAIN]
    xckpt.save(url, NEW, overwrite=True)
    assert bucket.lost[key] == []
    assert step_at(url) == 2
    root = xckpt.open(url).manifest.root
    assert [each for each in keys(url) if not each.startswith(f"{root}/")] == [MANIFEST]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_is_called_an_error_stands(
    bucket: Holding, url: str, overwrite: bool
) -> None:
    if overwrite:
        xckpt.save(url, OLD)
    bucket.lost[MANIFEST] = [NOT_AGAIN]
    xckpt.save(url, NEW, overwrite=overwrite)
    assert step_at(url) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_may_come_yet_finds_its_data(
    bucket: Holding, url: str, overwrite: bool
) -> None:
    """The request for the manifest is on its way when the saver gives up."""
    if overwrite:
        xckpt.save(url, OLD)
    bucket.late[MANIFEST] = b""
    with pytest.raises(xckpt.StorageError, match="may still be committed"):
        xckpt.save(url, NEW, overwrite=overwrite)
    assert step_at(url) == 1 if overwrite else MANIFEST not in keys(url)
    # Its condition still holds: no other save has written the manifest.
    open_store(Location.parse(url)).write(MANIFEST, bucket.late.pop(MANIFEST)).result()
    assert step_at(url) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_after_a_commit_that_never_came_others_save(
    bucket: Holding, url: str, overwrite: bool
) -> None:
    if overwrite:
        xckpt.save(url, OLD)
    bucket.late[MANIFEST] = b""
    with pytest.raises(xckpt.StorageError, match="may still be committed"):
        xckpt.save(url, NEW, overwrite=overwrite)
    bucket.late.pop(MANIFEST)
    xckpt.save(url, OLD | {"step": 3}, overwrite=True)
    assert step_at(url) == 3
    root = xckpt.open(url).manifest.root
    assert [each for each in keys(url) if not each.startswith(f"{root}/")] == [MANIFEST]


def test_claims_of_one_process_differ(bucket: Holding, url: str) -> None:
    """S3 knows an object by its content: two claims with the same text would be one."""
    location = Location.parse(url)
    first = begin(location, overwrite=False)
    open_store(location).write(CLAIM, None).result()
    second = begin(location, overwrite=False)
    first.abort()
    assert CLAIM in keys(url)  # and perhaps a trial of listing, which is being removed
    second.abort()
    assert keys(url) == []


def test_another_save_is_still_noticed(bucket: Holding, url: str) -> None:
    store = open_store(Location.parse(url))
    store.write(CLAIM, b'{"host":"other","process":1}').result()
    bucket.lost[CLAIM] = [AGAIN]
    with pytest.raises(xckpt.CheckpointExistsError, match="claimed by a save"):
        xckpt.save(url, NEW)
    assert keys(url) == [CLAIM]
