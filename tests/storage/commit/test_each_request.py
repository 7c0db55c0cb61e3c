"""Each request of a call to a bucket fails, and those after it: nothing is lost, mixed or left.

After that the old checkpoint or the new one is there, whole, or none where that is allowed; and a
collection, or the next save, leaves no other key.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import xckpt
from tests.support.counted_bucket import counted_in_thread, environment_of
from tests.support.faulty_bucket import (
    Answer,
    Fault,
    FaultyBucket,
    Request,
    Reset,
    in_front_of,
    never,
)
from tests.support.servers import environment, faulty_gcs, gcs
from xckpt.core.manifest.own_keys import object_sizes
from xckpt.storage.commit import conditional, remove
from xckpt.storage.location import Location, forget_contexts, open_store

__all__ = ["environment", "faulty_gcs", "gcs"]

HASTY = {"retries": 0, "request_timeout": 5.0}
LIMITS = xckpt.LoadOptions(**HASTY)
PACKED, PLAIN = (xckpt.SaveOptions(pack_bytes=most, **HASTY) for most in (1 << 16, 0))
SOURCE = "memory://each-request-source"
MODES: dict[str, tuple[Fault, bool]] = {
    "refused once": (Answer(503, "SlowDown"), False),
    "done, the answer is lost": (Reset(done=True), False),
    "down from then on": (Answer(503, "SlowDown"), True),
    "expired from then on": (Answer(403, "ExpiredToken"), True),
}
"""What happens to a request, and whether it also happens to all that follow."""
_numbers = itertools.count()


FROZEN = np.arange(512, dtype=np.float32)
"""Is in every state, and fills most of a pack: what shares with a base copies it."""


def state(step: int) -> dict[str, object]:
    leaves = {f"w{n}": np.full(64, step, np.float32) for n in range(3)}
    return {**leaves, "frozen": FROZEN, "step": step}


def save(url: str, step: int, options: xckpt.SaveOptions) -> None:
    xckpt.save(url, state(step), overwrite=True, options=options)


def save_with_base(url: str, options: xckpt.SaveOptions) -> None:
    xckpt.save(url, state(2), base=url, overwrite=True, options=options)


def copy(url: str, options: xckpt.SaveOptions) -> None:
    save(SOURCE, 2, options)
    xckpt.copy(SOURCE, url, overwrite=True, options=LIMITS)


def delete(url: str, options: xckpt.SaveOptions) -> None:
    xckpt.delete(url, options=LIMITS)


def load(url: str, options: xckpt.SaveOptions) -> None:
    """What is loaded is what was saved, or nothing is."""
    loaded = xckpt.load(url, options=LIMITS)
    assert all(np.array_equal(loaded[name], np.asarray(leaf)) for name, leaf in state(1).items())


def verify(url: str, options: xckpt.SaveOptions) -> None:
    """A request that fails is no damage."""
    problems = xckpt.open(url, options=LIMITS).verify()
    assert {problem.kind for problem in problems} <= {"unreadable"}, problems
    if problems:
        raise xckpt.StorageError(str(problems[0]))


def collect(url: str, options: xckpt.SaveOptions) -> None:
    xckpt.gc(url, older_than=0, options=LIMITS)


Call = Callable[[str, xckpt.SaveOptions], object]
CALLS: dict[str, tuple[Call, int, int]] = {
    "save": (lambda url, options: save(url, 2, options), 0, 2),
    "overwrite": (lambda url, options: save(url, 2, options), 1, 2),
    "overwrite again": (lambda url, options: save(url, 2, options), 2, 2),
    "save with base": (save_with_base, 1, 2),
    "save with base again": (save_with_base, 2, 2),
    "delete": (delete, 1, 0),
    "delete what was overwritten": (delete, 2, 0),
    "copy": (copy, 0, 2),
    "copy over another": (copy, 1, 2),
    "load": (load, 1, 1),
    "verify": (verify, 2, 1),
    "gc of a save": (collect, 0, 0),
    "gc of an overwrite": (collect, 1, 1),
}
"""What is called, how often step 1 is saved before, and the step that is there afterwards."""
FEWEST = {"load": 3, "verify": 4}
"""Kinds of requests that a call makes at least, where these are fewer than six."""


def cut_off(server: FaultyBucket, url: str, options: xckpt.SaveOptions) -> None:
    """A save whose bucket is down once it has written data: nothing of it is removed."""
    down = False

    def fault(request: Request) -> Fault:
        nonlocal down
        data = request.path.endswith("/c/0") or "/xckpt.packs/" in request.path
        hit, down = down, down or (request.writes and data)
        return Answer(503, "SlowDown") if hit else None

    server.fault = fault
    with pytest.raises(xckpt.StorageError):
        save(url, 7, options)
    server.fault = never
    forget_contexts()


class Spoilt:
    """The faults of one call: the ``number``-th request of a kind, and perhaps what follows."""

    def __init__(self, kind: str = "", number: int = 0, mode: str = "refused once") -> None:
        self.seen = Counter[str]()
        self._at = kind, number
        self._fault, self._lasts = MODES[mode]
        self._hit = False

    def __call__(self, request: Request) -> Fault:
        last = re.sub(r"[0-9a-f]{16,}", "*", request.path.rpartition("/")[2])
        kind = f"{request.method} {request.conditional} {request.listing} {last}"
        self.seen[kind] += 1
        hit = self._at == (kind, self.seen[kind])
        self._hit |= hit
        return self._fault if hit or (self._lasts and self._hit) else None


def step_at(url: str) -> int:
    """The step that is there, whole; 0 for none."""
    try:
        checkpoint = xckpt.open(url)
    except xckpt.NotACheckpointError:
        return 0
    assert checkpoint.verify() == []
    return int(checkpoint["step"])  # type: ignore[call-overload]


def others(url: str) -> set[str]:
    """The keys that the checkpoint at a place does not need."""
    keys = {key.decode() for key in open_store(Location.parse(url)).list().result()}
    if "xckpt.json" not in keys:
        return keys
    manifest = xckpt.open(url).manifest
    within = f"{manifest.root}/" if manifest.root else ""
    own = {f"{within}{key}" for key, _ in object_sizes(manifest)}
    packs = {key for key in keys if key.startswith(f"{within}xckpt.packs/")}
    return keys - own - packs - {"xckpt.json", "xckpt.saving", f"{within}xckpt.saving"}


@pytest.fixture(scope="module")
def s3(environment: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with counted_in_thread() as (_, port), in_front_of(f"http://127.0.0.1:{port}") as server:
        for name, value in environment_of(port).items():
            environment.setenv(name, value)
        environment.setenv("AWS_ENDPOINT_URL", server.address)
        server.url = "s3://bucket"
        yield server


@pytest.fixture(params=["s3", pytest.param("faulty_gcs", marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FaultyBucket:
    monkeypatch.setattr(remove, "DELAYS", (0.0,))
    found: FaultyBucket = request.getfixturevalue(request.param)
    return found


def some(kinds: Counter[str], most: int) -> list[tuple[str, int]]:
    """Requests by kind and number, evenly chosen."""
    every = [(kind, number + 1) for kind, count in kinds.items() for number in range(count)]
    return every[:: max(1, len(every) // most)]


def check(
    server: FaultyBucket, call: str, mode: str, options: xckpt.SaveOptions, most: int
) -> None:
    act, before, after = CALLS[call]

    def spoil(spoilt: Spoilt) -> tuple[str, Exception | None]:
        url, raised = f"{server.url}/each{next(_numbers)}", None
        for _ in range(before):
            save(url, 1, options)
        if call.startswith("gc"):
            cut_off(server, url, options)
        server.fault = spoilt
        try:
            act(url, options)
        except xckpt.XckptError as error:
            raised = error
        finally:
            server.fault = never
            forget_contexts()
        return url, raised

    whole = Spoilt()
    _, raised = spoil(whole)
    assert raised is None and len(whole.seen) >= FEWEST.get(call, 6)
    for kind, number in some(whole.seen, most):
        url, raised = spoil(Spoilt(kind, number, mode))
        found = step_at(url)
        assert found in ({after} if raised is None else {min(before, 1), after}), (kind, number)
        xckpt.gc(url, older_than=0)
        assert step_at(url) == found and others(url) == set(), (kind, number, others(url))
        save(url, 3, options)
        assert step_at(url) == 3 and others(url) == set(), (kind, number, others(url))


@pytest.mark.parametrize("call", ["save", "overwrite", "delete", "copy over another"])
def test_some_requests(server: FaultyBucket, call: str) -> None:
    check(server, call, "expired from then on", PACKED, 5)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_every_request(server: FaultyBucket, call: str, mode: str) -> None:
    for options in (PACKED, PLAIN) if server.url == "s3://bucket" else (PACKED,):
        check(server, call, mode, options, 1000)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ["delete", "overwrite again", "gc of a save"])
def test_every_request_where_keys_are_deleted_together(
    s3: FaultyBucket, call: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditional, "MANY", 1)
    check(s3, call, mode, PLAIN, 1000)


def test_a_deletion_whose_answer_is_lost_goes_on(server: FaultyBucket) -> None:
    """The manifest has gone: a request that is repeated finds none to delete."""
    url = f"{server.url}/each{next(_numbers)}"
    save(url, 1, PLAIN)
    lost = itertools.count()

    def fault(request: Request) -> Fault:
        hit = request.deletes and request.path.endswith("xckpt.json") and next(lost) == 0
        return Reset(done=True) if hit else None

    server.fault = fault
    xckpt.delete(url)
    server.fault = never
    assert next(lost) > 1 and others(url) == set()
