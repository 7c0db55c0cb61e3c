"""Crashes: the storage operations of a save, an overwrite and a delete, cut off anywhere.

1. Each `Scenario` is played once by a process that is traced (`conformance.crash.recording`): two
   ranks save into a new place, two ranks overwrite a checkpoint, a checkpoint is deleted. That
   gives the list of operations on files, in their order.
2. After every prefix of the list the process may be killed: the files are as they are. Or the
   machine may lose power: whatever was not synced may be missing
   (`conformance.crash.disk.power_cuts`). Each is made into a folder, and a reader looks at it
   (`conformance.crash.scenarios.found_at`): it finds exactly the old state or exactly the new one,
   byte for byte, or gets an error, and never anything else.
3. Once an overwrite has begun the reader always finds one of both; once a save has returned, always
   the new one. Among kills, what was new does not become old again.
4. After a kill the next save works (law ``save-after-crash``).
"""

from __future__ import annotations

import base64
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.crash.disk import Disk, Image, apply, power_cuts, starting
from conformance.crash.recording import (
    ActionError,
    CannotRecordError,
    Recorder,
    Recording,
    memory,
    replay,
)
from conformance.crash.scenarios import (
    CHECKPOINT,
    FORMS,
    SCENARIOS,
    STATES,
    Scenario,
    found_at,
    save,
)
from conformance.implementation import Implementation, Refused
from conformance.outcome import Outcome

__all__ = ["Crashes", "EnoughError", "Fault", "image_from_json", "run"]

