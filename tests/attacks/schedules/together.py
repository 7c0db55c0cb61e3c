"""Ranks, conversions and runs under schedules."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import xckpt
from conformance.implementations.threads import results
from tests.attacks.schedules.states import SIZES, SMALL, THREADS, same, state
from tests.support.schedules import at_once, fuzzed
from tests.support.sharded_arrays import cut, holds, wish
from xckpt import LoadOptions, SaveOptions
from xckpt.convert import convert
from xckpt.policies import Latest


def ranks(place: str, seed: int, *, hosts: int) -> None:
    """Ranks that read for each other, on one host or between hosts."""
    array = np.arange(1, 1 + 48 * 24, dtype=np.float32).reshape(48, 24)

    def on_rank(group: Any) -> None:
        tree = {"w": cut(array, [((16 * group.rank, 0), (16, 24))]), "o": array}
        xckpt.save(place, tree, group=group, options=replace(SMALL, threads=2))
        like = {"w": wish(array, [((8, 0), (40, 24))]), "o": np.empty_like(array)}
        host = f"host{group.rank % hosts}"
        options = LoadOptions(threads=2, host=host, share_reads="job")
        loaded = xckpt.load(place, like, group=group, options=options)
        assert holds(loaded["w"], array)
        np.testing.assert_array_equal(loaded["o"], array)

    with fuzzed(seed):
        results(3, on_rank)


def spoiled(place: str, seed: int) -> None:
    """Whichever rank reads a number that no longer fits, all hear of it."""
    array = np.ones((48, 24), np.float32)
    array[16 * (seed % 3) + 9, 3] = 1e30

    def on_rank(group: Any) -> str:
        if group.rank == 0:
            xckpt.save(place, {"w": array, "o": array[:4]}, options=SMALL, no_dist=True)
        group.barrier()
        box = ((16 * group.rank, 0), (16, 24))
        like = {"w": wish(np.empty((48, 24), "float16"), [box]), "o": np.empty((4, 24), "float32")}
        options = LoadOptions(threads=2, host=f"host{group.rank % 2}", share_reads="job")
        try:
            xckpt.load(place, like, group=group, cast=True, options=options)
        except xckpt.XckptError as error:
            return str(error)
        return ""

    with fuzzed(seed):
        assert all("1 element does not fit into float16" in each for each in results(3, on_rank))


def conversion(format: str, place: str, seed: int, *, in_executor: bool = False) -> None:
    tree = {name: leaf for name, leaf in state(seed).items() if name != "text"}
    xckpt.save(f"{place}-ours", tree, options=SMALL)
    options = SaveOptions(chunk_bytes=1 << 9, memory_bytes=1 << 15, threads=3)
    with fuzzed(seed), ThreadPoolExecutor(3) as pool:
        executor = pool if in_executor else None
        convert(f"{place}-ours", place, format=format, options=options, executor=executor)
        loaded = xckpt.load(place, options=THREADS)
        opened = xckpt.open(place, options=THREADS)
        at_once(*(lambda: same({"w0": opened.array("w0")[...]}, {"w0": tree["w0"]}),) * 2)
        opened.close()
    if format == "safetensors":  # whose names have no levels
        small = {f"small.{name}": leaf for name, leaf in tree.pop("small").items()}
        tree |= small
    same(loaded, tree)


def manager(place: str, seed: int) -> None:
    """A run is looked at, waited for and restored from while it goes on."""
    over, rounds = threading.Event(), 4
    run = xckpt.CheckpointManager(place, keep=[Latest(2)], options=SMALL)

    def train() -> None:
        try:
            for step in range(rounds):
                run.save(step, {"w": np.full(SIZES, step + 1)}, force=True)
            run.wait()
        finally:
            over.set()

    def look() -> None:
        while not over.is_set():
            numbers = [record.number for record in run.steps()]
            assert numbers == sorted(set(numbers))

    def wait() -> None:
        while not over.is_set():
            run.wait()

    def restore() -> None:
        while not over.is_set():
            found = run.restore(default=None)
            assert found is None or len(np.unique(found["w"])) == 1

    with fuzzed(seed):
        at_once(train, look, wait, restore)
    run.wait()
    run.reload()
    assert [record.number for record in run.steps()][-1] == rounds - 1
    assert (run.restore()["w"] == rounds).all()


def deletion(place: str, seed: int) -> None:
    """Two threads delete steps of a run that goes on."""
    over = threading.Event()
    run = xckpt.CheckpointManager(place, options=SMALL, full_every=3)

    def train() -> None:
        try:
            for step in range(4):
                run.save(step, {"w": np.full(SIZES, step + 1)}, force=True)
            run.wait()
        finally:
            over.set()

    def delete(step: int) -> None:
        there = True
        while there:
            there = not over.is_set()
            with contextlib.suppress(ValueError, xckpt.NotACheckpointError):
                run.delete(step)  # it is the only one, or not there yet
                return

    with fuzzed(seed):
        at_once(train, partial(delete, 0), partial(delete, 1), run.latest)
    run.wait()
    run.reload()
    assert [record.number for record in run.steps()] == [2, 3]
    assert [xckpt.open(run.path(step)).verify() for step in (2, 3)] == [[], []]
