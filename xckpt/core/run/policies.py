"""Policies: when a run saves, and which of its steps it keeps.

1. A save policy is a function from a `Moment` to a bool. A run saves when one of its policies says
   so.
2. A keep policy is a function from the records of a run, oldest first, to the numbers of the steps
   that it keeps. What none of the policies keeps may be deleted (`xckpt.core.run.keeping`).
3. A policy that makes sense both ways, such as `EverySteps`, answers according to what it is asked.
"""

from __future__ import annotations

import reprlib
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Final, Literal, SupportsIndex, TypeAlias, overload

from xckpt.core.names import is_utf8
from xckpt.core.run.numbers import checked_step, count_of, minutes_of
from xckpt.core.run.record import StepRecord
from xckpt.core.run.signals import signals_named

MINUTE: Final = 60.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a save policy is asked about: a step of the training loop, as the coordinator sees it.

    Example:
        >>> Moment(500, time=60.0).last is None
        True
    """

    step: int
    """The step that has just been done."""
    time: float
    """The coordinator's clock, seconds since the epoch."""
    began: float = 0.0
    """When the manager was made, by the same clock."""
    last: StepRecord | None = None
    """The last step that was saved or restored; also one whose save still runs in the background. A
    save that failed does not count."""
    busy: bool = False
    """Whether a save runs in the background."""
    preempted: bool = False
    """Whether a rank was asked to end, and nothing was saved since."""


Records: TypeAlias = Sequence[StepRecord]
SavePolicy: TypeAlias = Callable[[Moment], bool]
KeepPolicy: TypeAlias = Callable[[Records], Iterable[int]]


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save at each multiple of ``n``, or at the first step after it; keep the multiples of ``n``.

    A multiple whose save failed is saved at the next step instead.

    Example:
        >>> EverySteps(500)(Moment(1000, time=0.0)), EverySteps(500)(Moment(7, time=0.0))
        (True, False)
        >>> EverySteps(500)([StepRecord(499), StepRecord(500), StepRecord(1000)])
        [500, 1000]
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", count_of("EverySteps(n)", self.n))

    @overload
    def __call__(self, asked: Moment, /) -> bool: ...
    @overload
    def __call__(self, asked: Records, /) -> Collection[int]: ...

    def __call__(self, asked: Moment | Records, /) -> bool | Collection[int]:
        """Whether to save now, or the numbers of the steps to keep."""
        if not isinstance(asked, Moment):
            return [record.number for record in asked if record.number % self.n == 0]
        passed = asked.last.number // self.n if asked.last is not None else 0
        return asked.step % self.n == 0 or asked.step // self.n > passed


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save when ``m`` minutes have passed; keep steps that are at least ``m`` minutes apart.

    To save, they count from the last save, or from the start of this process if that is later. A
    time in the future (the clock was set back) does not count: it is no reason to wait longer.

    Example:
        >>> EveryMinutes(30)(Moment(7, time=1800.0, began=0.0))
        True
        >>> EveryMinutes(1)([StepRecord(1, 0.0), StepRecord(2, 59.0), StepRecord(3, 60.0)])
        [1, 3]
    """

    m: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "m", minutes_of(self.m))

    @overload
    def __call__(self, asked: Moment, /) -> bool: ...
    @overload
    def __call__(self, asked: Records, /) -> Collection[int]: ...

    def __call__(self, asked: Moment | Records, /) -> bool | Collection[int]:
        """Whether to save now, or the numbers of the steps to keep."""
        if isinstance(asked, Moment):
            last = asked.last.time if asked.last is not None else None
            times = (asked.began, asked.began if last is None else last)
            past = [each for each in times if each <= asked.time]
            return not past or self._apart(max(past), asked.time)
        kept: dict[int, float] = {}
        since: float | None = None
        for record in asked:
            if record.time is not None and (since is None or self._apart(since, record.time)):
                since = kept[record.number] = record.time
        return list(kept)

    def _apart(self, earlier: float, later: float) -> bool:
        return not 0 <= later - earlier < self.m * MINUTE


@dataclass(frozen=True, slots=True)
class OnSteps:
    """Save at these steps; as a keep policy, keep them.

    Example:
        >>> OnSteps([1, 10])(Moment(10, time=0.0)), OnSteps([1, 10])([StepRecord(1), StepRecord(2)])
        (True, [1])
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        try:
            steps = frozenset(map(checked_step, self.steps))
        except TypeError:
            raise TypeError(f"OnSteps(steps) takes numbers of steps, not {self.steps!r}") from None
        object.__setattr__(self, "steps", steps)

    @overload
    def __call__(self, asked: Moment, /) -> bool: ...
    @overload
    def __call__(self, asked: Records, /) -> Collection[int]: ...

    def __call__(self, asked: Moment | Records, /) -> bool | Collection[int]:
        """Whether to save now, or the numbers of the steps to keep."""
        if isinstance(asked, Moment):
            return asked.step in self.steps
        return [record.number for record in asked if record.number in self.steps]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Save at the first step of a run that has no checkpoint yet.

    Example:
        >>> FirstStep()(Moment(0, time=0.0)), FirstStep()(Moment(1, time=0.0, last=StepRecord(0)))
        (True, False)
    """

    def __call__(self, moment: Moment, /) -> bool:
        """Whether to save now."""
        return moment.last is None


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """Save whenever the last save has finished: as often as the storage allows.

    Example:
        >>> WhenIdle()(Moment(3, time=0.0)), WhenIdle()(Moment(3, time=0.0, busy=True))
        (True, False)
    """

    def __call__(self, moment: Moment, /) -> bool:
        """Whether to save now."""
        return not moment.busy


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save once a rank was asked to end, at the same step on all ranks.

    Args:
        signals: those that ask to end: SIGTERM, and for example SIGUSR1 where a SLURM job was
            submitted with ``--signal=USR1@120``.

    Example:
        >>> OnPreemption()(Moment(3, time=0.0, preempted=True))
        True
        >>> OnPreemption(["SIGTERM", "SIGUSR1"]).signals == {signal.SIGTERM, signal.SIGUSR1}
        True
    """

    signals: str | int | Collection[str | int] = signal.SIGTERM

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", signals_named(self.signals))

    def __call__(self, moment: Moment, /) -> bool:
        """Whether to save now."""
        return moment.preempted


