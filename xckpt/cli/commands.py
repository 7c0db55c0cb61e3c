"""The group of all commands, with `xckpt info` and `xckpt verify`.

Exit codes: 0 all is well; 1 `verify`, `map check` or `doctor` found faults, or `diff` differences;
2 the question could not be answered (no checkpoint there, no such leaf, storage refused, wrong
usage); 130 interrupted; 141 the pipe that took the answer was closed. Answers go to stdout, errors
and progress to stderr. What ``--json`` prints is described by `schema.json` beside this file.

Everything heavy is imported by the command that needs it, so that `xckpt --help` is quick.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from xckpt.cli import end_interrupted, is_interrupt
from xckpt.cli.arguments import as_json, box_of, path_argument
from xckpt.cli.choose import no_such_leaf
from xckpt.cli.collector import collector_at_rest
from xckpt.cli.compare import diff_command
from xckpt.cli.convert import convert_command
from xckpt.cli.doctor.command import doctor_command
from xckpt.cli.elements import cat, head, stats
from xckpt.cli.listing import ls
from xckpt.cli.map import map_commands
from xckpt.cli.output import (
    Failure,
    Fault,
    notices_on_stderr,
    print_json,
    progress_bar,
    say,
)
from xckpt.cli.places import copy_command, delete_command, gc_command
from xckpt.cli.shell.manual import completion_command, manual_command
from xckpt.cli.view import view_command
from xckpt.core.text.printable import printable
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    MemoryLimitError,
    Problem,
    UnsafePickleError,
    VersionError,
    XckptError,
)

if TYPE_CHECKING:
    from xckpt.cli.report import CheckpointReport, LeafReport
    from xckpt.core.geometry.box import Box
    from xckpt.core.manifest.entries import Manifest, TensorEntry
    from xckpt.storage.checkpoint import Checkpoint

PIPE_CLOSED = 141
"""Exit code of a program that SIGPIPE ends; 1 would say that there are faults."""


def in_options(message: str, command: click.Command | None) -> str:
    """A message of the Python API with its advice on arguments written as command-line flags.

    Example:
        >>> in_options("taken; pass overwrite=True to replace it", copy_command)
        'taken; pass --overwrite to replace it'
    """
    for parameter in command.params if command else ():
        if isinstance(parameter, click.Option) and parameter.is_flag:
            argument = rf"(?<=\s){parameter.name}=True\b(?!/)"
            message = re.sub(argument, parameter.opts[0], message)
    return message


class Commands(click.Group):
    """A group that turns xckpt's own errors into a line on stderr, never a traceback."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Parse the arguments; --help and --version are answered here, and run no command."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except KeyboardInterrupt:
            end_interrupted()
        except OSError as error:  # of help, which no command prints, or of stderr
            failure = _unwritten(error)
            failure.show()
            sys.exit(failure.exit_code)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that the context names."""
        try:
            with notices_on_stderr():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except XckptError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            raise Failure(in_options(text, command)) from error
        except ValueError as error:
            # A variable of the environment that all commands read; see `storage_option`.
            if not str(error).startswith("XCKPT_"):
                raise
            raise Failure(str(error)) from error
        except OSError as error:
            raise _unwritten(error) from error
        except (KeyboardInterrupt, click.Abort, ImportError) as error:
            if not isinstance(error, click.Abort) and not is_interrupt(error):
                raise
            end_interrupted(map(printable, getattr(error, "__notes__", ())))


def _unwritten(error: OSError) -> Failure:
    """The failure of a command that could not write its answer, or not use the file that is named.

    Raises:
        SystemExit: the reader of the answer is gone.
    """
    # At the interpreter's end stdout's buffer is written once more, which must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        sys.exit(PIPE_CLOSED)
    what = "the answer cannot be written" if error.filename is None else error.filename
    return Failure(f"{what}: {error.strerror or error}")


@click.group("xckpt", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="xckpt")
def commands() -> None:
    """Look into checkpoints, and convert them.

    PATH is a folder or a URL (file://, s3://bucket/prefix, gs://...); of a checkpoint of xckpt,
    Orbax, DCP, safetensors or torch.save. Exit code 0: all is well. 1: there are faults or
    differences. 2: the question could not be answered. 130: interrupted.
    """


for _command in (
    *(ls, cat, head, stats, diff_command, copy_command, delete_command, gc_command),
    *(convert_command, map_commands, view_command),
    *(doctor_command, completion_command, manual_command),
):
    commands.add_command(_command)


@commands.command()
@path_argument
@click.argument("leaf", required=False)
@click.option("--box", "slice_", metavar="SLICE", help='Show what reading "0:100, 64:128" takes.')
@as_json
def info(path: str, leaf: str | None, slice_: str | None, as_json: bool) -> None:
    """Show a checkpoint's tree, or one LEAF (or container) of it.

    Shows dtypes, shapes, sizes, chunks and the sharding that wrote each tensor, and draws how one
    LEAF lies in chunks. With --box it also shows which chunks a slice of LEAF reads, and how many
    bytes.
    """
    from xckpt.cli.report import checkpoint_report, narrowed
    from xckpt.core.part.selection import with_containers
    from xckpt.storage.base.shared import shared_bytes

    with collector_at_rest():
        checkpoint = _open(path)
        shared = shared_bytes([checkpoint.location]).once
        whole = checkpoint_report(path, checkpoint.manifest, shared)
    report = whole if leaf is None else narrowed(whole, leaf)
    if report is None:
        nodes = with_containers(each.name for each in whole.leaves)
        raise no_such_leaf(path, nodes, str(leaf))
    is_leaf = [each.name for each in report.leaves] == [leaf]
    one = _with_value(checkpoint, report.leaves[0]) if is_leaf else None
    box = None
    if slice_ is not None:
        one, box = _with_reading(one, slice_)
    if as_json:
        print_json(one or report)
    elif one is not None:
        _print_leaf(checkpoint, one, box)
    else:
        _print_tree(report)


def _print_tree(report: CheckpointReport) -> None:
    """Print a line for each container and leaf: a table on a terminal, else plain columns."""
    if sys.stdout.isatty():
        from xckpt.cli.render.tables import checkpoint_table, console

        console().print(checkpoint_table(report))
        return
    from xckpt.cli.render.tree import checkpoint_lines

    with collector_at_rest():
        click.echo("\n".join(checkpoint_lines(report)))


def _print_leaf(checkpoint: Checkpoint, leaf: LeafReport, box: Box | None) -> None:
    """Print all of a leaf, with its drawings."""
    from xckpt.cli.render.tables import console, leaf_drawing, leaf_table, shard_drawing

    screen = console()
    screen.print(leaf_table(leaf))
    if leaf.kind != "tensor":
        return
    if not screen.options.ascii_only:
        screen.print()
        screen.print(leaf_drawing(leaf, box, screen.width))
    shards = shard_drawing(_entry(checkpoint.manifest, leaf.name), box, screen.width)
    if shards is not None:
        screen.print(shards)


def _entry(manifest: Manifest, name: str) -> TensorEntry:
    """What the manifest says of a tensor that it has."""
    from xckpt.core.manifest.entries import TensorEntry

    [found] = [leaf for leaf in manifest.leaves if leaf.name == name]
    assert isinstance(found, TensorEntry)
    return found


def _with_value(checkpoint: Checkpoint, leaf: LeafReport) -> LeafReport:
    """Read a value that the manifest does not hold."""
    if leaf.kind == "tensor" or leaf.value is not None:
        return leaf
    from msgspec.structs import replace

    from xckpt.core.values import shown_value

    return replace(leaf, value=shown_value(checkpoint[leaf.name]))


def _with_reading(leaf: LeafReport | None, slice_: str) -> tuple[LeafReport, Box]:
    """A leaf with the chunks that a slice of it reads."""
    from msgspec.structs import replace

    from xckpt.cli.report import reading

    if leaf is None or leaf.shape is None:
        raise click.UsageError("--box takes a slice of a tensor: name one as LEAF")
    box = box_of(slice_, leaf.shape)
    return replace(leaf, reading=reading(leaf, box)), box


@commands.command()
@path_argument
@as_json
def verify(path: str, as_json: bool) -> None:
    """Read every chunk and check it against its digest.

    A checkpoint of another library is read whole; what that proves depends on its own checksums.

    Exit code 0: all is as it was saved. 1: something is damaged, and is named. 2: the checkpoint
    could not be checked, or parts of it cannot be read, and nothing else is damaged.
    """
    import time

    from xckpt.cli.report import checkpoint_report, counted, holdings
    from xckpt.storage.refusals import error_of_reading

    started = time.perf_counter()
    problems: Sequence[Problem]
    summary = state = ""
    try:
        checkpoint = _open(path)
        own = checkpoint.format == "xckpt"
        state = "as it was saved" if own else f"{checkpoint.format}, can be read whole"
        with progress_bar("verifying") as progress:
            problems = checkpoint.verify(progress)
        summary = holdings(checkpoint_report(path, checkpoint.manifest))
    except (VersionError, MemoryLimitError, UnsafePickleError):  # it may be sound
        raise
    except (CorruptCheckpointError, ManifestError) as error:
        problems = error.problems or (Problem.of(str(error)),)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"ok": not problems, "problems": problems, "seconds": seconds})
    if problems:
        damaged = Fault(f"{path} is damaged: {counted(len(problems), 'problem')}", problems)
        raise error_of_reading(path, problems) or damaged
    if not as_json:
        say(f"{path}: {state}: {summary} ({seconds:.1f} s)")


def _open(path: str) -> Checkpoint:
    import xckpt

    return xckpt.open(path)
