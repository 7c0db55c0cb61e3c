"""The table that ``make test-models`` ends with: how each conversion went."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from tests.models.outcomes import Outcome


def table(outcomes: Iterable[Outcome]) -> Table:
    """One row a conversion."""
    made = Table("model", "direction", title="Against transformers' own torch and Flax models")
    for title in ("largest difference", "largest output", "seconds", "peak memory, MiB"):
        made.add_column(title, justify="right")
    for one in outcomes:
        made.add_row(
            one.case,
            one.direction,
            f"{one.difference:.1e}" if one.good else f"[red]{one.difference:.1e}[/]",
            f"{one.scale:.2f}",
            f"{one.seconds:.3f}",
            f"{one.peak / 2**20:.0f}",
        )
    return made
