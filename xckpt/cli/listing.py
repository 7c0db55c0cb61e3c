"""The command `xckpt ls`: which leaves, in what order.

1. `Row` is one line: it is made from the manifest's entry alone, so that a checkpoint of very many
   leaves is listed quickly.
2. `in_order` sorts the rows of the leaves that were chosen (`xckpt.cli.choose`).
3. A terminal gets a table; a pipe gets plain lines, which take a fraction of the time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

import click

from xckpt.cli.arguments import as_json, path_argument, patterns_argument
from xckpt.cli.choose import chosen
from xckpt.cli.collector import collector_at_rest
from xckpt.cli.output import print_json
from xckpt.cli.render.columns import columns
from xckpt.core.dtypes import item_size
from xckpt.core.manifest.entries import BytesEntry, Manifest, TensorEntry
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import NotACheckpointError


class Row(NamedTuple):
    """One leaf, as `ls` lists it."""

    name: str
    dtype: str
    """The format's dtype name, or a value's Python type."""
    shape: tuple[int, ...] | None
    """None for a value."""
    bytes: int
    """Bytes of all elements; 0 for a value that the manifest holds."""
    stored: bool
    """Whether its bytes are stored beside the manifest."""


ROOT: Final = "(the root)"
"""What stands for the name of a leaf that is the whole tree."""

ORDERS: Final[dict[str, Callable[[Row], tuple[object, ...]]]] = {
    "name": lambda row: (row.name,),
    "size": lambda row: (-row.bytes, row.name),
    "dtype": lambda row: (row.dtype, row.name),
}
"""What ``--sort`` takes -> the key to sort by; largest first."""


@click.command()
@path_argument
@patterns_argument
@click.option("--sort", type=click.Choice(list(ORDERS)), help="Sort by this; by default as saved.")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@as_json
def ls(
    path: str, patterns: tuple[str, ...], sort: str | None, reverse: bool, as_json: bool
) -> None:
    """List the leaves of a checkpoint, or the steps of a run.

    For each leaf: name, dtype, shape, size. For each step of a run (a folder of steps), by number:
    folder, time, size, metrics, and the rules of the run that keep it.

    A PATTERN is the name of a leaf, or of a container for all leaves below it. It may have
    wildcards, as in "model/**/bias": * is any text without a /, ** any text, ? one character.
    """
    import xckpt
    from xckpt.viewer.run import is_run, steps_at

    try:
        with collector_at_rest():
            checkpoint = xckpt.open(path)
            rows = list(listed(checkpoint.manifest))
    except NotACheckpointError:
        if patterns or sort or not _list_steps(path, reverse, as_json):
            raise
        return
    if not (patterns or sort) and is_run(checkpoint.format, lambda: steps_at(path)):
        _list_steps(path, reverse, as_json)
        return
    if patterns:
        kept = set(chosen(path, [row.name for row in rows], patterns))
        rows = [row for row in rows if row.name in kept]
    ordered = in_order(rows, sort, reverse)
    if as_json:
        shown = ("name", "dtype", "shape", "bytes")
        print_json([{each: getattr(row, each) for each in shown} for row in ordered])
    else:
        _print_rows(ordered)


def _print_rows(rows: Sequence[Row]) -> None:
    """Print a line for each leaf: a table on a terminal, else plain columns."""
    if not rows:
        return
    if sys.stdout.isatty():
        from xckpt.cli.render.tables import console, leaf_list

        console().print(leaf_list(rows))
    else:
        click.echo("\n".join(lines(rows)))


def _list_steps(path: str, reverse: bool, as_json: bool) -> bool:
    """List the steps of a run; whether there are any."""
    from xckpt.cli.steps import step_lines, step_values
    from xckpt.viewer.run import shared_at, steps_at

    steps = steps_at(path)
    if reverse:
        steps.reverse()
    shared, _ = shared_at(path, steps)
    if steps and as_json:
        print_json(step_values(steps, shared))
    elif steps:
        click.echo("\n".join(step_lines(steps, shared)))
    return bool(steps)


def listed(manifest: Manifest) -> Iterator[Row]:
    """A row for each leaf, in the saved order.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://listed-rows", {"w": np.zeros((2, 3), np.float32), "step": 7})
        >>> for row in listed(xckpt.open("memory://listed-rows").manifest):
        ...     print(row)
        Row(name='w', dtype='float32', shape=(2, 3), bytes=24, stored=True)
        Row(name='step', dtype='int', shape=None, bytes=0, stored=False)
    """
    for leaf in manifest.leaves:
        if isinstance(leaf, TensorEntry):
            size = prod(leaf.shape) * item_size(leaf.dtype)
            yield Row(leaf.name, leaf.dtype, leaf.shape, size, True)
        elif isinstance(leaf, BytesEntry):
            yield Row(leaf.name, leaf.type, None, leaf.size, True)
        else:
            yield Row(leaf.name, leaf.type, None, 0, False)


def in_order(rows: list[Row], sort: str | None, reverse: bool) -> list[Row]:
    """The rows in one of `ORDERS`, or as they are.

    Example:
        >>> rows = [Row("a", "int8", (2,), 2, True), Row("b", "int8", (9,), 9, True)]
        >>> [row.name for row in in_order(rows, "size", reverse=False)]
        ['b', 'a']
    """
    ordered = rows if sort is None else sorted(rows, key=ORDERS[sort])
    return ordered[::-1] if reverse else ordered


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The columns of a pipe: name, dtype, shape, size, two spaces between them.

    Example:
        >>> list(lines([Row("w", "int8", (2,), 2, True), Row("step", "int", None, 0, False)]))
        ['w     int8  [2]  2 B', 'step  int']
    """
    cells = (
        (printable(row.name or ROOT), row.dtype, shape_text(row.shape), size_text(row))
        for row in rows
    )
    return columns(cells, right=[3])


@functools.lru_cache(maxsize=1024)
def shape_text(shape: tuple[int, ...] | None) -> str:
    """A shape as the commands print it; empty for a value.

    Example:
        >>> shape_text((2, 3)), shape_text(()), shape_text(None)
        ('[2, 3]', '[]', '')
    """
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def size_text(row: Row) -> str:
    """A leaf's size; empty for a value that takes none.

    Example:
        >>> size_text(Row("w", "int8", (2048,), 2048, True))
        '2.0 KiB'
        >>> size_text(Row("step", "int", None, 0, False))
        ''
    """
    return readable_bytes(row.bytes) if row.stored else ""
