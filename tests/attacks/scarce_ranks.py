"""Calls of two ranks of which some lack open files, threads or memory, as `tests.attacks.scarce`.

`python -m tests.attacks.scarce_ranks FRAMEWORK KIND RANKS CALLS AMOUNTS` imports the framework and
xckpt, and uses nothing. For each call and each amount it forks two ranks that join. Those of RANKS
then have so much and no more. It prints, as JSON, what came of each call on each rank, and after
how many seconds.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import xckpt
from tests.attacks import scarce

TIMEOUT = 5.0
"""Seconds that a silent rank is waited for."""
SIZE = 2


def state(rank: int, step: int) -> dict[str, Any]:
    """A leaf of all, and some of one rank only."""
    own = {f"of{rank}/w{n}": np.full((64, 64), step, np.int32) for n in range(3)}
    return {**own, "all": np.full((64, 64), step, np.int32), "step": step}


def loads(root: str, rank: int) -> None:
    loaded = xckpt.load(f"{root}/old", state(rank, 0), timeout=TIMEOUT)
    assert loaded["step"] == 1 and np.all(loaded[f"of{rank}/w2"] == 1)


def manager(root: str) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(f"{root}/run", timeout=TIMEOUT)


def managed_save(root: str, rank: int) -> None:
    with manager(root) as run:
        run.save(2, state(rank, 2), force=True)


def managed_restore(root: str, rank: int) -> None:
    with manager(root) as run:
        assert run.restore(state(rank, 0))["step"] == 1


def saves(root: str, rank: int) -> None:
    xckpt.save(f"{root}/new", state(rank, 2), timeout=TIMEOUT)


def saves_in_the_background(root: str, rank: int) -> None:
    xckpt.save_async(f"{root}/new", state(rank, 2), timeout=TIMEOUT).result(60)


def converts(root: str, rank: int) -> None:
    [module] = [sys.modules[each] for each in GROUPS.values() if each in sys.modules]
    group = module.current_group(timeout=TIMEOUT)
    scarce.public.convert.convert(f"{root}/old", f"{root}/new.safetensors", group=group)


CALLS: dict[str, Callable[[str, int], object]] = {
    "save": saves,
    "save_async": saves_in_the_background,
    "load": loads,
    "manager.save": managed_save,
    "manager.restore": managed_restore,
    "convert": converts,
}


def prepare(root: str) -> None:
    scarce.prepare(root)
    whole = state(0, 1) | state(1, 1)
    xckpt.save(f"{root}/old", whole, overwrite=True)
    shutil.rmtree(f"{root}/run")
    with xckpt.CheckpointManager(f"{root}/run") as run:
        run.save(1, whole, force=True)


def join_torch(rank: int, port: int) -> None:
    import torch.distributed as dist

    wait = datetime.timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=wait)
    dist.barrier()


def join_jax(rank: int, port: int) -> None:
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", SIZE, rank)


JOIN = {"torch": join_torch, "jax": join_jax}
GROUPS = {each: f"xckpt.{each}.group" for each in JOIN}
"""What a call has imported that is given a group."""


def join(framework: str, name: str, rank: int, port: int) -> None:
    JOIN[framework](rank, port)
    if name == "convert":
        importlib.import_module(GROUPS[framework])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def on_rank(joins: Callable[[], object], call: Callable[[], object], limit: Any) -> list[Any]:
    """What came of a call of one rank, and the seconds that it took."""
    joins()
    time.sleep(0.5)  # the others have joined, too
    began = time.monotonic()
    said = scarce.made(call, *limit)
    return [*said, round(time.monotonic() - began, 2)]


def outcomes(
    framework: str, kind: str, ranks: Iterable[int], names: Iterable[str], amounts: Iterable[int]
) -> Iterator[list[Any]]:
    """What came of each call with each amount: `[call, amount, rank, class, text, seconds]`."""
    importlib.import_module({"torch": "torch.distributed"}.get(framework, framework))
    for name in names:
        for amount in amounts:
            root = tempfile.mkdtemp(prefix="scarce-")
            limits = [(kind, amount) if rank in ranks else ("", 0) for rank in range(SIZE)]
            try:
                assert scarce.forked(partial(prepare, root)) == ["done", ""]
                said = called(partial(join, framework, name), partial(CALLS[name], root), limits)
                yield from ([name, amount, rank, *each] for rank, each in enumerate(said))
                after = scarce.forked(partial(scarce.check, root))
            finally:
                shutil.rmtree(root)
            if after != ["done", ""]:
                yield [name, amount, -1, "afterwards", str(after), 0]


def called(
    joins: Callable[[int, int], object], call: Callable[[int], object], limits: Sequence[Any]
) -> list[Any]:
    """What came of a call on each rank. The first one stays until the others have ended."""
    port = free_port()
    stays, goes = os.pipe()

    def stay() -> None:
        os.close(goes)
        os.read(stays, 1)

    begun = [
        scarce.begun(
            partial(on_rank, partial(joins, rank, port), partial(call, rank), limits[rank]),
            stay if rank == 0 else lambda: None,
        )
        for rank in range(SIZE)
    ]
    others = [wait() for wait in begun[1:]]
    os.close(goes)
    os.close(stays)
    return [begun[0](), *others]


if __name__ == "__main__":
    framework, kind, ranks, names, amounts = sys.argv[1:]
    os.environ["JAX_PLATFORMS"] = "cpu"
    for each in outcomes(
        framework,
        kind,
        [int(each) for each in ranks.split(",")],
        names.split(",") if names else list(CALLS),
        [int(each) for each in amounts.split(",")],
    ):
        print(json.dumps(each), flush=True)
