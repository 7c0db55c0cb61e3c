"""Seconds to save and to load 100 tensors of 4 MiB, beside raw TensorStore and other readers.

1. The bucket answers each request after 30 ms (`tests.support.counted_bucket`). Behind a line of
   some MiB a second, what counts is how well a call keeps the line busy; with no limit, what the
   machine does for each byte.
2. All take their turn in each round, so that what else the machine does falls on all of them.
   Processor time is that of this process; the server has one of its own.
3. Raw TensorStore has an array for each tensor, and as many requests under way as xckpt. The
   readers of safetensors (`benchmarks.scale.readers`) give new tensors, as `xckpt.load` does.
"""

from __future__ import annotations

import gc
import http.client
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray
from safetensors.numpy import save as as_safetensors

import xckpt
from benchmarks.scale import readers
from benchmarks.scale.bucket import matrix
from tests.support.counted_bucket import counted_apart, environment_of
from xckpt.storage.location import REQUESTS

DELAY = 0.03
"""Seconds before each answer."""
LINES = (0, 100)
"""MiB a second that the bucket takes or sends; 0 for no limit."""
COUNT, SIZE, ROUNDS = 100, 4 << 20, 4
XCKPT, RAW = "xckpt", "raw TensorStore"
SAVE, INTO, NEW = "save", "load into memory", "load new arrays"

State = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Turns:
    """What each round of a call took."""

    line: int
    """MiB a second, 0 for no limit."""
    contender: str
    call: str
    seconds: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])

    def take(self, act: Callable[[], object]) -> object:
        """One round, and what the call gave."""
        gc.collect()
        began, used = time.perf_counter(), time.process_time()
        gave = act()
        self.processor.append(time.process_time() - used)
        self.seconds.append(time.perf_counter() - began)
        return gave


def measure(line: int, count: int = COUNT, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The turns of all contenders at a line, as JSON values."""
    rng = np.random.default_rng(0)
    state = {f"block.{n:04}": rng.random(matrix(SIZE), np.float32) for n in range(count)}
    with counted_apart(DELAY, line * (1 << 20) or math.inf) as port:
        os.environ |= environment_of(port)
        os.environ |= readers.environment()
        _upload(port, as_safetensors(dict(state)))
        saves = {XCKPT: partial(_save, state), RAW: partial(_save_raw, state)}
        loads = _loads(state)
        turns = {(name, SAVE): Turns(line, name, SAVE) for name in saves}
        turns |= {(name, call): Turns(line, name, call) for call in loads for name in loads[call]}
        # A first time outside the rounds: connections are opened, and modules are loaded.
        for save in saves.values():
            save("0")
        for call, acts in loads.items():
            for name, load in acts.items():
                _check(f"{name}, {call}", load(), state)
        for number in range(1, rounds + 1):
            for name, save in saves.items():
                turns[name, SAVE].take(partial(save, str(number)))
                _bucket(f"{number}/").delete_range(ts.KvStore.KeyRange()).result()
            for call, acts in loads.items():
                for name, load in acts.items():
                    turns[name, call].take(load)
    return [asdict(each) for each in turns.values()]


def _check(what: str, loaded: Any, state: State) -> None:
    for name, array in state.items():
        if not np.array_equal(np.asarray(loaded[name]), array):
            raise RuntimeError(f"{what} gave another {name}")


def _upload(port: int, content: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/bucket/{readers.KEY}", content)
    assert connection.getresponse().status == 200
    connection.close()


def _bucket(path: str) -> ts.KvStore:
    return ts.KvStore.open(_spec(path), context=_context()).result()


def _spec(path: str) -> dict[str, object]:
    return {
        "driver": "s3",
        "bucket": "bucket",
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
        "aws_region": os.environ["AWS_REGION"],
        "aws_credentials": {"type": "environment"},
        "path": path,
    }


@cache
def _context() -> ts.Context:
    requests = {"s3_request_concurrency": {"limit": REQUESTS}}
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}} | requests)


def _array(number: str, name: str, **how: Any) -> ts.Future[ts.TensorStore]:
    spec = {"driver": "zarr3", "kvstore": _spec(f"{number}/raw/{name}/")}
    return ts.open(spec, context=_context(), **how)


def _save(state: State, number: str) -> None:
    xckpt.save(f"s3://bucket/{number}/run", state)


def _save_raw(state: State, number: str) -> None:
    arrays = {
        name: _array(number, name, create=True, dtype=ts.float32, shape=array.shape)
        for name, array in state.items()
    }
    for write in [arrays[name].result().write(array) for name, array in state.items()]:
        write.result()


def _loads(state: State) -> dict[str, dict[str, Callable[[], object]]]:
    url, target = "s3://bucket/0/run", {name: np.ones_like(each) for name, each in state.items()}

    def into() -> State:
        xckpt.load_into(url, target)
        return target

    def raw() -> State:
        arrays = {name: _array("0", name, open=True) for name in state}
        reads = [
            ts.array(array, copy=False, write=True).write(arrays[name].result())
            for name, array in target.items()
        ]
        for read in reads:
            read.result()
        return target

    return {
        INTO: {XCKPT: into, RAW: raw},
        NEW: {XCKPT: partial(xckpt.load, url), **readers.installed()},
    }
