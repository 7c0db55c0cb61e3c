"""``python -m conformance --impl MODULE``: judge an implementation.

It runs the parts of the suite one after the other, says how each law went, prints the table and the
smallest case of every law that failed. The exit code is 0 if none failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import cast

from conformance.implementation import Implementation, find
from conformance.outcome import Outcome, Part, table

PARTS = (
    "conformance.laws.properties",
    "conformance.laws.refusals",
    "conformance.laws.damage",
    "conformance.crash.machine",
    "conformance.crash.crash",
    "conformance.laws.golden",
)
"""Modules that are a `Part`."""


def judged(
    implementation: Implementation, parts: Sequence[str], *, examples: int, seed: int, only: str
) -> Iterator[Outcome]:
    """What comes of every law of every part."""
    for name in parts:
        if importlib.util.find_spec(name) is None:
            continue
        part = cast(Part, importlib.import_module(name))
        yield from part.run(implementation, examples=examples, seed=seed, only=only)


def report(outcome: Outcome) -> str:
    """What there is to say of a law beyond its row."""
    lines: list[str] = []
    if outcome.failed:
        lines += [f"{outcome.law} FAILED: {outcome.error}", "the smallest case:", outcome.smallest]
    lines += [f"{outcome.law} refused {n}: {why}" for why, n in outcome.refusals.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--impl", required=True, metavar="MODULE", help="has an IMPLEMENTATION")
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="cases a law")
    parser.add_argument("--seed", type=int, default=None, metavar="S")
    parser.add_argument("--property", default="", metavar="NAME", help="run this law alone")
    parser.add_argument("--part", action="append", metavar="MODULE", help="run these parts alone")
    chosen = parser.parse_args(arguments)
    implementation = find(chosen.impl)
    seed = secrets.randbelow(1 << 32) if chosen.seed is None else chosen.seed
    print(f"{implementation.name}; repeat with --seed {seed}")
    for limit in implementation.limits:
        print(f"  refuses: {limit}")
    outcomes: list[Outcome] = []
    start = time.perf_counter()
    for outcome in judged(
        implementation,
        chosen.part or PARTS,
        examples=chosen.examples,
        seed=seed,
        only=chosen.property,
    ):
        seconds, start = time.perf_counter() - start, time.perf_counter()
        print(f"{outcome.law}: {outcome.verdict} ({seconds:.1f} s)", flush=True)
        outcomes.append(outcome)
    if not outcomes:
        parser.error(f"no part has a property {chosen.property!r}")
    print("", *filter(None, map(report, outcomes)), table(outcomes), sep="\n")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
