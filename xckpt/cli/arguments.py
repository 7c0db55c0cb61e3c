"""Arguments that several commands take."""

from __future__ import annotations

from typing import Final

import click

PATH: Final = click.Path(readable=False)
"""A path or a URL, which the shell completes; each command says itself what is wrong with one."""

path_argument: Final = click.argument("path", type=PATH)
patterns_argument: Final = click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
