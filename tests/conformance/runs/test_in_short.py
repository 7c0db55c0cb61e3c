"""The README's table of managers is what was printed of them, and leaves none out."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.peers import current
from conformance.runs import in_short
from conformance.runs.peers import MANAGERS, TRAINERS
from conformance.runs.promises import LAWS

PRINTED = [table.printed.read_text() for table in (MANAGERS, TRAINERS)]


def test_the_readme_shows_what_was_printed() -> None:
    shown = current(in_short.README.read_text(), in_short.BEGIN, in_short.END)
    assert shown == in_short.summary(*PRINTED)


def test_every_promise_and_every_manager_is_shown() -> None:
    assert [*in_short.WORDS] == [*LAWS]
    head, _, *lines = in_short.summary(*PRINTED).splitlines()
    assert len(lines) == len(LAWS)
    assert all(line.count("|") == head.count("|") for line in lines)


def test_it_is_written_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, printed = tmp_path / "README.md", tmp_path / "judged.md"
    readme.write_text(f"before\n{in_short.BEGIN}old\n{in_short.END}after\n")
    printed.write_text("| promise | one 1.0 |\n|---|---|\n| ranks-agree | not supported |\n")
    monkeypatch.setattr(in_short, "README", readme)
    in_short.main([printed])
    table = "| | one 1.0 |\n|---|---|\n| all ranks decide alike | not judged |\n"
    assert readme.read_text() == f"before\n{in_short.BEGIN}{table}{in_short.END}after\n"
