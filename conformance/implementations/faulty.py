"""Implementations that are wrong on purpose: a suite that passes one of them is not a judge."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.implementations import faulty_arrays, faulty_checkpoints
from conformance.implementations.faulty_arrays import Faulty

__all__ = ["FAULTY", "Faulty"]

FAULTY: Sequence[Faulty] = tuple(
    kind()
    for module in (faulty_arrays, faulty_checkpoints)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Faulty) and kind.__module__ == module.__name__
    if kind is not Faulty
)
"""One of each; `Faulty.caught_by` names the law that catches it."""
