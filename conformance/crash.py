"""Crashes: the storage operations of a save, an overwrite and a delete, cut off anywhere.

1. Each `Scenario` is played once by a process that is traced (`conformance.recording`): two ranks
   save into a new place, two ranks overwrite a checkpoint, a checkpoint is deleted. That gives the
   list of operations on files, in their order.
2. After every prefix of the list the process may be killed: the files are as they are. Or the
   machine may lose power: whatever was not synced may be missing (`conformance.disk.power_cuts`).
   Each is made into a folder, and a reader looks at it (`found_at`): it finds exactly the old state
   or exactly the new one, byte for byte, or gets an error, and never anything else.
3. Once an overwrite has begun the reader always finds one of both; once a save has returned, always
   the new one. Among kills, what was new does not become old again.
4. After a kill the next save works (law ``save-after-crash``).
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.disk import Disk, Image, Operation, apply, power_cuts, starting
from conformance.implementation import (
    Array,
    Box,
    Held,
    Implementation,
    Refused,
    Shard,
    Wanted,
)
from conformance.outcome import Outcome
from conformance.recording import (
    ActionError,
    CannotRecordError,
    Recorder,
    Recording,
    memory,
    replay,
)

__all__ = ["SCENARIOS", "Crashes", "Scenario", "State", "found_at", "run"]

AFTERWARDS = "save-after-crash"

CHECKPOINT = "checkpoint"
"""The name of the checkpoint in the folder that is recorded."""

State = Mapping[str, NDArray[np.generic]]


def state(number: int, *extra: str, plain: bool) -> State:
    """A state that tells whole ones from mixtures: every element depends on the number.

    A plain one is for implementations that refuse the other.
    """
    leaves: dict[str, NDArray[np.generic]] = {
        "w": np.arange(24, dtype=np.float32).reshape(6, 4) + 100 * number,
        "bias": np.full(5, number, np.int16),
        **{name: np.full((2, 2), number, np.uint8) for name in extra},
    }
    if not plain:
        leaves["table"] = np.arange(20, dtype=np.int64).reshape(5, 4) * number
        leaves["step"] = np.array(number, np.int32)
        leaves["empty"] = np.zeros((0, 3), np.float32)
    return leaves


BOXES: Mapping[str, Sequence[Sequence[Box]]] = {
    "w": ([Box((0, 0), (3, 4))], [Box((3, 0), (3, 4))]),
    "table": (
        [Box((0, 0), (2, 3)), Box((2, 0), (3, 1))],
        [Box((0, 3), (2, 1)), Box((2, 1), (3, 3))],
    ),
    "step": ([Box((), ())], []),
}
"""What each of two ranks holds of a leaf; of all others both hold everything."""


def ranks_of(whole: State) -> list[dict[str, Held]]:
    """A state, held by two ranks."""
    ranks: list[dict[str, Held]] = [{}, {}]
    for name, values in whole.items():
        array = Array(values.shape, str(values.dtype))
        everything = Box((0,) * values.ndim, values.shape)
        for held, boxes in zip(ranks, BOXES.get(name, ([everything],) * 2), strict=True):
            shards = tuple(Shard(box, values[(*box.region, ...)]) for box in boxes)
            held[name] = Held(array, shards)
    return ranks


STATES = {
    plain: {
        "old": state(1, "only old", plain=plain),
        "new": state(2, "only new", plain=plain),
        "next": state(3, plain=plain),
    }
    for plain in (False, True)
}
"""Plain or not -> the states by their names."""


def save(implementation: Implementation, folder: Path, name: str, plain: bool) -> None:
    """Save one of `STATES`, over whatever is there."""
    ranks = ranks_of(STATES[plain][name])
    implementation.save(folder / CHECKPOINT, ranks, overwrite=True)


def save_new(implementation: Implementation, folder: Path, plain: bool) -> None:
    implementation.save(folder / CHECKPOINT, ranks_of(STATES[plain]["new"]))


def overwrite(implementation: Implementation, folder: Path, plain: bool) -> None:
    save(implementation, folder, "new", plain)


def delete(implementation: Implementation, folder: Path, plain: bool) -> None:
    implementation.delete(folder / CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is recorded, and what a reader may find then: ``old``, ``new`` or ``error``."""

    law: str
    old: bool
    """Whether the old state is there before."""
    act: Callable[[Implementation, Path, bool], None]
    meanwhile: frozenset[str]
    at_last: frozenset[str]
    """When the action has returned."""
    at_last_without_power: frozenset[str]
    """The same, when the power fails then."""


