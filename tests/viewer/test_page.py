"""The page as a file: what a checkpoint says stays data, and nothing is asked of the network."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.core.text.printable import printable
from xckpt.viewer.model import Page
from xckpt.viewer.page import SCRIPTS, escaped_json, page_html, policy

HOSTILE = "</script><script>alert(1)</script><!--\u2028\u202e{{page}}\x1b]0;a\x07"


class Elements(HTMLParser):
    """The elements of a page, and the text in each script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("type") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


@pytest.fixture(scope="module")
def elements() -> Elements:
    state = {HOSTILE: HOSTILE, f"{HOSTILE}w": np.zeros(3)}
    # A worker may make it twice, with tests of other modules between.
    xckpt.save("memory://test-page", state, metadata={HOSTILE: HOSTILE}, overwrite=True)
    return Elements(xckpt.view("memory://test-page").html())


def test_names_and_values_stay_in_the_json(elements: Elements) -> None:
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    assert [each["type"] for each in scripts] == ["application/json", "module"]
    page = msgspec.json.decode(elements.texts["application/json"], type=Page)
    assert page.checkpoint is not None
    assert printable(HOSTILE).replace("/", "%2F").split("%2F")[0] in page.checkpoint.names[0]
    assert all(text.isprintable() for text in page.checkpoint.names)
    assert all(text.isprintable() for text in page.checkpoint.values.values())


def test_the_title_is_a_text() -> None:
    elements = Elements(page_html(Page(HOSTILE, HOSTILE)))
    assert elements.texts["title"].startswith("</script><script>alert(1)")
    assert [tag for tag, _ in elements.tags].count("script") == 2


def test_the_policy_knows_the_scripts_and_allows_no_others(elements: Elements) -> None:
    [declared] = [
        str(attributes["content"])
        for tag, attributes in elements.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert declared == policy(served=False)
    for key in ("module", "style"):
        digest = hashlib.sha256(elements.texts[key].encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in declared
    assert "default-src 'none'" in declared
    assert "connect-src 'none'" in declared
    assert "unsafe" not in declared


def test_nothing_is_loaded_from_elsewhere(elements: Elements) -> None:
    for _, attributes in elements.tags:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    urls = re.findall(r"https?://[^\"'\s]+", elements.texts["module"] + elements.texts["style"])
    assert urls == ["http://www.w3.org/2000/svg"]  # A namespace, which is never asked for.


def test_scripts_make_no_markup_of_texts() -> None:
    folder = Path(xckpt.__file__).parent / "viewer" / "files"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    for name in SCRIPTS:
        text = (folder / name).read_text(encoding="utf-8")
        forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function"
        assert not re.findall(forbidden, text), name
        assert len(text.splitlines()) <= 350, name


@given(st.text())
def test_escaped_json_means_the_same(text: str) -> None:
    escaped = escaped_json(msgspec.json.encode([text.encode("utf-8", "replace").decode()]).decode())
    assert not set(escaped) & set("<>&\u2028\u2029")
    assert msgspec.json.decode(escaped) == [text.encode("utf-8", "replace").decode()]
