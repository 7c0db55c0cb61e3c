"""Each row of the comparison is run: by a law of the conformance suite, or as `rows.py` asks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.rows import ROWS
from tests.docs.test_pages import ROOT
from tests.support.ranks import Ranks

PAGE = (ROOT / "docs" / "why" / "comparison.md").read_text(encoding="utf-8")
ANSWERS, _, LAWS = PAGE.partition("## What a conformance suite finds")
FOUND = re.compile(r"^(?:(\d+) / (\d+) / \**(\d+)\**|not supported)$")


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of each row of each table."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): [each.strip() for each in rest] for first, *rest in cells}


def run_as() -> dict[str, tuple[list[str], list[str]]]:
    """Row -> the cells of the libraries, and what runs it."""
    _, *named = rows(ANSWERS).items()
    return {row: (cells[:-1], re.findall(r"`([\w-]+)`", cells[-1])) for row, cells in named}


def verdict(laws: list[str], library: int) -> str:
    """What cases of some laws say of a library, in the words of the page."""
    passed = failed = 0
    for law in laws:
        found = FOUND.match(rows(LAWS)[law][library])
        assert found, law
        passed, failed = passed + int(found[1] or 0), failed + int(found[3] or 0)
    if not passed and not failed:
        return "cannot be asked"
    return "no" if failed else "yes"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_every_row_is_run() -> None:
    laws = rows(LAWS)
    for row, (cells, run_by) in run_as().items():
        assert len(cells) == 4 and run_by, row
        assert all(each in laws for each in run_by) or run_by[0] in ROWS, row
    assert {each for _, named in run_as().values() for each in named} >= set(ROWS)


def test_a_row_that_laws_run_says_what_they_found() -> None:
    judged = {row: each for row, each in run_as().items() if each[1][0] not in ROWS}
    assert len(judged) >= 5
    for row, (cells, laws) in judged.items():
        assert [verdict(laws, library) for library in range(4)] == cells, row


def test_the_readme_has_rows_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Beside the others")[2].partition("\n## ")[0]
    _, *shown = rows(table).items()
    answers = run_as()
    assert len(shown) >= 8
    for row, cells in shown:
        assert answers[row][0] == cells, row


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("question", ROWS)
def test_a_row_is_what_the_libraries_do(question: str, two_ranks: Ranks, tmp_path: Path) -> None:
    [cells] = [cells for cells, run_by in run_as().values() if run_by == [question]]
    assert ROWS[question](tmp_path, two_ranks) == cells
