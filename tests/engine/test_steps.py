"""The steps over a group: every rank gets an answer, or every rank gets the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.examples import examples
from xckpt.engine.ranks.group import Group, LocalGroup
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.errors import (
    ManifestError,
    PlanError,
    Problem,
    RankFailure,
    RanksFailedError,
    StorageError,
    UnsupportedLeafError,
    VersionError,
    XckptError,
)

KINDS = ("reduce_scatter", "all_reduce", "broadcast")


class OddError(Exception):
    """An exception that the library doesn't know."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, str, frozenset[int], bool]:
    """Size, coordinator, kind of step, the ranks that fail in it, whether the decision fails."""
    size = draw(st.integers(2, 4))
    ranks = st.integers(0, size - 1)
    return (
        size,
        draw(ranks),
        draw(st.sampled_from(KINDS)),
        frozenset(draw(st.lists(ranks, max_size=size))),
        draw(st.booleans()),
    )


def take_step(
    group: Group,
    kind: str,
    local: Callable[[], bytes],
    decide: Callable[[list[bytes]], list[bytes]],
) -> bytes:
    """One step of any kind, whose decision is a list with one answer a rank."""
    if kind == "reduce_scatter":
        return reduce_scatter(group, "step", local, decide)
    if kind == "all_reduce":
        return all_reduce(group, "step", local, lambda data: b"+".join(decide(data)))
    return broadcast(group, "step", lambda: b"+".join(decide([local()])))


def parts(
    group: ThreadGroup, failing: frozenset[int], decision_fails: bool
) -> tuple[Callable[[], bytes], Callable[[list[bytes]], list[bytes]]]:
    def local() -> bytes:
        if group.rank in failing:
            raise OddError(f"rank {group.rank} is unwell \ud800")
        return b"%d" % group.rank

    def decide(data: list[bytes]) -> list[bytes]:
        assert group.rank == group.coordinator
        if decision_fails:
            raise PlanError.listing("no", ["a: bad", "b: bad"])
        return [b"<%s>" % item for item in data]

    return local, decide


def expected_failures(
    size: int, coordinator: int, kind: str, failing: frozenset[int], decision_fails: bool
) -> list[RankFailure]:
    unwell = sorted(failing & {coordinator}) if kind == "broadcast" else sorted(failing)
    if unwell:
        return [RankFailure(r, "OddError", f"rank {r} is unwell \\ud800") for r in unwell]
    if decision_fails:
        message, problems = "no\n  - a: bad\n  - b: bad", ("a: bad", "b: bad")
        problems = tuple((None, None, "", line, line) for line in problems)
        return [RankFailure(coordinator, "PlanError", message, "PlanError", problems)]
    return []


def expected_answers(size: int, coordinator: int, kind: str) -> list[bytes]:
    each = [b"<%d>" % rank for rank in range(size)]
    if kind == "reduce_scatter":
        return each
    return [b"+".join(each)] * size if kind == "all_reduce" else [b"<%d>" % coordinator] * size


@given(steps())
@examples(60)
@example((3, 1, "reduce_scatter", frozenset({0, 2}), False))
@example((3, 1, "all_reduce", frozenset({1}), True))
@example((2, 1, "broadcast", frozenset({0}), False))
@example((2, 0, "broadcast", frozenset({0}), False))
@example((4, 3, "reduce_scatter", frozenset(), True))
def test_all_ranks_get_their_answer_or_the_same_error(step):
    size, coordinator, kind, failing, decision_fails = step

    def run(group: ThreadGroup) -> tuple[bytes | XckptError, bytes]:
        local, decide = parts(group, failing, decision_fails)
        first: bytes | XckptError
        try:
            first = take_step(group, kind, local, decide)
        except XckptError as error:
            first = error
        # All ranks are in step: the next one works.
        return first, take_step(group, kind, *parts(group, frozenset(), False))

    outcomes = results(size, run, coordinator=coordinator)
    answers = expected_answers(size, coordinator, kind)
    assert [second for _, second in outcomes] == answers
    failures = expected_failures(*step)
    if not failures:
        assert [first for first, _ in outcomes] == answers
        return
    for rank, (first, _) in enumerate(outcomes):
        assert type(first) is (PlanError if failures[0].kind == "PlanError" else RanksFailedError)
        assert list(first.failures) == failures
        assert str(first).startswith(f"{len(failures)} rank")
        assert all(f"rank {failure.rank}: {failure.kind}" in str(first) for failure in failures)
        # On the rank itself the exception is there whole, with its traceback.
        own = [failure for failure in failures if failure.rank == rank]
        assert type(first.__cause__).__name__ == own[0].kind if own else first.__cause__ is None


