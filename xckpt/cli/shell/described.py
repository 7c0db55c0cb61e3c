"""The commands as text, for the manual page and the reference of the site."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click

__all__ = ["ENVIRONMENT", "EXIT_CODES", "CommandText", "Parameter", "described"]


EXIT_CODES: Final = (
    ("0", "All is well."),
    ("1", "`verify`, `map check` or `doctor` found faults, `diff` differences."),
    (
        "2",
        "The question could not be answered: no checkpoint there, no such leaf, wrong usage, "
        "or something cannot be read.",
    ),
    ("130", "Interrupted."),
    ("141", "The reader of its output has closed the pipe."),
)
"""(exit code, when a command ends with it)."""

ENVIRONMENT: Final = (
    ("NO_COLOR", "If it is set and not empty, nothing is coloured."),
    ("XCKPT_RETRIES", "How often a request to a bucket is repeated after a failure; 16."),
    ("XCKPT_TIMEOUT", "Seconds that a command may wait for the storage; no limit."),
    ("XCKPT_REQUEST_TIMEOUT", "Seconds without an answer after which a bucket is dead; 60."),
    ("XCKPT_CONCURRENCY", "Requests to a storage at a time; 128 for a bucket."),
    ("AWS_ENDPOINT_URL", "The server of s3:// URLs, if it is not Amazon's."),
    ("AWS_REGION", "The region of s3:// URLs."),
    ("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "Credentials of s3:// URLs."),
    ("GOOGLE_APPLICATION_CREDENTIALS", "The file with the credentials of gs:// URLs."),
)
"""(variable, what it changes, and its default)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option or an argument of a command."""

    words: str
    """How it is written: ``--box SLICE``."""
    help: str


@dataclass(frozen=True, slots=True)
class CommandText:
    """The description of one command."""

    name: str
    """With the groups that it is in: ``xckpt map infer``."""
    usage: str
    paragraphs: tuple[str, ...]
    options: tuple[Parameter, ...]


def described(
    command: click.Command, name: str = "xckpt", group: click.Context | None = None
) -> Iterator[CommandText]:
    """A command, and then those in it if it is a group, by name; ``group`` is what it is in.

    Example:
        >>> from xckpt.cli.places import delete_command
        >>> [text] = described(delete_command, "xckpt rm")
        >>> text.usage, text.options[0]
        ('xckpt rm [OPTIONS] PATH', Parameter(words='-y, --yes', help='Do not ask.'))
    """
    context = click.Context(command, group, name, **command.context_settings)
    pieces = " ".join(command.collect_usage_pieces(context))
    records = (
        parameter.get_help_record(context)
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
    )
    options = tuple(Parameter(*record) for record in records if record is not None)
    text = inspect.cleandoc(command.help or "")
    paragraphs = tuple(" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    yield CommandText(name, f"{name} {pieces}", paragraphs, options)
    if isinstance(command, click.Group):
        for inner in sorted(command.commands):
            yield from described(command.commands[inner], f"{name} {inner}", context)
