"""The table of managers is what was printed, of today's releases; failures have reasons."""

from __future__ import annotations

import re

from conformance.outcome import Outcome
from conformance.peers import PAGE, current
from conformance.runs import peers
from conformance.runs.manager import find
from conformance.runs.peers import BEGIN, END, MANAGERS, PRINTED, known
from conformance.runs.promises import LAWS

TEXT = PRINTED.read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]


def test_the_page_shows_what_was_printed() -> None:
    assert current(PAGE.read_text(), BEGIN, END) == TEXT


def test_the_table_has_every_promise_and_every_manager_of_today() -> None:
    assert ROWS[0] == ["promise", *(find(module).name for module in MANAGERS.values())]
    assert [row[0] for row in ROWS[1:]] == [*LAWS]


def test_this_project_breaks_none_and_others_for_a_reason() -> None:
    _, own, *others = ROWS[0]
    assert own not in known() and {*known()} <= {*others}
    for promise, cell, *cells in ROWS[1:]:
        assert re.fullmatch(r"[1-9]\d* / 0 / 0", cell), f"{own}, {promise}: {cell}"
        broken = {name for name, each in zip(others, cells, strict=True) if "**" in each}
        assert broken == {name for name in others if promise in known().get(name, {})}


def test_a_failure_without_a_reason_is_listed() -> None:
    outcomes = [Outcome("power-cuts", failed=1), Outcome("ranks-agree", failed=1, error="why")]
    judged = {"orbax": (ROWS[0][2], outcomes)}
    assert list(peers.unexplained(judged)) == [f"{ROWS[0][2]}, ranks-agree: why"]
    assert f"- {ROWS[0][2]}, ranks-agree: why" in peers.printed(judged, 1, 0)