SCENARIOS = (
    Scenario(
        "crash-save",
        False,
        save_new,
        frozenset({"error", "new"}),
        frozenset({"new"}),
        frozenset({"new"}),
    ),
    Scenario(
        "crash-overwrite",
        True,
        overwrite,
        frozenset({"old", "new"}),
        frozenset({"new"}),
        frozenset({"new"}),
    ),
    Scenario(
        "crash-delete",
        True,
        delete,
        frozenset({"old", "error"}),
        frozenset({"error"}),
        frozenset({"old", "error"}),
    ),
)


def found_at(implementation: Implementation, path: Path, states: Mapping[str, State]) -> str:
    """Which of the states is at a path; ``error`` if a load or `verify` says that none is whole.

    Raises:
        AssertionError: something loads that nobody saved.
    """
    try:
        arrays = implementation.list(path)
        wanted = {
            name: Wanted(array, (Box((0,) * len(array.shape), array.shape),))
            for name, array in arrays.items()
        }
        loaded = implementation.load(path, [wanted])[0]
    except Exception:
        return "error"
    for name, whole in states.items():
        if loaded.keys() == whole.keys() and all(
            _same(loaded[leaf][0], values) for leaf, values in whole.items()
        ):
            return "error" if _damaged(implementation, path) else name
    values = {leaf: np.unique(np.asarray(found[0])).tolist() for leaf, found in loaded.items()}
    raise AssertionError(f"a mixture loads: {values}")


def _damaged(implementation: Implementation, path: Path) -> bool:
    try:
        return bool(implementation.verify(path))
    except Refused:
        return False


def _same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


@dataclass(slots=True)
class Crashes:
    """The crashes of one recorded action, replayed."""

    implementation: Implementation
    scenario: Scenario
    recording: Recording
    plain: bool
    """Whether the states are plain."""
    folder: Path
    """Where they are replayed; what is made there is left to the caller."""
    found: Counter[str] = field(default_factory=Counter)
    """What readers found, and how often."""
    faults: list[str] = field(default_factory=list)
    """What they should not have found."""
    _made: int = 0
    _seen: set[int] = field(default_factory=set)

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
                self.faults.append(f"{self.where(count)}: what was new is {found or 'damaged'}")

    def power_cuts(self, most: int, seed: int) -> None:
        """Replay power cuts after every prefix: all that differ, or ``most`` random ones."""
        images: list[tuple[int, Image]] = []
        for count, disk in self.prefixes():
            for image in power_cuts(disk):
                key = hash((count == self.count, tuple(image.items())))
                if key not in self._seen:
                    self._seen.add(key)
                    images.append((count, image))
        if len(images) > most:
            images = random.Random(seed).sample(images, most)
        for count, image in images:
            self.look(count, "a power cut", image, self.allowed(count, power=False))

    def saves_afterwards(self, most: int, seed: int) -> None:
        """Replay kills, and save another state over what is left: all, or ``most`` random ones."""
        disks = list(self.prefixes())
        if len(disks) > most:
            disks = random.Random(seed).sample(disks, most)
        for count, disk in disks:
            folder = self._fresh(disk.image())
            try:
                save(self.implementation, folder, "next", self.plain)
                found = self.found_in(folder)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            self.found[found] += 1
            if found != "next":
                self.faults.append(f"{self.where(count)} and another save: {found}")

    def look(self, count: int, what: str, image: Image, allowed: frozenset[str]) -> str:
        """Have a reader look at an image; what it found, empty for a mixture."""
        folder = self._fresh(image)
        found, fault = "", ""
        try:
            found = self.found_in(folder)
        except Exception as error:
            fault = str(error)
        if found and found not in allowed:
            fault = f"a reader finds {found}, and may find {' or '.join(sorted(allowed))}"
        self.found[found or "mixture"] += 1
        if fault:
            files = "\n".join(f"    {path}" for path in image)
            self.faults.append(f"{self.where(count)} and {what}: {fault}\n  what is left:\n{files}")
        return found

    def found_in(self, folder: Path) -> str:
        """What a reader finds in a folder; see `found_at`."""
        return found_at(self.implementation, folder / CHECKPOINT, STATES[self.plain])

    def allowed(self, count: int, *, power: bool) -> frozenset[str]:
        """What a reader may find after the first ``count`` operations."""
        if count < self.count:
            return self.scenario.meanwhile
        return self.scenario.at_last if power else self.scenario.at_last_without_power

    @property
    def count(self) -> int:
        """How many operations there are."""
        return len(self.recording.operations)

    def where(self, count: int) -> str:
        """A moment, for people."""
        last: Operation | str = self.recording.operations[count - 1] if count else "nothing yet"
        return f"after {count} of {self.count} operations, the last {last}"

    def _fresh(self, image: Image) -> Path:
        self._made += 1
        folder = self.folder / str(self._made)
        replay(image, folder)
        return folder


