"""How many requests calls make to Google's storage, and how many one after the other.

The server of the other tests answers after a while here, and notes what it is asked, so that the
same is counted as of S3 (`test_round_trips`).
"""

from __future__ import annotations

import threading
import time
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

import xckpt
from tests.storage.test_round_trips import PACKED, PLAIN, STATE, same, trips
from tests.support import gcs_server
from tests.support.counted_bucket import CountedBucket, SeenRequest, kinds
from tests.support.servers import environment, gcs

__all__ = ["environment", "gcs"]

DELAY = 0.06


class Counted(CountedBucket):
    """What the server was asked; only `taken` and `delay` are of use."""

    def note(self, handler: gcs_server._Handler, began: float, answered: int) -> None:
        """A request is answered now."""
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        listing = handler.command == "GET" and url.path.endswith("/o")
        key = query.get("prefix", "") if listing else query.get("name", "")
        key = key or unquote(url.path.rpartition("/o/")[2])
        method = "PUT" if handler.command == "POST" else handler.command
        conditional = method == "PUT" and "ifGenerationMatch" in query
        sent = int(handler.headers.get("Content-Length") or 0)
        times = began, time.monotonic()
        self._seen.append(SeenRequest(method, key, listing, conditional, *times, sent, answered))


@pytest.fixture
def bucket(gcs: str, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted, local = Counted(), threading.local()
    asked, answer = gcs_server._Handler._request, gcs_server._Handler._answer

    def noted(self: gcs_server._Handler) -> tuple[str, dict[str, str]]:
        local.began = time.monotonic()
        time.sleep(counted.delay)
        return asked(self)

    def answered(
        self: gcs_server._Handler,
        status: int,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        counted.note(self, local.began, len(content))
        answer(self, status, content, headers)

    monkeypatch.setattr(gcs_server._Handler, "_request", noted)
    monkeypatch.setattr(gcs_server._Handler, "_answer", answered)
    return counted


@pytest.mark.parametrize("options", [PLAIN, PACKED])
def test_a_load(bucket: Counted, options: xckpt.SaveOptions) -> None:
    url = f"gs://bucket/load/{options.pack_bytes}"
    xckpt.save(url, STATE, options=options)
    bucket.delay = DELAY
    assert len(trips(bucket, lambda: xckpt.load(url), 2)) <= 2
    part = trips(bucket, lambda: xckpt.open(url).array("w3")[100:200], 2)
    assert len(part) <= 2
    assert same(xckpt.load(url))


def test_a_save(bucket: Counted) -> None:
    bucket.delay = DELAY
    urls = (f"gs://bucket/save/{number}" for number in count())
    # Look, claim, write, commit, as with S3: whether this bucket may be listed is seen meanwhile.
    chain = trips(bucket, lambda: xckpt.save(next(urls), STATE, options=PACKED), 4)
    assert len(chain) <= 4, chain
    assert same(xckpt.load("gs://bucket/save/0"))
    few = dict(list(STATE.items())[:8])
    chain = trips(bucket, lambda: xckpt.save(next(urls), few, options=PLAIN), 4)
    assert len(chain) <= 4, chain


def test_small_leaves_take_few_requests(bucket: Counted) -> None:
    url = "gs://bucket/few"
    bucket.taken()
    xckpt.save(url, STATE, options=PACKED)
    # The claim of a generation shows that the bucket may be listed: 3 requests more than with S3.
    assert kinds(bucket.taken()) == {
        "DELETE trial": 1,
        "DELETE xckpt.saving": 1,
        "GET xckpt.json": 1,
        "GET xckpt.saving": 2,
        "LIST": 2,
        "PUT pack": 1,
        "PUT xckpt.digests": 1,
        "PUT xckpt.saving": 1,
        "PUT zarr.json": 1,
        "PUT-if xckpt.json": 1,
        "PUT-if xckpt.saving": 1,
    }
    assert same(xckpt.load(url))
    assert kinds(bucket.taken()) == {
        "GET pack": 1,
        "GET xckpt.digests": 1,
        "GET xckpt.json": 1,
    }


def test_a_deletion_waits_for_no_part_of_the_objects(bucket: Counted) -> None:
    urls = [f"gs://bucket/delete/{number}" for number in range(6)]
    for url in urls:
        xckpt.save(url, {f"w{n}": np.arange(n + 1) for n in range(60)}, options=PLAIN)
    bucket.delay, rest = DELAY, iter(urls)
    objects = ("DELETE chunk", "DELETE zarr.json")
    assert len(trips(bucket, lambda: xckpt.delete(next(rest)), 4, objects)) <= 4


def test_a_deletion_takes_few_requests(bucket: Counted) -> None:
    """Google's storage deletes on a condition by one request."""
    urls = [f"gs://bucket/few-deletions/{number}" for number in range(6)]
    for url in urls:
        xckpt.save(url, STATE, options=PACKED)
    bucket.delay, rest = DELAY, iter(urls)
    assert len(trips(bucket, lambda: xckpt.delete(next(rest)), 6)) <= 6
