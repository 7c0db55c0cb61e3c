"""torch's distributed checkpoint through xckpt, beside its own files.

1. ``python -m benchmarks.dcp`` saves and loads the 1.4 GiB state with DCP's own files (one thread
   and two) and through xckpt, in turns, each verified bit for bit (`benchmarks.speed`).
2. A row shard (`run`): the matrices are saved whole, and the second of four ranks loads its rows of
   each, as a DTensor under ``Shard(0)``; it is alone, in a process group that is a fake. What it
   read is counted as in `benchmarks.reshard`; what the chunks it touches hold is counted from the
   checkpoint's grids.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from benchmarks import state
from benchmarks.contender import Contender, State
from benchmarks.contenders import dcp as contenders
from benchmarks.reshard import bytes_read

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

RANKS, RANK = 4, 1
CONTENDERS = (contenders.ONE_THREAD, contenders.TWO_THREADS, contenders.THROUGH_XCKPT)


@dataclass(frozen=True, slots=True)
class RowShard:
    """What loading one row shard took."""

    wanted: int
    """Bytes of the rows."""
    touched: int
    """Bytes of the stored chunks that hold some of them: for DCP's own files, the tensors."""
    read: int
    """Bytes that were read or mapped, metadata included."""
    seconds: float


def rows(shape: tuple[int, int]) -> slice:
    """The rows of a matrix that this rank has: torch.chunk's, rounded up."""
    size = -(-shape[0] // RANKS)
    return slice(min(RANK * size, shape[0]), min((RANK + 1) * size, shape[0]))


def touched_bytes(checkpoint: Path, matrices: dict[str, tuple[int, int]]) -> int:
    """Bytes of the chunks that hold some of this rank's rows."""
    import xckpt

    total = 0
    opened = xckpt.open(checkpoint)
    for name, shape in matrices.items():
        leaf = opened[name]
        assert isinstance(leaf, xckpt.StoredArray) and leaf.chunks is not None
        step, mine = leaf.chunks[0], rows(shape)
        first, last = mine.start // step * step, min(-(-mine.stop // step) * step, shape[0])
        total += (last - first) * shape[1] * 4
    return total


def _shards(matrices: dict[str, tuple[int, int]]) -> dict[str, DTensor]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        name: DTensor.from_local(
            torch.full((len(range(*rows(shape).indices(shape[0]))), shape[1]), -1.0),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
        for name, shape in matrices.items()
    }


def run(parent: Path, quick: bool) -> dict[str, RowShard]:
    """Save whole and load one row shard, with each contender.

    Raises:
        RuntimeError: a contender loaded other data than it saved.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    matrices = state.matrices(quick)
    source = state.random_arrays(matrices)
    figures: dict[str, RowShard] = {}
    for contender in CONTENDERS:
        directory = parent / "rows"
        contender.save(directory, state.as_torch(source))
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
        try:
            figures[contender.name] = _load(contender, directory, matrices, source)
        finally:
            dist.destroy_process_group()
            shutil.rmtree(directory)
    return figures


def _load(
    contender: Contender,
    directory: Path,
    matrices: dict[str, tuple[int, int]],
    source: state.Arrays,
) -> RowShard:
    target: State = _shards(matrices)
    before, start = bytes_read(), time.perf_counter()
    contender.loads[0].run(directory, target)
    seconds, after = time.perf_counter() - start, bytes_read()
    for name, shape in matrices.items():
        if not np.array_equal(target[name].to_local().numpy(), source[name][rows(shape)]):
            raise RuntimeError(f"{contender.name}: {name} differs")
    wanted = sum(tensor.to_local().numel() * 4 for tensor in target.values())
    touched = state.size_of(matrices)
    if contender is contenders.THROUGH_XCKPT:
        touched = touched_bytes(directory / "state", matrices)
    return RowShard(wanted, touched, sum(after) - sum(before), seconds)


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="6 MB and one round: a smoke test.")
def main(rounds: int, quick: bool) -> None:
    """Measure DCP through xckpt beside DCP with its own files."""
    from rich.console import Console

    from benchmarks import bars, report, speed

    warnings.filterwarnings("ignore", module="torch")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="xckpt-dcp-", dir=memory if memory.is_dir() else None))
    console = Console(width=120)
    try:
        shapes = state.shapes(quick)
        arena = speed.Arena.of(shapes)
        times = speed.run(CONTENDERS, arena, folder, 1 if quick else rounds, lambda line: None)
        report.show(console, report.speed_table(times, state.size_of(shapes)))
        figures = run(folder, quick)
        report.show(console, report.row_shard_table(figures))
        found = [*bars.through_xckpt(times), *bars.row_shard(figures)]
        report.show(console, report.bars_table([] if quick else found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
