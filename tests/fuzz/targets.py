"""What is fuzzed, and the limits within which each input must be dealt with.

A target takes bytes and says in a word what came of them. Any exception is a finding: a target
lets only xckpt's own errors pass, and only where they are an answer. `judged` adds:

1. *time*: seconds of work that an input may take;
2. *memory*: bytes that an input may take, and address space, so that an absurd allocation fails.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.twins.confined import ADDRESS_SPACE, MEMORY

__all__ = ["SHARES", "TARGETS", "Judge", "Target", "limit_address_space", "load"]

Target = Callable[[bytes], str]

TARGETS = {
    "manifest": "tests.fuzz.manifests:manifest",
    "readers": "tests.fuzz.readers:readers",
    "names": "tests.fuzz.manifests:names",
    "checkpoint": "tests.fuzz.checkpoints:checkpoint",
    "metadata": "tests.fuzz.pickles:metadata",
    "archive": "tests.fuzz.pickles:archive",
    "safetensors": "tests.fuzz.headers:safetensors",
    "shown": "tests.fuzz.shown:shown",
}
"""Name -> module and function."""

SHARES = {
    "manifest": 7,
    "readers": 2,
    "names": 1,
    "checkpoint": 4,
    "metadata": 2,
    "archive": 2,
    "safetensors": 1,
    "shown": 1,
}
"""Name -> how many of twenty inputs it gets: whole loads are slow."""

SECONDS = 5.0
"""Seconds of processor time that an input may take."""
NOTICED = 32 << 20
"""Bytes: after an input that took as many, the kernel counts anew."""


def load(name: str) -> Target:
    """A target, by name."""
    module, _, function = TARGETS[name].partition(":")
    return getattr(importlib.import_module(module), function)


@dataclass(slots=True)
class Judge:
    """Runs a target within limits.

    Raises:
        AssertionError: the target took too long, or too much memory.
    """

    target: Target
    resting: int = 0
    """The most bytes of memory that were taken before."""

    def __call__(self, data: bytes) -> str:
        # The process may have taken more, long ago.
        self.resting = self.resting or _count_memory_anew()
        begun = time.process_time()
        outcome = self.target(data)
        seconds = time.process_time() - begun
        assert seconds < SECONDS, f"took {seconds:.1f} s"
        taken = _most_memory() - self.resting
        if taken > NOTICED:
            self.resting = _count_memory_anew()
        assert taken < MEMORY, f"took {taken >> 20} MiB"
        return outcome


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _count_memory_anew() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _most_memory()


def limit_address_space() -> None:
    """Let an allocation beyond what an input may take fail, in this process for good."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_SPACE
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
