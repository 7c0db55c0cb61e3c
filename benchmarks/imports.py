"""Seconds that ``import xckpt`` takes in a fresh process, and the frameworks that it pulls in."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

FRAMEWORKS = ("torch", "jax", "flax", "tensorstore")
SCRIPT = f"""
import json, sys, time
start = time.perf_counter()
import xckpt
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {FRAMEWORKS!r} if name in sys.modules]]))
"""


@dataclass(frozen=True, slots=True)
class Import:
    """What importing the package costs."""

    seconds: float
    """Median of the runs."""
    frameworks: list[str]
    """Frameworks, and TensorStore, that the import brought with it."""


def run(runs: int = 5) -> Import:
    """Import the package in ``runs`` fresh processes; the first, cold run is not counted."""
    found = [_once() for _ in range(runs + 1)][1:]
    return Import(statistics.median(seconds for seconds, _ in found), found[0][1])


def _once() -> tuple[float, list[str]]:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, frameworks = json.loads(done.stdout)
    return seconds, frameworks
