"""Golden checkpoints: files that every reader of the format must take, and whose twins it refuses.

``golden/1/NAME/ckpt`` is a checkpoint of version 1 of the format, and ``expected.json`` beside it
says what is in it, for a reader in any language:

1. ``leaves`` lists each leaf with its ``name``, its ``type`` (an element type, or the Python type
   of a value), its ``shape`` (only arrays have one) and its ``data`` in base64: the elements in C
   order and little-endian; of a value its text (int, bool: in decimals), UTF-8 (str), bytes, or
   IEEE double (float; two for complex).
2. ``tree`` shows the containers: ``{"list": [...]}``, ``{"dict": [[key, ...], ...]}`` and so on,
   with null for a leaf. ``user`` and ``planner`` are what was kept with the checkpoint.

`twins.twins` derives corrupt twins of each, and `confined.run` has a reader load and verify them
all in a separate process. It may refuse a twin, or give exactly what was saved if the damage is
to something that no load depends on; then its verification must find it. `run` counts both as laws
for an implementation that names the module of its readers as ``golden_readers``.

    python -m conformance.laws.golden                 # every twin, with every reader of xckpt
    python -m conformance.laws.golden --write         # save the golden checkpoints again
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from conformance.implementation import Implementation
from conformance.judge import message
from conformance.outcome import Outcome

__all__ = ["GOLDEN", "FormatReader", "Golden", "Read", "goldens", "main", "run", "write"]

GOLDEN = Path(__file__).parents[1] / "golden" / "1"

XCKPT = "conformance.implementations.xckpt_golden"


@dataclass(frozen=True, slots=True)
class Read:
    """A leaf as a reader found it."""

    type: str
    """The name of the element type, or of a value's Python type."""
    shape: tuple[int, ...] | None
    """None for a value."""
    data: bytes
    """As in ``expected.json``."""


class FormatReader(Protocol):
    """Something that reads checkpoints of this format."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What it may raise when it refuses a checkpoint; anything else is a crash."""
        ...

    def load(self, path: Path) -> Mapping[str, Read]:
        """Every leaf of a checkpoint, by name."""
        ...

    def verify(self, path: Path) -> Sequence[str]:
        """A line for everything that is damaged."""
        ...

    def digest(self, data: bytes) -> str:
        """XXH3-128 in hex, with which twins are sealed so that only what is in them is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Golden:
    """A golden checkpoint."""

    name: str
    path: Path
    """The checkpoint."""
    document: Mapping[str, Any]
    """``expected.json``."""

    @property
    def expected(self) -> dict[str, Read]:
        """What a reader must find."""
        return {
            leaf["name"]: Read(
                leaf["type"],
                tuple(leaf["shape"]) if "shape" in leaf else None,
                base64.b64decode(leaf["data"], validate=True),
            )
            for leaf in self.document["leaves"]
        }


def goldens(folder: Path = GOLDEN) -> list[Golden]:
    """The golden checkpoints in a folder."""
    return [
        Golden(each.name, each / "ckpt", json.loads((each / "expected.json").read_bytes()))
        for each in sorted(folder.iterdir())
        if each.is_dir()
    ]


def write(folder: Path) -> None:
    """Save all golden checkpoints, with what they must give, into a folder."""
    writer = importlib.import_module(XCKPT)
    for name, recipe in writer.checkpoints().items():
        home = folder / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        writer.write(recipe, home / "ckpt")
        text = json.dumps(writer.describe(recipe), ensure_ascii=False, indent=1)
        (home / "expected.json").write_text(text + "\n", "utf-8")


def run(
    implementation: Implementation, *, examples: int, seed: int, only: str = ""
) -> Iterator[Outcome]:
    """Golden checkpoints and about ten twins an example; see `conformance.outcome.Part`."""
    module = getattr(implementation, "golden_readers", "")
    for law in ("golden", "corrupt-twins"):
        if only not in ("", law):
            continue
        outcome = Outcome(law)
        if not module:
            outcome.refused = 1
            outcome.refusals["has a format of its own"] += 1
        elif law == "golden":
            _read_goldens(importlib.import_module(module).READERS, outcome)
        else:
            _judge_twins(module, examples, seed, outcome)
        yield outcome


def _read_goldens(readers: Sequence[FormatReader], outcome: Outcome) -> None:
    for reader in readers:
        for golden in goldens():
            try:
                assert reader.load(golden.path) == golden.expected, "not what was saved"
            except Exception as error:
                outcome.failed += 1
                outcome.error = outcome.error or message(error)
                outcome.smallest = outcome.smallest or f"{golden.name}, {reader.name}"
            else:
                outcome.passed += 1


def _judge_twins(module: str, examples: int, seed: int, outcome: Outcome) -> None:
    from conformance.twins import confined

    readers = importlib.import_module(module).READERS
    every = max(1, confined.count(readers[0]) * len(readers) // (10 * examples))
    for report in confined.run(module, every=every, first=seed % every):
        outcome.passed += report.twins - len(report.failures)
        outcome.failed += len(report.failures)
        if report.failures and not outcome.error:
            outcome.smallest, _, outcome.error = report.failures[0].rpartition(": ")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: judge readers by the twins, or write the golden checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m conformance.laws.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="save the golden checkpoints again")
    parser.add_argument("--impl", default=XCKPT, help="the module with READERS")
    parser.add_argument("--flips", type=int, default=24, help="bytes to flip in each file")
    parser.add_argument("--every", type=int, default=1, help="judge one twin in every N")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        write(GOLDEN)
        return 0
    from conformance.twins import confined

    reports = confined.run(chosen.impl, flips=chosen.flips, every=chosen.every)
    for report in reports:
        print(report)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
