"""Records what a save does to files, or cuts it off, in separate processes.

1. `Recorder` starts a process that has a new one for each action: it calls
   ``function(implementation, *args)``.
2. That runs free (`Recorder.do`), or under a `Tracer` that lists its operations on files
   (`Recorder.record`) and may kill it before one of them (`Recording.killed`), or until it is
   killed at a moment in seconds (`Recorder.kill`).
3. `image_of` and `replay` turn a folder into a value and back.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from conformance.crash.disk import Image
from conformance.crash.operations import Operation
from conformance.crash.savers import SECONDS, ActionError, CannotRecordError, serve
from conformance.implementation import Implementation, Refused

__all__ = [
    "ActionError",
    "CannotRecordError",
    "Recorder",
    "Recording",
    "image_of",
    "memory",
    "replay",
]


@dataclass(frozen=True, slots=True)
class Recording:
    """What an action did to the files of a folder."""

    before: Image
    """What the folder held."""
    operations: tuple[Operation, ...]
    killed: bool
    """Whether it was killed before its end, as was asked for."""


class Recorder:
    """The process that forks savers, seen from here; a context."""

    def __init__(self, implementation: Implementation) -> None:
        """Start it for an implementation: one that its module names, or that pickle takes.

        Raises:
            ActionError: the implementation cannot be imported there, or cannot save.
            CannotRecordError: no new process of it can save in time.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, _portable(implementation)))
        self._process.start()
        there.close()
        try:
            self.forks: bool = self._answer(3 * SECONDS)
            """Whether an action takes milliseconds; else seconds."""
        except BaseException:
            self.close()
            raise

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(implementation, *args)`` in a separate process.

        Raises:
            ActionError: it raised, or ended otherwise.
            Refused: that is what it raised.
        """
        self._ask("do", function, args, None)

    def record(
        self, folder: Path, function: Callable[..., None], *args: Any, most: int | None = None
    ) -> Recording:
        """Do so, and list the operations on files below a folder.

        Args:
            folder: below it operations count.
            function: what to call, as in `do`.
            args: its arguments after the implementation.
            most: how many operations may happen; before the next one the process is killed.

        Raises:
            ActionError: it raised, or ended otherwise.
            Refused: that is what it raised.
            CannotRecordError: it did something that no operation expresses.
        """
        root = os.path.realpath(folder)
        before = image_of(Path(root))
        operations, killed = self._ask("record", function, args, (root, most))
        return Recording(before, tuple(operations), killed)

    def kill(self, seconds: float, function: Callable[..., None], *args: Any) -> bool:
        """Do so, and kill the process after some seconds; whether it had not ended by then.

        Raises:
            ActionError: it raised, or ended otherwise.
            Refused: that is what it raised.
        """
        return self._ask("kill", function, args, seconds)

    def _ask(self, order: str, function: Callable[..., None], args: Any, more: object) -> Any:
        self._pipe.send((order, function, args, more))
        return self._answer()

    def _answer(self, seconds: int = 2 * SECONDS) -> Any:
        if not self._pipe.poll(seconds):
            raise ActionError(f"no answer within {seconds} seconds")
        kind, answer = self._pipe.recv()
        if kind == "cannot":
            raise CannotRecordError(answer)
        if kind == "failed":
            raise ActionError(answer)
        if kind == "refused":
            raise Refused(answer)
        return answer

    def can_record(self) -> None:
        """Find out whether anything can be recorded here.

        Raises:
            CannotRecordError: no, and why.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.record(Path(folder), nothing)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def memory() -> str | None:
    """A folder for files that need no disk, if there is one; for ``dir=`` of `tempfile`.

    Saves sync every file, and hundreds of them would wait for the disk.
    """
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def image_of(folder: Path) -> Image:
    """What a folder holds: path -> content of a file, or None for a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def replay(image: Image, folder: Path) -> None:
    """Make a folder that holds an image."""
    folder.mkdir(parents=True)
    for path, content in image.items():
        place = (
            f"{folder}/{path}"  # thousands of images: a `Path` for each would take a third of this
        )
        if content is None:
            os.mkdir(place)
        else:
            with open(place, "wb") as stream:
                stream.write(content)


def nothing(implementation: Implementation) -> None:
    """An action that does nothing."""


def _portable(implementation: Implementation) -> Implementation | str:
    """Something for another process to have the implementation from."""
    module = type(implementation).__module__
    named = getattr(sys.modules.get(module), "IMPLEMENTATION", None)
    return module if named is implementation else implementation
