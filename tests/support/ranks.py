"""Processes of one torch.distributed group that live as long as the tests that share them.

Ranks are forked from a process that has imported torch (`fork_server`), so a group starts in some
tenths of a second. Tests that share a `Ranks` send it functions: every rank calls
``function(rank, *args)``, and `Ranks.run` gives back what they returned.
"""

from __future__ import annotations

import datetime
import gc
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.fork_server import context

SECONDS = 60
"""How long a rank may take to answer, and to wait for another."""


class RankError(AssertionError):
    """A rank raised what the test did not expect; the message is its traceback."""


class Ranks:
    """``size`` processes in a gloo group, of which each answers within some ``seconds``."""

    def __init__(self, size: int, *, seconds: float = SECONDS) -> None:
        self.size = size
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self.processes = []
        store = str(Path(self._folder.name) / "store")
        for rank in range(size):
            here, there = context().Pipe()
            process = context().Process(target=_serve, args=(there, rank, size, store), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's result of ``function(rank, *args)``, in rank order."""
        answers = self.attempt(function, *args)
        faults = [f"rank {r}: {why}" for r, (ok, why) in enumerate(answers) if not ok]
        if faults:
            raise RankError("\n".join(faults))
        return [result for _, result in answers]

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """For each rank (True, its result) or (False, its traceback, or how it died)."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        pipe, process = self._pipes[rank], self.processes[rank]
        try:
            if not pipe.poll(self._seconds):
                return False, f"no answer within {self._seconds} seconds"
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(SECONDS)
            return False, f"ended with code {process.exitcode}"

    def close(self) -> None:
        """Let the ranks leave together, and make sure that they are gone."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def die() -> None:
    """End this process as the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def share_a_device() -> None:
    """Have all gloo groups of this process share one device.

    Each would make its own, whose thread wakes up a hundred times a second; ranks that live long
    make dozens of groups.
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    device, make = gloo.create_default_device(), gloo.__init__

    def make_with_it(
        group: Any, store: Any, rank: int, size: int, timeout: Any, **newer: Any
    ) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        for name, value in newer.items():  # torch 2.14 has `enable_reconfigure` too
            setattr(options, name, value)
        make(group, store, rank, size, options)

    gloo.__init__ = make_with_it


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported: no look for garbage goes through it
    torch.set_num_threads(1)
    share_a_device()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    # No rank may die before all are connected.
    dist.barrier()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()
