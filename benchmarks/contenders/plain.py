"""One plain file a tensor, written and read by one thread or two.

Two threads of ``readinto`` over such files are the limit that a load is measured against.  The
tensors are handed out largest first, so that both threads end together.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.contender import Contender, Load, State


def _each(threads: int, work: Callable[[str, np.ndarray], None], state: State) -> None:
    ordered = sorted(state.items(), key=lambda item: -item[1].nbytes)
    if threads == 1:
        for name, array in ordered:
            work(name, array)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, name, array) for name, array in ordered]:
            done.result()


def _write(path: Path, array: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):
            left = left[file.write(left) :]


def _read(path: Path, array: np.ndarray) -> None:
    with path.open("rb", buffering=0) as file:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):
            count = file.readinto(left)
            if not count:
                raise EOFError(f"{path} ends early")
            left = left[count:]


def _contender(threads: int) -> Contender:
    def save(directory: Path, state: State) -> None:
        _each(threads, lambda name, array: _write(directory / name, array), state)

    def load(directory: Path, target: State) -> State:
        _each(threads, lambda name, array: _read(directory / name, array), target)
        return target

    label = "1 thread" if threads == 1 else f"{threads} threads"
    return Contender(f"plain files, {label}", "numpy", save, (Load("into memory", False, load),))


ONE_THREAD = _contender(1)
TWO_THREADS = _contender(2)
