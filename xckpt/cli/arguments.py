"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from xckpt.core.geometry.box import Box

PATH: Final = click.Path(readable=False)
"""A path or a URL, which the shell completes; each command says itself what is wrong with one."""

path_argument: Final = click.argument("path", type=PATH)
patterns_argument: Final = click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def box_of(slice_: str | None, shape: Sequence[int]) -> Box:
    """The box that ``--box`` names in a tensor of a shape; the whole tensor without ``--box``.

    Raises:
        click.UsageError: the text is no slice, or does not fit the shape.

    Example:
        >>> box_of("2:", (10, 4))
        Box(offsets=(2, 0), sizes=(8, 4))
    """
    from xckpt.cli.report import parse_box

    try:
        return parse_box(slice_ or "", shape)
    except ValueError as error:
        raise click.UsageError(f"--box: {error}") from error
