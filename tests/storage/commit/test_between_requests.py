"""A law of calls that race: another call comes between any two requests of a call to a bucket.

The other call runs from its beginning to its end while a request of the first one is on its way.
Each succeeds or says by its error what happened, and the bucket always has one state, whole:
the one that was committed last. A collection leaves no other key, and the next save works.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import xckpt
from tests.api.test_between import FIRST, OLD, SECOND, check_outcomes
from tests.storage.commit.test_each_request import others, s3, server
from tests.support.faulty_bucket import Answer, Fault, FaultyBucket, Request, never
from tests.support.paused import DONE, Outcome
from tests.support.savers import number_of
from tests.support.savers import state as changing
from tests.support.servers import environment, faulty_gcs, gcs
from xckpt.core.manifest.own_keys import CLAIM
from xckpt.storage.commit import conditional
from xckpt.storage.location import forget_contexts

__all__ = ["environment", "faulty_gcs", "gcs", "s3", "server"]

SOURCES = {number: f"memory://between-requests-{number}" for number in (FIRST, SECOND)}
PLAIN = xckpt.SaveOptions(pack_bytes=0, request_timeout=300.0)
"""Saves in place write the same keys; a request waits for the whole other call."""
LOADS = xckpt.LoadOptions(request_timeout=300.0)
HASTY = xckpt.SaveOptions(pack_bytes=0, retries=0, request_timeout=5.0)
LATE = "a deletion that nobody can call back"
"""No bucket takes back a request: an overwrite that is deleting the old keys ends after those that
are on their way (`conditional.AT_ONCE`), and a new save in place may have written them anew."""
STEP = 13
"""One request in so many is tried in the default tier."""
FROZEN = np.arange(64.0)
_numbers = itertools.count()


def state(number: int) -> dict[str, object]:
    """A state of which a part is in all others too: what shares with a base copies it."""
    return {**changing(number), "frozen": FROZEN}


def save(number: int, url: str) -> None:
    xckpt.save(url, state(number), overwrite=True, options=PLAIN)


def save_with_base(number: int, url: str) -> None:
    xckpt.save(url, state(number), base=url, overwrite=True, options=PLAIN)


def copy(number: int, url: str) -> None:
    xckpt.copy(SOURCES[number], url, overwrite=True, options=LOADS)


def verify(url: str) -> None:
    """What is missing may have been removed meanwhile."""
    problems = xckpt.open(url, options=LOADS).verify()
    if problems:
        raise xckpt.CorruptCheckpointError(str(problems))


def save_anew(url: str) -> None:
    """Delete what is there, and save to the free path."""
    xckpt.delete(url, options=LOADS)
    xckpt.save(url, state(SECOND), options=PLAIN)


def save_and_delete(url: str) -> None:
    save(SECOND, url)
    xckpt.delete(url, options=LOADS)


Call = Callable[[str], object]
CALLS: dict[str, Call] = {
    "save": partial(save, FIRST),
    "save with base": partial(save_with_base, FIRST),
    "delete": partial(xckpt.delete, options=LOADS),
    "load": partial(xckpt.load, options=LOADS),
    "verify": verify,
    "copy": partial(copy, FIRST),
    "gc": partial(xckpt.gc, older_than=0, options=LOADS),
}
OTHERS: dict[str, tuple[Call, str]] = {
    "save": (partial(save, SECOND), "save another"),
    "save with base": (partial(save_with_base, SECOND), "save another"),
    "copy": (partial(copy, SECOND), "save another"),
    "delete": (CALLS["delete"], "delete"),
    "gc": (partial(xckpt.gc, older_than=3600, options=LOADS), "gc"),
    "gc of all": (CALLS["gc"], "gc of all"),
    "load": (CALLS["load"], "load"),
    "verify": (verify, "load"),
    "delete and save": (save_anew, "save another"),
    "save and delete": (save_and_delete, "delete"),
}
"""The other calls, and what they are to the law. A collection of all takes what is being written
for that of a dead save."""

PAIRS = [
    *itertools.product(("save", "copy", "gc"), (False, True), OTHERS),
    *itertools.product(("save with base", "delete", "load", "verify"), (True,), OTHERS),
]
"""The call with a request on its way, whether a checkpoint is there, and the other call."""


def outcome_of(act: Call, url: str) -> Outcome:
    try:
        act(url)
    except Exception as error:
        return Outcome(type(error).__name__, str(error), isinstance(error, xckpt.XckptError))
    return Outcome(DONE)


class Between:
    """Makes a call while the n-th request is on its way, before the bucket has it."""

    def __init__(self, server: FaultyBucket, url: str, number: int, act: Call) -> None:
        self._server, self._url, self._left, self._act = server, url, number, act
        self.at = ""
        """The request, if there was one."""
        self.seen: int | None = None
        self.outcome = Outcome("never called")
        self.after: int | None = None
        self.is_over = threading.Event()
        self.awaited = True
        """Whether the call waits for the request: a claim that showed whether a bucket lists goes
        beside the data (`ListingTrial`)."""
        self.late = False
        """Whether a deletion that is on its way is let go: the next save writes the same keys."""

    def __call__(self, request: Request) -> Fault:
        self._left -= 1
        if self._left == 0:
            self._server.fault = never
            self.at = f"{request.method} {request.path}"
            self.awaited = not (request.deletes and request.path.endswith(f"/{CLAIM}"))
            if self.late and request.deletes:
                self.outcome = Outcome(LATE)
                return None
            try:
                self.seen = number_at(self._url)
                self.outcome = outcome_of(self._act, self._url)
                self.after = number_at(self._url)
            except Exception as error:
                self.outcome = Outcome(type(error).__name__, repr(error), ours=False)
            finally:
                self.is_over.set()
        return None


def number_at(url: str) -> int | None:
    """The number of the whole state at a URL; None if there is none.

    A call that waits no longer for a look at its claim may commit meanwhile.
    """
    try:
        loaded = xckpt.load(url, options=LOADS)
        problems = xckpt.open(url).verify()
    except xckpt.NotACheckpointError:
        return None
    except xckpt.CheckpointReplacedError:
        return number_at(url)
    assert np.array_equal(loaded.pop("frozen"), FROZEN)
    found = number_of(loaded)
    assert problems == []
    return found


def cut_off(server: FaultyBucket, url: str) -> None:
    """A save whose bucket is down once it has written a chunk: nothing of it is removed."""
    down = False

    def fault(request: Request) -> Fault:
        nonlocal down
        hit, down = down, down or (request.writes and request.path.endswith("/c/0/0"))
        return Answer(503, "SlowDown") if hit else None

    server.fault = fault
    with pytest.raises(xckpt.StorageError):
        xckpt.save(url, state(7), overwrite=True, options=HASTY)
    server.fault = never
    forget_contexts()


def check(server: FaultyBucket, name: str, old: bool, other: str, number: int) -> bool:
    """Check the law at one request of a call; False if it has none so late."""
    url = f"{server.url}/between{next(_numbers)}"
    if old:
        save(OLD, url)
    if name == "gc":
        cut_off(server, url)
    act, kind = OTHERS[other]
    server.fault = between = Between(server, url, number, act)
    between.late = other == "delete and save"
    first = outcome_of(CALLS[name], url)
    server.fault = never
    if not between.at:
        return False
    if between.outcome.how == LATE:
        return True
    waited = between.awaited and between.is_over.is_set()
    assert between.is_over.wait(60)
    before = OLD if old else None
    numbers = (before, between.seen, between.after, number_at(url))
    story = f"{name} at {number}, {between.at}: {first}; {other}: {between.outcome}; {numbers}"
    assert first.ours and between.outcome.ours, story
    named = {"save with base": "save", "verify": "load"}.get(name, name)
    after = {"save": FIRST, "copy": FIRST, "gc": before, "load": before}.get(named)
    assert between.seen in (before, after), story
    outcomes = first, between.outcome
    if waited and (between.outcome.how == DONE or not other.count(" and ")):
        assert check_outcomes(numbers, after, outcomes, named, kind), story
    check_rest(url, numbers[-1], story)
    return True


def check_rest(url: str, found: int | None, story: str) -> None:
    """What is left is collected, and the next save works."""
    xckpt.gc(url, older_than=0)
    assert number_at(url) == found and others(url) == set(), (story, others(url))
    save(3, url)
    assert number_at(url) == 3 and others(url) == set(), (story, others(url))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves trust no earlier look at their claim."""
    monkeypatch.setattr(conditional, "SECONDS", -1.0)
    for number, url in SOURCES.items():
        xckpt.save(url, state(number), overwrite=True)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "old", "other"), PAIRS)
def test_between_any_requests(
    server: FaultyBucket, exact: None, name: str, old: bool, other: str
) -> None:
    numbers = itertools.count(1)
    tried = list(itertools.takewhile(lambda at: check(server, name, old, other, at), numbers))
    assert len(tried) > 3


def check_some(server: FaultyBucket, pair: tuple[str, bool, str]) -> None:
    """Each case at requests of its own."""
    for number in range(2 + PAIRS.index(pair) % STEP, 1000, STEP):
        if not check(server, *pair, number):
            break


@pytest.mark.parametrize("pair", PAIRS[::9], ids=str)
def test_between_some_requests(
    server: FaultyBucket, exact: None, pair: tuple[str, bool, str]
) -> None:
    check_some(server, pair)


@pytest.mark.parametrize("pair", PAIRS[7::31], ids=str)
def test_between_some_requests_to_google(
    faulty_gcs: FaultyBucket, exact: None, pair: tuple[str, bool, str]
) -> None:
    check_some(faulty_gcs, pair)
