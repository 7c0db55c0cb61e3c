"""``python -m conformance.runs.in_short``: how managers were judged, for the README in short.

It is made of what was printed (``conformance/runs/managers.md`` and ``trainers.md``) and nothing
else. `conformance.runs.peers` writes it with ``--write``, as this command does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from conformance.peers import updated
from conformance.runs.promises import LAWS

__all__ = ["BEGIN", "END", "README", "main", "rows", "summary"]

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- managers in short: make conformance, make judge-trainers -->\n"
END = "<!-- end of managers in short -->\n"
WORDS = {
    "successor-first": "nothing is deleted before its successor is committed",
    "power-cuts": "the same, when the machine loses power",
    "latest-committed": "the latest step is a committed one, of now",
    "failure-raised": "a save that failed is raised, and is not the last one",
    "falls-back": "a damaged newest step gives way to the newest good one",
    "last-good-stays": "the last good step is never deleted",
    "ranks-agree": "all ranks decide alike",
    "reader-finishes": "a reader that has begun ends with the step, or with an error",
}
"""Law -> the promise, in the words of a user."""
FOUND = re.compile(r"(\d+) / \d+ / \**(\d+)\**")


def rows(printed: str) -> dict[str, list[str]]:
    """First cell -> the others, of each row of a table.

    Example:
        >>> rows("| promise | one 1.0 |\\n|---|---|\\n| power-cuts | 3 / 0 / 0 |\\n")
        {'promise': ['one 1.0'], 'power-cuts': ['3 / 0 / 0']}
    """
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:2] == "| "]
    return {first: cells for first, *cells in lines}


def summary(*printed: str) -> str:
    """One table of the managers of several, Markdown.

    Args:
        printed: what `conformance.runs.peers` has printed of each.

    Example:
        >>> text = "| promise | one 1.0 |\\n| power-cuts | 3 / 0 / **1** |\\n"
        >>> print(summary(text), end="")
        | | one 1.0 |
        |---|---|
        | the same, when the machine loses power | **no**, 1 of 4 |
    """
    tables = [rows(each) for each in printed]
    names = [name for table in tables for name in table["promise"]]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for law in LAWS:
        cells = [_cell(each) for table in tables for each in table.get(law, ())]
        if cells:
            lines.append(f"| {WORDS[law]} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(found: str) -> str:
    counts = FOUND.fullmatch(found)
    if counts is None:
        return "not judged"
    kept, broken = map(int, counts.groups())
    return f"**no**, {broken} of {kept + broken}" if broken else "yes"


def main(printed: Sequence[Path] = ()) -> None:
    """Bring the README up to date.

    Args:
        printed: the files; by default those beside this module.
    """
    here = Path(__file__).parent
    files = printed or (here / "managers.md", here / "trainers.md")
    text = summary(*(file.read_text(encoding="utf-8") for file in files))
    readme = README.read_text(encoding="utf-8")
    README.write_text(updated(readme, text, BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
