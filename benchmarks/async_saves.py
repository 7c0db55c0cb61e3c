"""How long a save in the background blocks training, in copies of the state, and what it keeps.

1. Every contender runs in separate processes, since a first save happens once in a process. Each
   process holds the 1.4 GiB as torch tensors, and as much memory that exists to copy into.
2. One memory copy is the quickest of some runs of ``copy_`` from every tensor into that memory,
   before and after each save, with torch's own threads: what a user's loop would take.
3. Blocking is the time until the call returns and the state may be changed. Then the save is waited
   for, so that none begins with another in flight. The first save of a process is apart.
   One contender saves nothing: it copies every tensor with ``clone``, the plainest copy to memory
   that is new each time, whose pages the kernel has to find and clear.
4. The memory of the machine was used before: pages that the hypervisor has never backed would cost
   any first touch ten times as much, and say nothing of the library.
5. JAX arrays are not copied, so that their blocking is in milliseconds.
6. Twenty saves with a stager that keeps its memory, and what the process has allocated after each.

``python -m benchmarks.async_saves`` runs this part alone and prints the tables.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import state
from benchmarks.probe import memory_of

XCKPT = "xckpt"
PREPARED = "xckpt, prepared stager"
JAX = "xckpt, JAX"
MEMORY = "memory"
DCP = "DCP"
DCP_CACHED = "DCP, cached stager"
CLONE = "torch.clone, nothing saved"
CONTENDERS = (XCKPT, PREPARED, DCP, DCP_CACHED, CLONE)
LATER = 5
"""Saves after the first, in each process."""
MANY = 20
"""Saves whose memory is watched."""
COPIES = 3
"""Runs of the plain copy before and after each save."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """One contender's blocking in one process, in seconds; `copies` are the plain copies beside."""

    contender: str
    first: float
    first_copy: float
    later: list[float]
    later_copies: list[float]

    def first_ratio(self) -> float:
        """Copies of the state that the first save blocks for."""
        return self.first / self.first_copy

    def later_ratio(self) -> float:
        """Copies of the state that a later save blocks for: the median."""
        pairs = zip(self.later, self.later_copies, strict=True)
        return statistics.median(blocked / copy for blocked, copy in pairs)


@dataclass(frozen=True, slots=True)
class AsyncSaves:
    """All figures of this part."""

    torch: list[Blocking]
    """For each contender as many as there were rounds."""
    jax: list[float]
    """Seconds that each save of JAX arrays blocked, the first one first."""
    size: int
    """Bytes of the state."""
    memory: list[int]
    """Bytes allocated above the state after each of 20 saves."""

    def ratios(self, contender: str) -> tuple[float, float]:
        """Copies that the first and a later save block for; medians of the rounds."""
        mine = [each for each in self.torch if each.contender == contender]
        first = statistics.median(each.first_ratio() for each in mine)
        return first, statistics.median(each.later_ratio() for each in mine)

    def copies_held(self) -> float:
        """The most memory that a stager held, in copies of the state."""
        return max(self.memory) / self.size

    def growth(self) -> int:
        """Bytes that the last ten saves hold more than the first ten."""
        half = len(self.memory) // 2
        return max(self.memory[half:]) - max(self.memory[:half])


def run(parent: Path, rounds: int, quick: bool, tell: Callable[[str], None]) -> AsyncSaves:
    """Run every contender in turn, as often as there are rounds."""
    blocking: list[Blocking] = []
    for number in range(rounds):
        for contender in CONTENDERS:
            tell(f"blocking, round {number + 1} of {rounds}: {contender}")
            blocking.append(Blocking(contender, **_ask(contender, parent, quick)))
    tell("blocking of JAX arrays")
    jax = _ask(JAX, parent, quick)
    tell(f"memory over {MANY} saves")
    memory = _ask(MEMORY, parent, quick)
    return AsyncSaves(blocking, jax["seconds"], memory["size"], memory["allocated"])


