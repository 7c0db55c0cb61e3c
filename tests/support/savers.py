"""A process that forks savers and kills them; it takes commands on stdin.

Forking is much faster than starting Python anew, and allowed as long as the parent has not used
TensorStore. A command is a line of JSON, `Command`; the answer is a line with the last number that
a saver reported as committed, -1 if none did, or -2 if a saver failed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import numpy as np

import xckpt
import xckpt.engine.save  # what a save imports is to be there before the operations are counted
import xckpt.numpy
from tests.support.line_process import LineProcess
from xckpt.storage.commit import staging

OPERATIONS = {
    "ctypes.dlsym",
    "fcntl.flock",
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
}
"""Audit events of the operations on files that a commit consists of."""

PLACES = ("exchange", "generation", "in place")
"""How a save commits: renaming, exchanging nothing, or renaming nothing (a mount point)."""


class Command(msgspec.Struct):
    """What savers shall do."""

    path: str
    place: str = "exchange"
    first: int = 1
    """Number of the first state to save."""
    most: int = 1000
    """How many to save."""
    savers: int = 1
    """How many processes save at the same time."""
    seconds: float = 10.0
    """When to kill the savers."""
    operation: int = 0
    """Kill the saver before its n-th operation on files; 0 for never."""


def state(number: int) -> dict[str, object]:
    """A state that tells whole ones from mixtures: every leaf holds the number."""
    leaves = {f"leaf{n}": np.full((64, 64), number, np.int32) for n in range(3)}
    return {**leaves, "step": number}


def number_of(loaded: dict[str, object]) -> int:
    """The number of a loaded state.

    Raises:
        AssertionError: it is a mixture.
    """
    numbers = {int(leaf) for value in loaded.values() for leaf in np.unique(np.asarray(value))}
    assert len(numbers) == 1 and len(loaded) == 4, f"a mixture: {numbers}"
    return numbers.pop()


class Savers(LineProcess):
    """The process, seen from a test."""

    def __init__(self) -> None:
        super().__init__("tests.support.savers")

    def run(self, command: Command) -> int:
        """Carry out a command; the last number committed."""
        return int(self.ask(command))


def main() -> None:
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        print(_supervise(command), flush=True)


def _supervise(command: Command) -> int:
    """Fork savers, kill them in time, and read what they reported."""
    reading, writing = os.pipe()
    children = []
    for saver in range(command.savers):
        child = os.fork()
        if child == 0:
            os.close(reading)
            _save(command, saver, writing)
        children.append(child)
    os.close(writing)
    deadline = time.monotonic() + command.seconds
    left = set(children)
    failed = False
    while left and time.monotonic() < deadline:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.remove(child)
                failed |= os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        time.sleep(0.0005)
    for child in left:
        os.kill(child, signal.SIGKILL)
    for child in left:
        os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        reported = [int(line) for line in stream.read().split()]
    if failed:
        return -2
    return reported[-1] if reported else -1


def _save(command: Command, saver: int, writing: int) -> None:
    """Save state after state, and report each; never returns."""
    commit_by(command.place)
    if command.operation:
        _die_before(command.operation)
    code = 0
    try:
        for number in range(command.first, command.first + command.most):
            try:
                xckpt.save(command.path, state(number * command.savers + saver), overwrite=True)
            except xckpt.CheckpointExistsError:
                if command.savers == 1:
                    raise
            os.write(writing, b"%d\n" % number)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        code = 1
    os._exit(code)


def commit_by(place: str) -> None:
    """Have this process's saves commit in a way of `PLACES`."""
    if place == "generation":
        staging.can_exchange = lambda folder: False
    if place == "in place":
        staging.can_rename = lambda folder: False


def _die_before(operation: int) -> None:
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    main()
