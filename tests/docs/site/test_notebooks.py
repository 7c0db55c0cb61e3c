"""The notebooks run, and show what is written in them; the site has them as pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.site import notebooks
from tests.docs.site.test_search import SITE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", notebooks.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_written_in_it(notebook: Path) -> None:
    written = notebooks.shown(json.loads(notebook.read_text(encoding="utf-8")))
    assert notebooks.shown(notebooks.executed(notebook)) == written, (
        "what it shows has changed: python -m docs.site.notebooks writes it anew"
    )


def test_the_pictures_of_a_notebook_are_in_its_page() -> None:
    page = (SITE / "notebooks" / "resharding.html").read_text(encoding="utf-8")
    assert page.count('class="shard"') >= 8 + 2 + 8


def test_both_notebooks_are_there() -> None:
    assert [path.stem for path in notebooks.notebooks()] == ["convert", "resharding"]
