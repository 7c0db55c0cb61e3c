"""Two ranks of a gloo group that save together again and again, until some of them are killed.

A process imports torch and uses nothing of it; for each trial it forks the ranks, which is much
faster than to start them anew, waits until they are connected, kills, and waits for the others.
"""

from __future__ import annotations

import datetime
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import numpy as np

import xckpt
from tests.support.fork_server import context

RANKS = 2
SECONDS = 30
"""How long a rank may need to notice that the other is dead."""


@dataclass(frozen=True, slots=True)
class Trial:
    path: str
    first: int
    """Number of the first state to save."""
    saves: int
    """How many saves come before the time begins; the first takes longest."""
    seconds: float
    """When to kill, from then on."""
    victims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    last: int
    """The last number whose save returned on any rank; -1 if none did."""
    survivors: tuple[str, ...]
    """How each rank that was not killed ended: the error's type, or ``hangs``."""


def number_at(path: Path) -> int | None:
    """The number of the whole and verified state at a path; None if there is none."""
    try:
        checkpoint = xckpt.open(path)
    except xckpt.NotACheckpointError:
        return None
    assert checkpoint.verify() == []
    loaded = xckpt.load(path)
    found = {int(each) for leaf in loaded.values() for each in np.unique(np.asarray(leaf))}
    assert len(found) == 1 and set(loaded) == {"rows", "both", "step"}, f"a mixture: {found}"
    return found.pop()


class KilledRanks:
    """The process that forks ranks, seen from a test."""

    def __init__(self) -> None:
        self._pipe, there = context().Pipe()
        self._process = context().Process(target=_serve, args=(there,))
        self._process.start()
        there.close()

    def run(self, trial: Trial) -> Outcome:
        self._pipe.send(trial)
        assert self._pipe.poll(4 * SECONDS), "no answer"
        return self._pipe.recv()

    def __enter__(self) -> KilledRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(SECONDS)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed.tensor

    import xckpt.engine.save  # what a save needs is imported here, once
    import xckpt.storage.write_checkpoint
    import xckpt.torch.adapter  # noqa: F401

    torch.set_num_threads(1)
    while True:
        try:
            trial = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            pipe.send(_try(trial, f"{folder}/store"))


def _try(trial: Trial, store: str) -> Outcome:
    pipes = [os.pipe() for _ in range(RANKS)]
    ranks: list[int] = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            _save_until_killed(trial, rank, store, pipes[rank][1])
        ranks.append(process)
    for _, writing in pipes:
        os.close(writing)
    for reading, _ in pipes:
        os.read(reading, 1)
    time.sleep(trial.seconds)
    for victim in trial.victims:
        os.kill(ranks[victim], signal.SIGKILL)
    hanging = _wait(ranks)
    numbers, ends = [-1], []
    for rank, (reading, _) in enumerate(pipes):
        with os.fdopen(reading) as stream:
            words = stream.read().split()
        numbers += [int(word) for word in words if word.isdigit()]
        if rank not in trial.victims:
            ends.append("hangs" if rank in hanging else words[-1])
    return Outcome(max(numbers), tuple(ends))


def _wait(ranks: list[int]) -> set[int]:
    """Wait for all; those that had to be killed because they did not end."""
    left = set(range(len(ranks)))
    deadline = time.monotonic() + SECONDS
    while left and time.monotonic() < deadline:
        left -= {rank for rank in left if os.waitpid(ranks[rank], os.WNOHANG)[0]}
        time.sleep(0.002)
    for rank in left:
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    return left


def _save_until_killed(trial: Trial, rank: int, store: str, writing: int) -> None:
    """Save state after state and report each; never returns."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, RANKS),
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=SECONDS),
        )
        mesh = init_device_mesh("cpu", (RANKS,))
        dist.barrier()
        for number in range(trial.first, trial.first + 10_000):
            if number == trial.first + trial.saves:
                os.write(writing, b"\n%d\n" % (number - 1) if trial.saves else b"\n")
            local = torch.full((32, 16), number, dtype=torch.int32)
            state = {
                "rows": DTensor.from_local(local, mesh, [Shard(0)]),
                "both": torch.full((40,), number),
                "step": number,
            }
            xckpt.save(trial.path, state, overwrite=True)
            if number >= trial.first + trial.saves:
                os.write(writing, b"%d\n" % number)
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}\n".encode())
    os._exit(0)
