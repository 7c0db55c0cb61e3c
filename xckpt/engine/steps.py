"""Running a step on all ranks of a group: one rank's failure is every rank's.

`reduce_scatter`, `all_reduce` and `broadcast` wrap the steps of a save and of a load so that no
rank waits for one that has failed:

1. A rank on which the step raises still takes part: its failure travels in the gather.
2. The coordinator looks at all outcomes; its verdict goes to every rank with the scatter or the
   broadcast that the step needs anyway.
3. If any rank failed, every rank raises the same `RanksFailedError`. In a group of one, the
   exception itself is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from xckpt.engine.group import Group
from xckpt.errors import RankFailure, RanksFailedError


class _Outcome(msgspec.Struct, array_like=True):
    """What a rank contributes to a step: its bytes, or why it has none."""

    data: bytes = b""
    failure: tuple[str, str] | None = None


class _Verdict(msgspec.Struct, array_like=True):
    """What the coordinator answers: bytes for the rank, or all ranks' failures."""

    data: bytes = b""
    failures: list[tuple[int, str, str]] = []


_encode = msgspec.msgpack.Encoder().encode
_outcome = msgspec.msgpack.Decoder(_Outcome).decode
_verdict = msgspec.msgpack.Decoder(_Verdict).decode

T = TypeVar("T")


class Codec(Protocol[T]):
    """How values travel between ranks."""

    def encode(self, obj: T, /) -> bytes:
        """A value as bytes."""
        ...

    def decode(self, buf: bytes, /) -> T:
        """A value from bytes; inverse of `encode`."""
        ...


class _AsTheyAre:
    """Carries values that are bytes."""

    def encode(self, obj: Any, /) -> bytes:  # noqa: ANN401
        return obj

    def decode(self, buf: bytes, /) -> Any:  # noqa: ANN401
        return buf


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
        RanksFailedError: some rank failed (groups of several); no rank is left waiting.
    """
    if group.size == 1:
        value = codec.decode(codec.encode(local()))
        return codec.decode(codec.encode(decide([value])[0]))
    outcome, caught = _attempt(lambda: codec.encode(local()))
    gathered = group.gather(_encode(outcome))
    answers: list[bytes] | None = None
    if gathered is not None:
        data, failures = _collect(gathered)
        shares: Sequence[bytes] = ()
        if not failures:
            shares, decide_error = _attempt_many(
                lambda: [codec.encode(share) for share in decide(list(map(codec.decode, data)))],
                group.size,
            )
            if decide_error is not None:
                caught = decide_error
                failures = [_failure(group.coordinator, decide_error)]
        answers = [
            _encode(_Verdict(failures=failures) if failures else _Verdict(shares[rank]))
            for rank in range(group.size)
        ]
    return codec.decode(_answer(step, _verdict(group.scatter(answers)), caught))


def all_reduce(
    group: Group,
    step: str,
    local: Callable[[], T],
    decide: Callable[[list[T]], bytes],
    codec: Codec[T] = _AS_THEY_ARE,
) -> bytes:
    """Run ``local`` everywhere, ``decide`` on the coordinator, and give its answer to all.

    Raises:
        RanksFailedError: some rank failed (groups of several); no rank is left waiting.
    """
    if group.size == 1:
        return decide([codec.decode(codec.encode(local()))])
    outcome, caught = _attempt(lambda: codec.encode(local()))
    gathered = group.gather(_encode(outcome))
    answer: bytes | None = None
    if gathered is not None:
        data, failures = _collect(gathered)
        verdict = _Verdict(failures=failures)
        if not failures:
            decided, decide_error = _attempt(lambda: decide(list(map(codec.decode, data))))
            verdict = _Verdict(decided.data)
            if decide_error is not None:
                caught = decide_error
                verdict = _Verdict(failures=[_failure(group.coordinator, decide_error)])
        answer = _encode(verdict)
    return _answer(step, _verdict(group.broadcast(answer)), caught)


def broadcast(group: Group, step: str, decide: Callable[[], bytes]) -> bytes:
    """Run ``decide`` on the coordinator and give its answer to all.

    Raises:
        RanksFailedError: the coordinator failed (groups of several).
    """
    if group.size == 1:
        return decide()
    answer: bytes | None = None
    caught: BaseException | None = None
    if group.rank == group.coordinator:
        outcome, caught = _attempt(decide)
        failures = [] if caught is None else [_failure(group.rank, caught)]
        answer = _encode(_Verdict(outcome.data, failures))
    return _answer(step, _verdict(group.broadcast(answer)), caught)


def _attempt(call: Callable[[], bytes]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(call()), None
    except Exception as error:
        return _Outcome(failure=_failure(0, error)[1:]), error


def _attempt_many(
    call: Callable[[], Sequence[bytes]], size: int
) -> tuple[Sequence[bytes], Exception | None]:
    try:
        answers = call()
        if len(answers) != size:
            raise ValueError(f"{len(answers)} answers for {size} ranks")
        return answers, None
    except Exception as error:
        return (), error


def _failure(rank: int, error: BaseException) -> tuple[int, str, str]:
    # A message that could not be sent would leave the other ranks waiting.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    return rank, type(error).__name__, message


def _collect(gathered: Sequence[bytes]) -> tuple[list[bytes], list[tuple[int, str, str]]]:
    outcomes = [_outcome(item) for item in gathered]
    failures = [(rank, *o.failure) for rank, o in enumerate(outcomes) if o.failure is not None]
    return [o.data for o in outcomes], failures


def _answer(step: str, verdict: _Verdict, caught: BaseException | None) -> bytes:
    if verdict.failures:
        failures = [RankFailure(*failure) for failure in verdict.failures]
        raise RanksFailedError.of(step, failures) from caught
    return verdict.data
