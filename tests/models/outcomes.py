"""What one conversion was like."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 2e-6
"""How far two outputs of equal weights may be apart, in units of the largest value, at least 1.

The oracle's own conversions reach 1.2e-6 in these units: torch and XLA sum in other orders."""


@dataclass(frozen=True)
class Outcome:
    """A conversion of one model in one direction."""

    case: str
    direction: str
    difference: float
    """Between the two frameworks' outputs, absolute."""
    scale: float
    """The largest output."""
    seconds: float
    """From the call that loads to its return."""
    peak: int
    """Bytes of host memory above what there was before the call, the result included."""

    @property
    def good(self) -> bool:
        """Whether the outputs agree."""
        return self.difference <= ROUNDING * max(1.0, self.scale)
