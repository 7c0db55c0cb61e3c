"""Requests that are on their way while another call runs: they come late, and nothing is lost.

A save looks at its claim before it writes its manifest, and an overwrite before it deletes the old
keys; what it then sends may arrive after another call has taken the claim over.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import xckpt
from tests.storage.commit.test_each_request import s3, server
from tests.support.faulty_bucket import Fault, FaultyBucket, Request, Silence, never
from tests.support.servers import environment, faulty_gcs, gcs
from tests.support.stored import keys, step_at
from xckpt.storage.commit import conditional

__all__ = ["environment", "faulty_gcs", "gcs", "s3", "server"]

PLAIN = xckpt.SaveOptions(pack_bytes=0)
LATE = Silence(1.5)
"""So many seconds a request is on its way."""
_numbers = itertools.count()


def state(step: int) -> dict[str, object]:
    return {"w": np.full(3, step), "step": step}


class Meanwhile:
    """Holds up the first request of a kind, or its answer, and makes a call meanwhile."""

    def __init__(
        self, is_late: Callable[[Request], bool], act: Callable[[], object], late: Silence
    ) -> None:
        self._is_late, self._act, self._late = is_late, act, late
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __call__(self, request: Request) -> Fault:
        if self._thread is not None or not self._is_late(request):
            return None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self._late

    def _run(self) -> None:
        try:
            self._act()
        except xckpt.XckptError as error:
            self.error = error

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join(60)


def is_manifest(request: Request) -> bool:
    return request.writes and request.path.endswith("xckpt.json")


def deletes_data(request: Request) -> bool:
    named = request.path.endswith("w/c/0") or b"w/c/0</Key>" in request.content
    return request.deletes and named


@pytest.mark.parametrize("old", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize(
    "on_its_way",
    [LATE, pytest.param(Silence(3.0, done=True), marks=pytest.mark.thorough)],
    ids=["the request", "the answer"],
)
def test_a_manifest_that_arrives_amid_a_collection(
    server: FaultyBucket, on_its_way: Silence, old: bool
) -> None:
    """The collection waits for it: what it names is there."""
    url = f"{server.url}/late{next(_numbers)}"
    if old:
        xckpt.save(url, state(1), options=PLAIN)
    server.fault = late = Meanwhile(is_manifest, lambda: xckpt.gc(url, older_than=0), on_its_way)
    xckpt.save(url, state(2), overwrite=old, options=PLAIN)
    late.wait()
    server.fault = never
    assert late.error is None and step_at(url) == 2 and xckpt.open(url).verify() == []
    assert xckpt.gc(url, older_than=0) == []


@pytest.mark.parametrize("many", [conditional.MANY, 1])
def test_a_deletion_that_arrives_after_a_save_to_the_same_keys(
    server: FaultyBucket, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overwrite deletes the old keys, one by one or many by one request; meanwhile what it saved
    is deleted, and saved anew.
    """
    monkeypatch.setattr(conditional, "MANY", many)
    url = f"{server.url}/late{next(_numbers)}"

    def anew() -> None:
        time.sleep(0.5)  # the old claim has gone by now
        xckpt.delete(url)
        xckpt.save(url, state(3), options=PLAIN)

    xckpt.save(url, state(1), options=PLAIN)
    server.fault = late = Meanwhile(deletes_data, anew, LATE)
    xckpt.save(url, state(2), overwrite=True, options=PLAIN)
    late.wait()
    server.fault = never
    assert late.error is None and step_at(url) == 3 and xckpt.open(url).verify() == []


@pytest.mark.thorough
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("late", [Silence(3.0), Silence(6.0)], ids=str)
def test_a_manifest_later_than_a_look_is_good_for(
    server: FaultyBucket, late: Silence, old: bool
) -> None:
    """The save looks at its claim again; what it wrote is collected, and the old is there."""
    url = f"{server.url}/late{next(_numbers)}"
    if old:
        xckpt.save(url, state(1), options=PLAIN)
    server.fault = meanwhile = Meanwhile(is_manifest, lambda: xckpt.gc(url, older_than=0), late)
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.save(url, state(2), overwrite=old, options=PLAIN)
    meanwhile.wait()
    server.fault = never
    xckpt.gc(url, older_than=0)
    if old:
        assert step_at(url) == 1 and xckpt.open(url).verify() == []
    assert keys(url) == [] or old
    xckpt.save(url, state(3), overwrite=True, options=PLAIN)
    assert step_at(url) == 3


@pytest.mark.thorough
def test_a_look_counts_from_when_it_was_asked(server: FaultyBucket) -> None:
    """Its answer comes after a collection has taken the claim over."""
    url = f"{server.url}/late{next(_numbers)}"
    xckpt.save(url, state(1), options=PLAIN)
    server.fault = meanwhile = Meanwhile(
        lambda request: request.method == "GET" and "generations" in request.path,
        lambda: xckpt.gc(url, older_than=0),
        Silence(5.0, done=True),
    )
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.save(url, state(2), overwrite=True, options=PLAIN)
    meanwhile.wait()
    server.fault = never
    assert step_at(url) == 1
    xckpt.gc(url, older_than=0)
    assert step_at(url) == 1 and xckpt.gc(url, older_than=0) == []
