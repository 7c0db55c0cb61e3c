"""The command `xckpt diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from xckpt.cli.arguments import PATH, as_json
from xckpt.cli.output import print_json, progress_bar, say

if TYPE_CHECKING:
    from xckpt.core.manifest.differences import Difference

MARKS: Final = {"missing": "-", "added": "+"}
"""Kind of difference -> the mark of its line; ``~`` for the others."""


@click.command("diff")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--values", is_flag=True, help="Also compare elements, values and user metadata.")
@as_json
@click.pass_context
def diff_command(
    context: click.Context, first: str, second: str, values: bool, as_json: bool
) -> None:
    """Show how the checkpoint SECOND differs from FIRST.

    Compares the leaves' names, types, dtypes and shapes; with --values also their contents, by
    digests where both have the same chunks, else by reading both. Shardings are not compared. Exit
    code 0: they are equal. 1: they differ.
    """
    import xckpt

    with progress_bar("comparing") as bar:
        options = xckpt.LoadOptions(progress=bar)
        found = xckpt.diff(first, second, values=values, options=options)
    if as_json:
        rows = [
            {"name": d.name, "kind": d.kind, "first": d.first, "second": d.second} for d in found
        ]
        print_json({"equal": not found, "values_compared": values, "differences": rows})
    else:
        for difference in found:
            say(f"{MARKS.get(difference.kind, '~')} {difference}")
        say(_summary(found, values))
    if found:
        context.exit(1)


def _summary(found: Sequence[Difference], values: bool) -> str:
    """How many differences there are, of which kinds.

    Example:
        >>> _summary([], False)
        'equal in structure, dtypes and shapes; --values compares contents too'
    """
    from xckpt.cli.report import counted

    if not found:
        if values:
            return "equal, values included"
        return "equal in structure, dtypes and shapes; --values compares contents too"
    counts = Counter(difference.kind for difference in found)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    return f"{counted(len(found), 'difference')}: {kinds}"
