"""Requests of each call to a bucket that is 30 ms away: their kinds, and how often it waits.

Raw TensorStore stands beside, with an array for each leaf. Each state is saved to servers in
processes of their own (`tests.support.counted_bucket`):

1. One answers after 30 ms: seconds, requests, and the longest *chain*, of which each was begun
   after the one before had been answered. What is sent late, because others take the line or the
   processor, makes a chain longer, too.
2. One answers in *rounds*, which leave out what only takes time: how often an answer is waited for
   before the next is asked. They are counted as the call is configured by default, and without
   limits of memory and concurrency: then they are what truly depends on each other.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

import xckpt
from tests.support.counted_bucket import (
    SeenRequest,
    counted_apart,
    environment_of,
    kinds,
    longest_chain,
    rounds,
    seen_at,
)

DELAY = 0.03
"""Seconds before each answer."""
STATES = {
    "small": (3000, 2 << 10),
    "medium": (300, 64 << 10),
    "large": (100, 4 << 20),
}
"""Name -> how many leaves, and bytes of each."""
QUIET = 0.25
"""Seconds without a request that end a round."""
TRIES = 2
"""A busy machine may send a request so late that it begins a round: the fewest count."""
MEMORY_BYTES, CONCURRENCY = 1 << 34, 4096
"""What takes the place of limits."""
RAW_LEAVES = 300
"""Of more leaves raw TensorStore's rounds take minutes: they are not counted."""

State = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Call:
    """What one call asked of the bucket."""

    state: str
    call: str
    seconds: float
    requests: int
    chain: int
    kinds: dict[str, int]
    rounds: int = 0
    """0 where they were not counted."""
    rounds_without_limits: int = 0


def matrix(size: int) -> tuple[int, int]:
    """The shape of a float32 matrix, square or twice as wide, of a power of two of bytes."""
    elements = size // 4
    columns = 1 << elements.bit_length() // 2
    return elements // columns, columns


def measure(name: str, delay: float = DELAY, *, raw: bool = True) -> list[dict[str, Any]]:
    """The calls of a state, in turn, as JSON values."""
    count, size = STATES[name]
    rng = np.random.default_rng(0)
    state = {f"block.{n:04}": rng.random(matrix(size), np.float32) for n in range(count)}
    found: list[Call] = []

    def add(call: str, seconds: float, seen: list[SeenRequest]) -> None:
        chain = longest_chain(seen)
        found.append(Call(name, call, seconds, len(seen), len(chain), kinds(seen)))

    with counted_apart(delay) as port:
        os.environ |= environment_of(port)
        _measure_calls(partial(_timed, port, add), state)
        if raw:
            _measure_raw(partial(_timed, port, add), state)
    with_raw = raw and count <= RAW_LEAVES
    default, free = (_rounds(state, free=free, raw=with_raw) for free in (False, True))
    counts = [(default.get(each.call, 0), free.get(each.call, 0)) for each in found]
    return [
        asdict(replace(each, rounds=some, rounds_without_limits=least))
        for each, (some, least) in zip(found, counts, strict=True)
    ]


def _timed(
    port: int,
    add: Callable[[str, float, list[SeenRequest]], None],
    call: str,
    act: Callable[[], object],
) -> None:
    """Make a call, and hand on its seconds and requests."""
    seen_at(port)
    gc.collect()
    began = time.perf_counter()
    kept = act()
    seconds = time.perf_counter() - began
    add(call, seconds, [request for request in seen_at(port) if request.method != "HEAD"])
    del kept


def _rounds(state: State, *, free: bool, raw: bool) -> dict[str, int]:
    """The rounds of each call, by default or ``free`` of limits."""
    fewest: dict[str, int] = {}

    def add(call: str, seconds: float, seen: list[SeenRequest]) -> None:
        fewest[call] = min(fewest.get(call, len(seen)), rounds(seen))

    for _ in range(TRIES):
        with counted_apart(0, quiet=QUIET) as port:
            os.environ |= environment_of(port)
            _measure_calls(partial(_timed, port, add), state, free=free)
            if raw:
                _measure_raw(partial(_timed, port, add), state, free=free)
    return fewest


def _measure_calls(
    timed: Callable[[str, Callable[[], object]], None], state: State, *, free: bool = False
) -> None:
    url, options = "s3://bucket/run/1", xckpt.SaveOptions()
    reading = xckpt.LoadOptions()
    if free:
        options = replace(options, memory_bytes=MEMORY_BYTES, concurrency=CONCURRENCY)
        reading = xckpt.LoadOptions(memory_bytes=MEMORY_BYTES, concurrency=CONCURRENCY)
    target = {name: np.full_like(array, 1) for name, array in state.items()}
    first = next(iter(state))
    xckpt.save("s3://bucket/warm", {"w": np.zeros(3)})
    timed("save", lambda: xckpt.save(url, state, options=options))
    timed("load", lambda: xckpt.load_into(url, target, options=reading))
    timed("open", lambda: xckpt.open(url, options=reading))
    timed("one leaf", lambda: xckpt.open(url, options=reading).array(first)[:])
    timed("verify", lambda: xckpt.open(url, options=reading).verify())
    timed("overwrite", lambda: xckpt.save(url, state, options=options, overwrite=True))
    timed("load again", lambda: xckpt.load_into(url, target, options=reading))
    timed("delete", lambda: xckpt.delete(url))
    assert all(np.array_equal(target[name], array) for name, array in state.items())


def _measure_raw(
    timed: Callable[[str, Callable[[], object]], None], state: State, *, free: bool = False
) -> None:
    """An array for each leaf, written and read at once."""
    target = {name: np.full_like(array, 1) for name, array in state.items()}
    spec = {
        "driver": "s3",
        "bucket": "bucket",
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
        "aws_region": os.environ["AWS_REGION"],
        "aws_credentials": {"type": "environment"},
    }
    resources: dict[str, object] = {"cache_pool": {"total_bytes_limit": 0}}
    if free:
        resources["s3_request_concurrency"] = {"limit": CONCURRENCY}
    context = ts.Context(resources)

    def place(name: str) -> dict[str, object]:
        return {"driver": "zarr3", "kvstore": spec | {"path": f"raw/{name}/"}}

    def save() -> None:
        arrays = {
            name: ts.open(
                place(name), context=context, create=True, dtype=ts.float32, shape=array.shape
            )
            for name, array in state.items()
        }
        writes = [arrays[name].result().write(array) for name, array in state.items()]
        for write in writes:
            write.result()

    def load() -> None:
        arrays = {name: ts.open(place(name), context=context, open=True) for name in state}
        reads = [
            ts.array(target[name], copy=False, write=True).write(arrays[name].result())
            for name in state
        ]
        for read in reads:
            read.result()

    timed("raw save", save)
    timed("raw load", load)
