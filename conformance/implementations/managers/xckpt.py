"""`xckpt.CheckpointManager`; its ranks are threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from conformance.runs.manager import Keep, Restored, Run, State
from xckpt.policies import Best, EverySteps, KeepPolicy, Latest

__all__ = ["MANAGER", "Xckpt"]

Result = TypeVar("Result")


class XckptRun:
    """One rank's manager."""

    def __init__(self, root: Path, keep: Keep, group: ThreadGroup | None = None) -> None:
        policies: list[KeepPolicy] = []
        if keep.latest:
            policies.append(Latest(keep.latest))
        if keep.best:
            policies.append(Best("loss", keep.best))
        self.manager = xckpt.CheckpointManager(
            root, save=EverySteps(1), keep=policies or [lambda _: ()], group=group
        )

    def save(self, step: int, state: State, loss: float) -> bool:
        return self.manager.save(step, state, {"loss": loss}, force=True)

    def wait(self) -> None:
        self.manager.wait()

    def latest(self) -> int | None:
        found = self.manager.latest()
        return None if found is None else found.number

    def restore(self) -> Restored | None:
        state = self.manager.restore(default=None)
        if state is None or self.manager.restored is None:
            return None
        skipped = {each.number: str(each.error) for each in self.manager.skipped}
        return Restored(self.manager.restored.number, state, skipped)

    def close(self) -> None:
        with contextlib.suppress(xckpt.XckptError):
            self.manager.wait()


class Xckpt:
    """This project's."""

    fewest = 1
    name = f"xckpt {xckpt.__version__}"

    def open(self, root: Path, keep: Keep) -> Run:
        return XckptRun(root, keep)

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        stored = xckpt.open(root / f"step-{step:08d}")
        leaves = {name: cast(xckpt.StoredArray, stored[name]) for name in ("w", "noise")}
        return lambda: {name: np.asarray(leaf[...]) for name, leaf in leaves.items()}

    def on_ranks(
        self, size: int, root: Path, keep: Keep, function: Callable[[int, Run], Result]
    ) -> list[Result]:
        return results(size, lambda group: function(group.rank, XckptRun(root, keep, group)))


MANAGER = Xckpt()
