"""torch.distributed.checkpoint with its file writer, at one thread and at two.

Its reader has no thread option: the number of threads is that of the writer, which decides in how
many files the data lies.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from benchmarks.contender import Contender, Load, State


def _be_quiet() -> None:
    # It warns at each call that it runs in a single process, as it was told to.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _contender(threads: int) -> Contender:
    def save(directory: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        _be_quiet()
        writer = dcp.FileSystemWriter(directory, thread_count=threads)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)

    def load(directory: Path, target: State) -> State:
        import torch.distributed.checkpoint as dcp

        _be_quiet()
        dcp.load(dict(target), storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        return target

    label = "1 thread" if threads == 1 else f"{threads} threads"
    return Contender(f"DCP, {label}", "torch", save, (Load("into memory", False, load),))


ONE_THREAD = _contender(1)
TWO_THREADS = _contender(2)
