"""The command line: `xckpt ls`, `info`, `cat`, `stats`, `diff` and others.

`main` is the console script. The commands themselves need click and rich, which the extra ``cli``
installs; a training job that only saves and loads does without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from io import TextIOWrapper
from typing import NoReturn

from xckpt.api.save import names_limits
from xckpt.errors import XckptError

__all__ = ["main"]

UNANSWERED = 2
"""Exit code of a command that cannot answer: wrong usage, no checkpoint, a missing package."""

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    try:
        _run()
    except (KeyboardInterrupt, ImportError) as error:  # before there is a command to stop
        if not is_interrupt(error):
            raise
        end_interrupted()
    except XckptError as error:  # this process lacks what even an import needs
        sys.stderr.write(f"xckpt: {error}\n")
        sys.exit(UNANSWERED)


@names_limits
def _run() -> None:
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed by the shell, as in `xckpt gc . >&-`
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115  # for the process's life
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, TextIOWrapper):  # its encoding may lack characters of a name
            written.reconfigure(errors="backslashreplace")
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        words = " and ".join(missing)
        # Not 1, which says that a checkpoint is damaged.
        sys.stderr.write(f"xckpt: the command line needs {words}: pip install 'xckpt[cli]'\n")
        sys.exit(UNANSWERED)
    from xckpt.cli.commands import commands

    try:
        commands()
    except OSError:  # stderr does not take the line that says what is wrong with the arguments
        sys.exit(UNANSWERED)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C; a C library that is being imported makes an ImportError of it.

    Example:
        >>> is_interrupt(KeyboardInterrupt()), is_interrupt(ImportError("no such module"))
        (True, False)
    """
    stopped = error.__cause__ if isinstance(error, ImportError) else error
    return isinstance(stopped, KeyboardInterrupt)


def end_interrupted(lines: Iterable[str] = ()) -> NoReturn:
    """End a command on Ctrl-C, with a line on stderr.

    Args:
        lines: more lines, without control characters.

    Raises:
        SystemExit: always.
    """
    sys.stderr.writelines(f"xckpt: {line}\n" for line in ("interrupted", *lines))
    sys.stderr.flush()
    sys.exit(INTERRUPTED)
