"""Output that all commands share: failures, warnings and the log on stderr, JSON on stdout, a bar.

Names come from a checkpoint and may hold anything: what goes to a terminal or into a pipe passes
`xckpt.core.text.printable`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, ClassVar

import click

from xckpt.cli import UNANSWERED
from xckpt.core.text.printable import printable, printable_json, printable_lines

if TYPE_CHECKING:
    from xckpt.progress import Progress


def say(line: str) -> None:
    """Print a line of an answer.

    Example:
        >>> say("model/w: 3 chunks")
        model/w: 3 chunks
    """
    click.echo(printable(line))


def notice(line: str) -> None:
    """Print a line on stderr, beside the answer: a stderr that takes none ends no command."""
    with suppress(OSError):
        click.echo(line, err=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: IO[str] | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on stderr, without the code that gave it; a `warnings.showwarning`."""
    notice(f"xckpt: warning: {printable_lines(str(message))}")


class LogOnStderr(logging.Handler):
    """Prints what a command logs on stderr, as `show_warning` prints warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message with its level."""
        text = printable_lines(record.getMessage())
        notice(f"xckpt: {record.levelname.lower()}: {text}")


@contextmanager
def notices_on_stderr() -> Iterator[None]:
    """Print warnings and the log of xckpt on stderr while a command runs."""
    logger, handler = logging.getLogger("xckpt"), LogOnStderr()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            yield
    finally:
        logger.removeHandler(handler)


class Failure(click.ClickException):
    """The question could not be answered: a message on stderr, exit code 2.

    Example:
        >>> failure = Failure("ckpt holds no checkpoint; check the path")
        >>> print(failure.message, failure.exit_code)
        ckpt holds no checkpoint; check the path 2
    """

    exit_code: ClassVar[int] = UNANSWERED

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message, without click's usage lines; else the exit code alone says it."""
        message = f"xckpt: {printable_lines(self.format_message())}"
        with suppress(OSError):
            click.echo(message, file=file, err=file is None)


def unwritable(file: str, error: OSError) -> click.UsageError:
    """The error about the file of ``--output`` that the system refuses.

    Example:
        >>> print(unwritable("a.toml", OSError(13, "Permission denied")))
        a.toml cannot be written: Permission denied
    """
    return click.UsageError(f"{file} cannot be written: {error.strerror}")


class Fault(Failure):
    """The answer is no: what is wrong, a line for each problem, exit code 1.

    Example:
        >>> fault = Fault("ckpt is damaged: 1 problem", ["w: a chunk is missing"])
        >>> print(fault.message, fault.exit_code)
        ckpt is damaged: 1 problem
          - w: a chunk is missing 1
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        super().__init__("\n  - ".join([summary, *map(printable_lines, problems)]))


def print_json(document: object) -> None:
    """Print a document of plain values or msgspec structs; a `Problem` is written as its line.

    Example:
        >>> print_json({"ok": True, "problems": ()})
        {
          "ok": true,
          "problems": []
        }
    """
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2).decode()
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # half a character, or one that stdout lacks: an escape spells it
        text = json.dumps(msgspec.to_builtins(document, enc_hook=str), indent=2)
    click.echo(printable_json(text))


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[Progress], None]]:
    """A progress callback: a bar where stderr is a terminal, else a line now and then.

    Example:
        >>> from xckpt.progress import Progress
        >>> with progress_bar("reading") as report:  # quick work shows nothing
        ...     report(Progress(1, 2))
    """
    from xckpt.progress_bar import ProgressBar

    with ProgressBar(doing) as bar:
        yield bar
