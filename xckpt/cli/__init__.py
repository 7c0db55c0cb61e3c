"""The command line: `xckpt ls`, `info`, `cat`, `stats`, `diff` and others.

`main` is the console script. The commands themselves need click and rich, which the extra ``cli``
installs; a training job that only saves and loads does without.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        words = " and ".join(missing)
        sys.exit(f"xckpt: the command line needs {words}: pip install 'xckpt[cli]'")
    try:
        from xckpt.cli.commands import commands
    except KeyboardInterrupt:  # While modules are imported, before there is a command to stop.
        sys.stderr.write("xckpt: interrupted\n")
        sys.exit(INTERRUPTED)
    commands()
