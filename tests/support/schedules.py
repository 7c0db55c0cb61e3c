"""Schedules that hardly ever happen: threads give way in the middle of chosen code.

Python switches threads some hundred times a second, and so between two lines of one thread hardly
ever. `fuzzed` has every thread give way at opcodes of chosen modules:

1. A seed chooses slow places, a few of the many; a thread that comes to one rests there, now and
   then, long enough for all others to pass. So an order of events that needs one thread to stop
   at one place is tried by one seed in a few dozen.
2. Elsewhere a thread gives way at random.

A seed does not repeat a run opcode by opcode, since the system chooses who goes on; it repeats the
slow places, so that a failing seed fails again within a few runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import xckpt

PACKAGE = f"{Path(xckpt.__file__).parent}{os.sep}"
SHARED = (
    *("numpy.py", "torch/target.py", "jax/target.py", "core/host_buffers.py"),
    *("core/plan/wanted.py", "core/plan/load.py", "core/targets/casting.py"),
    *("core/manifest/stored_arrays.py", "engine/background.py", "engine/stager.py"),
    *("engine/host_copy.py", "engine/save.py", "engine/run", "engine/ranks/alive.py"),
    *("api/run", "convert/units", "convert/mapped", "convert/journal.py", "convert/to_sink.py"),
    *("formats/opened.py", "formats/reader.py", "formats/sink.py", "storage"),
)
"""Modules of xckpt with values that several threads share."""
SLOW = 0.02
"""The part of the opcodes that are slow places."""
REST = 0.002
"""Seconds of a rest at a slow place."""
GIVES_WAY = 0.003
"""How often a thread gives way elsewhere."""
MOST_RESTS = 250
"""Rests of one schedule, so that a call of many steps ends."""
PATIENCE = 60.0
"""Seconds after which a thread counts as hanging."""


class _Schedule:
    """Where and when threads give way."""

    def __init__(self, seed: int, modules: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._chosen = tuple(PACKAGE + module for module in modules)
        self._places: dict[CodeType, frozenset[int] | None] = {}
        self.rests = 0

    def on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        """Have the opcodes of a function be traced, if it is of a chosen module."""
        code = frame.f_code
        if code not in self._places:
            self._places[code] = self._slow_places(code)
        if self._places[code] is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.on_opcode

    def on_opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        """Rest, give way or go on."""
        if event != "opcode":
            return self.on_opcode
        drawn = self._random.random()
        slow = frame.f_lasti in (self._places[frame.f_code] or ())
        if slow and drawn < 0.5 and self.rests < MOST_RESTS:
            self.rests += 1
            time.sleep(REST * (1 + 4 * (drawn < 0.05)))
        elif drawn > 1 - GIVES_WAY:
            time.sleep(0)
        return self.on_opcode

    def _slow_places(self, code: CodeType) -> frozenset[int] | None:
        if not code.co_filename.startswith(self._chosen):
            return None
        offsets = range(0, len(code.co_code), 2)
        return frozenset(at for at in offsets if self._random.random() < SLOW)


@contextlib.contextmanager
def fuzzed(seed: int, *modules: str) -> Iterator[None]:
    """Within: this thread, and those that it starts, give way in some modules of xckpt.

    Args:
        seed: which schedule.
        modules: the beginnings of their paths in the package, such as ``"storage/budget"``; by
            default `SHARED`.
    """
    schedule = _Schedule(seed, modules or SHARED)
    before, interval = sys.gettrace(), sys.getswitchinterval()
    in_threads = threading.gettrace()
    sys.setswitchinterval(1e-6)
    threading.settrace(schedule.on_call)
    sys.settrace(schedule.on_call)
    try:
        yield
    except BaseException as error:
        error.add_note(f"This is of the schedule with the seed {seed}.")
        raise
    finally:
        sys.settrace(before)
        threading.settrace(in_threads)  # type: ignore[arg-type]  # None is what it was
        sys.setswitchinterval(interval)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls in a thread each, all begun at one moment; what they have returned.

    Raises:
        BaseException: what the first of them that failed has raised.
        AssertionError: a thread hangs.
    """
    gate = threading.Barrier(len(calls))
    outcomes: list[tuple[object, BaseException | None]] = [(None, None)] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        gate.wait()
        try:
            outcomes[number] = call(), None
        except BaseException as error:
            outcomes[number] = None, error

    threads = [
        threading.Thread(target=run, args=each, daemon=True, name=f"call-{each[0]}")
        for each in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    hanging = [thread.name for thread in threads if thread.is_alive()]
    assert not hanging, f"{hanging} hang"
    for _, error in outcomes:
        if error is not None:
            raise error
    return [found for found, _ in outcomes]
