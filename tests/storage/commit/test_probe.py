"""What a bucket does not permit is refused before anything is uploaded, with advice that fits."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

import xckpt
from tests.support.faulty_bucket import Altered, Answer, Faults, FaultyBucket, Request, never
from tests.support.servers import environment, faulty_gcs, faulty_s3, gcs, s3
from tests.support.stored import keys
from xckpt.core.manifest.own_keys import object_sizes
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "faulty_gcs", "faulty_s3", "gcs", "s3"]

STATE = {"w": np.arange(200_000), "b": {"c": np.ones(9, np.float32)}, "step": 2}


@pytest.fixture(params=["faulty_s3", "faulty_gcs"])
def bucket(request: pytest.FixtureRequest) -> FaultyBucket:
    found: FaultyBucket = request.getfixturevalue(request.param)
    found.fault = never
    found.name = re.sub(r"\W", "-", request.node.name)
    return found


def only(status: int, code: str, when: str) -> Faults:
    """An answer to the requests that write on a condition, list, delete, read or write; or all."""

    def fault(request: Request) -> Answer | None:
        kinds = {
            "all": True,
            "condition": request.writes and request.conditional,
            "list": request.listing,
            "delete": request.deletes,
            "write": request.writes,
            "read": request.method == "GET" and not request.listing,
        }
        return Answer(status, code) if kinds[when] else None

    return fault


FEW = [
    (only(403, "AccessDenied", "list"), r"may not list in the bucket.*s3:ListBucket"),
    (only(403, "AccessDenied", "read"), r"may not read in the bucket.*s3:GetObject"),
    (only(403, "AccessDenied", "write"), r"may not write in the bucket|s3:PutObject"),
    (only(403, "ExpiredToken", "all"), "the credentials have expired"),
]
MORE = []
FAULTS = [*FEW, *(pytest.param(*each, marks=pytest.mark.thorough) for each in MORE)]


@pytest.mark.parametrize("overwrite", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("fault, advice", FAULTS)
def test_refused_before_an_upload(
    bucket: FaultyBucket, fault: Faults, advice: str, overwrite: bool
) -> None:
    url = f"{bucket.url}/{bucket.name}"
    if overwrite:
        xckpt.save(url, STATE)
    there = keys(url)
    bucket.fault = fault
    bucket.seen.clear()
    with pytest.raises(xckpt.StorageError, match=advice) as caught:
        xckpt.save(url, STATE, overwrite=overwrite)
    assert str(caught.value).startswith(f"{url}: ")
    assert not hasattr(caught.value, "__notes__")
    sent = sum(len(request.content) for request in bucket.seen)
    assert len(bucket.seen) <= 8 and sent < 1000
    bucket.fault = never
    assert keys(url) == there
    if overwrite:
        assert xckpt.open(url).verify() == []


S3_ONLY = [
    (only(501, "NotImplemented", "all"), "needs conditional writes"),
    (only(501, "NotImplemented", "condition"), "needs conditional writes"),
    (only(507, "", "write"), "the quota or the space is used up"),
    (only(301, "PermanentRedirect", "all"), "in another region, or at another endpoint"),
    (only(307, "TemporaryRedirect", "all"), "in another region, or at another endpoint"),
]
"""Google's API answers none of these, and TensorStore repeats 501 and 507 there."""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fault, advice", S3_ONLY, ids=range(len(S3_ONLY)))
def test_refused_by_s3_before_an_upload(
    faulty_s3: FaultyBucket,
    request: pytest.FixtureRequest,
    fault: Faults,
    advice: str,
    overwrite: bool,
) -> None:
    faulty_s3.name = re.sub(r"\W", "-", request.node.name)
    url = f"{faulty_s3.url}/{faulty_s3.name}"
    faulty_s3.fault = never
    if overwrite:
        xckpt.save(url, STATE)
    there = keys(url)
    faulty_s3.fault = fault
    with pytest.raises(xckpt.StorageError, match=advice):
        xckpt.save(url, STATE, overwrite=overwrite)
    faulty_s3.fault = never
    assert keys(url) == there


@pytest.mark.parametrize("code, advice", [(501, "does not know this request"), (403, "may do")])
def test_a_load_says_what_the_bucket_refused(bucket: FaultyBucket, code: int, advice: str) -> None:
    url = f"{bucket.url}/{bucket.name}"
    xckpt.save(url, STATE)
    bucket.fault = only(code, "Refused", "read")
    with pytest.raises(xckpt.StorageError, match=advice):
        xckpt.load(url, options=xckpt.LoadOptions(retries=0))


def test_what_is_no_answer_of_a_bucket_is_called_so(bucket: FaultyBucket) -> None:
    """A page of a network that asks to sign in; little of it is quoted."""
    url, page = f"{bucket.url}/{bucket.name}", Altered(status=200, content=lambda _: b"<p>" * 9999)
    bucket.fault = lambda request: page if request.listing else None
    with pytest.raises(xckpt.StorageError, match="no answer of such a storage") as caught:
        xckpt.save(url, STATE)
    assert len(str(caught.value)) < 600


def test_a_deletion_needs_a_listing_that_has_the_manifest(bucket: FaultyBucket) -> None:
    """Google's storage lists nothing to who may not list: the data would be left, and unseen."""
    url = f"{bucket.url}/{bucket.name}"
    xckpt.save(url, STATE)
    there = keys(url)
    blind = Altered(content=lambda page: page.replace(b"xckpt.json", b"other"))
    bucket.fault = lambda request: blind if request.listing else None
    with pytest.raises(xckpt.StorageError, match=r"does not list xckpt\.json.*may not list"):
        xckpt.delete(url)
    bucket.fault = never
    assert keys(url) == there and xckpt.open(url).verify() == []


