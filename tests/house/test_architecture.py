"""docs/architecture.md is the code: its diagram, its rooms and its files.

1. The table of the page gives each room its modules; the diagram gives each room its arrows.
2. The same arrows are taken from the imports of the code, as `test_imports.py` finds them.
"""

from __future__ import annotations

import re
from graphlib import TopologicalSorter

from tests.house.test_imports import ROOT, imports_of_the_package

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ((?:`[\w.]+` ?)+) \| (.+) \|$", re.MULTILINE)
GROUND = "core"


def rooms() -> dict[str, str]:
    """Module, or package with all below it -> the room that the page gives it."""
    return {
        "xckpt" if module == "__init__" else f"xckpt.{module}": room
        for room, modules, _ in ROW.findall(PAGE)
        for module in re.findall(r"[\w.]+", modules)
    }


def room_of(module: str, known: dict[str, str]) -> str | None:
    """The room of the longest package that holds a module; the bare package holds only itself."""
    if module == "xckpt":
        return known[module]
    parts = module.split(".")
    packages = [".".join(parts[:n]) for n in range(len(parts), 1, -1)]
    return next((known[package] for package in packages if package in known), None)


def drawn() -> set[tuple[str, str]]:
    """The arrows of the diagram."""
    [diagram] = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    arrows = re.findall(r"^ *(\w+) --> (.+)$", diagram, re.MULTILINE)
    return {(start, end) for start, ends in arrows for end in ends.split(" & ")}


def imported() -> set[tuple[str, str]]:
    """The arrows of the code, those to the ground aside."""
    known = rooms()
    pairs = {
        (room_of(module, known), room_of(name, known))
        for module, names in imports_of_the_package().items()
        for name in names
        if name.split(".")[0] == "xckpt"
    }
    return {(str(a), str(b)) for a, b in pairs if a != b and b != GROUND}


def test_every_module_has_a_room() -> None:
    known = rooms()
    assert {"face", "cli", "storage", GROUND} <= set(known.values())
    assert [each for each in imports_of_the_package() if room_of(each, known) is None] == []


def test_the_diagram_shows_the_imports() -> None:
    assert drawn() == imported()


def test_no_arrow_leads_back() -> None:
    order = TopologicalSorter[str]()
    for start, end in drawn():
        order.add(start, end)
    order.prepare()


def test_the_ground_imports_nothing_above_it() -> None:
    assert not {end for start, end in imported() if start == GROUND}


def test_the_files_named_are_there() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w./-]*)`", PAGE)) - {"/"}
    assert len(named) > 50
    places = [(ROOT / name, ROOT / "xckpt" / name) for name in named]
    assert [str(a) for a, b in places if not (a.exists() or b.exists())] == []


def test_every_folder_of_the_core_is_named() -> None:
    folders = sorted(path.name for path in (ROOT / "xckpt" / "core").iterdir() if path.is_dir())
    named = re.search(r"It has (\w+) folders: (.+?)\. Beside", PAGE, re.DOTALL)
    assert named is not None and named[1] == "seven"
    listed = set(re.findall(r"`core/(\w+)`", named[2]))
    assert listed == {name for name in folders if name != "__pycache__"}
