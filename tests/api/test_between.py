"""A law of calls that race: another call comes between any two operations of a call on files.

A call is paused before each of its operations, in a process of its own, while another call runs
here from its beginning to its end. Each of them succeeds or says by its error what happened,
and the path always has one state, whole: the one that was committed last.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import xckpt
from tests.api.test_crash import check_next_save
from tests.support.paused import DONE, PAUSED, Call, Outcome, Paused, call, source_of
from tests.support.savers import PLACES, number_of, state
from xckpt.storage.commit import staging
from xckpt.storage.commit.folder import claim, new_identity

OLD, FIRST, SECOND = 100, 101, 102
"""Numbers of the states: the one at the path, the paused call's, the other call's."""

CALLS = {
    **{("save", place, True): "delete" for place in PLACES},
    **{("save", place, False): "save another" for place in PLACES},
    **{("delete", place, True): "save another" for place in PLACES},
    ("delete", "exchange", False): "save another",
    **{("load", place, True): "delete" for place in PLACES},
    **{("load", place, False): "save another" for place in PLACES},
    ("copy", "exchange", True): "delete",
    ("copy", "exchange", False): "save another",
    ("gc", "exchange", True): "save another",
    ("gc", "in place", True): "save another",
    ("delete a step", "exchange", True): "delete",
}
"""The calls that are paused: which, how a save commits, and whether a checkpoint is there; and the
other call that comes between in the default tier."""

OTHERS = ["save another", "delete", "gc", "load", "save a sibling"]

STEP = 29
"""One operation in so many is tried in the default tier, of a call with few of them one in two."""

WRONG_ADVICE = ("is a checkpoint of xckpt", ", xckpt.json")


@pytest.fixture(scope="module")
def paused() -> Iterator[Paused]:
    with Paused() as process:
        yield process


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with the source of a copy, in memory where possible."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="between-", dir=where) as name:
        xckpt.save(source_of(Path(name) / "1" / "3"), state(FIRST))
        yield Path(name)


def number_at(path: Path) -> int | None:
    """The number of the whole state at a path; None if there is none."""
    try:
        return number_of(xckpt.load(path))
    except xckpt.NotACheckpointError:
        return None


def prepare(path: Path, calls: tuple[str, str], *, old: bool) -> None:
    """Put at a path, and beside it, what two calls find there."""
    path.parent.mkdir()
    if old:
        xckpt.save(path, state(OLD))
    if "delete a step" in calls:
        xckpt.save(path.with_name("5"), state(5))  # the only step is not deleted
    if "gc" in calls:
        dead = claim(path, new_identity())
        dead.folder.mkdir()
        os.close(dead.descriptor)


def check(paused: Paused, message: Call, other: str, *, old: bool) -> bool:
    """Check the law for a call that is paused at one operation; False if it has none so late."""
    path = Path(message.path)
    prepare(path, (message.call, other), old=old)
    at = paused.begin(message)
    if at.how != PAUSED:
        return False
    seen = number_at(path)
    second = call(other, path)
    between = number_at(path)
    first = paused.go_on()
    before = OLD if old else None
    numbers = (before, seen, between, number_at(path))
    story = f"paused before {at.what}: {first}; then {other}: {second}; found {numbers}"
    for outcome in (first, second):
        assert outcome.ours and not any(each in outcome.what for each in WRONG_ADVICE), story
    after = {"save": FIRST, "copy": FIRST, "gc": before, "load": before}.get(message.call)
    assert seen in (before, after), story
    if message.place == "exchange":  # elsewhere it would be a mount point, which stays
        assert not any("No such file" in outcome.what for outcome in (first, second)), story
    is_right = check_deletion if message.call == "delete a step" else check_outcomes
    assert is_right(numbers, after, (first, second), message.call, other), story
    for sibling in (path.with_name("5"), path.with_name("7")):
        if sibling.exists():
            xckpt.delete(sibling)
    check_next_save(path)
    return True


Numbers = tuple[int | None, int | None, int | None, int | None]
"""Of the states at a path at first, while a call was paused, after the other, and in the end."""


def check_outcomes(
    numbers: Numbers, after: int | None, outcomes: tuple[Outcome, Outcome], name: str, other: str
) -> bool:
    """Whether the states found are those that the outcomes of both calls promise.

    Args:
        numbers: see `Numbers`.
        after: what the paused call leaves if nothing comes between.
        outcomes: of the paused call and of the other.
        name: the paused call.
        other: the other one.
    """
    before, seen, between, found = numbers
    first, second = (outcome.how == DONE for outcome in outcomes)
    promised = {"save another": SECOND, "delete": None}.get(other, seen)
    if between != (promised if second else seen):
        return False
    if other in ("gc", "save a sibling") and not second:
        return False
    if other in ("gc", "load", "save a sibling") and not first and seen is not None:
        return False  # they disturb nobody
    if not first or name in ("gc", "load"):
        return found == between
    # The later commit wins; a deletion may have begun before the other call's.
    return found == between if seen == after != before else found in (after, between)


def check_deletion(
    numbers: Numbers, after: int | None, outcomes: tuple[Outcome, Outcome], name: str, other: str
) -> bool:
    """The same for the deletion of a step, a thread of which goes on to its next operation."""
    _, seen, between, found = numbers
    committed = SECOND if other == "save another" and outcomes[1].how == DONE else seen
    return between in (committed, None) and found in (between, None)


def commit_by(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Have the saves of this test commit in one way, as those of the paused process."""
    if place != "exchange":
        ability = "can_exchange" if place == "generation" else "can_rename"
        monkeypatch.setattr(staging, ability, lambda folder: False)


EVERY = [
    pytest.param(*each, other, True, marks=pytest.mark.thorough)
    for each in CALLS
    for other in OTHERS
]


@pytest.mark.parametrize(
    ("name", "place", "old", "other", "every"),
    [*((*each, other, False) for each, other in CALLS.items()), *EVERY],
)
def test_a_call_between(
    paused: Paused,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: str,
    old: bool,
    other: str,
    every: bool,
) -> None:
    """Some operations, or every one with every other call."""
    commit_by(monkeypatch, place)
    few = not old and name in ("delete", "load")
    some = range(2, 1000, 2 if few else STEP)
    tried = check_each(paused, folder, (name, place, old, other), range(1, 1000) if every else some)
    assert tried > 3 if every else tried >= 1


def check_each(
    paused: Paused, folder: Path, case: tuple[str, str, bool, str], operations: range
) -> int:
    """Check the law at these operations of a call, to its last; how many there were."""
    name, place, old, other = case
    for count, operation in enumerate(operations):
        message = Call(name, str(folder / str(operation) / "3"), operation, place)
        if not check(paused, message, other, old=old):
            return count
    raise AssertionError("the call has no end")
