"""The command `xckpt view`: a checkpoint in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser

import click

from xckpt.cli.output import say


@click.command("view")
@click.argument("path")
@click.option("-o", "--output", metavar="FILE", help="Write one HTML file instead of serving.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="By default any free one.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def view_command(path: str, output: str | None, port: int, no_browser: bool) -> None:
    """Look at a checkpoint in the browser: its tree, its shards and chunks, its values.

    The page is served to this machine alone, under an address that nobody can guess, until it is
    interrupted. With --output it is one HTML file, without values. No request leaves the machine.
    """
    import xckpt

    view = xckpt.view(path)
    if output is not None:
        try:
            view.save(output)
        except OSError as error:
            raise click.UsageError(f"{output} cannot be written: {error.strerror}") from error
        say(f"{output}: {os.path.getsize(output):,} bytes")
        return
    from xckpt.viewer.server import PageServer

    try:
        server = PageServer(view, port)
    except OSError as error:
        raise click.UsageError(f"--port {port}: {error.strerror}") from error
    with server:
        say(f"{server.url} until Ctrl-C")
        sys.stdout.flush()
        if not no_browser and has_screen():
            webbrowser.open(server.url)
        server.serve_forever()


def has_screen() -> bool:
    """Whether a browser would open a window, rather than take over the terminal."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in screens)
