"""The built site: pages, names, and what assistants read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site import reference, stage
from docs.site.members import members
from tests.docs.site.test_search import SITE


def test_every_public_name_has_an_anchor() -> None:
    for module in reference.MODULES:
        page = (SITE / "reference" / "api" / f"{module}.html").read_text(encoding="utf-8")
        for name in reference.public_names(module):
            home = reference.home(name, module)
            assert f'id="{module}.{name}"' in page or home != module, f"{module}.{name}"


def test_every_member_has_an_anchor() -> None:
    for thing, name in reference.classes().items():
        module = next(each for each in reference.MODULES if name in reference.public_names(each))
        home = reference.home(name, module)
        page = (SITE / "reference" / "api" / f"{home}.html").read_text(encoding="utf-8")
        for each in members(thing, reference.classes()):
            assert f'id="{home}.{name}.{each.name}"' in page, f"{home}.{name}.{each.name}"


def test_every_page_is_there_as_markdown_and_listed_for_assistants() -> None:
    listed = set(re.findall(r"\]\((.+?\.md)\):", (SITE / "llms.txt").read_text(encoding="utf-8")))
    for page in stage.pages():
        name = stage.place(stage.PurePosixPath(page)).as_posix()
        assert name in listed
        assert (SITE / name).is_file() and (SITE / name).with_suffix(".html").is_file()
    api = (SITE / "reference/api/xckpt.md").read_text(encoding="utf-8")
    assert "## xckpt.save\n\n```python\nsave(path" in api


def test_no_page_asks_another_server_for_anything() -> None:
    for page in SITE.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', text
        )
        assert loaded == [], page.relative_to(SITE)


@pytest.mark.parametrize("page, arrows", [("architecture", 31), ("why/commit", 5)])
def test_a_diagram_is_a_picture(page: str, arrows: int) -> None:
    """And text where assistants read it."""
    html = (SITE / f"{page}.html").read_text(encoding="utf-8")
    assert html.count("data-arrow=") >= arrows
    assert "flowchart" not in html
    assert "```mermaid\nflowchart TD" in (SITE / f"{page}.md").read_text(encoding="utf-8")


def test_links_that_lead_out_are_listed() -> None:
    links = (Path(SITE).parent / "links.txt").read_text(encoding="utf-8").split()
    assert "https://semver.org" in links
