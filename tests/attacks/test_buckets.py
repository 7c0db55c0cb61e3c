"""Buckets that fail, lie, stall or forbid: S3 and GCS behind a server that spoils requests.

Whatever happens, a save succeeds or is a `StorageError`, what was there before is whole, and no key
stays behind for which nothing is said.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import Outcome, outcome
from tests.support.faulty_bucket import (
    Altered,
    Answer,
    Fault,
    FaultyBucket,
    Request,
    Reset,
    Silence,
    Trickle,
    in_front_of,
    never,
)
from tests.support.servers import environment, gcs, s3
from tests.support.time_limit import ALLOWANCE
from xckpt.storage.location import Location, forget_contexts, open_store

__all__ = ["environment", "gcs", "s3"]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]

ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gcs": "TENSORSTORE_GCS_HTTP_URL"}
PATIENT = {"retries": 16}
HASTY = {"retries": 2, "request_timeout": 4.0, "timeout": 20.0}
SLACK = 2.0 * ALLOWANCE
"""Seconds beyond a timeout."""

_numbers = itertools.count()


class Bucket:
    """A folder in a bucket, and the server before it."""

    def __init__(self, url: str, server: FaultyBucket) -> None:
        self.url = url
        self.server = server

    def spoil(self, faults: Callable[[Request], Fault]) -> None:
        self.server.fault = faults

    @property
    def keys(self) -> list[str]:
        return sorted(k.decode() for k in open_store(Location.parse(self.url)).list().result())

    def save(self, step: int, limits: dict[str, Any]) -> Outcome:
        options = xckpt.SaveOptions(chunk_bytes=4096, **limits)
        return outcome(xckpt.save, self.url, state(step), overwrite=True, options=options)

    def load(self, limits: dict[str, Any]) -> Outcome:
        return outcome(xckpt.load, self.url, options=xckpt.LoadOptions(**limits))

    def step(self) -> int:
        """The step that is there, whole; 0 for none."""
        self.spoil(never)
        if not xckpt.exists(self.url):
            return 0
        opened = xckpt.open(self.url)
        assert opened.verify() == []
        return int(opened["step"])  # type: ignore[call-overload]


def state(step: int) -> dict[str, Any]:
    return {**{f"w{n}": np.full((64, 64), step, np.float32) for n in range(4)}, "step": step}


@pytest.fixture(scope="module")
def fronts(
    s3: str, gcs: str, environment: pytest.MonkeyPatch
) -> Iterator[dict[str, tuple[str, FaultyBucket]]]:
    """The servers stand as long as TensorStore may remember their addresses."""
    with contextlib.ExitStack() as stack:
        made: dict[str, tuple[str, FaultyBucket]] = {}
        for kind, url in (("s3", s3), ("gcs", gcs)):
            server = stack.enter_context(in_front_of(os.environ[ENDPOINT[kind]]))
            environment.setenv(ENDPOINT[kind], server.address)
            forget_contexts()
            made[kind] = url, server
        yield made


@pytest.fixture(params=["s3", "gcs"])
def bucket(
    request: pytest.FixtureRequest, fronts: dict[str, tuple[str, FaultyBucket]]
) -> Iterator[Bucket]:
    url, server = fronts[request.param]
    yield Bucket(f"{url}/attack{next(_numbers)}", server)
    server.fault = never
    server.released.set()
    server.released = threading.Event()


def some(share: float, fault: Fault, seed: int = 0) -> Callable[[Request], Fault]:
    """A share of the requests."""
    pick = random.Random(seed)
    return lambda request: fault if pick.random() < share else None


def all_of(fault: Fault) -> Callable[[Request], Fault]:
    return lambda request: fault


def check(bucket: Bucket, done: Outcome, before: int, after: int) -> None:
    """Done and there, or a StorageError and what was there before."""
    assert done.kind in ("done", "StorageError"), (done.kind, done.text)
    assert bucket.step() in ((after,) if done.kind == "done" else (before, after))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("status", [503, 429, 500])
def test_refusals_that_pass(bucket: Bucket, share: float, status: int) -> None:
    for step in (1, 2):
        bucket.spoil(some(share, Answer(status, "SlowDown")))
        assert bucket.save(step, PATIENT).kind == "done"
        bucket.spoil(some(share, Answer(status, "SlowDown"), seed=1))
        done = bucket.load(PATIENT)
        assert done.kind == "done" and done.value["step"] == step, done.text
    assert bucket.step() == 2


ALWAYS = {
    "500": Answer(500, "InternalError"),
    "503": Answer(503, "SlowDown"),
    "429": Answer(429, "TooManyRequests"),
    "RequestTimeout": Answer(400, "RequestTimeout"),
    "SlowDown": Answer(403, "SlowDown"),
    "RequestTimeTooSkewed": Answer(403, "RequestTimeTooSkewed"),
    "409": Answer(409, "OperationAborted"),
    "AccessDenied": Answer(403, "AccessDenied"),
    "ExpiredToken": Answer(400, "ExpiredToken"),
    "401": Answer(401, "Unauthorized"),
    "301": Answer(301, "PermanentRedirect"),
    "NoSuchBucket": Answer(404, "NoSuchBucket"),
    "501": Answer(501, "NotImplemented"),
    "412": Answer(412, "PreconditionFailed"),
    "416": Answer(416, "InvalidRange"),
    "nonsense": Answer(200, "", {"ETag": '"x"'}),
    "teapot": Answer(418, "Teapot"),
    "reset": Reset(),
}


@pytest.mark.parametrize("what", ALWAYS)
def test_refusals_that_stay(bucket: Bucket, what: str) -> None:
    """Fresh, over an old one, and a load: errors in time; nothing of the refused save stays."""
    bucket.spoil(all_of(ALWAYS[what]))
    fresh = bucket.save(1, HASTY)
    nothing = bucket.load(HASTY)
    assert nothing.kind != "done" and nothing.xckpt, (nothing.kind, nothing.text)
    assert fresh.kind != "done" and fresh.xckpt, (fresh.kind, fresh.text)
    bucket.spoil(never)
    assert bucket.keys == []
    assert bucket.save(1, HASTY).kind == "done"
    before = bucket.keys
    bucket.spoil(all_of(ALWAYS[what]))
    again = bucket.save(2, HASTY)
    loaded = bucket.load(HASTY)
    assert again.kind != "done" and again.xckpt, (again.kind, again.text)
    assert loaded.kind != "done" and loaded.xckpt, (loaded.kind, loaded.text)
    assert bucket.step() == 1 and bucket.keys == before
    assert max(each.seconds for each in (fresh, nothing, again, loaded)) < 20 + SLACK


def test_no_conditional_writes(bucket: Bucket) -> None:
    """A store that answers 501 to them says so before anything is uploaded."""
    spoilt = lambda request: (  # noqa: E731
        Answer(501, "NotImplemented") if request.conditional and request.writes else None
    )
    bucket.spoil(spoilt)
    done = bucket.save(1, HASTY)
    assert done.kind == "StorageError" and "condition" in done.text, done.text
    bucket.spoil(never)
    assert bucket.keys == []


LOSSES = {
    "resets": Reset(),
    "half answers": Reset(done=True, after=100),
    "answers lost": Reset(done=True),
}


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("what", ["resets", "half answers", "answers lost"])
def test_losses(bucket: Bucket, what: str, share: float) -> None:
    for step in (1, 2, 3):
        bucket.spoil(some(share, LOSSES[what], seed=step))
        done = bucket.save(step, PATIENT)
        check(bucket, done, step - 1, step)
        assert done.kind == "done", done.text
        bucket.spoil(some(share, LOSSES[what], seed=step + 9))
        loaded = bucket.load(PATIENT)
        assert loaded.kind == "done" and loaded.value["step"] == step, loaded.text
    bucket.spoil(never)
    root = xckpt.open(bucket.url).manifest.root
    assert [k for k in bucket.keys if not k.startswith(root)] == ["xckpt.json"]


def test_listing_is_forbidden(bucket: Bucket) -> None:
    """An overwrite is refused before it uploads, or leaves nothing."""
    assert bucket.save(1, HASTY).kind == "done"
    before = bucket.keys
    bucket.spoil(lambda request: Answer(403, "AccessDenied") if request.listing else None)
    for _ in range(2):
        done = bucket.save(2, HASTY)
        assert done.kind == "StorageError" and "list" in done.text, done.text
    assert bucket.step() == 1 and bucket.keys == before


def test_deleting_is_forbidden(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """An overwrite is refused, or works and says what it could not remove."""
    assert bucket.save(1, HASTY).kind == "done"
    bucket.spoil(lambda request: Answer(403, "AccessDenied") if request.deletes else None)
    done = bucket.save(2, HASTY)
    check(bucket, done, 1, 2)
    assert "delet" in done.text or "remove" in caplog.text, (done, caplog.text)


def test_a_stale_listing(bucket: Bucket) -> None:
    assert bucket.save(1, HASTY).kind == "done"
    bucket.spoil(lambda request: Answer(200) if request.listing else None)
    done = bucket.save(2, HASTY)
    check(bucket, done, 1, 2)


@pytest.mark.parametrize("phase", ["save", "load"])
def test_an_endpoint_that_never_answers(bucket: Bucket, phase: str) -> None:
    if phase == "load":
        assert bucket.save(1, HASTY).kind == "done"
    bucket.spoil(all_of(Silence()))
    done = bucket.save(1, HASTY) if phase == "save" else bucket.load(HASTY)
    assert done.kind == "StorageError" and done.seconds < 4 + SLACK, (done.seconds, done.text)


@pytest.mark.parametrize("where", ["writes", "reads"])
def test_an_endpoint_falls_silent(bucket: Bucket, where: str) -> None:
    """After some requests; where only writes are silent, the time of the call ends it."""
    limit = HASTY["timeout"] if where == "writes" else 2 * HASTY["request_timeout"]
    assert bucket.save(1, HASTY).kind == "done"
    seen = itertools.count()
    bucket.spoil(
        lambda request: (
            Silence() if request.writes == (where == "writes") and next(seen) > 1 else None
        )
    )
    done = bucket.save(2, HASTY) if where == "writes" else bucket.load(HASTY)
    assert done.kind == "StorageError" and done.seconds < limit + SLACK, (done.seconds, done.text)
    assert bucket.step() == 1


def test_slow_answers(bucket: Bucket) -> None:
    bucket.spoil(some(0.05, Silence(2.0)))
    assert bucket.save(1, PATIENT).kind == "done"
    bucket.spoil(lambda request: Trickle(100_000) if request.method == "GET" else None)
    done = bucket.load(PATIENT)
    assert done.kind == "done" and done.value["step"] == 1


@pytest.mark.parametrize("endpoint", ["refused", "unknown"])
def test_a_dead_endpoint(
    endpoint: str, s3: str, environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "127.0.0.1" if endpoint == "refused" else "nowhere.invalid"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{held.getsockname()[1]}")
        saved = outcome(xckpt.save, f"{s3}/dead", state(1), options=xckpt.SaveOptions(**HASTY))
        loaded = outcome(xckpt.load, f"{s3}/dead", options=xckpt.LoadOptions(**HASTY))
    for done in (saved, loaded):
        assert done.kind == "StorageError" and done.seconds < 20 + SLACK, (done.seconds, done.text)


BODIES: dict[str, Callable[[Any, bytes], Any]] = {
    "a flipped bit": lambda server, data: bytes([*data[:-1], data[-1] ^ 1]) if data else data,
    "short": lambda server, data: data[: len(data) // 2],
    "empty": lambda server, data: b"",
    "longer": lambda server, data: data + b"x",
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("which", ["xckpt.json", "xckpt.digests", "/c/", "zarr.json"])
def test_wrong_bodies(bucket: Bucket, what: str, which: str) -> None:
    """Objects whose content is not what was written, with headers that fit."""
    assert bucket.save(1, HASTY).kind == "done"
    store = open_store(Location.parse(bucket.url))
    hit = [key for key in bucket.keys if which in key]
    for key in hit:
        store.write(key, BODIES[what](None, store.read(key).result().value)).result()
    loaded = bucket.load(HASTY)
    if which == "zarr.json":
        assert loaded.kind == "done" or loaded.xckpt
    else:
        assert loaded.kind != "done" and loaded.xckpt, (loaded.kind, loaded.text)
    verified = outcome(lambda: xckpt.open(bucket.url).verify())
    assert verified.value or verified.xckpt


def test_etags_that_differ_each_time(bucket: Bucket) -> None:
    """As some caches do: a load is right, or refused."""
    assert bucket.save(1, HASTY).kind == "done"
    numbers = itertools.count()
    bucket.spoil(
        lambda request: (
            Altered({"ETag": f'"{next(numbers):032x}"'}) if request.method == "GET" else None
        )
    )
    done = bucket.load(HASTY)
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)
    assert done.value is None or np.array_equal(done.value["w1"], state(1)["w1"])
    assert bucket.step() == 1


def test_ranges_are_ignored(bucket: Bucket) -> None:
    """Whole objects come where parts were asked for."""
    assert bucket.save(1, HASTY).kind == "done"
    bucket.spoil(lambda request: Altered(whole=True) if request.method == "GET" else None)
    done = bucket.load(HASTY)
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)
    assert done.value is None or np.array_equal(done.value["w1"], state(1)["w1"])
