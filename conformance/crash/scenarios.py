"""What crashes: a save, an overwrite and a delete, of states that tell whole ones from mixtures.

1. Two ranks hold a state in one of three `FORMS`: any boxes, rows, or all of it each; an
   implementation is given the first that it does not refuse.
2. A `Scenario` is an action on a checkpoint, and what a reader may find if it is cut off.
3. `found_at` is the reader: exactly one of the states, or an error; anything else is a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import (
    Array,
    Box,
    Held,
    Implementation,
    Refused,
    Shard,
    Wanted,
)

__all__ = ["CHECKPOINT", "FORMS", "SCENARIOS", "STATES", "Scenario", "State", "found_at", "save"]

CHECKPOINT = "checkpoint"
"""The name of the checkpoint in the folder that is recorded."""

State = Mapping[str, NDArray[np.generic]]


FORMS = ("any boxes", "rows", "whole")
"""How a state is held; the later ones are for implementations that refuse the first."""


def state(number: int, *extra: str, form: str) -> State:
    """A state that tells whole ones from mixtures: every element depends on the number."""
    leaves: dict[str, NDArray[np.generic]] = {
        "w": np.arange(24, dtype=np.float32).reshape(6, 4) + 100 * number,
        "bias": np.full(5, number, np.int16),
        **{name: np.full((2, 2), number, np.uint8) for name in extra},
    }
    if form == "any boxes":
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


def ranks_of(whole: State, form: str) -> list[dict[str, Held]]:
    """A state, held by two ranks."""
    cut = {} if form == "whole" else BOXES
    ranks: list[dict[str, Held]] = [{}, {}]
    for name, values in whole.items():
        array = Array(values.shape, str(values.dtype))
        everything = Box((0,) * values.ndim, values.shape)
        for held, boxes in zip(ranks, cut.get(name, ([everything],) * 2), strict=True):
            shards = tuple(Shard(box, values[(*box.region, ...)]) for box in boxes)
            held[name] = Held(array, shards)
    return ranks


STATES = {
    form: {
        "old": state(1, "only old", form=form),
        "new": state(2, "only new", form=form),
        "next": state(3, form=form),
    }
    for form in FORMS
}
"""Form -> the states by their names."""


def save(implementation: Implementation, folder: Path, name: str, form: str) -> None:
    """Save one of `STATES`, over whatever is there."""
    ranks = ranks_of(STATES[form][name], form)
    implementation.save(folder / CHECKPOINT, ranks, overwrite=True)


def save_new(implementation: Implementation, folder: Path, form: str) -> None:
    implementation.save(folder / CHECKPOINT, ranks_of(STATES[form]["new"], form))


def overwrite(implementation: Implementation, folder: Path, form: str) -> None:
    save(implementation, folder, "new", form)


def delete(implementation: Implementation, folder: Path, form: str) -> None:
    implementation.delete(folder / CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is recorded, and what a reader may find then: ``old``, ``new`` or ``error``."""

    law: str
    old: bool
    """Whether the old state is there before."""
    act: Callable[[Implementation, Path, str], None]
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
        AssertionError: something loads that was never saved.
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
