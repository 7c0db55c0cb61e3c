"""torch.distributed.checkpoint with its file writer, at one thread and at two, and with xckpt's.

Its own reader has no thread option: the number of threads is that of the writer, which decides in
how many files the data lies. Through xckpt, planners and calls stay the same and the storage is
xckpt's, digests taken and verified.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from benchmarks.contender import Contender, Load, State


def _be_quiet() -> None:
    # It warns at each call that it runs in a single process, as it should.
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


def _save_by_xckpt(directory: Path, state: State) -> None:
    import torch.distributed.checkpoint as dcp

    from xckpt.torch.dcp import XckptStorageWriter

    _be_quiet()
    dcp.save(dict(state), storage_writer=XckptStorageWriter(directory / "state"), no_dist=True)


def _load_by_xckpt(directory: Path, target: State) -> State:
    import torch.distributed.checkpoint as dcp

    from xckpt.torch.dcp import XckptStorageReader

    _be_quiet()
    dcp.load(dict(target), storage_reader=XckptStorageReader(directory / "state"), no_dist=True)
    return target


ONE_THREAD = _contender(1)
TWO_THREADS = _contender(2)
THROUGH_XCKPT = Contender(
    "DCP through xckpt", "torch", _save_by_xckpt, (Load("into memory", False, _load_by_xckpt),)
)
