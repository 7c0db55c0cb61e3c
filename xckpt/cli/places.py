"""Checkpoints as wholes: the commands `xckpt cp` and `xckpt rm`."""

from __future__ import annotations

import sys

import click

from xckpt.cli.output import Failure, say
from xckpt.core.text.printable import printable


@click.command("cp")
@click.argument("source")
@click.argument("target")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at TARGET.")
def copy_command(source: str, target: str, overwrite: bool) -> None:
    """Copy the checkpoint SOURCE to TARGET, which is there as a whole or not at all.

    Within one local file system the files are linked, and no bytes copied.
    """
    import xckpt

    try:
        xckpt.copy(source, target, overwrite=overwrite)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    say(f"{target}: a copy of {source}")


@click.command("rm")
@click.argument("path")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def delete_command(path: str, yes: bool) -> None:
    """Delete the checkpoint at PATH, after asking; what else is in the folder stays.

    What is no checkpoint of xckpt is refused.
    """
    import xckpt
    from xckpt.cli.report import checkpoint_report, holdings

    held = holdings(checkpoint_report(path, xckpt.open(path).manifest))
    if not yes:
        if not sys.stdin.isatty():
            raise Failure(f"{path} holds {held}; pass --yes to delete it without being asked")
        question = f"delete {printable(path)}, which holds {held}?"
        if not click.confirm(question, err=True):
            raise Failure("nothing was deleted")
    xckpt.delete(path)
    say(f"{path}: deleted: {held}")
