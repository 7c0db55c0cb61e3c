"""Peak memory of each save and each load, every one in a separate process.

1. The child saves and loads a small state first, so that imports and thread pools are paid for.
2. It then builds the state or the targets, and works while the parent watches (see `probe`).
3. A load into memory is charged with what rises above the targets; a load that returns new arrays
   is charged with what rises above the arrays' own size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import state
from benchmarks.contender import Contender, as_arrays, in_form
from benchmarks.contenders import named
from benchmarks.probe import serve, watch
from benchmarks.speed import fresh_directory

SAVE = "save"


@dataclass(frozen=True, slots=True)
class Extra:
    """Memory above the state (save) or the targets (load), in bytes."""

    contender: str
    work: str
    """``save``, or the name of a way to load."""
    anonymous: int
    """Peak of allocated memory."""
    total: int
    """Peak of everything mapped, file pages included."""


def run(
    contenders: Sequence[Contender],
    parent: Path,
    quick: bool,
    tell: Callable[[str], None],
) -> list[Extra]:
    """Return the peaks of every save and load."""
    size = state.size_of(state.shapes(quick))
    found: list[Extra] = []
    for contender in contenders:
        with fresh_directory(parent) as directory:
            for work in (SAVE, *(load.name for load in contender.loads)):
                tell(f"memory of {contender.name}, {work}")
                arguments = ("benchmarks.memory", contender.name, work, str(directory))
                peak = watch((*arguments, "quick") if quick else arguments)
                # New arrays are the result, not an expense.
                result = size if peak.answer["fresh"] else 0
                found.append(
                    Extra(contender.name, work, peak.anonymous - result, peak.total - result)
                )
    return found


def _warm(contender: Contender, directory: Path) -> None:
    small = in_form(state.random_arrays(state.shapes(quick=True)), contender.form)
    with fresh_directory(directory.with_name(f"{directory.name}-warm")) as warm:
        contender.save(warm, small)
        for load in contender.loads:
            state.touch(as_arrays(load.run(warm, small)))
    directory.with_name(f"{directory.name}-warm").rmdir()
    contender.release()


def _child(name: str, work: str, directory: Path, quick: bool) -> None:
    contender = named(name)
    _warm(contender, directory)
    shapes = state.shapes(quick)
    if work == SAVE:
        source = in_form(state.random_arrays(shapes), contender.form)

        def save() -> dict[str, bool]:
            contender.save(directory, source)
            return {"fresh": False}

        serve(save)
        return
    load = contender.load(work)
    given = in_form(state.empty_arrays(shapes), contender.form)

    def run_load() -> dict[str, bool]:
        loaded = load.run(directory, given)
        state.touch(as_arrays(loaded))
        return {"fresh": load.fresh}

    serve(run_load)


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], Path(sys.argv[3]), "quick" in sys.argv[4:])
