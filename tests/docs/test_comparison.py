"""The comparison says which law of the conformance suite runs a row, and the tables bear it out."""

from __future__ import annotations

import re

from tests.docs.test_pages import ROOT

PAGE = (ROOT / "docs" / "why" / "comparison.md").read_text(encoding="utf-8")
FEATURES, _, LAWS = PAGE.partition("## What a conformance suite finds")
ANSWERS, _, RUN_AS = FEATURES.partition("[How fast it is]")
FOUND = re.compile(r"^(?:(\d+) / (\d+) / \**(\d+)\**|not supported)$")


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of each row of each table."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): [each.strip() for each in rest] for first, *rest in cells}


def failed(law: str) -> list[int | None]:
    """Failures of each library; None where it does not do such a thing at all."""
    found = [FOUND.match(cell) for cell in rows(LAWS)[law]]
    assert all(found)
    return [int(each[3]) if each and each[3] else None for each in found]


def test_every_law_that_is_named_is_in_the_table() -> None:
    named = [law for run in rows(RUN_AS).values() for law in re.findall(r"`([\w-]+)`", run[-1])]
    assert {"reshard", "flipped-bit", "gaps", "crash-overwrite"} <= set(named)
    assert set(named) <= set(rows(LAWS))


def test_a_yes_is_a_law_without_failures() -> None:
    answers = rows(ANSWERS)
    crash = [answer == "yes" for answer in answers["crash-safe overwrite"]]
    assert crash == [count == 0 for count in failed("crash-overwrite")]
    cover = [
        answer == "yes" for answer in answers["checks that shards cover each tensor exactly once"]
    ]
    laws = zip(failed("overlaps"), failed("gaps"), strict=True)
    assert cover == [pair == (0, 0) for pair in laws]
    digest = answers["a digest of every chunk, verified on load"]
    flipped = zip(digest, failed("flipped-bit"), failed("swapped-files"), strict=True)
    assert all(counts == [0, 0] for answer, *counts in flipped if answer == "yes")
