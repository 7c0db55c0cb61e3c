"""Many keys of S3 are deleted by few requests; where that is refused, one by one."""

from __future__ import annotations

import numpy as np
import pytest

import xckpt
from tests.support.counted_bucket import CountedBucket, kinds, without_obstore
from tests.support.faulty_bucket import Altered, Answer, Fault, FaultyBucket, Request, never
from tests.support.servers import bucket, environment, faulty_s3, s3
from xckpt.storage.commit import remove
from xckpt.storage.location import Location, open_store

__all__ = ["bucket", "environment", "faulty_s3", "s3"]

STATE = {f"l{number}": np.full(3, number) for number in range(300)}
PLAIN = xckpt.SaveOptions(pack_bytes=0)


def together(request: Request) -> bool:
    return request.deletes and request.method == "POST"


def keys(url: str) -> list[bytes]:
    return open_store(Location.parse(url)).list().result()


def test_the_requests_of_a_deletion(bucket: CountedBucket) -> None:
    xckpt.save("s3://bucket/run", STATE, options=PLAIN)
    assert len(bucket.objects) > 600
    bucket.taken()
    xckpt.delete("s3://bucket/run")
    requests = bucket.taken()
    assert not bucket.objects
    assert len(requests) <= 17 and kinds(requests)["DELETE many"] == 1


def test_the_requests_of_an_overwrite(bucket: CountedBucket) -> None:
    xckpt.save("s3://bucket/run", STATE, options=PLAIN)
    bucket.taken()
    xckpt.save("s3://bucket/run", {"w": np.zeros(3)}, overwrite=True)
    assert len(bucket.taken()) <= 28 and len(bucket.objects) < 8
    assert xckpt.open("s3://bucket/run").verify() == []


def test_without_the_package_each_key_has_its_request(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save("s3://bucket/run", STATE, options=PLAIN)
    without_obstore(monkeypatch)
    bucket.taken()
    xckpt.delete("s3://bucket/run")
    assert not bucket.objects and kinds(bucket.taken())["DELETE chunk"] == 300


def an_error(answer: bytes) -> bytes:
    """The answer to a deletion, of which one key is refused."""
    refused = b"<Error><Key>one</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    return answer.replace(b"</DeleteResult>", refused + b"</DeleteResult>")


@pytest.mark.parametrize(
    "fault",
    [Answer(501, "NotImplemented"), Answer(403, "AccessDenied"), Altered(content=an_error)],
)
def test_what_is_not_deleted_together_is_deleted_one_by_one(
    faulty_s3: FaultyBucket, fault: Fault
) -> None:
    url = f"{faulty_s3.url}/one-by-one"
    few = {name: STATE[name] for name in list(STATE)[:12]}
    xckpt.save(url, few, options=PLAIN)
    faulty_s3.seen.clear()
    faulty_s3.fault = lambda request: fault if together(request) else None
    xckpt.delete(url)
    faulty_s3.fault = never
    assert any(map(together, faulty_s3.seen)) and keys(url) == []


def test_a_key_that_may_not_be_deleted_is_named(
    faulty_s3: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remove, "DELAYS", ())
    url = f"{faulty_s3.url}/kept"
    few = {name: STATE[name] for name in list(STATE)[:12]}
    xckpt.save(url, few, options=PLAIN)

    def kept(request: Request) -> Fault:
        one = request.method == "DELETE" and request.path.endswith("l7/c/0")
        return Answer(403, "AccessDenied") if one or together(request) else None

    faulty_s3.fault = kept
    with pytest.raises(xckpt.StorageError, match="are left"):
        xckpt.delete(url)
    faulty_s3.fault = never
    assert b"l7/c/0" in keys(url) and not xckpt.exists(url)
