"""A process that saves to a file system that lacks something, or whose calls fail.

`odd_files.c` stands between the process and the C library; it is compiled when it is needed. The
process takes commands on stdin, a line of JSON each, and answers in the same way.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import msgspec

from tests.support.line_process import LineProcess

MANY = 5
"""Leaves from which on a save syncs files together, here; see `xckpt.core.commit`."""

ROOT = Path(__file__).parents[2]


class Attempt(msgspec.Struct):
    """A save, and the file system under it."""

    path: str
    step: int = 1
    leaves: tuple[str, ...] = ("a/w", "b")
    overwrite: bool = True
    lacks: str = ""
    """See ``ODD_LACKS`` in `odd_files.c`; the others are there too."""
    fails: str = ""
    names: int = 0
    base: str = ""
    call: str = "save"
    """``"copy"`` and ``"convert"`` take the base as the source; ``"manager"`` saves a step of the
    run that the path is in, and keeps no other."""


class Outcome(msgspec.Struct):
    """What came of it, seen without faults."""

    error: str
    """Class of the exception; empty if the save succeeded."""
    text: str
    there: int
    """The step that loads at the path, verified; 0 if there is no checkpoint."""
    left: list[str]
    """Names beside the path."""
    shared: int = 0
    """Bytes that were not written, for the base has them."""


class OddFiles(LineProcess):
    """The process, seen from a test."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Compile into a folder; what is below ``root`` is odd."""
        library = folder / "odd_files.so"
        source = Path(__file__).with_suffix(".c")
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
        subprocess.run([*compiler, "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "ODD_ROOT": os.path.realpath(root)}
        super().__init__("tests.support.odd_files", environment)

    def run(self, attempt: Attempt) -> Outcome:
        """Save as the attempt says."""
        return msgspec.json.decode(self.ask(attempt), type=Outcome)


def main() -> None:
    for line in sys.stdin:
        outcome = _attempt(msgspec.json.decode(line, type=Attempt))
        print(msgspec.json.encode(outcome).decode(), flush=True)


def _attempt(attempt: Attempt) -> Outcome:
    import numpy as np

    import xckpt
    from xckpt.core import commit

    commit.MANY = MANY
    state: dict[str, Any] = {}
    for leaf in attempt.leaves:
        *above, name = leaf.split("/")
        inner = state
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = np.full((64, 64), attempt.step, np.int32)
    _set(ODD_LACKS=attempt.lacks, ODD_FAILS=attempt.fails, ODD_NAMES=attempt.names or "")
    error = text = ""
    taken: list[xckpt.Metrics] = []
    options = xckpt.SaveOptions(metrics=taken.append)
    state["step"] = attempt.step
    try:
        _make(attempt, state, options)
    except Exception as failure:
        error, text = type(failure).__name__, str(failure)
    _set(ODD_LACKS=attempt.lacks, ODD_FAILS="", ODD_NAMES="")
    there = 0
    try:
        checkpoint = xckpt.open(attempt.path)
        assert checkpoint.verify() == []
        loaded = xckpt.load(attempt.path)
        for leaf in checkpoint:
            assert np.all(reduce(getitem, leaf.split("/"), loaded) == loaded["step"])
        there = loaded["step"]
    except xckpt.NotACheckpointError:
        pass
    parent = os.path.dirname(attempt.path)
    left = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    return Outcome(error, text, there, left, sum(each.shared for each in taken))


def _make(attempt: Attempt, state: dict[str, Any], options: Any) -> None:
    """The call itself."""
    import xckpt
    from xckpt.convert import convert
    from xckpt.policies import EverySteps, Latest

    path, overwrite, base = attempt.path, attempt.overwrite, attempt.base or None
    if attempt.call == "copy":
        xckpt.copy(attempt.base, path, overwrite=overwrite)
    elif attempt.call == "convert":
        convert(attempt.base, path, overwrite=overwrite, options=options)
    elif attempt.call == "manager":
        root, policies = os.path.dirname(path), [EverySteps(1)]
        with xckpt.CheckpointManager(root, save=policies, keep=[Latest(1)], options=options) as run:
            run.save(attempt.step, state)
    else:
        xckpt.save(path, state, overwrite=overwrite, base=base, options=options)


def _set(**settings: object) -> None:
    os.environ.update({name: str(value) for name, value in settings.items()})
    ctypes.CDLL(None).odd_reset()


if __name__ == "__main__":
    main()
