"""The promises of a manager, each a law: cases that were kept, and cases that were not.

=====================  ==========================================================================
``successor-first``    nothing is deleted before its successor is committed
``power-cuts``         the same, when the machine loses power
``latest-committed``   ``latest`` is committed and whole, and what is there now, not what was
``failure-raised``     a save that failed is raised by the next call, and is not the last save
``falls-back``         a damaged newest step gives way to the newest good one, and is named
``last-good-stays``    the last good step is not deleted, whatever the manager was asked to keep
``ranks-agree``        all ranks decide alike
``reader-finishes``    a reader that has begun ends with the step, or an error: it was deleted
=====================  ==========================================================================

Each law is a generator of cases: a text says what a case was and what was wrong with it, an empty
one that nothing was. `run` counts them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from conformance.crash.recording import ActionError, CannotRecordError, Recorder
from conformance.implementation import Refused
from conformance.outcome import Outcome
from conformance.runs import crashes, faults, ranks, readers
from conformance.runs.crashes import Left, Trained
from conformance.runs.manager import Keep, Manager, find

__all__ = ["LAWS", "Judge", "run"]


@dataclass
class Judge:
    """A manager that is judged, and what was recorded of it so far."""

    module: str
    examples: int
    seed: int
    folder: Path
    recorder: Callable[[], Recorder]
    _trained: dict[Keep, Trained | Exception] = field(
        default_factory=dict[Keep, "Trained | Exception"]
    )
    _kills: dict[Keep, list[Left]] = field(default_factory=dict[Keep, list[Left]])

    @property
    def manager(self) -> Manager:
        return find(self.module)

    @property
    def few(self) -> Keep:
        """As few newest steps as it can be asked to keep."""
        return Keep(latest=self.manager.fewest)

    @property
    def least(self) -> Keep:
        """No step; where it cannot be asked for that, as few as it can."""
        try:
            self.manager.open(self.folder / "least", Keep()).close()
        except Refused:
            return self.few
        return Keep()

    def trained(self, keep: Keep) -> Trained:
        """A recorded run.

        Raises:
            ActionError: the manager raised.
            CannotRecordError: it cannot be recorded.
            Refused: it cannot be asked to keep these.
        """
        if keep not in self._trained:
            place = self.folder / f"crashes-{len(self._trained)}"
            try:
                trained = crashes.record(self.recorder(), self.module, keep, place)
            except (Refused, CannotRecordError) as refusal:
                trained = refusal
            self._trained[keep] = trained
        found = self._trained[keep]
        if isinstance(found, Exception):
            raise found
        return found

    def kills(self, keep: Keep) -> list[Left]:
        """What kills leave of it."""
        if keep not in self._kills:
            self._kills[keep] = list(crashes.kills(self.trained(keep)))
        return self._kills[keep]


Law = Callable[[Judge], Iterator[str]]


def successor_first(judge: Judge) -> Iterator[str]:
    """No kill takes back what was there."""
    before = -1
    for left in judge.kills(judge.few):
        least = max(before, left.said)
        before = max(before, left.newest)
        yield _older(left, least)


def power_cuts(judge: Judge) -> Iterator[str]:
    """No power cut takes back what the manager has said to be saved."""
    trained = judge.trained(judge.few)
    for left in crashes.losses_of_power(trained, judge.examples, judge.seed):
        yield _older(left, left.said)


def _older(left: Left, least: int) -> str:
    if left.newest >= least:
        return ""
    found = f"the newest step that loads is {left.newest}" if left.whole else "no step loads"
    return f"{left.text}: {found}, and step {least} was there"


def latest_committed(judge: Judge) -> Iterator[str]:
    """What a manager says in the place of one that was killed, and beside one that is at work."""
    for left in judge.kills(judge.few):
        run = judge.manager.open(left.root, Keep(latest=1000))
        try:
            said = run.latest()
        finally:
            run.close()
        newest = left.newest if left.whole else None
        yield "" if said == newest else f"{left.text}: latest says {said}, and {newest} loads"
    yield from faults.stale(judge.manager, judge.folder / "stale")


def last_good_stays(judge: Judge) -> Iterator[str]:
    """Whatever is kept, something is there once a step was saved."""
    was = False
    for left in judge.kills(judge.least):
        was = was or bool(left.whole)
        missing = was and not left.whole
        yield f"{left.text}: no step loads any longer" if missing else ""
    yield from faults.last_good(judge.manager, judge.folder / "last")


LAWS: dict[str, Law] = {
    "successor-first": successor_first,
    "power-cuts": power_cuts,
    "latest-committed": latest_committed,
    "failure-raised": lambda judge: faults.failures(judge.manager, judge.folder / "failures"),
    "falls-back": lambda judge: faults.damaged(judge.manager, judge.folder / "damaged"),
    "last-good-stays": last_good_stays,
    "ranks-agree": lambda judge: ranks.agreeing(judge.manager, judge.folder / "ranks"),
    "reader-finishes": lambda judge: readers.readers(
        judge.manager, judge.kills(judge.few), judge.folder / "readers"
    ),
}


def run(
    module: str, *, examples: int, seed: int, only: str = "", recorder: Recorder | None = None
) -> Iterator[Outcome]:
    """Judge a manager.

    Args:
        module: has a ``MANAGER``.
        examples: about how many power cuts.
        seed: of all that is random.
        only: the one law to judge by; empty for all.
        recorder: where its runs are played; by default a new one.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(crashes.temporary()))

        @cache
        def recording() -> Recorder:
            return recorder or stack.enter_context(crashes.recorder(module))

        judge = Judge(module, examples, seed, folder, recording)
        for name, law in LAWS.items():
            if only in ("", name):
                yield _counted(name, law, judge)


def _counted(name: str, law: Law, judge: Judge) -> Outcome:
    outcome = Outcome(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for fault in law(judge):
                outcome.passed += not fault
                outcome.failed += bool(fault)
                outcome.error = outcome.error or fault
    except (Refused, CannotRecordError) as refusal:
        outcome.refused += 1
        outcome.refusals = Counter([str(refusal)])
    except ActionError as error:
        outcome.failed += 1
        outcome.error = outcome.error or str(error)
    return outcome
