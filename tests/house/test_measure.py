"""The sizes that the package keeps to, and what `tests/house/measure.py` counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.house.measure import ROOT, SourceFile, measure, report, same_names

FILE_LINES, CLASS_LINES, FUNCTION_LINES, FOLDER_FILES = 350, 200, 40, 15

HOOK_LINES = 60
"""Lines of code of a module of `xckpt.integrations`: a screen."""

LARGER: dict[str, int] = {}
"""Files, definitions and folders above their bar, and how large at most."""

SAME_NAMES: set[str] = set()
"""Names of classes that are defined more than once."""

EXAMPLE = '''\
"""A module.

Two lines of it."""

# a comment
TEXT = """one
two"""
SIZE = 3
"""An attribute's docstring."""


class Outer:
    """A class."""

    def method(self):
        """Says nothing."""
        return (
            1  # with a comment

        )

    class Inner:
        pass


async def one_line(): return 2
'''


@pytest.fixture(scope="module")
def package() -> list[SourceFile]:
    return measure(ROOT / "xckpt")


@pytest.fixture(scope="module")
def above(package: list[SourceFile]) -> dict[str, int]:
    """File, definition or folder -> its size, of those above their bar."""
    files = {each.path.as_posix(): each.lines for each in package if each.lines > FILE_LINES}
    definitions = {
        f"{each.where.partition(':')[0]} {each.name}": each.lines
        for file in package
        for each in file.definitions
        if each.lines > (CLASS_LINES if each.is_class else FUNCTION_LINES)
    }
    sizes = Counter(each.path.parent.as_posix() for each in package)
    folders = {folder: count for folder, count in sizes.items() if count > FOLDER_FILES}
    return files | definitions | folders


def test_files_definitions_and_folders_keep_to_their_bars(above: dict[str, int]) -> None:
    assert {name: size for name, size in above.items() if size > LARGER.get(name, 0)} == {}


def test_a_hook_is_a_screen(package: list[SourceFile]) -> None:
    hooks = {
        each.path.as_posix(): each.code for each in package if each.path.parts[1] == "integrations"
    }
    assert hooks and {name: code for name, code in hooks.items() if code > HOOK_LINES} == {}


def test_a_class_name_has_one_meaning(package: list[SourceFile]) -> None:
    names = same_names(package)
    assert {name: where for name, where in names.items() if name not in SAME_NAMES} == {}


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(EXAMPLE)
    (tmp_path / "package" / "b.py").write_text("class Inner: pass\n")
    first, second = measure(tmp_path / "package")
    # TEXT (2), SIZE, Outer, method, its return (3), Inner (2), one_line
    assert (first.lines, first.code) == (26, 11)
    assert (second.lines, second.code) == (1, 1)
    spans = {each.name: (each.lines, each.is_class) for each in first.definitions}
    assert spans == {
        "Outer": (11, True),
        "method": (5, False),
        "Inner": (2, True),
        "one_line": (1, False),
    }
    where = ["package/a.py:22", "package/b.py:1"]
    assert same_names([first, second]) == {"Inner": where}


def test_the_report_adds_up(package: list[SourceFile]) -> None:
    lines = list(report(package))
    [total] = [line for line in lines if line.startswith("xckpt, all of it")]
    folders = [line.split() for line in lines if line.startswith(("xckpt ", "xckpt/"))]
    for column in (-3, -2, -1):
        counts = [int(row[column].replace(",", "")) for row in folders]
        assert sum(counts) == int(total.split()[column].replace(",", ""))
