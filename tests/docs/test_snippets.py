"""The modules that `make lint` makes of the pages have all of their Python, line by line."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.support import snippets


def test_every_block_of_a_page_is_checked_on_its_own_lines(tmp_path: Path) -> None:
    snippets.write(tmp_path / "modules")
    written = {path.stem: path.read_text() for path in (tmp_path / "modules").glob("*.py")}
    for path in snippets.pages():
        page = path.read_text(encoding="utf-8")
        name = snippets.module_name(path)
        modules = [
            text for found, text in written.items() if re.fullmatch(rf"{name}(_line_\d+)?", found)
        ]
        lines = dict[int, str]()
        for text in modules:
            lines |= {n: line for n, line in enumerate(text.splitlines()) if line}
        for block in snippets.BLOCK.finditer(page):
            first = page[: block.start(1)].count("\n")
            for number, line in enumerate(block[1].splitlines(), first):
                shown = snippets.SIGNATURES in block[1]
                assert shown or not line or lines[number] == line, f"{path.name}:{number + 1}"


def test_what_a_library_lacks_here_is_untyped_and_nothing_else_is(tmp_path: Path) -> None:
    snippets.write(tmp_path / "modules")
    stubs = {path.relative_to(tmp_path / "modules") for path in tmp_path.rglob("__init__.pyi")}
    assert Path("lightning/pytorch/callbacks/__init__.pyi") in stubs
    assert {stub.parts[0] for stub in stubs} == set(snippets.LACKED)
    assert [each for each in snippets.LACKED if find_spec(each)] == []
