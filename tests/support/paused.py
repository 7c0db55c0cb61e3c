"""A process that forks a call and pauses it before one of its operations on files.

A line on stdin is a `Call`; the answer is an `Outcome`. While the call is paused, another line lets
it go on. Operations are those of `tests.support.savers`, looks at files, and the answers of
TensorStore.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

import xckpt
import xckpt.api.gc
import xckpt.api.load
import xckpt.api.places
import xckpt.engine.load
import xckpt.engine.save  # what a call imports is to be there before the operations are counted
import xckpt.formats.own_files
import xckpt.manager
import xckpt.numpy
import xckpt.storage.commit.collect
import xckpt.storage.copy_checkpoint
from tests.support.line_process import LineProcess
from tests.support.savers import OPERATIONS, commit_by, state
from xckpt.storage import location

PAUSED = "paused"
DONE = "done"


class Call(msgspec.Struct):
    """What shall be called, and when it is to pause."""

    call: str
    path: str
    operation: int
    """Pause before the n-th operation on files; 0 for never."""
    place: str = "exchange"


class Outcome(msgspec.Struct):
    """`PAUSED`, `DONE` or the name of an error's class, and at what, or with which message."""

    how: str
    what: str = ""
    ours: bool = True
    """Whether the error is one of xckpt."""


def call(name: str, path: str | Path, place: str = "exchange") -> Outcome:
    """Make a call, and say what became of it.

    Args:
        name: of `CALLS`.
        path: of the checkpoint; a sibling, and the source of a copy, have names made of it.
        place: how a save commits, of `tests.support.savers.PLACES`.
    """
    try:
        CALLS[name](Path(path))
    except Exception as error:
        return Outcome(type(error).__name__, str(error), isinstance(error, xckpt.XckptError))
    return Outcome(DONE)


def source_of(path: Path) -> Path:
    """Where the checkpoint is that a copy to a path is taken from."""
    return path.parent.parent / "source"


def _save(number: int) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        xckpt.save(path, state(number), overwrite=True)

    return save


def _copy(path: Path) -> None:
    xckpt.copy(source_of(path), path, overwrite=True)


def _gc(path: Path) -> None:
    xckpt.gc(path.parent)


def _delete_step(path: Path) -> None:
    with xckpt.CheckpointManager(path.parent) as manager:
        manager.delete(int(path.name))


def _save_sibling(path: Path) -> None:
    xckpt.save(path.with_name("7"), state(7), overwrite=True)


CALLS: dict[str, Callable[[Path], object]] = {
    "save": _save(101),
    "save another": _save(102),
    "save a sibling": _save_sibling,
    "delete": xckpt.delete,
    "delete a step": _delete_step,
    "copy": _copy,
    "gc": _gc,
    "load": xckpt.load,
}


class Paused(LineProcess):
    """The process, seen from a test."""

    def __init__(self) -> None:
        super().__init__("tests.support.paused")

    def begin(self, message: Call) -> Outcome:
        """Begin a call; its outcome, or where it is paused."""
        return msgspec.json.decode(self.ask(message), type=Outcome)

    def go_on(self) -> Outcome:
        """Let the paused call go on to its end."""
        return msgspec.json.decode(self.ask(Outcome("go on")), type=Outcome)


def main() -> None:
    # Unbuffered, because a child reads on where its parent stands.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in iter(lines.readline, b""):
            child = os.fork()
            if child == 0:
                _run(msgspec.json.decode(line, type=Call), lines.readline)
            os.waitpid(child, 0)


def _run(message: Call, wait: Callable[[], bytes]) -> None:
    """Make a call that pauses; never returns."""
    commit_by(message.place)
    _pause_before(message.operation, str(Path(message.path).parent), wait)
    _tell(call(message.call, message.path, message.place))
    os._exit(0)


def _tell(outcome: Outcome) -> None:
    os.write(1, msgspec.json.encode(outcome) + b"\n")


def _pause_before(operation: int, below: str, wait: Callable[[], bytes]) -> None:
    seen = 0
    one_at_a_time = threading.RLock()

    def count(event: str, what: object) -> None:
        nonlocal seen
        with one_at_a_time:
            seen += 1
            if seen == operation:
                _tell(Outcome(PAUSED, f"{event} {what}"))
                wait()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        at = arguments[0] if arguments else ""
        if event in OPERATIONS and (event != "open" or below in str(at)):
            count(event, at)

    def stat(at: os.PathLike[str], **options: bool) -> os.stat_result:
        if below in str(at):
            count("os.stat", at)
        return real_stat(at, **options)

    real, real_stat = location.answer, os.stat

    def answer(asked: object, *others: object) -> object:
        answered = real(asked, *others)  # pyright: ignore
        count("answer", others)
        return answered

    os.stat = stat
    for module in list(sys.modules.values()):
        if getattr(module, "answer", None) is real:
            vars(module)["answer"] = answer
    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
