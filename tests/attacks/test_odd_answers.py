"""Buckets whose answers are odd: wrong lengths, ranges, statuses, redirects, dates, listings.

Whatever a bucket answers, a call succeeds with the right numbers, or is an error of xckpt in time.
What was committed before is still whole when the bucket is itself again, and the next save works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

import xckpt
from tests.attacks.test_buckets import HASTY, SLACK, Bucket, bucket, fronts, state
from tests.attacks.victim import Outcome, outcome
from tests.support.faulty_bucket import Altered, Answer, Fault, Faults, Request, never
from tests.support.servers import environment, gcs, s3
from xckpt.storage.commit import remove

__all__ = ["bucket", "environment", "fronts", "gcs", "s3"]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]

LAYOUTS = {
    "plain": xckpt.SaveOptions(pack_bytes=0, **HASTY),
    "packed": xckpt.SaveOptions(pack_bytes=1 << 16, **HASTY),
}
PAGE = b"<html><body>Sign in to this network</body></html>"
XML = b'<?xml version="1.0"?><Error><Code>PreconditionFailed</Code></Error>'


def is_read(request: Request) -> bool:
    """Whether it reads an object."""
    return request.method == "GET" and not request.listing


def is_condition(request: Request) -> bool:
    """Whether it writes on a condition."""
    return request.writes and request.conditional


def always(which: Callable[[Request], bool], fault: Fault) -> Faults:
    return lambda request: fault if which(request) else None


def once(which: Callable[[Request], bool], fault: Fault) -> Faults:
    """The first request of a kind to each object."""
    seen = set[tuple[str, str]]()

    def faults(request: Request) -> Fault:
        key = request.method, request.path
        if not which(request) or key in seen:
            return None
        seen.add(key)
        return fault

    return faults


def swapped() -> Faults:
    """Each object has the content of the one that was read before."""
    last = [b""]

    def other(content: bytes) -> bytes:
        content, last[0] = last[0], content
        return content

    return always(is_read, Altered(content=other))


def reads(**altered: object) -> Callable[[], Faults]:
    return lambda: always(is_read, Altered(**altered))  # type: ignore[arg-type]


READS: dict[str, Callable[[], Faults]] = {
    "half a body": reads(content=lambda data: data[: len(data) // 2]),
    "no body": reads(content=lambda data: b""),
    "more bytes than there are": reads(content=lambda data: data + b"x" * 100),
    "other bytes": reads(content=lambda data: data[1:] + data[:1]),
    "zeros": reads(content=lambda data: bytes(len(data))),
    "what another object holds": swapped,
    "a length that is too long": reads(length=1 << 20),
    "a length without bounds": reads(length=1 << 50),
    "a length that is too short": reads(length=3),
    "another range": reads(headers={"Content-Range": "bytes 5-9/10"}),
    "a range of an unknown length": reads(headers={"Content-Range": "bytes 0-0/*"}),
    "a range that is none": reads(headers={"Content-Range": "bytes x"}),
    "zipped, it says": reads(headers={"Content-Encoding": "gzip"}),
    "a page to sign in": reads(status=200, content=lambda data: PAGE),
    "not modified": reads(status=304, content=lambda data: b""),
    "no content": reads(status=204, content=lambda data: b""),
    "the whole object, as a range": reads(status=206, whole=True),
}


def right(loaded: object, step: int) -> bool:
    """Whether what was loaded is what was saved."""
    assert isinstance(loaded, dict)
    return all(np.array_equal(loaded[name], leaf) for name, leaf in state(step).items())


def save(bucket: Bucket, step: int, layout: str) -> Outcome:
    options = LAYOUTS[layout]
    return outcome(xckpt.save, bucket.url, state(step), overwrite=True, options=options)


def fair(done: Outcome) -> bool:
    """Success, or an error of ours in time."""
    return (done.kind == "done" or done.xckpt) and done.seconds < 20 + SLACK


def check_calls(bucket: Bucket, faults: Callable[[], Faults], layout: str = "plain") -> None:
    """A load, a verification, an overwrite and a deletion under faults."""
    assert save(bucket, 1, layout).kind == "done"
    bucket.spoil(faults())
    loaded = bucket.load(HASTY)
    assert fair(loaded), loaded
    assert loaded.value is None or right(loaded.value, 1)
    options = xckpt.LoadOptions(**HASTY)
    verified = outcome(lambda: xckpt.open(bucket.url, options=options).verify())
    assert fair(verified), verified
    bucket.spoil(faults())
    again = save(bucket, 2, layout)
    assert fair(again), again
    there = bucket.step()
    assert there in ({2} if again.kind == "done" else {1, 2}), again
    bucket.spoil(faults())
    deleted = outcome(lambda: xckpt.delete(bucket.url, options=options))
    assert fair(deleted), deleted
    assert bucket.step() in ({0} if deleted.kind == "done" else {0, there}), deleted
    assert save(bucket, 3, layout).kind == "done" and bucket.step() == 3


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove, "DELAYS", (0.0,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", READS)
def test_odd_answers_to_reads(bucket: Bucket, what: str, layout: str) -> None:
    check_calls(bucket, READS[what], layout)


WRITES: dict[str, Callable[[], Faults]] = {
    "done, and 412": lambda: once(is_condition, Altered(status=412, content=lambda data: XML)),
    "done, and 412 each time": lambda: always(
        is_condition, Altered(status=412, content=lambda data: XML)
    ),
    "not done, 409": lambda: once(is_condition, Answer(409, "ConditionalRequestConflict")),
    "done, and 409": lambda: once(is_condition, Altered(status=409, content=lambda data: XML)),
    "404 of a condition": lambda: once(is_condition, Answer(404, "NoSuchKey")),
    "done, and 500": lambda: once(lambda request: request.writes, Altered(status=500)),
    "an error in a success": lambda: once(is_condition, Answer(200, "InternalError")),
    "a version that is none": lambda: always(
        lambda request: request.writes, Altered(headers={"ETag": ""}, content=lambda data: b"{}")
    ),
    "a page to sign in": lambda: always(
        lambda request: request.writes, Altered(status=200, content=lambda data: PAGE)
    ),
    "a weak version": lambda: always(lambda request: True, Altered(headers={"ETag": 'W/"1"'})),
    "accepted": lambda: always(lambda request: request.writes, Altered(status=202)),
    "later, in an hour": lambda: once(
        lambda request: True, Answer(429, "SlowDown", {"Retry-After": "3600"})
    ),
    "never, in an hour": lambda: always(
        lambda request: True, Answer(503, "SlowDown", {"Retry-After": "3600"})
    ),
    "a day before": lambda: always(
        lambda request: True,
        Altered(headers=dict.fromkeys(("Date", "Last-Modified"), "Thu, 01 Jan 1970 00:00:00 GMT")),
    ),
    "a day that is none": lambda: always(
        lambda request: True, Altered(headers={"Date": "soon", "Last-Modified": "Never"})
    ),
    "deleted, and 404": lambda: always(
        lambda request: request.deletes, Altered(status=404, content=lambda data: XML)
    ),
    "not deleted, and 204": lambda: always(lambda request: request.deletes, Answer(204)),
}


@pytest.mark.parametrize("what", [*WRITES][:-1])
def test_odd_answers_to_writes(bucket: Bucket, what: str) -> None:
    check_calls(bucket, WRITES[what])


def test_deletions_that_are_said_and_not_done(bucket: Bucket) -> None:
    """The checkpoint is still there, or what is left of it is cleared by the next save."""
    assert save(bucket, 1, "plain").kind == "done"
    bucket.spoil(WRITES["not deleted, and 204"]())
    assert fair(save(bucket, 2, "plain"))
    assert fair(outcome(xckpt.delete, bucket.url))
    assert bucket.step() == 2
    assert save(bucket, 3, "plain").kind == "done" and bucket.step() == 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", ["itself", "the server", "a closed port", "a file", "nowhere"])
def test_redirects(bucket: Bucket, to: str, status: int) -> None:
    """Followed or refused: never without end, and never to a file."""

    def faults(request: Request) -> Fault:
        where = {
            "itself": f"{bucket.server.address}{request.path}",
            "the server": f"http://{bucket.server.upstream}{request.path}",
            "a closed port": f"http://127.0.0.1:1{request.path}",
            "a file": "file:///etc/passwd",
            "nowhere": "",
        }
        return Answer(status, "TemporaryRedirect", {"Location": where[to]})

    check_calls(bucket, lambda: faults)


def listing(made: Callable[[list[str]], list[str]], *, endless: bool = False) -> Faults:
    """Listings with other keys: entries are changed as text, in S3's XML or in Google's JSON."""

    def change(content: bytes) -> bytes:
        if content.startswith(b"{"):
            page = json.loads(content)
            entries = [json.dumps(item) for item in page.get("items", [])]
            page["items"] = [json.loads(item) for item in made(entries)]
            page |= {"nextPageToken": "again"} if endless else {}
            return json.dumps(page).encode()
        text = content.decode()
        entries = re.findall(r"<Contents>.*?</Contents>", text, re.DOTALL)
        first, last = text.partition("<Contents>")[0], text.rpartition("</Contents>")[2]
        if endless:
            first = re.sub("<IsTruncated>.*?<", "<IsTruncated>true<", first, flags=re.IGNORECASE)
            last = f"<NextContinuationToken>again</NextContinuationToken>{last}"
        return "".join([first, *(made(entries) if entries else []), last]).encode()

    return always(lambda request: request.listing, Altered(content=change))


def without(word: str) -> Callable[[list[str]], list[str]]:
    return lambda entries: [entry for entry in entries if word not in entry]


LISTINGS: dict[str, Callable[[], Faults]] = {
    "without the manifest": lambda: listing(without("xckpt.json")),
    "without the claim": lambda: listing(without("xckpt.saving")),
    "without chunks": lambda: listing(without("/c/")),
    "each key twice": lambda: listing(lambda entries: entries * 2),
    "backwards": lambda: listing(lambda entries: entries[::-1]),
    "with keys that are not there": lambda: listing(
        lambda entries: [*entries, *(entry.replace("/w1/", "/w9/") for entry in entries)]
    ),
    "with keys of others": lambda: listing(
        lambda entries: [*entries, *(entry.replace("attack", "other") for entry in entries)]
    ),
    "without end": lambda: listing(lambda entries: entries, endless=True),
    "a page to sign in": lambda: always(
        lambda request: request.listing, Altered(content=lambda data: PAGE)
    ),
    "half of one": lambda: always(
        lambda request: request.listing, Altered(content=lambda data: data[: len(data) // 2])
    ),
    "not found": lambda: always(lambda request: request.listing, Answer(404, "NoSuchKey")),
}


@pytest.mark.parametrize("what", LISTINGS)
def test_odd_listings(bucket: Bucket, what: str) -> None:
    """What a listing hides may stay; what it makes up is not missed."""
    options = xckpt.LoadOptions(**HASTY)
    assert save(bucket, 1, "plain").kind == "done"
    bucket.spoil(LISTINGS[what]())
    again = save(bucket, 2, "plain")
    assert fair(again), again
    there = bucket.step()
    assert there in ({2} if again.kind == "done" else {1, 2}), again
    bucket.spoil(LISTINGS[what]())
    collected = outcome(lambda: xckpt.gc(bucket.url, older_than=3600, options=options))
    deleted = outcome(lambda: xckpt.delete(bucket.url, options=options))
    assert fair(collected) and fair(deleted), (collected, deleted)
    assert bucket.step() in ({0} if deleted.kind == "done" else {0, there}), deleted
    last = save(bucket, 3, "plain")
    assert (last.kind, bucket.step()) == ("done", 3) or last.kind == "CheckpointExistsError", last


def test_reads_that_are_late_see_the_checkpoint_before(bucket: Bucket) -> None:
    """A manifest of before an overwrite names what is gone: an error, and no mixture."""
    assert save(bucket, 1, "plain").kind == "done"
    old = list[bytes]()
    bucket.spoil(
        always(
            lambda request: is_read(request) and request.path.endswith("xckpt.json"),
            Altered(content=lambda data: old.append(data) or data),  # type: ignore[func-returns-value]
        )
    )
    assert bucket.load(HASTY).kind == "done"
    bucket.spoil(never)
    assert save(bucket, 2, "plain").kind == "done"
    late = Altered(content=lambda data: old[0])
    bucket.spoil(
        always(lambda request: is_read(request) and request.path.endswith("xckpt.json"), late)
    )
    done = bucket.load(HASTY)
    assert done.xckpt and ("missing" in done.text or "replaced" in done.text), done
    assert bucket.step() == 2


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_writes_that_are_said_and_not_done(bucket: Bucket) -> None:
    """No save can see it; a load names the leaf."""
    lost = Answer(200, "", {"ETag": '"00000000000000000000000000000000"'})
    bucket.spoil(always(lambda request: request.writes and "/w1/c/" in request.path, lost))
    assert save(bucket, 1, "plain").kind == "done"
    bucket.spoil(never)
    loaded = bucket.load(HASTY)
    assert loaded.xckpt and "w1: [0, 64) x [0, 64)" in loaded.text, loaded
