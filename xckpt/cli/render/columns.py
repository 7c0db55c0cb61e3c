"""Tables for a pipe: plain lines in columns, which take a fraction of the time of a rich table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence


def columns(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Rows of equally many cells as lines, two spaces between the columns.

    Args:
        rows: the cells of each row.
        right: the numbers of the columns that end at the right.

    Example:
        >>> list(columns([("w", "int8", "2 B"), ("step", "int", "")], right=[2]))
        ['w     int8  2 B', 'step  int']
    """
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    form = "  ".join(
        f"{{:{'>' if number in right else ''}{width}}}" if width else "{}"
        for number, width in enumerate(widths)
    ).format
    for row in cells:
        yield form(*row).rstrip()
