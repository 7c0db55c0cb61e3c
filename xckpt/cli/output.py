"""What every command prints the same way: failures on stderr, JSON on stdout, a progress bar.

Names come from a checkpoint and may hold anything: what goes to a terminal passes `printable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, ClassVar

import click

if TYPE_CHECKING:
    from xckpt.progress import Progress


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def printable(text: str) -> str:
    """A text without control characters, those that turn the writing direction included.

    Example:
        >>> printable("a\\x1b[31m\\u202eb"), printable("naïve 重み")
        ('a\\\\x1b[31m\\\\u202eb', 'naïve 重み')
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class Failure(click.ClickException):
    """The question could not be answered: a message on stderr, exit code 2."""

    exit_code: ClassVar[int] = 2

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message, without click's usage lines."""
        lines = map(printable, self.format_message().split("\n"))
        click.echo("xckpt: " + "\n".join(lines), file=file, err=file is None)


class Fault(Failure):
    """The answer is no: what is wrong, a line for each problem, exit code 1."""

    exit_code: ClassVar[int] = 1

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        super().__init__("\n  - ".join([summary, *problems]))


def print_json(document: object) -> None:
    """Print a document of plain values or msgspec structs; a problem is its line."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2))


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[Progress], None]]:
    """A progress callback that moves a bar, where stderr is a terminal."""
    from xckpt.progress_bar import ProgressBar

    with ProgressBar(doing) as bar:
        yield bar