@pytest.mark.parametrize(
    "status, code, advice",
    [(404, "NoSuchKey", "though it holds what it held"), (409, "Conflict", "at the same time")],
)
def test_a_commit_that_is_refused_says_what_happened(
    bucket: FaultyBucket, status: int, code: str, advice: str
) -> None:
    """404 is Amazon's answer to a condition on an object that has gone."""
    url = f"{bucket.url}/{bucket.name}"
    xckpt.save(url, STATE)
    there, refused = keys(url), Answer(status, code)
    bucket.fault = lambda request: (
        refused if request.conditional and request.path.endswith("xckpt.json") else None
    )
    with pytest.raises(xckpt.StorageError, match=advice):
        xckpt.save(url, STATE, overwrite=True, options=xckpt.SaveOptions(retries=0))
    bucket.fault = never
    assert xckpt.open(url).verify() == [] and set(there) <= set(keys(url))


def test_a_storage_that_ignores_conditions_is_refused(
    faulty_s3: FaultyBucket,
) -> None:
    url = f"{faulty_s3.url}/ignores"
    faulty_s3.fault = never
    xckpt.save(url, STATE)
    there = keys(url)
    faulty_s3.dropped = ("if-match", "if-none-match")
    try:
        with pytest.raises(xckpt.StorageError, match="does not keep the conditions"):
            xckpt.save(url, STATE, overwrite=True)
    finally:
        faulty_s3.dropped = ()
    assert keys(url) == there


def test_requests_of_the_trial(bucket: FaultyBucket) -> None:
    """A fresh save asks twice more than for its own sake, an overwrite four times.

    At Google's storage a fresh one writes, lists and removes a key, too; the removal is on its way.
    """
    url = f"{bucket.url}/{bucket.name}"
    most = (7 if url.startswith("gs:") else 4, 5)
    for overwrite in (False, True):
        bucket.seen.clear()
        writer = xckpt.storage.ZarrStorageWriter(url, overwrite=overwrite)
        writer.stage()
        seen = [f"{each.method} {each.path}" for each in bucket.seen if each.method != "HEAD"]
        assert len(seen) <= most[overwrite], seen
        writer.abort()
        if not overwrite:
            xckpt.save(url, STATE)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_abort_removes_what_was_written_without_a_listing(
    bucket: FaultyBucket, overwrite: bool
) -> None:
    """The credentials expire for all but deletions, in the midst of the upload."""
    url = f"{bucket.url}/{bucket.name}"
    if overwrite:
        xckpt.save(url, STATE)
    there, written = keys(url), [0]

    def fault(request: Request) -> Answer | None:
        written[0] += request.writes
        listed = request.listing and written[0] > 3
        return (
            Answer(403, "ExpiredToken") if listed or (written[0] > 5 and request.writes) else None
        )

    bucket.fault = fault
    with pytest.raises(xckpt.StorageError, match="have expired"):
        xckpt.save(url, STATE, overwrite=overwrite)
    bucket.fault = never
    assert keys(url) == there


@pytest.mark.parametrize("overwrite", [False, True])
def test_packs_that_are_not_listed_are_said_and_collected(
    faulty_s3: FaultyBucket, overwrite: bool
) -> None:
    """They have the names of their content, which the coordinator does not know."""
    url, options = f"{faulty_s3.url}/packs-{overwrite}", xckpt.SaveOptions(pack_bytes=1 << 16)
    faulty_s3.fault = never
    if overwrite:
        xckpt.save(url, STATE, options=options)
    there = keys(url)

    def fault(request: Request) -> Answer | None:
        digests = request.writes and request.path.endswith("/xckpt.digests")
        packed = any("/xckpt.packs/" in each.path and each.writes for each in faulty_s3.seen)
        return Answer(403, "AccessDenied") if digests or (packed and request.listing) else None

    faulty_s3.seen.clear()
    faulty_s3.fault = fault
    with pytest.raises(xckpt.StorageError) as caught:
        xckpt.save(url, STATE, overwrite=overwrite, options=options)
    assert "xckpt.packs" in "".join(caught.value.__notes__)
    faulty_s3.fault = never
    xckpt.gc(url, older_than=0)
    assert keys(url) == there


def test_what_could_not_be_removed_is_named_with_its_size(
    bucket: FaultyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{bucket.url}/{bucket.name}"
    written = [0]

    def fault(request: Request) -> Answer | None:
        written[0] += request.writes
        return Answer(403, "AccessDenied") if written[0] > 4 else None

    bucket.fault = fault
    with caplog.at_level(logging.WARNING, "xckpt"), pytest.raises(xckpt.StorageError) as caught:
        xckpt.save(url, STATE)
    [note] = caught.value.__notes__
    assert note in caplog.messages
    assert re.search(r"objects, 1\.5 MiB that this save wrote .* could not be removed", note)
    bucket.fault = never
    assert keys(url)


def test_the_keys_that_a_manifest_implies_are_those_that_are_there(bucket: FaultyBucket) -> None:
    url = f"{bucket.url}/{bucket.name}"
    xckpt.save(url, STATE)
    store = open_store(Location.parse(url))
    implied = dict(object_sizes(xckpt.open(url).manifest))
    assert sorted([*implied, "xckpt.json", "xckpt.saving"]) == keys(url)
    assert implied == {key: len(store.read(key).result().value) for key in implied}
