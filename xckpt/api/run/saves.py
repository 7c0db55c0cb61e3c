"""The saves of a run: decided by all ranks together, one at a time in the background.

1. `RunSaves.decide`: the coordinator asks the save policies; its answer reaches every rank.
2. If the save in the background has ended by then, every rank records that: a failure is
   raised; a step that is committed becomes the last one, and what no policy keeps is deleted.
3. `RunSaves.begin`: all ranks wait for the save before and check the data saved with the step; then
   the next save begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, SupportsFloat, SupportsIndex, cast

from xckpt.api.run.folder import RunFolder
from xckpt.api.run.going import Going
from xckpt.api.save import save_async
from xckpt.core.json_values import check_json
from xckpt.core.metadata import JSONValue
from xckpt.core.run.bases import Bases
from xckpt.core.run.names import OptionalBase, step_name
from xckpt.core.run.numbers import checked_step
from xckpt.core.run.policies import KeepPolicy, Moment, SavePolicy, is_due, signals_of
from xckpt.core.run.record import StepRecord, run_metadata
from xckpt.core.run.rules import rule_texts
from xckpt.core.text.arguments import named
from xckpt.engine.run.decision import Decision, KeptError, Rounds
from xckpt.engine.run.preemption import Preemption
from xckpt.options import SaveOptions, check_flags

logger: Final = logging.getLogger("xckpt")

NEWER = (
    "%s: step %d is saved though newer steps are there, up to step %d: restore() finds that one, "
    "and keep= counts it as the newest; to go on from step %d for good, delete the newer ones: "
    "checkpoints.delete(%d)"
)


@dataclass(frozen=True, slots=True)
class Rules:
    """When a root is saved to, and which of its steps stay."""

    save: tuple[SavePolicy, ...]
    keep: tuple[KeepPolicy, ...]


class RunSaves:
    """What one rank knows of the saves of a run.

    Args:
        folder: the roots of the run.
        rules: of each root.
        options: for each save.
        bases: the steps that saves share unchanged chunks with.
    """

    def __init__(
        self, folder: RunFolder, rules: Sequence[Rules], options: SaveOptions, bases: Bases
    ) -> None:
        self.folder = folder
        self.rules = rules
        self.options = options
        self.bases = bases
        self.signal: Final = Preemption(signals_of(p for each in rules for p in each.save))
        self._rounds = Rounds(folder.group)
        self.preempted: bool = False
        """Whether some rank was asked to end; the same on all ranks."""
        self.last: StepRecord | None = None
        """The last step that was saved or restored."""
        self._last_kept: StepRecord | None = None
        """The same, of those in the root that is kept."""
        self._began = time.time()
        self._going: list[Going] = []
        """Saves in the background; more than one where signal handlers interrupted a begin."""
        self._noting = threading.RLock()  # held by the one thread that notes the end of a save
        self._decided: tuple[int | None, Decision] | None = None
        """The result of `preview`, for the `decide` that follows."""
        self._fault = KeptError()  # a keep policy's on the coordinator, for all ranks
        self._answered = False
        """Whether a save was begun since the run was preempted."""
        self._goes_back = False  # whether a warning said that newer steps exist than those saved
        self.resume(next(iter(folder.look()[-1:]), None))

    def resume(self, record: StepRecord | None) -> None:
        """Go on from a step of the run, as if it had been saved last."""
        self.last = record
        last = -1 if record is None else record.number
        kept = [r for r in self.folder.records if not r.temporary and r.number <= last]
        self._last_kept = next(iter(kept[-1:]), None)

    def forget(self, step: int) -> None:
        """A step was deleted: if it was the last, the run goes on from the one before."""
        last = self.last
        if last is not None and last.number == step:
            last = next((r for r in reversed(self.folder.records) if r.number < step), None)
        self.resume(last)

    def preview(self, step: SupportsIndex) -> bool:
        """What `decide` will say at this step; collective."""
        decision = self.decide(step, force=False)
        self._decided = (self._rounds.checked(step), decision)
        return decision.due

    def decide(self, step: SupportsIndex, *, force: bool, metrics: object = None) -> Decision:
        """Whether to save now; collective, once a step.

        Raises:
            XckptError: the save in the background has failed.
            TypeError, ValueError: an argument of some rank makes no sense; it is named.
            Exception: what a policy raised.
        """
        number = self._rounds.checked(step, lambda: _check_metrics(metrics))
        known, self._decided = self._decided, None
        # A rank with an invalid step takes part, so that the others learn of it.
        same = known is not None and (number == known[0] or None in (number, known[0]))
        if known is not None and same and (known[1].due or not force):
            return known[1]
        if known is not None and not same and known[1].due:
            self._rounds.leave(number)
        decision = self._rounds.agree(
            number,
            self.signal.asked(),
            lambda preempted: self._answer(number, force, preempted or self.preempted),
        )
        self.preempted = decision.preempted
        if decision.ended:
            self.settle()
        return decision

    def _answer(self, step: int | None, force: bool, preempted: bool) -> Decision:
        """The coordinator's decision."""
        check_flags("CheckpointManager.save", force=force)
        assert step is not None, "a wrong step was raised before"
        self._fault.raise_once()
        now = time.time()
        saves = tuple(self._going)
        ended = bool(saves) and all(each.saving.done() for each in saves)
        busy = bool(saves) and not ended
        going = saves[-1].record if saves else None
        kept = self._last_kept if going is None or going.temporary else going
        moment = Moment(step, now, self._began, kept, busy, preempted and not self._answered)
        due, temporary = bool(force) or is_due(moment, self.rules[0].save), False
        for rules in () if due else self.rules[1:]:
            moment = replace(moment, last=going or self.last)
            due = temporary = is_due(moment, rules.save)
        name, temporary = self.folder.replaced(step, temporary=temporary) if due else (None, False)
        return Decision(due, now, ended, preempted, name, temporary)

    def begin(
        self,
        step: SupportsIndex,
        state: object,
        metrics: Mapping[str, SupportsFloat] | None,
        metadata: JSONValue,
        decision: Decision,
    ) -> None:
        """Begin to save in the background, as was decided; collective.

        Raises:
            XckptError: the save before has failed, or the root cannot be written.
            TypeError: on some rank a metric is not a number, or the metadata are not a dict.
        """
        self.settle()
        base = self.bases.base_for(decision.temporary)
        rules = self.rules[decision.temporary]
        made = partial(_recorded, self.folder, step, metrics, metadata, decision, rules, base)
        record, kept = self._rounds.prepare(self._rounds.checked(step), made)
        self._warn_of_newer(record.number)
        saving = save_async(
            self.folder.path(record),
            state,
            # Also the remains of this step from a killed save or deletion.
            overwrite=True,
            base=base,
            metadata=kept,
            group=self.folder.group,
            options=self.options,
        )
        self._going.append(Going(saving, record, shares=base is not None))
        self._answered = self.preempted

    def _warn_of_newer(self, step: int) -> None:
        """Warn once that a run has gone back behind existing steps."""
        newest = next((each.number for each in self.folder.records[-1:]), step)
        if newest <= step:
            self._goes_back = False
        elif self.folder.is_coordinator and not self._goes_back:
            self._goes_back = True
            logger.warning(NEWER, self.folder.kept.location, step, newest, step, newest)

    def settle(self) -> None:
        """Wait for the save in the background, and take note of it.

        Raises:
            XckptError: it has failed.
        """
        for going in tuple(self._going):
            self._note(going)

    def _note(self, going: Going) -> None:
        """Wait for a save; unless it is noted already, take note of it."""
        error = going.failure()
        record = going.record if error is not None else going.saved()
        with self._noting:
            if not self._going or self._going[0] is not going:
                return  # another thread has noted it, or a signal handler
            # Up to the next call no signal handler comes between, which may note a later save.
            del self._going[0]  # not earlier: an interrupt of the wait does not end the save
            if error is not None:
                self._answered = False
                raise going.named(error)
            self.last = record
            if not record.temporary:
                self._last_kept = record
            self.bases.saved(self.folder.path(record), root=record.temporary, shared=going.shares)
            self.folder.add(record)
            try:
                self.folder.keep([each.keep for each in self.rules], record)
            except Exception as fault:  # a policy's, on the coordinator alone
                self._fault.note(fault)

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save in the background and for what is being deleted.

        Raises:
            Exception: the save has failed; or a keep policy: several ranks raise that later.
        """
        try:
            self.settle()
        finally:
            self.folder.wait()
        if last or self.folder.group.size == 1:
            self._fault.raise_once()

    def enter(self) -> None:
        """The training loop begins; the signal that ended an earlier one was answered."""
        self.folder.collect()
        if self.signal.watch():  # last: if that fails, no end of the loop puts the handlers back
            self.preempted = self._answered = False

    def leave(self, error: BaseException | None) -> None:
        """The training loop has ended, perhaps by an error, which counts more than a save's.

        Raises:
            XckptError: the last save has failed, and there is no other error.
        """
        try:
            self.wait(last=True)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"The last save of the run failed as well: {failure}")
        finally:
            self.signal.rest()


def _recorded(
    folder: RunFolder,
    step: object,
    metrics: Mapping[str, SupportsFloat] | None,
    metadata: JSONValue,
    decision: Decision,
    rules: Rules,
    base: OptionalBase | None,
) -> tuple[StepRecord, JSONValue]:
    """What is known of a step that is saved, and how it is written.

    Raises:
        TypeError, ValueError: an argument makes no sense; it is named.
        ManifestError: JSON cannot express the metadata.
        StorageError: the root cannot be written.
    """
    number = checked_step(step)
    record = StepRecord(
        number,
        decision.time,
        {name: _number(name, value) for name, value in (metrics or {}).items()},
        name=decision.replaced or step_name(number),
        temporary=decision.temporary,
        keep=rule_texts(rules.keep),
        base=None if base is None else _step_at(folder, base.path),
    )
    saved = record, run_metadata(record, metadata)
    check_json(saved[1], "metadata")  # a metric's name, too, may hold half a character
    if folder.is_coordinator:
        root = folder.root_of(record)
        root.remover.finish(record.name)  # the last save may have outdated what is there
        root.check_writable(record.name)
    return saved


def _step_at(folder: RunFolder, path: str) -> int | None:
    return next((each.number for each in folder.records if folder.path(each) == path), None)


def _check_metrics(metrics: object) -> None:
    """Refuse what are no metrics, at each step; no accelerator is waited for.

    Raises:
        TypeError: they are not a mapping from names to numbers.
    """
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics= is a mapping from names to numbers, such as {{'loss': 0.25}}, not "
            f"{named(type(metrics).__name__)}"
        )
    for name, value in cast(Any, metrics).items():
        if not isinstance(name, str):
            raise TypeError(f"metrics[{name!r}] has no name: a name is a str")
        if not isinstance(value, SupportsFloat):
            kind = named(type(value).__name__)
            raise TypeError(f"metrics[{name!r}] is {kind}, and has to be a number")


def _number(name: str, value: object) -> float:
    """A metric as a float: a number, or an array or tensor of one element.

    Raises:
        TypeError: it is none.
    """
    # torch warns of a loss that has a gradient.
    value = getattr(value, "detach", lambda: value)()
    if getattr(value, "size", 0) == 1 and getattr(value, "ndim", 0):
        value = cast(Any, value).reshape(())  # NumPy takes those without dimensions alone
    try:
        return float(cast(Any, value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"metrics[{name!r}] is not a number: {error}") from error
