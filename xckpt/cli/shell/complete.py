"""What a shell completes behind a command besides its options: the names of files and folders."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a path: an argument's ``shell_complete``."""
    return [CompletionItem(incomplete, type="file")]