def record(recorder: Recorder, scenario: Scenario, folder: Path, *, plain: bool) -> Recording:
    """Play a scenario in an empty folder, and record it.

    Raises:
        ActionError: the implementation raised.
        CannotRecordError: it cannot be recorded.
        Refused: the implementation refuses.
    """
    if scenario.old:
        recorder.do(save, folder, "old", plain)
    return recorder.record(folder, scenario.act, folder, plain)


def must_be_plain(recorder: Recorder) -> bool:
    """Whether the implementation refuses what is not plain.

    Raises:
        ActionError: it can save neither.
        CannotRecordError: not in a forked process.
    """
    for plain in (False, True):
        with tempfile.TemporaryDirectory(prefix="crashes-", dir=memory()) as folder:
            try:
                recorder.do(save, Path(folder), "old", plain)
            except Refused:
                continue
            return plain
    return True


def run(
    implementation: Implementation, *, examples: int, seed: int, only: str = ""
) -> Iterator[Outcome]:
    """All scenarios: every prefix, ``examples`` power cuts of each and a quarter as many saves
    after its kills; see `conformance.outcome.Part`."""
    if only not in ("", AFTERWARDS, *(scenario.law for scenario in SCENARIOS)):
        return
    afterwards = Outcome(AFTERWARDS)
    with contextlib.ExitStack() as stack:
        try:
            recorder = stack.enter_context(Recorder(implementation))
            plain = must_be_plain(recorder)
        except ActionError as error:
            yield Outcome(only or SCENARIOS[0].law, failed=1, error=str(error))
            return
        except CannotRecordError as error:
            for law in [only] if only else [*(scenario.law for scenario in SCENARIOS), AFTERWARDS]:
                yield Outcome(law, refused=1, refusals=Counter([str(error)]))
            return
        judge = _Judge(implementation, recorder, plain, examples, seed)
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
    plain: bool
    examples: int
    seed: int

    def judge(self, scenario: Scenario, outcome: Outcome, afterwards: Outcome) -> None:
        """Count what comes of a scenario, and of saves after its crashes."""
        with tempfile.TemporaryDirectory(prefix="crashes-", dir=memory()) as name:
            folder = Path(name)
            (folder / "recorded").mkdir()
            try:
                recording = record(self.recorder, scenario, folder / "recorded", plain=self.plain)
            except (CannotRecordError, Refused) as refusal:
                outcome.refused += 1
                outcome.refusals[str(refusal)] += 1
                return
            except ActionError as error:
                outcome.failed, outcome.error = 1, str(error)
                return
            judged = self.implementation, scenario, recording, self.plain
            crashes = Crashes(*judged, folder / "replayed")
            crashes.kills()
            crashes.power_cuts(self.examples, self.seed)
            _count(crashes, outcome)
            following = Crashes(*judged, folder / "followed")
            following.saves_afterwards(max(self.examples // 4, 1), self.seed)
            _count(following, afterwards)


def _count(crashes: Crashes, outcome: Outcome) -> None:
    outcome.failed += len(crashes.faults)
    outcome.passed += max(0, crashes.found.total() - len(crashes.faults))
    if crashes.faults and not outcome.error:
        outcome.error, _, outcome.smallest = crashes.faults[0].partition("\n")
