"""What it costs a save on several ranks to compare their small replicas.

``python -m benchmarks.replicas`` forks ranks of a gloo group. Each holds its rows of the 1.4 GiB
state as DTensors, and 1,000 small tensors that all ranks have alike. In each round all ranks

1. save the whole state, and
2. compare what a save compares (`xckpt.engine.ranks.compare`), once for equal ranks and once for
   the stages of a pipeline, whose names differ.

The slowest rank counts. The bar is 1 % of the save.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import xckpt
from benchmarks import state
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.groups import find_group
from xckpt.engine.ranks.compare import arguments_of, compare_ranks

SMALL, ELEMENTS = 1000, 256
BAR = 0.01


def _state(rank: int, ranks: int, quick: bool) -> dict[str, Any]:
    """The rows of a rank as DTensors, and the small tensors."""
    mesh = init_device_mesh("cpu", (ranks,))
    sharded: dict[str, DTensor] = {}
    for number, (name, shape) in enumerate(state.shapes(quick).items()):
        rows = torch.arange(shape[0] if shape else 1).chunk(ranks)
        own = len(rows[rank]) if rank < len(rows) else 0
        local = torch.full((own, *shape[1:]), float(number + rank))
        whole = torch.Size(shape or (1,))
        stride = torch.empty(whole, device="meta").stride()
        sharded[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole, stride=stride
        )
    small = {f"norm{n}": torch.full((ELEMENTS,), float(n)) for n in range(SMALL)}
    return {"model": sharded, "small": small}


def _slowest(work: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    work()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _work(rank: int, ranks: int, folder: str, rounds: int, quick: bool, results: Any) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous{ranks}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    tree, group = _state(rank, ranks, quick), find_group()
    path = Path(folder) / f"ckpt{ranks}"
    equal = xckpt.planner.DefaultSavePlanner()
    equal.use_adapters(loaded_adapters(rank))
    equal.set_up_planner(tree)
    stage = xckpt.planner.DefaultSavePlanner()
    stage.use_adapters(loaded_adapters(rank))
    stage.set_up_planner({**tree, "small": {f"stage{rank}": tree["small"]}, "step": 1})
    arguments = arguments_of(xckpt.storage.ZarrStorageWriter(path))
    works: list[Callable[[], object]] = [
        lambda: xckpt.save(path, tree, overwrite=True),
        lambda: compare_ranks(group, arguments, equal.replicas, equal.adapters),
        lambda: compare_ranks(group, arguments, stage.replicas, stage.adapters),
    ]
    times = [[_slowest(work) for work in works] for _ in range(rounds)]
    if rank == 0:
        results.put(np.array(times).T.tolist())
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, folder: str, rounds: int, quick: bool) -> list[float]:
    """Median seconds of a save, of comparing equal ranks, and of comparing stages of a pipeline."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_work, (ranks, folder, rounds, quick, results), nprocs=ranks)
    return [median(times) for times in results.get()]


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2, 4), show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--quick", is_flag=True, help="A small model, to try the script.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to save; default: /tmp.")
def main(ranks: tuple[int, ...], rounds: int, quick: bool, folder: Path | None) -> None:
    """Print the figures; fail if the bar is missed."""
    missed = False
    for count in ranks:
        base = tempfile.mkdtemp(prefix="replicas-", dir=folder)
        try:
            save, equal, stages = measure(count, base, rounds, quick)
        finally:
            shutil.rmtree(base)
        print(f"{count} ranks: save {save:.3f} s; {SMALL:,} small replicas compared in", end=" ")
        print(f"{equal * 1e3:.2f} ms ({equal / save:.2%}),", end=" ")
        print(f"pipeline stages in {stages * 1e3:.2f} ms ({stages / save:.2%})", flush=True)
        missed |= max(equal, stages) > BAR * save
    if missed:
        raise SystemExit(f"above {BAR:.0%} of a save")


if __name__ == "__main__":
    main()