def _ask(contender: str, parent: Path, quick: bool) -> dict[str, Any]:
    """What one contender measures in a separate process."""
    command = [sys.executable, "-m", "benchmarks.async_saves", contender, str(parent)]
    done = subprocess.run(
        [*command, *(["quick"] if quick else [])], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """A path that does not exist yet, and will not afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent)) / "checkpoint"
    try:
        yield folder
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def _measure(
    source: state.Tensors, parent: Path, save: Callable[[Path], Callable[[], object]]
) -> dict[str, Any]:
    """Time the first save and some later ones; ``save`` gives what waits for the commit."""
    target = state.as_torch(state.empty_arrays({n: tuple(t.shape) for n, t in source.items()}))

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    def blocked() -> tuple[float, float]:
        before = [_seconds(copy) for _ in range(COPIES)]
        with _folder(parent) as folder:
            gc.collect()
            start = time.perf_counter()
            wait = save(folder)
            seconds = time.perf_counter() - start
            wait()
        return seconds, min(before + [_seconds(copy) for _ in range(COPIES)])

    first, first_copy = blocked()
    later = [blocked() for _ in range(LATER)]
    return {
        "first": first,
        "first_copy": first_copy,
        "later": [seconds for seconds, _ in later],
        "later_copies": [copied for _, copied in later],
    }


def _torch(contender: str, parent: Path, quick: bool) -> dict[str, Any]:
    shapes = state.shapes(quick)
    state.use_memory({f"{name}, {copy}": shape for name, shape in shapes.items() for copy in "ab"})
    source = state.as_torch(state.random_arrays(shapes))
    make = {XCKPT: _xckpt, PREPARED: _xckpt, DCP: _dcp, DCP_CACHED: _dcp, CLONE: _clone}[contender]
    return _measure(source, parent, make(source, contender))


def _xckpt(source: Any, contender: str) -> Callable[[Path], Callable[[], object]]:
    import xckpt
    from xckpt.staging import BlockingAsyncStager

    stager = None
    if contender == PREPARED:
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        stager.prepare(source)
    return lambda folder: xckpt.save_async(folder, source, stager=stager).result


def _dcp(source: Any, contender: str) -> Callable[[Path], Callable[[], object]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = None
    if contender == DCP_CACHED:
        stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(folder: Path) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(folder)
        return dcp.async_save(source, storage_writer=writer, async_stager=stager).result  # type: ignore[union-attr]

    return save


def _clone(source: Any, contender: str) -> Callable[[Path], Callable[[], object]]:
    def save(folder: Path) -> Callable[[], object]:
        return {name: tensor.clone() for name, tensor in source.items()}.clear

    return save


def _jax(parent: Path, quick: bool) -> dict[str, Any]:
    arrays = state.as_jax(state.random_arrays(state.shapes(quick)))
    # After JAX, whose adapter it then loads.
    import xckpt

    seconds: list[float] = []
    for _ in range(1 + LATER):
        with _folder(parent) as folder:
            gc.collect()
            start = time.perf_counter()
            saving = xckpt.save_async(folder, arrays)
            seconds.append(time.perf_counter() - start)
            saving.result()
    return {"seconds": seconds}


def _memory(parent: Path, quick: bool) -> dict[str, Any]:
    import xckpt
    from xckpt.staging import BlockingAsyncStager

    warm = state.as_torch(state.random_arrays({"w": (1 << 20,)}))
    with _folder(parent) as folder:
        xckpt.save_async(folder, warm, stager=BlockingAsyncStager()).result()
    shapes = state.shapes(quick)
    source = state.as_torch(state.random_arrays(shapes))
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    gc.collect()
    before, allocated = memory_of()["RssAnon"], []
    for _ in range(MANY):
        with _folder(parent) as folder:
            xckpt.save_async(folder, source, stager=stager).result()
        allocated.append(memory_of()["RssAnon"] - before)
    return {"size": state.size_of(shapes), "allocated": allocated}


def _child(contender: str, parent: Path, quick: bool) -> None:
    if contender == JAX:
        found = _jax(parent, quick)
    elif contender == MEMORY:
        found = _memory(parent, quick)
    else:
        found = _torch(contender, parent, quick)
    print(json.dumps(found), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run this part alone, or one contender for it."""
    if arguments and arguments[0] in (*CONTENDERS, JAX, MEMORY):
        _child(arguments[0], Path(arguments[1]), "quick" in arguments[2:])
        return
    from rich.console import Console

    from benchmarks import bars, report
    from benchmarks.run import MEMORY_BACKED

    parent = Path(tempfile.mkdtemp(prefix="xckpt-bench-", dir=MEMORY_BACKED))
    console = Console(width=120)
    try:
        figures = run(
            parent, 3, "quick" in arguments, lambda line: console.print(line, style="dim")
        )
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    report.show(console, report.async_table(figures), report.bars_table(bars.async_saves(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
