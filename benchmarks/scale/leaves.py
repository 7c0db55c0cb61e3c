"""Many small leaves: processor seconds of each call, files and memory, beside DCP and Orbax.

Each contender runs in a process of its own (``python -m benchmarks.scale.leaves NAME COUNT``), with
its defaults, on leaves of 1 to 4 KiB in a folder that is backed by memory where there is one.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contender import Contender
from benchmarks.contenders import dcp, orbax, safetensors, xckpt
from benchmarks.probe import serve, watch

CONTENDERS = {
    each.name: each
    for each in (xckpt.WITH_TORCH, dcp.ONE_THREAD, orbax.ORBAX, safetensors.SAFETENSORS)
}
CASES = (
    (xckpt.WITH_TORCH.name, 100_000),
    (dcp.ONE_THREAD.name, 100_000),
    (safetensors.SAFETENSORS.name, 100_000),
    (orbax.ORBAX.name, 10_000),
)
"""Who saves how many. Orbax takes minutes for 100,000."""
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Leaves:
    """What a state of so many leaves took."""

    contender: str
    count: int
    save: float
    """Processor seconds, as the next three; what a contender has no call for is -1."""
    load: float
    open: float
    ls: float
    files: int
    memory: int
    """Peak of allocated memory over the state and its targets, bytes."""


def measure(name: str, count: int) -> dict[str, Any]:
    """The figures of a contender, as JSON values."""
    peak = watch(("benchmarks.scale.leaves", name, str(count)))
    return asdict(Leaves(name, count, memory=peak.anonymous, **peak.answer))


def _work(contender: Contender, folder: Path, count: int) -> Callable[[], dict[str, Any]]:
    """Make a state and its targets; then what is measured."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(256, 1024, count, endpoint=True).tolist()
    arrays = {f"block.{n}": rng.random(size, np.float32) for n, size in enumerate(sizes)}
    if contender.form == "jax":
        import jax

        state = {name: jax.device_put(array) for name, array in arrays.items()}
        target = state
    else:
        import torch

        state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    [load, *_] = contender.loads
    few = dict([*state.items()][:9])
    with tempfile.TemporaryDirectory(dir=folder.parent) as warm:  # Modules are loaded before.
        contender.save(Path(warm), few)
        load.run(Path(warm), few)

    def work() -> dict[str, Any]:
        save = _seconds(lambda: contender.save(folder, state))
        loaded: list[Any] = []
        into = _seconds(lambda: loaded.append(load.run(folder, target)))
        assert all(np.array_equal(np.asarray(loaded[0][name]), arrays[name]) for name in arrays)
        files = sum(len(names) for _, _, names in os.walk(folder))
        looks = _looks(folder / "state") if contender is xckpt.WITH_TORCH else (-1.0, -1.0)
        return {"save": save, "load": into, "open": looks[0], "ls": looks[1], "files": files}

    return work


def _looks(path: Path) -> tuple[float, float]:
    """Processor seconds to open a checkpoint, and of a process that lists it."""
    import xckpt as library

    opened = _seconds(lambda: library.open(path).tree)
    before = _of_children()
    command = [sys.executable, "-m", "xckpt", "ls", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return opened, _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


if __name__ == "__main__":
    _folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        serve(_work(CONTENDERS[sys.argv[1]], _folder, int(sys.argv[2])))
    finally:
        shutil.rmtree(_folder)
