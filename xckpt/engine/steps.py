"""Running a step on all ranks of a group: one rank's failure is every rank's.

`reduce_scatter`, `all_reduce` and `broadcast` wrap the steps of a save and of a load so that no
rank waits for one that has failed:

1. A rank on which the step raises still takes part: its failure travels in the gather.
2. The coordinator looks at all outcomes; its verdict goes to every rank with the scatter or the
   broadcast that the step needs anyway.
3. While a rank works at its part, or the coordinator at its decision, the others hear that it
   makes progress (`xckpt.engine.ranks.alive`); a rank that works at its part learns of lost ranks.
4. One answer for all is compressed: a manifest becomes a tenth or less, and each rank gets one.
5. If any rank failed, every rank raises the same error: of the class of the one cause, or a
   `RanksFailedError` (`xckpt.errors`). In a group of one, the exception itself is raised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, Protocol, TypeVar

import msgspec

from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.alive import working
from xckpt.engine.ranks.group import Group, SuspectingGroup
from xckpt.engine.ranks.waiting import OTHER_RELEASE
from xckpt.errors import PlanError, RankFailure, RanksFailedError, XckptError


class _Outcome(msgspec.Struct, array_like=True):
    """What a rank contributes to a step: its bytes, or why it has none."""

    step: int
    """What the rank takes part in: see `_number`."""
    data: memoryview = memoryview(b"")
    """Not copied: the reports of many ranks are long together."""
    failure: bytes | None = None
    """A `RankFailure` without its rank, compressed: the same of all ranks that fail alike."""


class _Verdict(msgspec.Struct, array_like=True):
    """What the coordinator answers: bytes for the rank, or all ranks' failures."""

    data: bytes = b""
    failures: list[tuple[list[int], RankFailure]] = []
    """Ranks and how each of them failed; usually all fail alike."""
    step: str = ""
    """What they failed to do, if that is not what all ranks were to do."""


ELSEWHERE: Final = (
    "this rank is in another step than the coordinator: does every rank call the same save or "
    "load, and did one call again after an interrupt?"
)

_encode = msgspec.msgpack.Encoder().encode
_outcome = msgspec.msgpack.Decoder(_Outcome).decode
_failure = msgspec.msgpack.Decoder(RankFailure).decode
_verdict = msgspec.msgpack.Decoder(_Verdict).decode

T = TypeVar("T")


class Codec(Protocol[T]):
    """How values travel between ranks."""

    def encode(self, obj: T, /) -> bytes:
        """A value as bytes."""
        ...

    def decode(self, buf: bytes | memoryview, /) -> T:
        """A value from bytes; inverse of `encode`."""
        ...


class _AsTheyAre:
    """Carries values that are bytes."""

    def encode(self, obj: Any, /) -> bytes:  # noqa: ANN401
        return obj

    def decode(self, buf: bytes | memoryview, /) -> Any:  # noqa: ANN401
        return bytes(buf)


_AS_THEY_ARE = _AsTheyAre()


def reduce_scatter(
    group: Group,
    step: str,
    local: Callable[[], T],
    decide: Callable[[list[T]], Sequence[T]],
    codec: Codec[T] = _AS_THEY_ARE,
) -> T:
    """Run ``local`` everywhere, ``decide`` on the coordinator, and hand each rank its share.

    Values travel by ``codec``, by default as the bytes that they are. They are encoded in a group
    of one too, so that what cannot travel fails there as well.

    Raises:
        XckptError: some rank failed (see `xckpt.errors`); no rank is left waiting.
    """
    if group.size == 1:
        value = codec.decode(codec.encode(local()))
        return codec.decode(codec.encode(decide([value])[0]))

    def answers(values: list[T]) -> list[bytes]:
        shares = decide(values)
        if len(shares) != group.size:
            raise PlanError(f"{len(shares)} answers for {group.size} ranks")
        return [codec.encode(share) for share in shares]

    verdicts, caught = _reduce(group, step, local, answers, codec)
    return codec.decode(_answer(step, group.scatter(verdicts), caught))


def all_reduce(
    group: Group,
    step: str,
    local: Callable[[], T],
    decide: Callable[[list[T]], bytes],
    codec: Codec[T] = _AS_THEY_ARE,
    deciding: str = "",
) -> bytes:
    """Run ``local`` everywhere, ``decide`` on the coordinator, and give its answer to all.

    ``deciding`` is what the coordinator is said to have failed to do, if ``decide`` raises.

    Raises:
        XckptError: some rank failed (see `xckpt.errors`); no rank is left waiting.
    """
    if group.size == 1:
        return decide([codec.decode(codec.encode(local()))])
    verdicts, caught = _reduce(
        group, step, local, lambda values: [_compress(decide(values))], codec, deciding
    )
    return _answer_for_all(group, step, verdicts, caught)


