"""Diagrams of the pages are pictures in the site: every box and arrow of their text."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.site import diagram
from tests.house.test_architecture import drawn

ROOT = Path(__file__).parents[2]
DIAGRAMS = {
    page.name: found
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for found in re.findall(r"^```mermaid\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
}
SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> dict[str, tuple[float, float, float]]:
    """Box -> left, top, width."""
    rectangles = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return {
        each.attrib["data-box"]: tuple(float(each.attrib[name]) for name in ("x", "y", "width"))
        for each in rectangles
    }  # pyright: ignore[reportReturnType]  # three of them


def ways(picture: str) -> dict[str, list[tuple[float, float]]]:
    """Arrow -> its first and its last point."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in ElementTree.fromstring(picture).iter(f"{SVG}path"):
        if "data-arrow" in path.attrib:
            numbers = [float(each) for each in re.findall(r"[\d.]+", path.attrib["d"])]
            found[path.attrib["data-arrow"]] = [
                (numbers[0], numbers[1]),
                (numbers[-2], numbers[-1]),
            ]
    return found


def check(text: str) -> None:
    """The picture has what the text has; arrows go from box to box, and boxes stand apart."""
    arrows = diagram.arrows(text)
    picture = diagram.svg(text)
    places = boxes(picture)
    assert set(places) == {box for arrow in arrows for box in arrow}
    assert set(ways(picture)) == {f"{start} -> {end}" for start, end in arrows}
    for start, end in arrows:
        (x, y), (below, bottom) = ways(picture)[f"{start} -> {end}"]
        left, top, width = places[start]
        assert left <= x <= left + width and y == top + diagram.HEIGHT
        left, top, width = places[end]
        assert left <= below <= left + width and bottom == top
        assert y < bottom
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    for left, top, wide in places.values():
        assert left >= 0 and left + wide <= width
        assert top >= 0 and top + diagram.HEIGHT <= height
    for one, other in combinations(places.values(), 2):
        apart = one[0] + one[2] <= other[0] or other[0] + other[2] <= one[0]
        assert apart or abs(one[1] - other[1]) >= diagram.HEIGHT


@pytest.mark.parametrize("page", DIAGRAMS)
def test_the_diagram_of_a_page(page: str) -> None:
    check(DIAGRAMS[page])


def test_the_architecture_is_drawn() -> None:
    """With the arrows that `tests/house/test_architecture.py` finds in the code."""
    picture = diagram.svg(DIAGRAMS["architecture.md"])
    assert set(ways(picture)) == {f"{start} -> {end}" for start, end in drawn()}
    assert len(ways(picture)) > 25


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_any_diagram(pairs: set[tuple[int, int]]) -> None:
    down = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    check("\n".join(["flowchart TD", *(f"box{a} --> box{b}" for a, b in down or [(0, 1)])]))


def test_an_arrow_passes_between_the_boxes() -> None:
    picture = diagram.svg("flowchart TD\na --> b\nb --> c\na --> c")
    [path] = re.findall(r'data-arrow="a -&gt; c" d="(.*?)"', picture)
    left, _, width = boxes(picture)["b"]
    corners = [float(x) for x in re.findall(r"([\d.]+) [\d.]+V", path)]
    assert corners and all(not left <= x <= left + width for x in corners)


@pytest.mark.parametrize(
    "text, words",
    [
        ("flowchart LR\na --> b", "begins with"),
        ("flowchart TD\na --- b", "is not an arrow"),
        ("flowchart TD\nsubgraph a", "is not an arrow"),
        ("flowchart TD\na --> b\nb --> a", "circle: a -> b -> a"),
    ],
)
def test_what_cannot_be_drawn(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        diagram.svg(text)


def test_words_are_no_markup() -> None:
    picture = diagram.svg('flowchart TD\na["<b> & co"] --> b["x > y"]')
    assert set(boxes(picture)) == {"<b> & co", "x > y"}


def test_levels_follow_each_other() -> None:
    tops = [top for _, top, _ in boxes(diagram.svg(DIAGRAMS["commit.md"])).values()]
    assert {after - before for before, after in pairwise(sorted(tops))} == {diagram.NEAR}