@dataclass(frozen=True, slots=True)
class Latest:
    """Keep the ``n`` newest steps.

    Example:
        >>> Latest(2)([StepRecord(1), StepRecord(2), StepRecord(3)])
        [2, 3]
    """

    n: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", count_of("Latest(n)", self.n))

    def __call__(self, records: Records, /) -> Collection[int]:
        """The numbers of the steps to keep."""
        return [record.number for record in records[-self.n :]]


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``n`` steps with the best value of a metric; of equal ones the newer.

    A step without the metric, or with NaN, is not among them.

    Example:
        >>> records = [StepRecord(step, 0.0, {"loss": 1 / step}) for step in (1, 2, 3)]
        >>> Best("loss", 2)(records), Best("loss", mode="max")(records)
        ([3, 2], [1])
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", count_of("Best(metric, n)", self.n))
        if not isinstance(self.metric, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Best(metric) takes a metric's name, not {self.metric!r}")
        if not is_utf8(self.metric):  # the rule is stored with each step
            raise ValueError(
                f"Best(metric) takes a metric's name; {self.metric!r} holds half a character "
                f"(a lone surrogate)"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best(mode=) is 'min' or 'max', not {self.mode!r}")

    def __call__(self, records: Records, /) -> Collection[int]:
        """The numbers of the steps to keep, the best first."""
        sign = 1 if self.mode == "min" else -1
        found = [
            (sign * record.metrics[self.metric], -record.number)
            for record in records
            if not isnan(record.metrics.get(self.metric, float("nan")))
        ]
        return [-number for _, number in sorted(found)[: self.n]]


@dataclass(frozen=True, slots=True)
class All:
    """Keep every step.

    Example:
        >>> All()([StepRecord(1), StepRecord(2)])
        [1, 2]
    """

    def __call__(self, records: Records, /) -> Collection[int]:
        """The numbers of the steps to keep."""
        return [record.number for record in records]


BY_DEFAULT: tuple[SavePolicy, ...] = (FirstStep(), WhenIdle(), OnPreemption())
"""When a run saves that names no policy."""
KEEP_BY_DEFAULT: tuple[KeepPolicy, ...] = (All(),)
"""What a run keeps that names no policy."""


def is_due(moment: Moment, policies: Iterable[SavePolicy]) -> bool:
    """Whether a run saves now: one of the policies says so, and the step is not saved yet.

    Raises:
        TypeError: a policy returned neither True nor False.

    Example:
        >>> is_due(Moment(10, time=0.0), [EverySteps(10)])
        True
    """
    if moment.last is not None and moment.last.number == moment.step:
        return False
    return any(_says(policy, moment) for policy in policies)


def _says(policy: Callable[[Moment], object], moment: Moment) -> bool:
    said = policy(moment)
    if isinstance(said, bool):  # as most are; at a step without a save each call counts
        return said
    # Anything else is true or false as well: a text, or the coroutine of an async function.
    is_number = isinstance(said, SupportsIndex) or hasattr(said, "dtype")
    if is_number and not getattr(said, "ndim", 0):
        return bool(said)
    raise TypeError(
        f"the save policy {name_of(policy)} has to return True or False, not {reprlib.repr(said)}"
    )


def name_of(policy: Callable[..., object]) -> str:
    """What to call a policy: a function by its name.

    Example:
        >>> name_of(len), name_of(Latest(2))
        ('len', 'Latest')
    """
    return str(getattr(policy, "__name__", type(policy).__name__))


def signals_of(policies: Iterable[object]) -> frozenset[signal.Signals]:
    """The signals that ask a run to end: those of its policies, or SIGTERM.

    Example:
        >>> sorted(signals_of([EverySteps(3)])) == [signal.SIGTERM]
        True
    """
    asked = [policy for policy in policies if isinstance(policy, OnPreemption)] or [OnPreemption()]
    return frozenset(each for policy in asked for each in signals_named(policy.signals))
