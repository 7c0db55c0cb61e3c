"""The processes that hold torch's side of every conversion, and the table at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from rich.console import Console

from tests.models.moves import RANKS
from tests.models.outcomes import Outcome
from tests.models.table import table
from tests.support.ranks import Ranks

Note = Callable[[Outcome], None]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks for all conversions; none may leave them broken."""
    with Ranks(RANKS) as ranks:
        yield ranks


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Put an outcome into the table."""
    return lambda outcome: record_property("outcome", asdict(outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table; pytest calls this where it was started on this folder."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.getreports(kind)]
    noted = [
        Outcome(**value)
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == "outcome"
    ]
    if noted:
        Console(width=132).print(table(noted))
