"""Checkpoints as wholes: the commands `xckpt cp`, `xckpt rm` and `xckpt gc`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from xckpt.cli.arguments import PATH, as_json, path_argument
from xckpt.cli.output import Failure, print_json, progress_bar, say
from xckpt.core.text.printable import printable

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds of the units that a time is given in."""


@click.command("cp")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at TARGET.")
@as_json
def copy_command(source: str, target: str, overwrite: bool, as_json: bool) -> None:
    """Copy the checkpoint SOURCE to TARGET.

    The copy is there as a whole or not at all. Within one local file system the files are linked,
    and no bytes are copied; within one bucket the bucket copies them, if xckpt[buckets] is
    installed.
    """
    import xckpt

    try:
        with progress_bar("copying") as bar:
            options = xckpt.LoadOptions(progress=bar)
            xckpt.copy(source, target, overwrite=overwrite, options=options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json({"source": source, "target": target})
    else:
        say(f"{target}: a copy of {source}")


@click.command("rm")
@path_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@as_json
def delete_command(path: str, yes: bool, as_json: bool) -> None:
    """Delete the checkpoint at PATH, after asking.

    Other files in the folder stay. A checkpoint of another library is deleted too, its own files
    alone; anything else is refused.
    """
    import xckpt
    from xckpt.cli.report import checkpoint_report, holdings

    report = checkpoint_report(path, xckpt.open(path).manifest)
    held = holdings(report) + _files_of(path)
    if not yes:
        if not sys.stdin.isatty():
            raise Failure(f"{path} holds {held}; pass --yes to delete it without being asked")
        question = f"delete {printable(path)}, which holds {held}?"
        if not click.confirm(question, err=True):
            raise Failure("nothing was deleted")
    with progress_bar("deleting") as bar:
        xckpt.delete(path, options=xckpt.LoadOptions(progress=bar))
    if as_json:
        print_json({"path": path, "leaves": len(report.leaves)})
    else:
        say(f"{path}: deleted: {held}")


def _files_of(path: str) -> str:
    """The files of another library's checkpoint, in words; they may lie among the user's."""
    from xckpt.cli.report import counted
    from xckpt.core.text.printable import in_few
    from xckpt.formats.detect import detect
    from xckpt.formats.own_files import own_files

    if detect(path) == "xckpt":
        return ""
    found = own_files(path)
    names = [
        file.name if found.single else str(file.relative_to(found.place)) for file in found.files
    ]
    return f" (format {found.format}, {counted(len(names), 'file')}: {in_few(names)})"


if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
else:  # click 8.2 has no types for it
    _FloatType = click.ParamType


class Duration(_FloatType):
    """A time in seconds, or with one of the units s, m, h, d and w.

    Example:
        >>> Duration().convert("90", None, None), Duration().convert("12h", None, None)
        (90.0, 43200.0)
    """

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(value))
        if found is None:
            self.fail(f"{value!r} is not a time: give 90s, 30m, 12h, 2d or 1w", param, ctx)
        return float(found[1]) * UNITS[found[2]]


@click.command("gc")
@path_argument
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option(
    "--older-than",
    type=Duration(),
    metavar="TIME",
    help="Also remove what may belong to another host, if it has not changed for TIME: 12h, 2d.",
)
@as_json
def gc_command(path: str, dry_run: bool, older_than: float | None, as_json: bool) -> None:
    """Remove what killed saves have left below PATH.

    PATH is a folder of checkpoints, or a bucket. Lists everything that was found, with its size.
    The files of running saves stay. Files that may belong to a save on another host, or in a
    bucket, stay too, unless --older-than is given: choose a time longer than any save takes. A save
    that is still running then fails, and has to be made again. What is of unknown age, because its
    claim is damaged, is removed by --older-than 0 alone.
    """
    import xckpt
    from xckpt.core.text.shown import readable_bytes

    with progress_bar("removing") as bar:
        options = xckpt.LoadOptions(progress=bar)
        found = xckpt.gc(path, dry_run=dry_run, older_than=older_than, options=options)
    if as_json:
        print_json(found)
        return
    for left in found:
        say(str(left))
    gone = [left for left in found if left.removed]
    stays = [left for left in found if not left.removed]
    say(
        f"{path}: {readable_bytes(sum(left.bytes for left in gone))} removed, "
        f"{readable_bytes(sum(left.bytes for left in stays))} left"
    )
