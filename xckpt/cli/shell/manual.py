"""The commands `xckpt completion` and `xckpt man`: text for a shell and for `man`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

from xckpt.cli.shell.described import ENVIRONMENT, EXIT_CODES, described

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands in SHELL.

    bash: eval "$(xckpt completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc. fish: xckpt
    completion fish > ~/.config/fish/completions/xckpt.fish.
    """
    made = get_completion_class(shell)
    assert made is not None
    root = context.find_root().command
    click.echo(made(root, {}, "xckpt", "_XCKPT_COMPLETE").source())


@click.command("man")
@click.pass_context
def manual_command(context: click.Context) -> None:
    """Print the page of the manual, in roff.

    To read it: xckpt man | man -l -. To keep it: xckpt man > xckpt.1.
    """
    click.echo("\n".join(manual(context.find_root().command)))


def manual(root: click.Command) -> Iterator[str]:
    """The lines of the page.

    Example:
        >>> from xckpt.cli.commands import commands
        >>> lines = list(manual(commands))
        >>> lines[0].split()[:3]
        ['.TH', 'XCKPT', '1']
    """
    from xckpt import __version__

    first, *others = described(root)
    yield f'.TH XCKPT 1 "" "xckpt {__version__}" "User Commands"'
    yield from (".SH NAME", "xckpt \\- look into checkpoints, and convert them")
    yield from (".SH SYNOPSIS", _roff(first.usage), ".SH DESCRIPTION")
    yield from _paragraphs(first.paragraphs)
    yield ".SH COMMANDS"
    for each in others:
        yield f".SS {_roff(each.usage)}"
        yield from _paragraphs(each.paragraphs)
        for option in each.options:
            yield from (".TP", f"\\fB{_roff(option.words)}\\fR", _roff(option.help))
    for title, rows in (("EXIT STATUS", EXIT_CODES), ("ENVIRONMENT", ENVIRONMENT)):
        yield f".SH {title}"
        for name, text in rows:
            yield from (".TP", f"\\fB{_roff(name)}\\fR", _roff(text))


def _paragraphs(texts: tuple[str, ...]) -> Iterator[str]:
    for text in texts:
        yield from (".PP", _roff(text))


def _roff(text: str) -> str:
    """Text that roff prints as it is.

    Example:
        >>> _roff(".a-b")
        '\\\\&.a\\\\-b'
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"^(?=[.'])", r"\\&", escaped)
