"""Requests of each call to a bucket that is 30 ms away: their kinds, and the longest chain of them.

A chain is requests of which each was begun after the one before had been answered. Raw TensorStore
stands beside, with an array for each leaf.

Each state is saved to a server in a process of its own (`tests.support.counted_bucket`).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

import xckpt
from tests.support.counted_bucket import (
    counted_apart,
    environment_of,
    kinds,
    longest_chain,
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
SMALL = 1 << 18

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


def measure(name: str, delay: float = DELAY, *, raw: bool = True) -> list[dict[str, Any]]:
    """The calls of a state, in turn, as JSON values."""
    count, size = STATES[name]
    rng = np.random.default_rng(0)
    state = {f"block.{n:04}": rng.random(size // 4, np.float32) for n in range(count)}
    with counted_apart(delay) as port:
        os.environ |= environment_of(port)
        found: list[Call] = []

        def timed(call: str, act: Callable[[], object]) -> None:
            seen_at(port)
            gc.collect()
            began = time.perf_counter()
            kept = act()
            seconds = time.perf_counter() - began
            seen = [request for request in seen_at(port) if request.method != "HEAD"]
            chain = longest_chain(seen)
            found.append(Call(name, call, seconds, len(seen), len(chain), kinds(seen)))
            del kept

        _measure_calls(timed, state)
        if raw:
            _measure_raw(timed, state)
    return [asdict(call) for call in found]


def _measure_calls(timed: Callable[[str, Callable[[], object]], None], state: State) -> None:
    url, options = "s3://bucket/run/1", xckpt.SaveOptions(pack_bytes=SMALL)
    target = {name: np.full_like(array, 1) for name, array in state.items()}
    first = next(iter(state))
    xckpt.save("s3://bucket/warm", {"w": np.zeros(3)})
    timed("save", lambda: xckpt.save(url, state, options=options))
    timed("load", lambda: xckpt.load_into(url, target))
    timed("open", lambda: xckpt.open(url))
    timed("one leaf", lambda: xckpt.open(url).array(first)[:])
    timed("verify", lambda: xckpt.open(url).verify())
    timed("overwrite", lambda: xckpt.save(url, state, options=options, overwrite=True))
    timed("load again", lambda: xckpt.load_into(url, target))
    timed("delete", lambda: xckpt.delete(url))
    assert all(np.array_equal(target[name], array) for name, array in state.items())


def _measure_raw(timed: Callable[[str, Callable[[], object]], None], state: State) -> None:
    """An array for each leaf, written and read at once."""
    target = {name: np.full_like(array, 1) for name, array in state.items()}
    spec = {
        "driver": "s3",
        "bucket": "bucket",
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
        "aws_region": os.environ["AWS_REGION"],
        "aws_credentials": {"type": "environment"},
    }
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

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
