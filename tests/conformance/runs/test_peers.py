"""The table of managers is what was printed, of today's releases; failures have reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.outcome import Outcome
from conformance.peers import PAGE, current
from conformance.runs import peers
from conformance.runs.manager import find
from conformance.runs.peers import MANAGERS, TRAINERS, Table, known
from conformance.runs.promises import LAWS

CONSTRAINTS = Path(__file__).parents[2] / "integrations" / "constraints.txt"


def rows(table: Table) -> list[list[str]]:
    lines = table.printed.read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


ROWS = rows(MANAGERS)


@pytest.mark.parametrize("table", [MANAGERS, TRAINERS])
def test_the_page_shows_what_was_printed(table: Table) -> None:
    assert current(PAGE.read_text(), table.begin, table.end) == table.printed.read_text()


def test_the_table_has_every_promise_and_every_manager_of_today() -> None:
    assert ROWS[0] == ["promise", *(find(module).name for module in MANAGERS.modules.values())]
    assert [row[0] for row in ROWS[1:]] == [*LAWS]


def test_the_trainers_are_those_of_their_environment() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    names = [f"torchtitan {pinned['torchtitan']}", f"Lightning {pinned['lightning']}"]
    found = rows(TRAINERS)
    assert found[0] == ["promise", names[0], f"{names[0]}, in the background", names[1]]
    assert [row[0] for row in found[1:]] == [*LAWS]


@pytest.mark.parametrize("table", [MANAGERS, TRAINERS])
def test_what_is_broken_is_broken_for_a_reason(table: Table) -> None:
    _, *names = rows(table)[0]
    for promise, *cells in rows(table)[1:]:
        broken = {name for name, each in zip(names, cells, strict=True) if "**" in each}
        assert broken == {name for name in names if promise in known().get(name, {})}


def test_this_project_breaks_none() -> None:
    own = ROWS[0][1]
    assert {*known()} <= {*ROWS[0][2:], *rows(TRAINERS)[0][1:]}
    for promise, cell, *_ in ROWS[1:]:
        assert re.fullmatch(r"[1-9]\d* / 0 / 0", cell), f"{own}, {promise}: {cell}"


def test_a_failure_without_a_reason_is_listed() -> None:
    outcomes = [Outcome("power-cuts", failed=1), Outcome("ranks-agree", failed=1, error="why")]
    judged = {"orbax": (ROWS[0][2], outcomes)}
    assert list(peers.unexplained(judged)) == [f"{ROWS[0][2]}, ranks-agree: why"]
    assert f"- {ROWS[0][2]}, ranks-agree: why" in peers.printed(judged, 1, 0)
