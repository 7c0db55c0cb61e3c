"""libFuzzer over one target, through atheris; `__main__` starts this in a process of its own.

python -m tests.fuzz.engine TARGET [what libFuzzer takes]
"""

from __future__ import annotations

import importlib
import shlex
import sys

from tests.fuzz.targets import Judge, limit_address_space, load

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Fuzz a target until libFuzzer ends the process."""
    atheris = importlib.import_module("atheris")  # in .venv-fuzz, not where tests run
    target, *options = arguments
    with atheris.instrument_imports(include=["xckpt"]):
        judge = Judge(load(target))
    judge(b"")  # so that what is made once is there
    limit_address_space()
    # What libFuzzer runs, through a shell, where it wants itself in a process of its own.
    itself = f"{shlex.quote(sys.executable)} -m tests.fuzz.engine {target}"
    atheris.Setup([itself, *options], judge)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
