"""What came of one law: how many cases passed, were refused, failed, and the smallest that failed.

Every part of the suite reports in these words, so that one table shows them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conformance.implementation import Implementation

__all__ = ["Outcome", "Part", "table"]


@dataclass(slots=True)
class Outcome:
    """One row of the table."""

    law: str
    """Its name, as ``--property`` takes it."""
    passed: int = 0
    refused: int = 0
    failed: int = 0
    error: str = ""
    """What the smallest failing case raised."""
    smallest: str = ""
    """The smallest failing case, for people."""
    case: dict[str, Any] | None = None
    """The smallest failing case as JSON, where it is one of `conformance.cases`."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Why cases were refused, and how often."""

    @property
    def verdict(self) -> str:
        """``FAILED``, ``passed``, or ``not supported`` where every case was refused."""
        if self.failed:
            return "FAILED"
        return "passed" if self.passed else "not supported"


class Part(Protocol):
    """A module of the suite: it runs its laws and reports each when it is done."""

    def run(
        self, implementation: Implementation, *, examples: int, seed: int, only: str = ""
    ) -> Iterator[Outcome]:
        """Judge an implementation.

        Args:
            implementation: what is judged.
            examples: about how many random cases a law gets.
            seed: of all that is random.
            only: the one law to run, if this part has it; empty for all.
        """
        ...


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in columns.

    Example:
        >>> print(table([Outcome("reshard", 9, 1)]))
        property | passed | refused | failed | verdict
        ---------|--------|---------|--------|--------
        reshard  |      9 |       1 |      0 | passed
    """
    width = max(len("property"), *(len(outcome.law) for outcome in outcomes))
    lines = [
        f"{'property':{width}} | passed | refused | failed | verdict",
        f"{'-' * width}-|--------|---------|--------|--------",
    ]
    lines += [
        f"{o.law:{width}} | {o.passed:6} | {o.refused:7} | {o.failed:6} | {o.verdict}"
        for o in outcomes
    ]
    return "\n".join(lines)
