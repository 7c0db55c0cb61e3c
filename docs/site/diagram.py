"""A diagram of boxes and arrows, from the few lines of mermaid that a page holds, as SVG.

The arrows lead downwards (``flowchart TD``), and ``a["words"] --> b & c`` is all that is
understood; other lines are an error. No program and no other server is asked.

1. A box lies as many levels above the lowest as its longest way down has arrows (`_levels`).
2. An arrow that passes levels gets a place in each of them (`_rows`), so that it passes between
   the boxes.
3. Each level is put into the order of what it is joined with, again and again; the order with the
   fewest crossings is kept (`_ordered`).
4. Every place moves towards those that it is joined with, as far as its neighbours let it
   (`_placed`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import combinations, pairwise
from typing import Final

HEAD: Final = "flowchart TD"
BOX: Final = re.compile(r'(\w+)(?:\["([^"]+)"\])?')
LINE: Final = re.compile(r"# --> #(?: & #)*".replace("#", r'\w+(?:\["[^"]+"\])?'))
HEIGHT, BETWEEN = 34, 26
"""Of a box, and between two places of a level, in pixels."""
NEAR, FAR = 62, 92
"""From level to level: where every arrow is short, and where some pass levels."""
ROUNDS: Final = 24
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#b2588c", "#8a6d00", "#3a86c8", "#6b7280")
"""Of the arrows, by the box that they come from: colour-blind people tell them apart."""

Arrow = tuple[str, str]
Place = tuple[str, str, int]
"""A box, twice its name, or an arrow that passes; and its level."""
Joined = Sequence[tuple[Place, Place]]
"""Places of neighbouring levels: the upper, the lower."""


def arrows(text: str) -> list[Arrow]:
    """The arrows of a diagram, from box to box; a box is its words, or its name.

    Raises:
        ValueError: a line is not understood.

    Example:
        >>> arrows('flowchart TD\\n    a["from here"] --> b & c\\n    b --> c')
        [('from here', 'b'), ('from here', 'c'), ('b', 'c')]
    """
    first, *rest = [line.strip() for line in text.strip().splitlines()]
    if first != HEAD:
        raise ValueError(f"a diagram begins with {HEAD!r}, not with {first!r}")
    pairs: list[Arrow] = []
    words: dict[str, str] = {}
    for line in rest:
        if not LINE.fullmatch(line):
            raise ValueError(f"{line!r} is not an arrow: write 'a --> b & c'")
        (start, _), *_ = boxes = BOX.findall(line)
        words |= {name: text for name, text in boxes if text}
        pairs += [(start, end) for end, _ in boxes[1:]]
    return [(words.get(start, start), words.get(end, end)) for start, end in pairs]


def svg(text: str, label: str = "A diagram") -> str:
    """The picture of a diagram; its lines and texts have the colour of the page's text.

    Args:
        text: the lines of mermaid.
        label: what the picture is, for who does not see it.

    Raises:
        ValueError: a line is not understood, or arrows lead in a circle.

    Example:
        >>> svg("flowchart TD\\na --> b").count("<rect")
        2
    """
    found = arrows(text)
    levels = _levels(found)
    rows, joined = _rows(found, levels)
    middles = _placed(_ordered(rows, joined), joined)
    left = min(x - _width(place) / 2 for place, x in middles.items()) - 2
    right = max(x + _width(place) / 2 for place, x in middles.items()) + 2
    down = FAR if any(start != end for start, end, _ in middles) else NEAR
    top = (len(rows) - 1) * down + 2
    points = {place: (x - left, top - place[2] * down) for place, x in middles.items()}
    size = f"{round(right - left)} {top + HEIGHT + 2}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" viewBox="0 0 {size}" '
        f'aria-label="{escape(label, quote=True)}" width="{round(right - left)}" '
        'style="max-width: 100%; height: auto" '
        'font-family="sans-serif" font-size="14" fill="currentColor">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 1L10 5L0 9z" fill="context-stroke"/>'
        "</marker></defs>",
        *_curves(found, levels, points),
        *_boxes(points),
        "</svg>",
    ]
    return "\n".join(parts)


def _levels(found: Sequence[Arrow]) -> dict[str, int]:
    """Box -> how many arrows its longest way down has."""
    ends: dict[str, list[str]] = {box: [] for pair in found for box in pair}
    for start, end in found:
        ends[start].append(end)
    known: dict[str, int] = {}

    def level(box: str, above: tuple[str, ...] = ()) -> int:
        if box in above:
            raise ValueError(f"arrows lead in a circle: {' -> '.join((*above, box))}")
        if box not in known:
            known[box] = max((level(end, (*above, box)) + 1 for end in ends[box]), default=0)
        return known[box]

    return {box: level(box) for box in ends}


def _rows(
    found: Sequence[Arrow], levels: Mapping[str, int]
) -> tuple[list[list[Place]], list[tuple[Place, Place]]]:
    """The places of each level, lowest first, and which are joined."""
    rows: list[list[Place]] = [[] for _ in range(max(levels.values()) + 1)]
    for box, level in levels.items():
        rows[level].append((box, box, level))
    joined: list[tuple[Place, Place]] = []
    for arrow in found:
        way = _way(arrow, levels)
        for place in way[1:-1]:
            rows[place[2]].append(place)
        joined += pairwise(way)
    return rows, joined


def _way(arrow: Arrow, levels: Mapping[str, int]) -> list[Place]:
    """The places that an arrow goes through, the upper end first."""
    start, end = arrow
    passed = range(levels[start] - 1, levels[end], -1)
    ends = (start, start, levels[start]), (end, end, levels[end])
    return [ends[0], *((start, end, level) for level in passed), ends[1]]


def _ordered(rows: list[list[Place]], joined: Joined) -> list[list[Place]]:
    """The rows, in an order with few crossings."""
    best, fewest = rows, _crossings(rows, joined)
    for round_ in range(ROUNDS):
        rows = [list(row) for row in rows]
        downwards = round_ % 2 == 0
        for row in reversed(rows) if downwards else rows:
            at = {place: n for each in rows for n, place in enumerate(each)}
            others = _neighbours(joined, above=downwards)
            means = {
                place: sum(at[other] for other in others[place]) / len(others[place])
                for place in row
                if others.get(place)
            }
            row.sort(key=lambda place: means.get(place, at[place]))
        crossings = _crossings(rows, joined)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _neighbours(joined: Joined, *, above: bool) -> dict[Place, list[Place]]:
    """Place -> those that it is joined with in the level above, or below."""
    found: dict[Place, list[Place]] = {}
    for upper, lower in joined:
        place, other = (lower, upper) if above else (upper, lower)
        found.setdefault(place, []).append(other)
    return found


def _crossings(rows: Sequence[Sequence[Place]], joined: Joined) -> int:
    at = {place: n for row in rows for n, place in enumerate(row)}
    return sum(
        (at[a] - at[c]) * (at[b] - at[d]) < 0
        for (a, b), (c, d) in combinations(joined, 2)
        if a[2] == c[2]
    )


def _placed(rows: Sequence[Sequence[Place]], joined: Joined) -> dict[Place, float]:
    """The middle of each place, in pixels from the left."""
    middles: dict[Place, float] = {}
    for row in rows:
        right = 0.0
        for place in row:
            middles[place] = right + _width(place) / 2
            right += _width(place) + BETWEEN
    above, below = (_neighbours(joined, above=each) for each in (True, False))
    for round_ in range(ROUNDS * 4):
        others = above if round_ % 2 else below
        for row in rows:
            _move(row, others, middles)
    return middles


def _move(
    row: Sequence[Place], others: Mapping[Place, Sequence[Place]], middles: dict[Place, float]
) -> None:
    """Move the places of a row towards the mean of others, in their order and without overlaps."""
    for places, side in ((row, 1), (row[::-1], -1)):
        edge: float | None = None
        for place in places:
            near = others.get(place, ())
            wish = sum(middles[other] for other in near) / len(near) if near else middles[place]
            wish = (wish + middles[place]) / 2
            if edge is not None:
                wish = side * max(side * wish, side * edge + _width(place) / 2 + BETWEEN)
            middles[place] = wish
            edge = wish + side * _width(place) / 2


def _width(place: Place) -> float:
    """Pixels; letters are about 8 wide."""
    start, end, _ = place
    return 22 + 8.2 * len(start) if start == end else 4


def _curves(
    found: Sequence[Arrow], levels: Mapping[str, int], points: Mapping[Place, tuple[float, float]]
) -> Iterator[str]:
    starts = list(dict.fromkeys(start for start, _ in found))
    for start, end in found:
        way = [points[place] for place in _way((start, end), levels)]
        path = f"M{way[0][0]:.0f} {way[0][1] + HEIGHT:.0f}"
        for (x, top), (below, bottom) in pairwise(way):
            middle = (top + HEIGHT + bottom) / 2
            path += f"C{x:.0f} {middle:.0f} {below:.0f} {middle:.0f} {below:.0f} {bottom:.0f}"
            path += f"V{bottom + HEIGHT:.0f}" if bottom != way[-1][1] else ""
        colour = COLOURS[starts.index(start) % len(COLOURS)]
        words = escape(f"{start} -> {end}", quote=True)
        yield (
            f'<path data-arrow="{words}" d="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="1.6" marker-end="url(#tip)"><title>{words}</title></path>'
        )


def _boxes(points: Mapping[Place, tuple[float, float]]) -> Iterator[str]:
    for place, (x, y) in points.items():
        start, end, _ = place
        if start == end:
            width, words = _width(place), escape(start, quote=True)
            yield (
                f'<rect data-box="{words}" x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" '
                f'height="{HEIGHT}" rx="6" fill="none" stroke="currentColor"/>'
            )
            middle = y + HEIGHT / 2 + 5
            yield f'<text x="{x:.0f}" y="{middle:.0f}" text-anchor="middle">{words}</text>'
