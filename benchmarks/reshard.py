"""Rows to columns: four processes save every matrix by rows and load it by columns.

1. Four gloo ranks hold the 98 matrices as DTensors under ``Shard(0)``; every rank makes its rows
   from the same seeds, so that any element can be checked anywhere.
2. Each contender saves, loads the same sharding, and loads ``Shard(1)``.  An untimed round
   compares every element; the timed rounds take turns in rotating order.
3. A time runs from one barrier to the next, so that it is the slowest rank's.
4. The bytes that a rank read are a sum.  ``read`` is the kernel's count of what ``read`` and
   ``pread`` returned in the process (``rchar``: files, and sockets that are read that way).  The
   kernel does not count what comes through a memory map; ``mapped`` is TensorStore's count of the
   bytes that it mapped, whole chunks, touched or not.  What ranks hand each other in memory is no
   read of storage and is not in it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import state
from benchmarks.speed import flush

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

RANKS = 4
MAPPED_METRIC = "/tensorstore/file/mmap_bytes"


@dataclass(slots=True)
class Resharding:
    """One contender's figures; the lists have an entry for each round."""

    save: list[float] = field(default_factory=list)
    """Seconds to save rows, what was left to the page cache flushed."""
    load_rows: list[float] = field(default_factory=list)
    """Seconds to load the sharding that was saved."""
    load_columns: list[float] = field(default_factory=list)
    """Seconds to load columns."""
    read: list[int] = field(default_factory=list)
    """Bytes that ``read`` and ``pread`` returned while columns were loaded, for each rank."""
    mapped: list[int] = field(default_factory=list)
    """Bytes of the files that TensorStore mapped meanwhile, for each rank."""
    wanted: list[int] = field(default_factory=list)
    """Bytes of the columns of each rank."""
    stored: int = 0
    """Bytes of the checkpoint on disk."""

    def seconds(self) -> dict[str, float]:
        """Medians of the three times."""
        return {
            "save": statistics.median(self.save),
            "load_rows": statistics.median(self.load_rows),
            "load_columns": statistics.median(self.load_columns),
        }

    def read_per_rank(self) -> list[int]:
        """The bytes that each rank read, one way or the other."""
        return [r + m for r, m in zip(self.read, self.mapped, strict=True)]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A contender that saves and loads dicts of DTensors on every rank."""

    name: str
    save: Callable[[Path, dict[str, DTensor]], None]
    load: Callable[[Path, dict[str, DTensor]], None]


def _dcp(threads: int) -> Sharded:
    import torch.distributed.checkpoint as dcp

    def save(directory: Path, rows: dict[str, DTensor]) -> None:
        dcp.save(dict(rows), storage_writer=dcp.FileSystemWriter(directory, thread_count=threads))

    def load(directory: Path, target: dict[str, DTensor]) -> None:
        dcp.load(dict(target), storage_reader=dcp.FileSystemReader(directory))

    return Sharded("DCP, 1 thread" if threads == 1 else f"DCP, {threads} threads", save, load)


def _dcp_through_xckpt() -> Sharded:
    import torch.distributed.checkpoint as dcp

    from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

    def save(directory: Path, rows: dict[str, DTensor]) -> None:
        dcp.save(dict(rows), storage_writer=XckptStorageWriter(directory / "state"))

    def load(directory: Path, target: dict[str, DTensor]) -> None:
        dcp.load(dict(target), storage_reader=XckptStorageReader(directory / "state"))

    return Sharded("DCP through xckpt", save, load)


def _xckpt() -> Sharded:
    import xckpt

    def save(directory: Path, rows: dict[str, DTensor]) -> None:
        xckpt.save(directory / "state", dict(rows))

    def load(directory: Path, target: dict[str, DTensor]) -> None:
        xckpt.load_into(directory / "state", dict(target))

    return Sharded("xckpt", save, load)


def _sharded(names: list[str]) -> list[Sharded]:
    makers = {
        "DCP, 1 thread": lambda: _dcp(1),
        "DCP, 2 threads": lambda: _dcp(2),
        "DCP through xckpt": _dcp_through_xckpt,
        "xckpt": _xckpt,
    }
    return [make() for name, make in makers.items() if name in names]


def _whole(number: int, shape: tuple[int, int]) -> np.ndarray:
    return state.random_arrays({"": shape}, seed=number)[""]


def _dtensors(mesh: DeviceMesh, dim: int, quick: bool, filled: bool) -> dict[str, DTensor]:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    found: dict[str, DTensor] = {}
    for number, (name, shape) in enumerate(state.matrices(quick).items()):
        part = _part(shape, dim, mesh.get_local_rank())
        if filled:
            local = np.ascontiguousarray(_whole(number, shape)[part])
        else:
            local = np.full(
                [len(range(*s.indices(n))) for s, n in zip(part, shape, strict=True)],
                -1,
                dtype=np.float32,
            )
        found[name] = DTensor.from_local(
            torch.from_numpy(local),
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
    return found


def _part(shape: tuple[int, int], dim: int, rank: int) -> tuple[slice, slice]:
    # torch.chunk: every shard but the last ones has the ceiling of the division.
    size = -(-shape[dim] // RANKS)
    mine = slice(min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]))
    return (mine, slice(None)) if dim == 0 else (slice(None), mine)


def _differing(loaded: dict[str, DTensor], dim: int, quick: bool, rank: int) -> list[str]:
    matrices = state.matrices(quick)
    return [
        f"rank {rank}: {name}"
        for number, (name, shape) in enumerate(matrices.items())
        if not np.array_equal(
            loaded[name].to_local().numpy(), _whole(number, shape)[_part(shape, dim, rank)]
        )
    ]


def bytes_read() -> tuple[int, int]:
    """Return this process's two counts: by ``read`` and ``pread``, and mapped by TensorStore."""
    lines = Path("/proc/self/io").read_text().splitlines()
    read = next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
    if "tensorstore" not in sys.modules:
        return read, 0
    import tensorstore as ts

    metrics = ts.experimental_collect_matching_metrics(MAPPED_METRIC)
    return read, sum(int(v["value"]) for metric in metrics for v in metric["values"])


