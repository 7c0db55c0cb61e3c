"""A day of a job, compressed: three ranks and a reader, saves, loads, kills, signals, faults.

`XCKPT_SOAK_SECONDS` says how long, 1200 by default. In each round

1. three ranks save a state, or overwrite the last, in the foreground or in the background; in one
   round of five something befalls a rank: it is killed, interrupted, or raises in a callback, or a
   twentieth of the calls that write files fail;
2. a reader in another process loads without pause: every state that it sees is whole, and steps
   never go back below what was committed when it began;
3. what is there is the last step that was reported as committed, or the one after it.

In the end nothing has leaked: files, threads and memory of a rank that was never struck, and bytes
beside the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.fork_server import context
from tests.support.ranks import Ranks, die

SECONDS = float(os.environ.get("XCKPT_SOAK_SECONDS", "1200"))
WAYS = ("killed", "interrupted", "raises", "faults")
ROUNDS_OF_A_LIFE = 25
"""After so many rounds the ranks are made anew, as after a job's end."""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(SECONDS + 300)]


def state(step: int) -> dict[str, Any]:
    leaves = {f"w{n}": np.full((128, 64), step, np.int32) for n in range(5)}
    return {**leaves, "step": step}


def step_of(loaded: dict[str, Any]) -> int:
    """The step of a whole state."""
    seen = {int(value) for leaf in loaded.values() for value in np.unique(np.asarray(leaf))}
    assert len(seen) == 1, f"a mixture: {seen}"
    return seen.pop()


@contextlib.contextmanager
def failing_calls(seed: int) -> Iterator[None]:
    """A twentieth of the calls that make, sync and rename files fail."""
    pick = random.Random(seed)
    kept = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir", "pwrite", "pwritev")}

    def unreliable(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if pick.random() < 0.05:
                raise OSError(errno.EIO, "Input/output error")
            return kept[name](*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in kept:
            patch.setattr(os, name, unreliable(name))
        yield


def usage() -> tuple[int, int, int]:
    """Open files, threads and KiB of this process."""
    fields = Path("/proc/self/status").read_text()
    threads, memory = (int(fields.partition(name)[2].split()[0]) for name in ("Threads:", "VmRSS:"))
    return len(os.listdir("/proc/self/fd")), threads, memory


def on_rank(rank: int, path: str, step: int, seed: int, way: str) -> tuple[str, Any]:
    """One round: a save of the step, then a load of what is there."""
    logging.getLogger("xckpt").setLevel(logging.CRITICAL)
    pick = random.Random(seed)
    victim, moment = pick.randrange(3), pick.randrange(1, 8)
    background, share = pick.random() < 0.5, pick.random() < 0.5
    seen = 0

    def progress(known: object) -> None:
        nonlocal seen
        seen += 1
        if rank != victim or seen != moment:
            return
        if way == "killed":
            die()
        if way == "interrupted":
            raise KeyboardInterrupt
        if way == "raises":
            raise ValueError("a callback")

    options = xckpt.SaveOptions(chunk_bytes=1 << 12, progress=progress, threads=2)
    faults = failing_calls(seed) if way == "faults" and rank == victim else contextlib.nullcontext()
    try:
        with faults:
            if background:
                xckpt.save_async(path, state(step), overwrite=True, options=options).result(60)
            else:
                xckpt.save(path, state(step), overwrite=True, options=options)
        loaded = xckpt.load(path, state(0), options=xckpt.LoadOptions(share_reads=share))
        assert step_of(loaded) == step
    except (xckpt.XckptError, KeyboardInterrupt, ValueError) as error:
        return type(error).__name__, str(error)[:300]
    return "done", usage()


def reads(path: str, stop: Any, answer: Any) -> None:
    """Load until the end; how many states were seen, or what went wrong."""
    count, last = 0, 0
    try:
        while not stop.is_set():
            step = step_of(xckpt.load(path))
            assert step >= last, f"step {step} after {last}"
            count, last = count + 1, step
    except BaseException as error:
        answer.send((count, f"{type(error).__name__}: {error}"))
        raise
    answer.send((count, ""))


def there(path: Path) -> int:
    opened = xckpt.open(path)
    assert opened.verify() == []
    return int(opened["step"])  # type: ignore[call-overload]


def test_a_day_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, state(1), no_dist=True)
    here, far = context().Pipe(duplex=False)
    stop = context().Event()
    reader = context().Process(target=reads, args=(str(path), stop, far), daemon=True)
    reader.start()
    pick = random.Random(0)
    until = time.monotonic() + SECONDS
    committed, step, outcomes = 1, 1, dict.fromkeys(("done", *WAYS), 0)
    try:
        while time.monotonic() < until:
            with Ranks(3) as ranks:
                used: list[tuple[int, int, int]] = []
                for _ in range(ROUNDS_OF_A_LIFE):
                    way = pick.choice(WAYS) if pick.random() < 0.2 else ""
                    step += 1
                    answers = ranks.attempt(on_rank, str(path), step, pick.randrange(1 << 30), way)
                    found = there(path)
                    assert found in (committed, step), (found, committed, step, answers)
                    done = all(ok and result[0] == "done" for ok, result in answers)
                    assert done or way, answers
                    assert not done or found == step
                    committed = found
                    outcomes[way or "done"] += 1
                    if way or time.monotonic() > until:
                        break  # the process group of a rank that was struck is spent
                    used.append(answers[0][1][1])
                if len(used) > 15:
                    files, threads, memory = (
                        now - then for now, then in zip(used[-1], used[9], strict=True)
                    )
                    assert files <= 1 and threads <= 1 and memory < 16 << 10, used
    finally:
        stop.set()
    assert here.poll(60)
    count, wrong = here.recv()
    reader.join(20)
    assert wrong == "" and count > 0
    xckpt.save(path, state(step + 1), overwrite=True, no_dist=True)
    assert os.listdir(tmp_path) == ["ckpt"]
    assert threading.active_count() < 20
    assert outcomes["done"] > 0
    print(f"{step} steps, {count} loads, {outcomes}")
