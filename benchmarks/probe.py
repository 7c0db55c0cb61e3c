"""The memory of another process, sampled from outside it.

1. The child prepares, says ``ready``, and waits; the parent notes the child's memory then.
2. The child resets its high-water mark, works, and says ``done``; meanwhile the parent reads
   ``/proc/PID/status`` every millisecond.
3. Anonymous memory (``RssAnon``) is what a process allocates.  Mapped pages of files (``RssFile``,
   and ``RssShmem`` where the files lie in memory) belong to the page cache and can be dropped, but
   they count in the high-water mark (``VmHWM``): both are reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL = 0.001
FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM")


@dataclass(frozen=True, slots=True)
class Peak:
    """How far a process's memory rose over what it held before the work, in bytes."""

    anonymous: int
    """Allocated memory, sampled every millisecond."""
    total: int
    """Everything mapped, file pages included, from the kernel's high-water mark."""
    kept: int
    """Allocated memory that the process still held when the work was done."""
    answer: dict[str, Any]
    """What the child reported."""


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Return a process's resident memory by kind, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    parts = (line.split() for line in lines)
    return {p[0][:-1]: int(p[1]) << 10 for p in parts if p and p[0][:-1] in FIELDS}


def serve(work: Callable[[], dict[str, Any] | None]) -> None:
    """In the child: announce, wait, reset the high-water mark, work, and report."""
    print("ready", flush=True)
    sys.stdin.readline()
    before = memory_of()
    Path("/proc/self/clear_refs").write_text("5")
    answer = work() or {}
    after = memory_of()
    total = after["VmHWM"] - before["VmRSS"]
    kept = after["RssAnon"] - before["RssAnon"]
    print("done", json.dumps({"total": total, "kept": kept, "answer": answer}), flush=True)


def watch(arguments: Sequence[str]) -> Peak:
    """Run ``python -m ARGUMENTS``, whose module calls `serve`, and return its peak.

    Raises:
        RuntimeError: the child ended without an answer; its own error is on the terminal.
    """
    command = [sys.executable, "-m", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        _expect(child.stdout.readline, "ready", arguments)
        before = memory_of(child.pid)["RssAnon"]
        highest = [before]
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(child.pid, highest, stop))
        sampler.start()
        try:
            child.stdin.write("go\n")
            child.stdin.flush()
            report = json.loads(_expect(child.stdout.readline, "done", arguments))
        finally:
            stop.set()
            sampler.join()
    return Peak(highest[0] - before, report["total"], report["kept"], report["answer"])


def _expect(readline: Callable[[], str], word: str, arguments: Sequence[str]) -> str:
    # Libraries print to standard output too: skip what is not ours.
    while line := readline():
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"python -m {' '.join(arguments)} ended before it was {word}")


def _sample(pid: int, highest: list[int], stop: threading.Event) -> None:
    while not stop.is_set():
        highest[0] = max(highest[0], memory_of(pid).get("RssAnon", 0))
        time.sleep(INTERVAL)
