"""A test of a bucket talks to its own server, whatever earlier tests have left open."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.gcs_server import PAGE, GCSServer
from tests.support.servers import lead_to_gcs
from xckpt.storage.location import Location, open_store


@contextlib.contextmanager
def served() -> Iterator[GCSServer]:
    server = GCSServer("bucket")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_store_that_an_earlier_test_has_left_leads_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    place = Location.parse("gs://bucket/run")
    with served() as first, served() as second:
        lead_to_gcs(monkeypatch, first.address)
        left = open_store(place)
        left.write("a", b"1").result()
        lead_to_gcs(monkeypatch, second.address)
        open_store(place).write("b", b"2").result()
        assert list(first.buckets["bucket"].objects) == ["run/a"]
        assert list(second.buckets["bucket"].objects) == ["run/b"]
        del left


def test_a_closed_server_answers_no_connection_that_was_kept() -> None:
    with served() as server:
        kept = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
        kept.request("GET", "/storage/v1/b/bucket/o")
        assert kept.getresponse().read().startswith(b"{")
        socket = kept.sock
    assert socket.recv(1) == b""
    kept.close()


def test_a_listing_in_pages_lacks_nothing_that_stays_while_others_go() -> None:
    with served() as server:
        bucket = server.buckets["bucket"]
        names = [f"{number:03}" for number in range(3 * PAGE)]
        for name in names:
            bucket.put(name, b"")
        connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
        found: list[str] = []
        token = "?"
        while token:
            connection.request("GET", f"/storage/v1/b/bucket/o{token}")
            answer = json.loads(connection.getresponse().read())
            found += [each["name"] for each in answer["items"]]
            bucket.objects.pop(found[0], None)
            token = f"?pageToken={answer['nextPageToken']}" if "nextPageToken" in answer else ""
        connection.close()
    assert found == names
