"""Hosts that load the same from a bucket whose network is full: each alone, and once in the job.

Each host is a thread with a name of its own (`xckpt.LoadOptions`); what they send each other goes
through sockets of this machine. The bucket counts the bytes that it answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.counted_bucket import counted_apart, environment_of, seen_at

RATE = float(100 << 20)
"""Bytes that the bucket sends a second."""
DELAY = 0.005
"""Seconds before each answer."""
ROUNDS = 3
"""Each way in turn; of the seconds the median counts."""
WAYS: tuple[Literal["host", "job"], ...] = ("host", "job")
HOSTS = (1, 2, 3, 4, 8, 16)
LEAVES, ELEMENTS = 8, 1 << 20
"""float32: 32 MiB."""

URL = "s3://bucket/replicas"


@dataclass(frozen=True)
class Load:
    """What a load of so many hosts took."""

    hosts: int
    alone_seconds: float
    """Where each host reads everything."""
    alone_times: float
    """Bytes that the bucket has sent, as a multiple of the state's."""
    once_seconds: float
    once_times: float


def loads_of(hosts: Sequence[int], rate: float = RATE) -> Iterator[Load]:
    """The loads of each number of hosts."""
    rng = np.random.default_rng(0)
    state = {f"w{n}": rng.random(ELEMENTS, np.float32) for n in range(LEAVES)}
    with counted_apart(DELAY, rate) as port:
        os.environ |= environment_of(port)
        xckpt.save(URL, state, options=xckpt.SaveOptions(chunk_bytes=1 << 20))
        for count in hosts:
            turns = [[_load(port, count, way) for way in WAYS] for _ in range(ROUNDS)]
            alone, once = (sorted(way)[ROUNDS // 2] for way in zip(*turns, strict=True))
            yield Load(count, *alone, *once)


def _load(port: int, hosts: int, share: Literal["host", "job"]) -> tuple[float, float]:
    """Seconds of the slowest host, and how many times the state's bytes were read."""
    targets = [
        {f"w{n}": np.zeros(ELEMENTS, np.float32) for n in range(LEAVES)} for _ in range(hosts)
    ]

    def run(group: ThreadGroup) -> float:
        options = xckpt.LoadOptions(share_reads=share, host=f"host {group.rank}")
        began = time.perf_counter()
        xckpt.load_into(URL, targets[group.rank], group=group, options=options)
        return time.perf_counter() - began

    seen_at(port)
    seconds = max(results(hosts, run))
    assert all(each["w0"][-1] == targets[0]["w0"][-1] > 0 for each in targets)
    chunks = [request for request in seen_at(port) if request.kind == "GET chunk"]
    return seconds, sum(request.answered for request in chunks) / (4 * LEAVES * ELEMENTS)
