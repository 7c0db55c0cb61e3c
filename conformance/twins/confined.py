"""Corrupt twins, each loaded and verified in a process that may die, hang or eat memory.

1. `run` starts a child process for each reader. The child makes every twin in a fresh folder,
   has the reader load and verify it, and prints a line before and a line after.
2. The child limits its own address space, and measures the most memory that each twin took.
3. A child that dies or falls silent is a crash of the twin that it was at; another child goes on
   with the next one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.laws.golden import FormatReader, Golden, goldens
from conformance.twins.manifests import sealed_twins
from conformance.twins.twins import Bar, Twin, twins

__all__ = ["Report", "all_twins", "judge", "run"]

ADDRESS_SPACE = 2 << 30
"""Bytes of address space that a twin may take beyond what the process has."""
MEMORY = 256 << 20
"""Bytes of memory that a twin may take."""
SECONDS = 240
"""How long a twin may take; much, for the machine may be busy with other things."""

FLIPS = 24
"""Bytes that are flipped in each file."""

GOOD = ("refused", "found", "padding")


@dataclass(slots=True)
class Report:
    """What came of all twins with one reader."""

    reader: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """A line for each twin that was not dealt with as it must be."""
    most_memory: int = 0
    """Bytes that the worst twin took."""
    seconds: float = 0.0

    @property
    def twins(self) -> int:
        """How many twins were judged."""
        return sum(self.outcomes.values())

    @property
    def passed(self) -> bool:
        """Whether every twin was dealt with as it must be."""
        return not self.failures and self.twins > 0

    def __str__(self) -> str:
        counts = self.outcomes
        lines = [
            f"{self.reader}: {self.twins:,} corrupt twins in {self.seconds:.0f} s: "
            f"{counts['refused']:,} refused, {counts['found']:,} found by verify, "
            f"{counts['padding']:,} harmless (padding); loaded silently {counts['silent']}, "
            f"crashed {counts['crashed']}, wrong errors {counts['wrong error']}, "
            f"missed by verify {counts['missed']}, over the memory limit {counts['memory']}; "
            f"most memory {self.most_memory >> 20} MiB"
        ]
        return "\n".join([*lines, *(f"  {failure}" for failure in self.failures)])


def all_twins(reader: FormatReader, flips: int, only: str = "") -> Iterator[tuple[Golden, Twin]]:
    """Every twin of every golden checkpoint (or of one), in a fixed order."""
    every = goldens()
    for golden in every:
        if only not in ("", golden.name):
            continue
        others = [other.path for other in every if other is not golden]
        for twin in twins(golden.path, others, flips=flips):
            yield golden, twin
        for twin in sealed_twins(golden.path, reader.digest):
            yield golden, twin


def judge(reader: FormatReader, golden: Golden, twin: Twin, path: Path) -> tuple[str, str]:
    """(outcome, detail) of a damaged checkpoint at a path."""
    loaded = False
    try:
        found = reader.load(path)
    except reader.errors as error:
        detail = str(error)
    except BaseException as error:
        return "wrong error", f"load: {type(error).__name__}: {error}"
    else:
        loaded, detail = True, "loaded what was saved"
        if found != golden.expected:
            return "silent", "loaded other data than were saved"
        if twin.bar is Bar.REFUSE:
            return "silent", "loaded what was saved, though it was altered"
    try:
        problems = list(reader.verify(path))
    except reader.errors as error:
        problems = [str(error)]
    except BaseException as error:
        return "wrong error", f"verify: {type(error).__name__}: {error}"
    if twin.bar is Bar.PADDING:
        return ("padding" if loaded else "refused"), detail
    if not problems:
        return "missed", detail
    return ("found" if loaded else "refused"), detail


def count(reader: FormatReader, flips: int = FLIPS) -> int:
    """How many twins there are."""
    return sum(1 for _ in all_twins(reader, flips))


def run(
    module: str, *, flips: int = FLIPS, every: int = 1, first: int = 0, only: str = ""
) -> list[Report]:
    """Judge each reader of a module.

    Args:
        module: its name; it has ``READERS``.
        flips: how many bytes are flipped in each file.
        every: judge one twin in every N.
        first: number of the first; each reader begins with another.
        only: the golden checkpoint whose twins are judged; all by default.
    """
    readers = importlib.import_module(module).READERS
    return [
        _run(module, [number, flips, every, (first + number) % every], only)
        for number in range(len(readers))
    ]


def _run(module: str, numbers: list[int], only: str) -> Report:
    report = Report(importlib.import_module(module).READERS[numbers[0]].name)
    begun = time.monotonic()
    at: int | None = numbers[-1]
    while at is not None:
        at = _follow([module, *map(str, numbers[:-1]), str(at), only], report)
    report.seconds = time.monotonic() - begun
    return report


def _follow(arguments: list[str], report: Report) -> int | None:
    """Read what one child prints; the twin to continue with if it ends before its time."""
    command = [sys.executable, "-m", "conformance.twins.confined", *arguments]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="twins-", dir=memory) as folder:
        with subprocess.Popen([*command, folder], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            at: dict[str, Any] | None = None
            for line in _lines(child):
                said = json.loads(line)
                if "outcome" in said:
                    _note(report, said)
                    at = None
                elif "end" in said:
                    return None
                else:
                    at = said
            child.kill()
        if at is None:
            report.failures.append(f"the process ended with {child.returncode} between twins")
            return None
        died = {"outcome": "crashed", "detail": f"code {child.returncode}", "memory": 0}
        _note(report, at | died)
        return at["at"] + int(arguments[3])


def _lines(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines of a child's output, until it ends or is silent for too long."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as waiting:
        waiting.register(child.stdout, selectors.EVENT_READ)
        rest = b""
        while waiting.select(SECONDS):
            read = os.read(child.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from lines


def _note(report: Report, said: dict[str, Any]) -> None:
    outcome = said["outcome"]
    report.most_memory = max(report.most_memory, said["memory"])
    if outcome in GOOD and said["memory"] > MEMORY:
        outcome, said["detail"] = "memory", f"took {said['memory'] >> 20} MiB"
    report.outcomes[outcome] += 1
    if outcome not in GOOD:
        report.failures.append(f"{said['golden']}: {said['twin']}: {outcome}: {said['detail']}")


def _serve(
    module: str, number: int, flips: int, every: int, first: int, only: str, folder: Path
) -> None:
    """The child: every twin from the first on."""
    reader: FormatReader = importlib.import_module(module).READERS[number]
    for golden in goldens():
        if only not in ("", golden.name):
            continue
        # Now, so that what the reader imports and starts is not counted as a twin's.
        assert reader.load(golden.path) == golden.expected, f"{golden.name} is not read"
        assert not reader.verify(golden.path), f"{golden.name} is damaged"
    taken = _status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (taken, taken))
    for at, (golden, twin) in enumerate(all_twins(reader, flips, only)):
        if at < first or (at - first) % every:
            continue
        _say(at=at, golden=golden.name, twin=twin.name)
        home = folder / "home"
        shutil.copytree(golden.path, home / "ckpt")
        twin.damage(home / "ckpt")
        before = _reset_memory()
        outcome, detail = judge(reader, golden, twin, home / "ckpt")
        _say(
            golden=golden.name,
            twin=twin.name,
            outcome=outcome,
            detail=detail[:300],
            memory=max(0, _status("VmHWM") - before),
        )
        shutil.rmtree(home)
    _say(end=True)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _status(what: str) -> int:
    """A number of bytes that the kernel says about this process."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


def _reset_memory() -> int:
    """Reset the kernel's count of the peak memory; returns what is in use now, in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


if __name__ == "__main__":
    name, *numbers, only, folder = sys.argv[1:]
    number, flips, every, first = map(int, numbers)
    _serve(name, number, flips, every, first, only, Path(folder))