AFTERWARDS = "save-after-crash"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a reader found and should not have."""

    error: str
    case: dict[str, Any]
    """As JSON: the operations up to the crash, and what was left of the files (base64)."""

    @property
    def smallest(self) -> str:
        """What was left, for people."""
        return "\n".join(["what is left:", *(f"    {path}" for path in self.case["left"])])


def image_from_json(left: dict[str, str | None]) -> Image:
    """What was left by a crash that was kept."""
    return {
        path: None if content is None else base64.b64decode(content)
        for path, content in left.items()
    }


class EnoughError(Exception):
    """A fault was found, and one is enough; raised with ``stop`` alone."""


@dataclass(slots=True)
class Crashes:
    """The crashes of one recorded action, replayed."""

    implementation: Implementation
    scenario: Scenario
    recording: Recording
    form: str
    """One of `FORMS`."""
    folder: Path
    """Where they are replayed; what is made there is left to the caller."""
    found: Counter[str] = field(default_factory=Counter)
    """What readers found, and how often."""
    faults: list[Fault] = field(default_factory=list)
    stop: bool = False
    """Whether to try no more once there is a fault."""
    _made: int = 0
    _seen: set[int] = field(default_factory=set)
    _said: dict[int, tuple[str, str]] = field(default_factory=dict)
    """What a reader said of an image, and the fault if it was a mixture: it is not asked twice."""

    def prefixes(self) -> Iterator[tuple[int, Disk]]:
        """The disk after the first n operations, for every n."""
        disk = starting(self.recording.before)
        yield 0, disk
        for count, operation in enumerate(self.recording.operations, 1):
            disk = apply(disk, operation)
            yield count, disk

    def kills(self) -> None:
        """Replay a kill after every prefix; a reader looks again where the files have changed."""
        found, seen = "", None
        for count, disk in self.prefixes():
            before, image, allowed = found, disk.image(), self.allowed(count, power=True)
            if (image, allowed) == seen:
                self.found[found or "mixture"] += 1
                continue
            seen = image, allowed
            found = self.look(count, "a kill", image, allowed)
            if before == "new" and found != "new":
                self._note(count, image, f": what was new is {found or 'damaged'}", found)

    def power_cuts(self, most: int, seed: int) -> None:
        """Replay power cuts after every prefix: all that differ, or about ``most`` random ones.

        Those after the last operation are tried in any case: what has returned must last.
        """
        pick = random.Random(seed)
        disks = list(self.prefixes())
        each = -(-most // len(disks))
        last = len(disks) - 1
        chosen = {last, *pick.sample(range(len(disks)), min(most, len(disks)))}
        for number in sorted(chosen):
            count, disk = disks[number]
            images = list(self._unseen(count, power_cuts(disk)))
            if number != last and len(images) > each:
                images = pick.sample(images, each)
            for image in images:
                self.look(count, "a power cut", image, self.allowed(count, power=False))

    def _unseen(self, count: int, images: Iterable[Image]) -> Iterator[Image]:
        """The images that have not been tried, those after the last operation apart."""
        for image in images:
            key = hash((count == self.count, tuple(image.items())))
            if key not in self._seen:
                self._seen.add(key)
                yield image

    def saves_afterwards(self, most: int, seed: int) -> None:
        """Replay kills, and save another state over what is left: all, or ``most`` random ones."""
        disks = list(self.prefixes())
        if len(disks) > most:
            disks = random.Random(seed).sample(disks, most)
        for count, disk in disks:
            folder = self._fresh(disk.image())
            try:
                save(self.implementation, folder, "next", self.form)
                found = self.found_in(folder)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            self.found[found] += 1
            if found != "next":
                self._note(count, disk.image(), f" and another save: {found}", found)

    def look(self, count: int, what: str, image: Image, allowed: frozenset[str]) -> str:
        """Have a reader look at an image; what it found, empty for a mixture."""
        key = hash(tuple(image.items()))
        if key not in self._said:
            self._said[key] = self._ask(self._fresh(image))
        found, fault = self._said[key]
        if found and found not in allowed:
            fault = f"a reader finds {found}, and may find {' or '.join(sorted(allowed))}"
        self.found[found or "mixture"] += 1
        if fault:
            self._note(count, image, f" and {what}: {fault}", found or "mixture")
        return found

    def _ask(self, folder: Path) -> tuple[str, str]:
        try:
            return self.found_in(folder), ""
        except Exception as error:
            return "", str(error)

    def found_in(self, folder: Path) -> str:
        """What a reader finds in a folder; see `found_at`."""
        return found_at(self.implementation, folder / CHECKPOINT, STATES[self.form])

    def allowed(self, count: int, *, power: bool) -> frozenset[str]:
        """What a reader may find after the first ``count`` operations."""
        if count < self.count:
            return self.scenario.meanwhile
        return self.scenario.at_last if power else self.scenario.at_last_without_power

    @property
    def count(self) -> int:
        """How many operations there are."""
        return len(self.recording.operations)

    def _note(self, count: int, image: Image, what: str, found: str) -> None:
        done = [str(operation) for operation in self.recording.operations[:count]]
        where = f"after {count} of {self.count} operations, the last {(done or ['nothing'])[-1]}"
        left = {
            path: None if content is None else base64.b64encode(content).decode()
            for path, content in image.items()
        }
        case = {"form": self.form, "operations": done, "of": self.count, "left": left}
        self.faults.append(Fault(f"{where}{what}", case | {"found": found}))
        if self.stop:
            raise EnoughError

    def _fresh(self, image: Image) -> Path:
        self._made += 1
        folder = self.folder / str(self._made)
        replay(image, folder)
        return folder


def record(recorder: Recorder, scenario: Scenario, folder: Path, *, form: str) -> Recording:
    """Play a scenario in an empty folder, and record it.

    Raises:
        ActionError: the implementation raised.
        CannotRecordError: it cannot be recorded.
        Refused: the implementation refuses.
    """
    if scenario.old:
        recorder.do(save, folder, "old", form)
    return recorder.record(folder, scenario.act, folder, form)


def form_for(recorder: Recorder) -> str:
    """The first of `FORMS` that the implementation does not refuse, else the last.

    Raises:
        ActionError: it cannot save.
        CannotRecordError: not in a forked process.
    """
    for form in FORMS:
        with tempfile.TemporaryDirectory(prefix="crashes-", dir=memory()) as folder:
            try:
                recorder.do(save, Path(folder), "old", form)
            except Refused:
                continue
            return form
    return FORMS[-1]


def run(
    implementation: Implementation,
    *,
    examples: int,
    seed: int,
    only: str = "",
    stop: bool = False,
    recorder: Recorder | None = None,
) -> Iterator[Outcome]:
    """All scenarios: every prefix, ``examples`` power cuts of each and all after its end, and a
    quarter as many saves after its kills; with ``stop``, none after the first fault. A recorder of
    the implementation may serve several runs. See `conformance.outcome.Part`."""
    if only not in ("", AFTERWARDS, *(scenario.law for scenario in SCENARIOS)):
        return
    afterwards = Outcome(AFTERWARDS)
    with contextlib.ExitStack() as stack:
        try:
            recorder = recorder or stack.enter_context(Recorder(implementation))
            form = form_for(recorder)
        except ActionError as error:
            yield Outcome(only or SCENARIOS[0].law, failed=1, error=str(error))
            return
        except CannotRecordError as error:
            for law in [only] if only else [*(scenario.law for scenario in SCENARIOS), AFTERWARDS]:
                yield Outcome(law, refused=1, refusals=Counter([str(error)]))
            return
        judge = _Judge(implementation, recorder, form, examples, seed, only, stop)
        for scenario in SCENARIOS:
            outcome = Outcome(scenario.law)
            if only in ("", AFTERWARDS, scenario.law):
                judge.judge(scenario, outcome, afterwards)
            if only in ("", scenario.law):
                yield outcome
    if only in ("", AFTERWARDS):
        yield afterwards


@dataclass(frozen=True, slots=True)
class _Judge:
    implementation: Implementation
    recorder: Recorder
    form: str
    examples: int
    seed: int
    only: str
    stop: bool

    def judge(self, scenario: Scenario, outcome: Outcome, afterwards: Outcome) -> None:
        """Count what comes of a scenario, and of saves after its crashes."""
        with tempfile.TemporaryDirectory(prefix="crashes-", dir=memory()) as name:
            folder = Path(name)
            (folder / "recorded").mkdir()
            try:
                recording = record(self.recorder, scenario, folder / "recorded", form=self.form)
            except (CannotRecordError, Refused) as refusal:
                outcome.refused += 1
                outcome.refusals[str(refusal)] += 1
                return
            except ActionError as error:
                outcome.failed, outcome.error = 1, str(error)
                return
            judged = self.implementation, scenario, recording, self.form
            if self.only != AFTERWARDS:
                crashes = Crashes(*judged, folder / "replayed", stop=self.stop)
                with contextlib.suppress(EnoughError):
                    if self.stop:  # what a kill leaves, a power cut may leave too
                        crashes.power_cuts(self.examples, self.seed)
                    crashes.kills()
                    if not self.stop:
                        crashes.power_cuts(self.examples, self.seed)
                _count(crashes, outcome)
            if self.only in ("", AFTERWARDS):
                following = Crashes(*judged, folder / "followed", stop=self.stop)
                with contextlib.suppress(EnoughError):
                    following.saves_afterwards(max(self.examples // 4, 1), self.seed)
                _count(following, afterwards)


def _count(crashes: Crashes, outcome: Outcome) -> None:
    outcome.failed += len(crashes.faults)
    outcome.passed += max(0, crashes.found.total() - len(crashes.faults))
    if crashes.faults and not outcome.error:
        first = crashes.faults[0]
        outcome.error, outcome.smallest, outcome.case = first.error, first.smallest, first.case
