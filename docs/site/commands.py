"""The page of the command line, and the page of the manual: both from what click knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from xckpt.cli.commands import commands
from xckpt.cli.shell.described import ENVIRONMENT, EXIT_CODES, described
from xckpt.cli.shell.manual import manual as manual_lines


def write(file: Path) -> None:
    """Write the page of the command line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines()) + "\n", encoding="utf-8")


def manual() -> str:
    """The page of the manual, in roff."""
    return "\n".join(manual_lines(commands)) + "\n"


def lines() -> Iterator[str]:
    """The lines of the page."""
    yield from ("# The command line", "")
    yield 'They come with the extra `cli`: `pip install "xckpt[cli]"`. The same text is printed by'
    yield from ("`xckpt COMMAND --help` and by `xckpt man | man -l -`.", "")
    for text in described(commands):
        yield from (f"## {text.name}", "", "```text", text.usage, "```", "")
        for paragraph in text.paragraphs:
            yield from (_escaped(paragraph), "")
        if text.options:
            yield from ("| option | |", "|---|---|")
            yield from (f"| `{o.words}` | {_escaped(o.help)} |" for o in text.options)
            yield ""
    yield from ("## Exit codes", "", "| code | when |", "|---|---|")
    yield from (f"| {code} | {text} |" for code, text in EXIT_CODES)
    yield from (
        "",
        "## Variables of the environment",
        "",
        "| variable | what it changes |",
        "|---|---|",
    )
    yield from (f"| `{name}` | {text} |" for name, text in ENVIRONMENT)


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("|", r"\|").replace("<", r"\<")
