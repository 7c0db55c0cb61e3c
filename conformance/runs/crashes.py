"""Runs that are killed, or lose power, before any of their operations on files.

1. A process trains (`train`): it saves a few steps, of which its manager is asked to keep the
   newest or none. Its operations on files are recorded (`conformance.crash.recording`); a mark says
   when the manager has said that a step is saved.
2. After every prefix of them, the files are what a kill, or one of the power cuts, has left. A
   reader tries all steps; a manager goes to work there and says which one is the latest.
3. Nothing was deleted too early if what the reader finds never becomes older, and never older than
   a mark. With power cuts only the marks count.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.crash.disk import Disk, Image, apply, power_cuts, starting
from conformance.crash.operations import Create
from conformance.crash.recording import Recorder, Recording, memory, replay
from conformance.runs.manager import Keep, Manager, find, loss_of, state_of, whole_steps

__all__ = ["Left", "Savable", "Trained", "kills", "losses_of_power", "record"]

STEPS = (0, 1, 2, 3)
ROOT = "run"
MARK = "saved-"
"""The name of the file that says that the step of a number was saved."""


@dataclass(frozen=True, slots=True)
class Savable:
    """A manager's module, as `conformance.crash.savers` knows implementations."""

    module: str

    def save(self, path: Path, ranks: object, *, overwrite: bool = False) -> None:
        """Save a step: the savers try first whether that goes in a forked process."""
        manager = find(self.module)
        run = manager.open(path, Keep(latest=manager.fewest))
        run.save(0, state_of(0), 0.0)
        run.wait()
        run.close()


def train(savable: Savable, module: str, folder: Path, keep: Keep) -> None:
    """What is recorded: a run that waits for each of its saves but the last two."""
    run = find(module).open(folder / ROOT, keep)
    for step in STEPS:
        run.save(step, state_of(step), loss_of(step))
        if step < STEPS[-2]:
            run.wait()
            (folder / f"{MARK}{step}").touch()
    run.wait()
    (folder / f"{MARK}{STEPS[-1]}").touch()


@dataclass(frozen=True, slots=True)
class Trained:
    """A recorded run."""

    manager: Manager
    keep: Keep
    recording: Recording
    folder: Path
    """Where its crashes are replayed."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a crash has left of a run."""

    text: str
    """When it was cut off, for people."""
    root: Path
    image: Image
    said: int
    """The newest step that the manager had said to be saved; -1 if none."""
    whole: tuple[int, ...]
    """The steps that load, each as it was saved."""

    @property
    def newest(self) -> int:
        """The newest of them; -1 if there is none."""
        return max(self.whole, default=-1)


def record(recorder: Recorder, module: str, keep: Keep, folder: Path) -> Trained:
    """Play a run and record it.

    Raises:
        ActionError: the manager raised.
        CannotRecordError: it cannot be recorded.
    """
    place = folder / "recorded"
    place.mkdir(parents=True)
    recording = recorder.record(place, train, module, place, keep)
    return Trained(find(module), keep, recording, folder / "replayed")


def recorder(module: str) -> Recorder:
    """The process that plays the runs of a manager; a context."""
    return Recorder(Savable(module))  # type: ignore[arg-type]  # of an implementation, `save` alone


def _moments(trained: Trained) -> Iterator[tuple[str, Disk, int]]:
    """After each prefix of the operations: a text for it, the disk, the newest mark."""
    disk, said = starting(trained.recording.before), -1
    operations = trained.recording.operations
    yield "before the first operation", disk, said
    for count, operation in enumerate(operations, 1):
        disk = apply(disk, operation)
        if isinstance(operation, Create) and operation.path.startswith(MARK):
            said = int(operation.path.removeprefix(MARK))
        yield f"after {count} of {len(operations)} operations, the last {operation}", disk, said


def _left(trained: Trained, text: str, image: Image, said: int) -> Left:
    folder = Path(tempfile.mkdtemp(dir=trained.folder))
    run = {path: content for path, content in image.items() if not path.startswith(MARK)}
    replay(run, folder / "left")
    root = folder / "left" / ROOT
    whole = whole_steps(trained.manager, root, STEPS)
    return Left(text, root, image, said, tuple(whole))


def kills(trained: Trained) -> Iterator[Left]:
    """What a kill leaves, after every prefix that changes the files of the run."""
    trained.folder.mkdir(exist_ok=True)
    before: Image | None = None
    for text, disk, said in _moments(trained):
        image = disk.image()
        if image != before:
            before = image
            yield _left(trained, text, image, said)


def losses_of_power(trained: Trained, most: int, seed: int) -> Iterator[Left]:
    """What power cuts leave, about ``most``, at random moments and at the last one."""
    trained.folder.mkdir(exist_ok=True)
    pick = random.Random(seed)
    moments = list(_moments(trained))
    chosen = {len(moments) - 1, *pick.sample(range(len(moments)), min(most, len(moments)))}
    each = max(1, -(-most // len(moments)))
    for number in sorted(chosen):
        text, disk, said = moments[number]
        images = list(power_cuts(disk))
        for image in pick.sample(images, min(each, len(images))):
            yield _left(trained, f"{text}, and a power cut", image, said)


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder for runs, in memory where there is one: recorded runs sync every file."""
    return tempfile.TemporaryDirectory(prefix="runs-", dir=memory())
