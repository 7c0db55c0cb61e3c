"""The command `xckpt view`: a checkpoint or a run in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from xckpt.cli.arguments import PATH, as_json, path_argument
from xckpt.cli.output import Failure, print_json, progress_bar, say, unwritable
from xckpt.errors import XckptError

if TYPE_CHECKING:
    from xckpt.viewer.view import CheckpointView

MAX_PLAN = 1 << 20
"""Characters: no plan is so long, but a device that is named by mistake never ends."""


@click.command("view")
@path_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PATH,
    help="Write one HTML file instead of serving.",
)
@click.option("--leaf", metavar="NAME", help="With --output FILE.svg, .png, .pdf: draw this leaf.")
@click.option("--plan", default="", metavar="TEXT|@FILE", help="The mesh and specs of a load.")
@click.option(
    "--diff",
    metavar="OTHER",
    type=PATH,
    help="Compare with another checkpoint, contents too.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the server; by default any free one.",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@as_json
def view_command(
    path: str,
    output: str | None,
    leaf: str | None,
    plan: str,
    diff: str | None,
    port: int,
    no_browser: bool,
    as_json: bool,
) -> None:
    """Look at a checkpoint or a run in the browser.

    The page shows the tree, shards, chunks and values. It is served to this machine alone, at a
    secret address, until Ctrl-C. With --output it becomes one HTML file, without
    values; with --leaf too, the picture of one leaf, as SVG or (with matplotlib) as PNG or PDF. No
    request leaves the machine.

    With --plan "data, model on data=2 x model=4" it also shows a load by that mesh: which rank
    reads which chunks, and how many bytes more than it wants. In a file, a line "mesh data=2 x
    model=4" comes before lines such as "model/*: data, model"; "hosts 2" says on how many hosts the
    ranks are.
    """
    if leaf is not None and output is None:
        raise click.UsageError("--leaf draws to a file: add --output FILE.svg or FILE.png")
    view = _view(path, plan, diff)
    if output is not None:
        _write(view, output, leaf)
    if as_json:
        print_json(view.page)
        return
    if output is not None:
        say(f"{output}: {os.path.getsize(output):,} bytes")
        return
    _serve(view, port, browse=not no_browser and has_screen())


def _serve(view: CheckpointView, port: int, *, browse: bool) -> None:
    """Serve the page to this machine until Ctrl-C."""
    from xckpt.viewer.server import PageServer

    try:
        server = PageServer(view, port)
    except OSError as error:
        raise click.UsageError(f"--port {port}: {error.strerror}") from error
    with server:
        say(f"{server.url} until Ctrl-C")
        sys.stdout.flush()
        if browse:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _view(path: str, plan: str, diff: str | None) -> CheckpointView:
    import xckpt

    try:
        with progress_bar("comparing") if diff else nullcontext() as bar:
            options = xckpt.LoadOptions(progress=bar)
            return xckpt.view(path, plan=_text(plan), diff=diff, options=options)
    except ValueError as error:
        if isinstance(error, xckpt.PathError) or not plan:
            raise
        raise click.UsageError(f"--plan: {error}") from error


def _write(view: CheckpointView, output: str, leaf: str | None) -> None:
    """Write the page, or the picture of a leaf."""
    try:
        view.save(output, leaf)
    except XckptError:
        raise  # some are OSErrors or ValueErrors too, about the checkpoint and not the output
    except OSError as error:
        raise unwritable(output, error) from error
    except ValueError as error:
        message = str(error).replace("save(file, leaf=name)", "add --leaf NAME")
        raise click.UsageError(message) from error
    except ImportError as error:
        raise Failure(str(error)) from error


def _text(plan: str) -> str:
    """A plan as it is given, or the content of the file after ``@``."""
    if not plan.startswith("@"):
        return plan
    try:
        with open(plan[1:], encoding="utf-8") as file:
            text = file.read(MAX_PLAN + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--plan: {plan[1:]} cannot be read: {error}") from error
    if len(text) > MAX_PLAN:
        raise click.UsageError(f"--plan: {plan[1:]} is longer than a plan can be (1 MiB)")
    return text


def has_screen() -> bool:
    """Whether a browser would open a window, rather than take over the terminal."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in screens)
