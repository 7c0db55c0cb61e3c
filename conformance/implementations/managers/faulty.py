"""Managers that are wrong on purpose: each breaks one promise, and its law must notice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conformance.implementations.durable import put
from conformance.implementations.managers import simple
from conformance.implementations.managers.simple import DONE, Simple, SimpleRun
from conformance.runs.manager import Keep, Restored, State

__all__ = ["FAULTY", "Faulty"]


class DeletesFirst(SimpleRun):
    """The old steps go before the new one is written."""

    def carry_out(self, step: int, state: State, loss: float) -> None:
        for each in self.steps():
            if each not in self.kept() or self.keep.latest == 1:
                self.delete(each)
        super().carry_out(step, state, loss)


class SyncsNothing(SimpleRun):
    """What is written may be lost with the power, and the old steps are deleted."""

    def write(self, step: int, state: State, loss: float) -> None:
        folder = self.root / f"step-{step}"
        folder.mkdir(parents=True)
        for name, leaf in state.items():
            (folder / name).write_bytes(leaf.tobytes())
        (folder / DONE).write_text(_document(state, loss))


class CommitsFirst(SimpleRun):
    """What says that a step is whole is written before its data."""

    def write(self, step: int, state: State, loss: float) -> None:
        folder = self.root / f"step-{step}"
        folder.mkdir(parents=True)
        put(folder / DONE, _document(state, loss).encode())
        super().write(step, state, loss)

    def delete(self, step: int) -> None:
        if (self.root / f"step-{step}" / "w").exists():
            super().delete(step)
        else:
            (self.root / f"step-{step}" / DONE).unlink()
            (self.root / f"step-{step}").rmdir()


class CachesLatest(SimpleRun):
    """The steps are listed once, when the manager is made."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known = set(self.steps())

    def save(self, step: int, state: State, loss: float) -> bool:
        self.known.add(step)
        return super().save(step, state, loss)

    def latest(self) -> int | None:
        return max(self.known, default=None)


class SwallowsFailures(SimpleRun):
    """A save that fails is not raised."""

    def wait(self) -> None:
        with contextlib.suppress(OSError):
            super().wait()


class CountsFailures(SimpleRun):
    """A save that was begun is the last one, whatever came of it."""

    begun: int | None = None

    def save(self, step: int, state: State, loss: float) -> bool:
        self.begun = step
        return super().save(step, state, loss)

    def latest(self) -> int | None:
        return super().latest() if self.begun is None else self.begun


class SkipsAfterFailures(SimpleRun):
    """A step that was begun before is not saved again."""

    begun = -1

    def save(self, step: int, state: State, loss: float) -> bool:
        if step <= self.begun:
            return False
        self.begun = step
        return super().save(step, state, loss)


class NeverFallsBack(SimpleRun):
    """The newest step is restored, or none."""

    def restored(self) -> Restored | None:
        step = max(self.steps())
        return Restored(step, simple.begin(self.root, step)(), {})


class RestoresAnything(SimpleRun):
    """What is read is believed."""

    def restored(self) -> Restored | None:
        step = max(self.steps())
        state = {}
        for name, dtype in (("w", "<f4"), ("noise", "|u1")):
            state[name] = np.fromfile(self.root / f"step-{step}" / name, dtype)
        return Restored(step, state, {})


class FallsBackSilently(SimpleRun):
    """An older step is restored, and nothing said of the newer ones."""

    def restored(self) -> Restored | None:
        found = super().restored()
        return found and Restored(found.step, found.state, {})


class ObeysItsPolicies(SimpleRun):
    """What no policy keeps is deleted, be it the last."""

    def delete_others(self, last: int) -> None:
        newest = self.steps()[-self.keep.latest :] if self.keep.latest else []
        for step in set(self.steps()) - set(newest):
            self.delete(step)


class PrunesAtStart(SimpleRun):
    """Steps are counted, good or not, and deleted when a run begins."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for step in self.steps()[: -self.keep.latest or None]:
            self.delete(step)


class RaisesOnOneRank(SimpleRun):
    """The rank that saves raises; the others do not hear of it."""

    def shared(self, mine: Any) -> Any:
        found = super().shared(mine)
        return mine if isinstance(found, Exception) else found


class DecidesOnEachRank(SimpleRun):
    """Each rank deletes what it deems worse, by the losses that it has seen."""

    def save(self, step: int, state: State, loss: float) -> bool:
        return super().save(step, state, loss) and loss <= 0


class ReadsZeros(Simple):
    """A file that is missing is taken for zeros."""

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        rest = super().begin(root, step)

        def lenient() -> State:
            try:
                return rest()
            except simple.DeletedError:
                return {"w": np.zeros(24, np.float32), "noise": np.zeros(40_000, np.uint8)}

        return lenient


class BlamesDamage(Simple):
    """A step that was deleted is called corrupt."""

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        rest = super().begin(root, step)

        def blaming() -> State:
            try:
                return rest()
            except simple.DeletedError as error:
                raise ValueError("the checkpoint is corrupt") from error

        return blaming


def _document(state: State, loss: float) -> str:
    return json.dumps({"loss": loss, "leaves": simple.leaves_of(state)})


class Faulty(Simple):
    """`Simple`, with runs of another class."""

    def __init__(self, run: type[SimpleRun]) -> None:
        self.run = run

    def open(self, root: Path, keep: Keep) -> SimpleRun:
        return self.run(root, keep)


FAULTY: dict[str, tuple[str, Simple]] = {
    kind.__name__: (law, kind() if issubclass(kind, Simple) else Faulty(kind))
    for law, kinds in {
        "successor-first": [DeletesFirst],
        "power-cuts": [SyncsNothing],
        "latest-committed": [CommitsFirst, CachesLatest],
        "failure-raised": [SwallowsFailures, CountsFailures, SkipsAfterFailures],
        "falls-back": [NeverFallsBack, RestoresAnything, FallsBackSilently],
        "last-good-stays": [ObeysItsPolicies, PrunesAtStart],
        "ranks-agree": [RaisesOnOneRank, DecidesOnEachRank],
        "reader-finishes": [ReadsZeros, BlamesDamage],
    }.items()
    for kind in kinds
}
"""Name -> the law that catches it, and the manager."""
MANAGERS = {name: manager for name, (_, manager) in FAULTY.items()}
