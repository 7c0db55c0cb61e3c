"""What the page draws of 200 random leaves, in random planes, is what the plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.viewer.browser import Browser
from tests.viewer.grids import Drawn, random_grids
from xckpt.core.manifest.entries import TensorEntry
from xckpt.viewer.leaves import checkpoint_page
from xckpt.viewer.model import Page
from xckpt.viewer.page import page_html

pytestmark = pytest.mark.browser
COUNT = 200

# Types a name, clicks on the leaf, chooses the plane as one does, and reads the rectangles.
DRAW = """
const [name, down, across, at] = arguments;
const fire = (element, value, kind) => {
  element.value = value;
  element.dispatchEvent(new Event(kind, { bubbles: true }));
};
fire(document.querySelector("#search"), name, "input");
document.querySelector("[data-leaf]").click();
if (down !== null) {
  fire(document.querySelector("#down"), down, "change");
  fire(document.querySelector("#across"), across, "change");
}
for (const slider of document.querySelectorAll("input[type=range]"))
  fire(slider, at[slider.dataset.dimension], "input");
const read = (selector) => [...document.querySelectorAll(`#figure ${selector}`)].map((each) => [
  ["x", "y", "width", "height"].map((n) => +each.getAttribute(n)), each.dataset.devices ?? "",
]);
return JSON.stringify([".chunk", ".unit", ".array", ".shard"].map(read));
"""


def drawn_in(browser: Browser, leaf: Drawn) -> Drawn:
    """What the page has drawn of a leaf; no rectangle lies there twice."""
    made = json.loads(browser.run(DRAW, leaf.name, leaf.down, leaf.across, leaf.at))
    rectangles = [[tuple(place) for place, _ in layer] for layer in made]
    assert [len(layer) for layer in rectangles] == [len(set(layer)) for layer in rectangles]
    chunks, units, arrays, _ = map(set, rectangles)
    shards = {tuple(place): devices for place, devices in made[3]} if leaf.shards else None
    named = (leaf.name, leaf.down, leaf.across, leaf.at)
    return Drawn(*named, chunks, units, arrays, shards)


def test_rectangles_are_the_boxes_of_the_plan(browser: Browser, tmp_path: Path) -> None:
    manifest, expected = random_grids(seed=0, count=COUNT)
    page = Page("grids", "grids", "xckpt", checkpoint=checkpoint_page(manifest))
    (tmp_path / "grids.html").write_text(page_html(page), encoding="utf-8")
    browser.open(tmp_path / "grids.html")
    for leaf in expected:
        assert drawn_in(browser, leaf) == leaf
    assert {len(leaf.at) for leaf in expected} == {0, 1, 2, 3, 4, 5}
    pieces = [leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry) and leaf.pieces]
    assert len(pieces) >= 15
    assert sum(bool(leaf.units) for leaf in expected) >= 10
    replicated = [leaf for leaf in expected if leaf.shards and " " in "".join(leaf.shards.values())]
    assert len(replicated) > 20
    browser.picture("grids")


def test_a_wrong_picture_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    manifest, expected = random_grids(seed=1, count=12)
    page = Page("grids", "grids", "xckpt", checkpoint=checkpoint_page(manifest))
    html = page_html(page)
    bent = html.replace('"intervals":[[[0,', '"intervals":[[[1,')
    assert bent != html
    (tmp_path / "bent.html").write_text(bent, encoding="utf-8")
    browser.open(tmp_path / "bent.html")
    assert any(drawn_in(browser, leaf) != leaf for leaf in expected)