class _Rank:
    """One of the processes: its shards, and how it times a step with the others."""

    def __init__(self, rank: int, directory: Path, quick: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (RANKS,))
        self.rank, self.directory, self.quick = rank, directory, quick
        self.source = _dtensors(mesh, 0, quick, filled=True)
        self.rows = _dtensors(mesh, 0, quick, filled=False)
        self.columns = _dtensors(mesh, 1, quick, filled=False)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds from one barrier to the next with the work between them."""
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    def run(self, contender: Sharded, figures: Resharding, check: bool) -> list[str]:
        """One save and two loads; returns what is wrong if asked to check."""
        self._make_directory()
        save = self.timed(lambda: contender.save(self.directory, self.source))
        save += self.timed(lambda: flush(self.directory) if self.rank == 0 else None)
        rows = self.timed(lambda: contender.load(self.directory, self.rows))
        before = bytes_read()
        columns = self.timed(lambda: contender.load(self.directory, self.columns))
        after = bytes_read()
        wrong: list[str] = []
        if check:
            wrong += _differing(self.rows, 0, self.quick, self.rank)
            wrong += _differing(self.columns, 1, self.quick, self.rank)
            self._clear()
        else:
            figures.save.append(save)
            figures.load_rows.append(rows)
            figures.load_columns.append(columns)
        self._count(figures, (after[0] - before[0], after[1] - before[1]))
        self._remove_directory()
        return wrong

    def _count(self, figures: Resharding, mine: tuple[int, int]) -> None:
        import torch.distributed as dist

        wanted = sum(t.to_local().numel() * 4 for t in self.columns.values())
        everyone: list[tuple[int, int, int]] = [(0, 0, 0)] * RANKS
        dist.all_gather_object(everyone, (*mine, wanted))
        figures.read, figures.mapped, figures.wanted = (
            list(c) for c in zip(*everyone, strict=True)
        )
        figures.stored = sum(p.stat().st_size for p in self.directory.rglob("*") if p.is_file())

    def _clear(self) -> None:
        for tensors in (self.rows, self.columns):
            state.clear({name: t.to_local().numpy() for name, t in tensors.items()})

    def _make_directory(self) -> None:
        import torch.distributed as dist

        if self.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        dist.barrier()

    def _remove_directory(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.directory)


def _work(rank: int, job: dict[str, object], rendezvous: str) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    names, rounds = job["names"], job["rounds"]
    assert isinstance(names, list) and isinstance(rounds, int)
    contenders = _sharded(names)
    me = _Rank(rank, Path(str(job["directory"])), bool(job["quick"]))
    figures = {contender.name: Resharding() for contender in contenders}
    wrong = [w for c in contenders for w in me.run(c, figures[c.name], check=True)]
    for number in range(0 if wrong else rounds):
        start = number % len(contenders)
        for contender in [*contenders[start:], *contenders[:start]]:
            me.run(contender, figures[contender.name], check=False)
    everyone: list[list[str]] = [[]] * RANKS
    dist.all_gather_object(everyone, wrong)
    if rank == 0:
        found = {name: asdict(each) for name, each in figures.items()}
        Path(str(job["answer"])).write_text(
            json.dumps({"wrong": [line for lines in everyone for line in lines], "figures": found})
        )
    dist.destroy_process_group()


def run(names: list[str], parent: Path, rounds: int, quick: bool) -> dict[str, Resharding]:
    """Run the contenders with these names on four ranks and return their figures.

    Raises:
        RuntimeError: a contender loaded other data than it saved.
    """
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        job: dict[str, object] = {
            "names": names,
            "directory": str(parent / "reshard"),
            "rounds": rounds,
            "quick": quick,
            "answer": str(answer),
        }
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            multiprocessing.spawn(_work, (job, f"file://{folder}/rendezvous"), nprocs=RANKS)
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads
        found = json.loads(answer.read_text())
    if found["wrong"]:
        raise RuntimeError("resharded data differs: " + "; ".join(found["wrong"][:20]))
    return {name: Resharding(**figures) for name, figures in found["figures"].items()}