class OwnPlanError(PlanError):
    """An error that only its author has."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ([PlanError("a"), PlanError("b")], PlanError),
        ([PlanError("a"), OwnPlanError("b")], PlanError),
        ([None, VersionError("newer")], VersionError),
        ([ManifestError("a"), VersionError("b")], RanksFailedError),
        ([PermissionError("a"), PermissionError("a")], PermissionError),
        ([TypeError("a"), None], TypeError),
        ([RuntimeError("a"), RuntimeError("b")], RanksFailedError),
        ([KeyError("a"), None], RanksFailedError),
        ([StorageError("full"), PlanError("b")], RanksFailedError),
    ],
)
def test_one_cause_has_its_own_class_on_every_rank(raised, expected):
    def run(group: ThreadGroup) -> bytes:
        def local() -> bytes:
            if raised[group.rank] is not None:
                raise raised[group.rank]
            return b""

        return all_reduce(group, "step", local, lambda _: b"")

    for outcome in run_ranks(2, run):
        error = outcome.error
        assert type(error) is expected
        assert error is not None
        with_failures = error if isinstance(error, XckptError) else error.__cause__
        assert isinstance(with_failures, XckptError)
        kinds = [(f.rank, f.kind) for f in with_failures.failures]
        assert kinds == [(r, type(e).__name__) for r, e in enumerate(raised) if e is not None]


def test_an_error_of_one_cause_has_every_problem_once():
    def run(group: ThreadGroup) -> bytes:
        def local() -> bytes:
            raise PlanError.listing("2 leaves differ", ["w: shape", f"b: only {group.rank}"])

        return all_reduce(group, "plan the save", local, lambda _: b"")

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, PlanError)
        assert outcome.error.problems == ("w: shape", "b: only 0", "b: only 1")
        assert str(outcome.error) == (
            "2 ranks failed to plan the save\n"
            "  - rank 0: PlanError: 2 leaves differ\n      - w: shape\n      - b: only 0\n"
            "  - rank 1: PlanError: 2 leaves differ\n      - w: shape\n      - b: only 1"
        )


def test_equal_failures_are_listed_once():
    failures = [RankFailure(rank, "PlanError", "no", "PlanError") for rank in (0, 1, 2, 5)]
    error = RanksFailedError.of("plan", failures).one_cause()
    assert str(error) == "4 ranks failed to plan\n  - ranks 0-2, 5: PlanError: no"


class Alike:
    """A group whose coordinator hears the same of every rank."""

    rank = coordinator = 0
    size = 300

    def gather(self, data: bytes) -> list[bytes]:
        self.sent = len(data)
        return [data] * self.size

    def scatter(self, data: Any) -> bytes:
        return data[0]

    def broadcast(self, data: Any) -> bytes:
        return data


def test_many_ranks_that_fail_alike_send_little():
    problems = [Problem(f"layer.{n}", text="a meta tensor cannot be filled") for n in range(1000)]

    def fail() -> bytes:
        raise UnsupportedLeafError.leaves("cannot be loaded into", problems)

    group = Alike()
    with pytest.raises(UnsupportedLeafError, match="ranks 0-299: UnsupportedLeafError") as caught:
        all_reduce(group, "plan", fail, lambda _: b"")
    assert len(caught.value.problems) == 1000 and len(caught.value.failures) == group.size
    assert group.sent < 10_000


def test_a_note_travels_with_its_failure():
    """Through two steps, in a line of its own: it stood as an escaped break in the first line."""
    error = StorageError("full")
    error.add_note("This is the failure of another save.")
    first = RanksFailedError.of("write", [RankFailure.of(0, error)]).one_cause()
    second = RanksFailedError.of("compare", [RankFailure.of(rank, first) for rank in (0, 1)])
    lines = [line.strip() for line in str(second).splitlines()]
    assert lines[2:] == ["- rank 0: StorageError: full", "This is the failure of another save."]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_decision_for_another_number_of_ranks_fails_on_every_rank(count):
    def run(group: ThreadGroup) -> bytes:
        return reduce_scatter(group, "step", lambda: b"", lambda data: [b"x"] * count)

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, PlanError)
        (failure,) = outcome.error.failures
        assert failure.rank == 0 and f"{count} answers for 2 ranks" in failure.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_raises_the_exception_itself(kind):
    def fail(data: Sequence[bytes] = ()) -> list[bytes]:
        raise OddError("alone")

    assert take_step(LocalGroup(), kind, lambda: b"a", lambda data: data) == b"a"
    with pytest.raises(OddError, match="alone"):
        take_step(LocalGroup(), kind, lambda: b"", fail)
    with pytest.raises(OddError, match="alone"):
        take_step(LocalGroup(), kind, lambda: fail()[0], lambda data: data)


class Numbers:
    """Numbers up to 255 travel as a byte."""

    def encode(self, obj: int, /) -> bytes:
        return bytes([obj])

    def decode(self, buf: bytes | memoryview, /) -> int:
        return buf[0]


@pytest.mark.parametrize("size", [1, 3])
def test_values_travel_by_a_codec_whatever_the_size_of_the_group(size):
    """What it cannot carry fails a group of one as it fails others."""

    def run(group: Group) -> tuple[int, bytes]:
        count, codec = group.size, Numbers()
        own = reduce_scatter(group, "plan", lambda: 7, lambda all_: [sum(all_)] * count, codec)
        for local, shares in [(256, 0), (0, 256)]:
            with pytest.raises((ValueError, RanksFailedError), match=r"range\(0, 256\)"):
                reduce_scatter(
                    group, "plan", lambda n=local: n, lambda _, n=shares: [n] * count, codec
                )
        return own, all_reduce(group, "write", lambda: 2, lambda all_: bytes(all_), codec)

    outcomes = [run(LocalGroup())] if size == 1 else results(size, run)
    assert outcomes == [(7 * size, b"\2" * size)] * size


def test_a_group_of_one_is_a_group():
    group = LocalGroup()
    assert isinstance(group, Group)
    assert (group.rank, group.size, group.coordinator) == (0, 1, 0)
    assert group.gather(b"a") == [b"a"]
    assert group.scatter([b"a"]) == b"a" == group.broadcast(b"a")


def test_a_thread_is_a_rank_of_a_group():
    def run(group: ThreadGroup) -> tuple[list[bytes] | None, bytes, bytes]:
        assert isinstance(group, Group)
        first = group.rank == group.coordinator
        gathered = group.gather(b"%d" % group.rank)
        group.barrier()
        return (
            gathered,
            group.scatter([b"a", b"b", b"c"] if first else None),
            group.broadcast(b"all" if first else None),
        )

    assert results(3, run, coordinator=2) == [
        (None, b"a", b"all"),
        (None, b"b", b"all"),
        ([b"0", b"1", b"2"], b"c", b"all"),
    ]


def test_one_answer_for_all_is_compressed(monkeypatch):
    """A manifest says much the same of each leaf, and goes to every rank."""
    manifest = b"".join(b'{"name":"layers.%d.weight","shape":[4096,1024]}' % n for n in range(999))
    lengths: list[int] = []

    def counted(group: ThreadGroup, data: bytes | None) -> bytes:
        received = sent(group, data)
        lengths.append(len(received))
        return received

    def run(group: ThreadGroup) -> tuple[bytes, bytes]:
        reduced = all_reduce(group, "commit", lambda: b"", lambda _: manifest)
        return reduced, broadcast(group, "find", lambda: manifest)

    sent = ThreadGroup.broadcast
    monkeypatch.setattr(ThreadGroup, "broadcast", counted)
    assert results(3, run) == [(manifest, manifest)] * 3
    assert len(lengths) == 6 and max(lengths) < len(manifest) / 8


@pytest.mark.parametrize("speaks", [0, 1])
def test_a_rank_that_says_what_no_release_knows_is_named(speaks):
    """The coordinator hears it, or it is the coordinator."""

    class Other:
        def __init__(self, group):
            self.rank, self.size, self.coordinator = group.rank, group.size, group.coordinator
            self._group = group

        def gather(self, data):
            return self._group.gather(b"\xc1" if self.rank == speaks == 1 else data)

        def scatter(self, data):
            return self._group.scatter([b"\xc1"] * 2 if data and not speaks else data)

        def broadcast(self, data):
            return self._group.broadcast(b"\xc1" if data is not None and not speaks else data)

    def run(group):
        return all_reduce(Other(group), "plan the save", lambda: b"plan", lambda said: b"done")

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, PlanError)
        assert "it sent bytes that are not a message: does it run the same release" in str(
            outcome.error
        )