def broadcast(group: Group, step: str, decide: Callable[[], bytes]) -> bytes:
    """Run ``decide`` on the coordinator and give its answer to all.

    Raises:
        XckptError: the coordinator failed (see `xckpt.errors`).
    """
    if group.size == 1:
        return decide()
    verdicts, caught = None, None
    if group.rank == group.coordinator:
        verdicts, caught = _verdicts(group, lambda: [_compress(decide())])
    return _answer_for_all(group, step, verdicts, caught)


BARE: Final = -15
"""zlib's stream without head and checksum: most answers are a few bytes."""


def _compress(answer: bytes) -> bytes:
    return zlib.compress(answer, level=1, wbits=BARE)


def _answer_for_all(
    group: Group, step: str, verdicts: list[bytes] | None, caught: Exception | None
) -> bytes:
    """The coordinator's one answer, at every rank."""
    verdict = group.broadcast(verdicts[0] if verdicts else None)
    return zlib.decompress(_answer(step, verdict, caught), wbits=BARE)


def _reduce(
    group: Group,
    step: str,
    local: Callable[[], T],
    decide: Callable[[list[T]], Sequence[bytes]],
    codec: Codec[T],
    deciding: str = "",
) -> tuple[list[bytes] | None, Exception | None]:
    """Gather what every rank made: the verdicts, on the coordinator, and what this rank raised."""
    caught: Exception | None = None
    number = _number(step)
    try:
        with working(group, heeds=True):
            outcome = _Outcome(number, memoryview(codec.encode(local())))
    except Exception as raised:
        error = naming_limit(raised)
        outcome, caught = _failed(number, error), error
        if isinstance(error, RanksFailedError) and isinstance(group, SuspectingGroup):
            group.suspect([failure.rank for failure in error.failures])
    gathered = group.gather(_encode(outcome))
    if gathered is None:
        return None, caught
    outcomes = [_outcome_of(item) for item in gathered]
    if failures := _failures_of(outcomes, number):
        return [_refusal(failures)] * group.size, caught
    return _verdicts(group, lambda: decide([codec.decode(o.data) for o in outcomes]), deciding)


def _failed(number: int, error: Exception) -> _Outcome:
    """What a rank contributes that has nothing but an error."""
    return _Outcome(number, failure=_compress(_encode(RankFailure.of(-1, error))))


def _outcome_of(item: bytes) -> _Outcome:
    """What a rank has made; a failure of the rank if it says nothing that this one understands."""
    try:
        return _outcome(item)
    except msgspec.DecodeError:
        return _failed(0, PlanError(OTHER_RELEASE))


def _failures_of(outcomes: Sequence[_Outcome], number: int) -> list[RankFailure]:
    """The failures of ranks, each distinct one decoded once, and of those in another step."""
    known: dict[bytes, RankFailure] = {}
    failures: list[RankFailure] = []
    for rank, outcome in enumerate(outcomes):
        said = outcome.failure
        if not said and outcome.step != number:
            said = _failed(0, PlanError(ELSEWHERE)).failure
        if said:
            if said not in known:
                known[said] = _failure(zlib.decompress(said, wbits=BARE))
            failures.append(replace(known[said], rank=rank))
    return failures


def _number(step: str) -> int:
    """A step in two bytes: every rank sends it."""
    return zlib.crc32(step.encode()) & 0xFFFF


def _verdicts(
    group: Group, decide: Callable[[], Sequence[bytes]], deciding: str = ""
) -> tuple[list[bytes], Exception | None]:
    """The coordinator's answers, encoded; or its failure for every rank, and what it raised."""
    try:
        with working(group):
            return [_encode(_Verdict(answer)) for answer in decide()], None
    except Exception as raised:
        error = naming_limit(raised)
        failed = RankFailure.of(group.coordinator, error)
        return [_refusal([failed], deciding)] * group.size, error


def _refusal(failures: Sequence[RankFailure], step: str = "") -> bytes:
    """The verdict that ranks have failed, each distinct failure once."""
    alike: dict[RankFailure, list[int]] = {}
    for failure in failures:
        alike.setdefault(replace(failure, rank=-1), []).append(failure.rank)
    return _encode(_Verdict(b"", [(ranks, failure) for failure, ranks in alike.items()], step))


def _answer(step: str, data: bytes, caught: Exception | None) -> bytes:
    """The coordinator's answer to this rank, which may have caught an exception of its own."""
    try:
        verdict = _verdict(data)
    except msgspec.DecodeError as error:
        raise PlanError(f"the coordinator: {OTHER_RELEASE}") from error
    if not verdict.failures:
        return verdict.data
    failures = [replace(failure, rank=r) for ranks, failure in verdict.failures for r in ranks]
    together = RanksFailedError.of(verdict.step or step, sorted(failures, key=attrgetter("rank")))
    error = together.one_cause()
    if isinstance(error, XckptError):
        raise error from caught
    together.__cause__ = caught
    raise error from together
