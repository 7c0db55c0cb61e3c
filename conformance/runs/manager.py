"""What the judges of runs ask of a manager, and the states that runs save.

A module that has a `Manager` under the name ``MANAGER`` can be judged. Most of it is an adapter: a
call of the library a method. A manager says no by raising `conformance.implementation.Refused`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Keep", "Manager", "Ranked", "Restored", "Run", "State", "find", "loss_of", "state_of"]

State = Mapping[str, NDArray[np.generic]]
Result = TypeVar("Result")

BYTES = 40_000
"""Of the large leaf of a state, which no file of metadata reaches."""


def state_of(step: int) -> dict[str, NDArray[np.generic]]:
    """The state after a step: every element depends on it, and no two steps share any."""
    noise = np.random.default_rng(step).integers(0, 256, BYTES, dtype=np.uint8)
    return {"w": np.arange(24, dtype=np.float32) + 100 * step, "noise": noise}


def loss_of(step: int) -> float:
    """The metric ``loss`` of a step: step 1 has the smallest."""
    return float(abs(step - 1))


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps a run is asked to keep: the ``latest`` so many, and the ``best`` by their loss.

    With 0 and 0 it is asked to keep none.
    """

    latest: int = 0
    best: int = 0


EVERY = Keep(latest=1000)
"""As good as all."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore has found."""

    step: int
    state: State
    skipped: Mapping[int, str]
    """Newer steps that were not taken, and why."""


class Run(Protocol):
    """A manager that is at work on a root."""

    def save(self, step: int, state: State, loss: float) -> bool:
        """Save, in the background if that is how it saves; whether a save was begun."""
        ...

    def wait(self) -> None:
        """Wait for what goes on in the background, deletions included; raise what has failed."""
        ...

    def latest(self) -> int | None:
        """The step from which a run would go on, as the manager says now."""
        ...

    def restore(self) -> Restored | None:
        """The newest good step; None if there is none."""
        ...

    def close(self) -> None:
        """Let go of the root; raises nothing."""
        ...


class Manager(Protocol):
    """A library's manager."""

    @property
    def name(self) -> str:
        """Its name and version, for reports."""
        ...

    @property
    def fewest(self) -> int:
        """How few newest steps it can be asked to keep: 1, if it can."""
        ...

    def open(self, root: Path, keep: Keep) -> Run:
        """Go to work on a root, which may hold steps of an earlier run.

        Raises:
            Refused: it cannot be asked to keep these.
        """
        ...

    def begin(self, root: Path, step: int) -> Callable[[], State]:
        """Begin to read a step, and do all that is done before its data are read.

        Returns:
            The rest: what reads the data.
        """
        ...


@runtime_checkable
class Ranked(Protocol):
    """A manager that works on several ranks."""

    def on_ranks(
        self, size: int, root: Path, keep: Keep, function: Callable[[int, Run], Result]
    ) -> list[Result]:
        """Call ``function(rank, run)`` on every rank at once; what each returned, by rank.

        Raises:
            Exception: what a rank raised.
        """
        ...


def load(manager: Manager, root: Path, step: int) -> State:
    """A step, as a reader loads it that knows nothing of the run."""
    return manager.begin(root, step)()


def whole_steps(manager: Manager, root: Path, steps: Sequence[int]) -> list[int]:
    """Those of some steps that load, each exactly as it was saved."""
    return [step for step in steps if _loads(manager, root, step)]


def _loads(manager: Manager, root: Path, step: int) -> bool:
    try:
        found = load(manager, root, step)
    except Exception:
        return False
    return same(found, state_of(step))


def same(one: State, other: State) -> bool:
    """Whether two states are equal, bit for bit."""
    return one.keys() == other.keys() and all(
        np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in one
    )


def find(module: str) -> Manager:
    """The manager of a module: its ``MANAGER``, or for ``MODULE:NAME`` that of its ``MANAGERS``.

    Raises:
        AttributeError: the module has none.
        KeyError: the module has none of that name.
    """
    module, _, name = module.partition(":")
    found = importlib.import_module(module)
    return found.MANAGERS[name] if name else found.MANAGER
