"""What a save with a base writes, and how long it takes, beside a save of everything.

In each `CASE` a state is saved, changed as a step of that kind of training changes it, and saved

1. without a base, and
2. with the first checkpoint as its base,

in turns, to the same file system. Bytes are those of the files that no other checkpoint has.

Files in memory take nothing but a copy, so that to hash an unchanged state once is much of it. On a
disk a full save waits until all is there: an unchanged state is saved to one, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

import xckpt

State = dict[str, NDArray[np.float32]]

MATRIX = (2048, 4096)
"""Shape of a weight: 32 MiB in float32."""

UNCHANGED = "nothing changed"
ON_DISK = "nothing changed, files on a disk"
LORA = "LoRA: rank 8 beside a frozen model"
ADAMW = "AdamW: every weight and moment"


@dataclass(slots=True)
class Delta:
    """The figures of one case."""

    case: str
    state_bytes: int
    changed_bytes: int
    """Bytes of the tensors in which something changed."""
    written_bytes: int = 0
    """Bytes of files that only the save with a base has."""
    full: list[float] = field(default_factory=list)
    """Seconds of each save without a base."""
    based: list[float] = field(default_factory=list)
    """Seconds of each save with one."""

    @property
    def time_ratio(self) -> float:
        """The part of a full save's time."""
        return median(self.based) / median(self.full)


def _weights(count: int, shape: tuple[int, ...]) -> State:
    random = np.random.default_rng(0)
    return {f"w{n}": random.standard_normal(shape, np.float32) for n in range(count)}


def _nothing(state: State) -> State:
    return state


def _all(state: State) -> State:
    return {name: array + 1 for name, array in state.items()}


def _trained(prefix: str) -> Callable[[State], State]:
    def change(state: State) -> State:
        return {n: each + 1 if n.startswith(prefix) else each for n, each in state.items()}

    return change


def _rows(state: State) -> State:
    """Rows of 200 consecutive numbers, as one source of data may use them; and a small head."""
    table = state["table"].copy()
    table[1000:1200] += 1
    return {**state, "table": table, "head": state["head"] + 1}


def cases(quick: bool) -> dict[str, tuple[State, Callable[[State], State]]]:
    """Each case's state, and what a step changes of it."""
    count, shape = (2, (64, 64)) if quick else (32, MATRIX)
    model = _weights(count, shape)
    low = {f"lora.{name}": np.ones((shape[0], 8), np.float32) for name in model}
    half = dict(list(model.items())[: count // 2])
    head = {f"tower.{n}": array for n, (_, array) in enumerate(list(model.items())[count // 2 :])}
    moments = {f"{kind}.{n}": array for kind in ("m", "v") for n, array in list(half.items())[::2]}
    table = {"table": np.concatenate(list(model.values())), "head": np.ones(shape, np.float32)}
    return {
        UNCHANGED: (model, _nothing),
        LORA: ({**model, **low}, _trained("lora")),
        "one of two towers is frozen": ({**half, **head}, _trained("tower")),
        "200 rows of an embedding, and a head": (table, _rows),
        ADAMW: ({**half, **moments}, _all),
    }


def run(
    directory: Path,
    rounds: int,
    quick: bool,
    tell: Callable[[str], object] = print,
    *,
    disk: Path | None = None,
) -> list[Delta]:
    """All cases, each in a folder that is removed again; an unchanged state on ``disk``, too."""
    found: list[Delta] = []
    for case, (state, change) in cases(quick).items():
        tell(f"deltas: {case}")
        found.append(_measured(case, state, change(state), directory / "deltas", rounds))
        if case == UNCHANGED and disk is not None:
            tell(f"deltas: {ON_DISK}")
            with tempfile.TemporaryDirectory(prefix="xckpt-bench-", dir=disk) as folder:
                found.append(_measured(ON_DISK, state, state, Path(folder) / "deltas", rounds))
    return found


def _measured(case: str, state: State, changed: State, folder: Path, rounds: int) -> Delta:
    """One case, in a folder that is removed again."""
    differing = sum(changed[n].nbytes for n in state if changed[n] is not state[n])
    delta = Delta(case, sum(array.nbytes for array in state.values()), differing)
    base = str(folder / "base")
    try:
        xckpt.save(base, state)
        for number in range(rounds + 1):
            full, based = (_seconds(str(folder / "new"), changed, each) for each in (None, base))
            if number:  # the first round warms up
                delta.full.append(full)
                delta.based.append(based)
        xckpt.save(folder / "new", changed, base=base)
        delta.written_bytes = _own_bytes(folder / "new")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return delta


def _seconds(path: str, state: State, base: str | None) -> float:
    started = time.perf_counter()
    xckpt.save(path, state, base=base)
    taken = time.perf_counter() - started
    shutil.rmtree(path)
    return taken


def _own_bytes(folder: Path) -> int:
    files = (os.lstat(path) for path in folder.rglob("*") if path.is_file())
    return sum(status.st_size for status in files if status.st_nlink == 1)
