"""Savers that are recorded, or cut off: processes that save, one forked for each action.

Starting Python with an implementation takes seconds, forking milliseconds; and a library with
threads of its own survives no fork once it was used. So:

1. `Recorder` starts a process that imports the implementation and what it needs, and uses nothing.
2. For each action that process forks another one, which calls ``function(implementation, *args)``.
3. The forked process runs free (`Recorder.do`), or under a `Tracer` that lists its operations on
   files (`Recorder.record`) and may kill it before one of them (`Recording.killed`), or until it is
   killed at a moment in seconds (`Recorder.kill`).

Functions and arguments travel by pickle between processes of this program; functions are named, so
they must stand at the top of a module.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from conformance.disk import Image, Operation
from conformance.implementation import Array, Box, Held, Implementation, Refused, Shard, find
from conformance.tracing import CannotRecordError, Tracer

__all__ = [
    "ActionError",
    "CannotRecordError",
    "Recorder",
    "Recording",
    "image_of",
    "memory",
    "replay",
]

SECONDS = 30
"""How long an action may take."""

SECONDS_TO_SAVE = 20
"""How long a forked process may take to save a few bytes."""

_REFUSED = 77
_MOST_TEXT = 60_000
"""What fits into a pipe that nobody reads yet."""


class ActionError(Exception):
    """An action raised; the message is its traceback."""


class TooLateError(ActionError):
    """It took too long."""


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
            CannotRecordError: forked processes of it cannot save.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, _portable(implementation)))
        self._process.start()
        there.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(implementation, *args)`` in a process of its own.

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
            CannotRecordError: its operations cannot be told.
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

    def _answer(self) -> Any:
        if not self._pipe.poll(2 * SECONDS):
            raise ActionError(f"no answer within {2 * SECONDS} seconds")
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
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def nothing(implementation: Implementation) -> None:
    """An action that does nothing."""


def _portable(implementation: Implementation) -> Implementation | str:
    """Something for another process to have the implementation from."""
    module = type(implementation).__module__
    named = getattr(sys.modules.get(module), "IMPLEMENTATION", None)
    return module if named is implementation else implementation


def _serve(pipe: Connection, portable: Implementation | str) -> None:
    """Carry out orders until the pipe is closed."""
    try:
        implementation = find(portable) if isinstance(portable, str) else portable
        _import_what_a_save_imports(implementation)
        pipe.send(("done", None))
    except CannotRecordError as error:
        pipe.send(("cannot", str(error)))
        return
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    while True:
        try:
            order, function, args, more = pipe.recv()
        except EOFError:
            return
        try:
            with _limited(SECONDS):
                answer = _carry_out(order, partial(function, implementation, *args), more)
            pipe.send(("done", answer))
        except (CannotRecordError, TooLateError) as error:
            # Whether the library hangs, or only its forked process, cannot be told from here.
            pipe.send(("cannot", str(error)))
        except Refused as error:
            pipe.send(("refused", str(error)))
        except ActionError as error:
            pipe.send(("failed", str(error)))


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise `TooLateError` when it takes longer."""

    def late(*_: object) -> None:
        raise TooLateError(f"it takes longer than {seconds} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _carry_out(order: str, action: Callable[[], None], more: Any) -> object:
    child = _Child(action)
    try:
        return _let_run(child, order, more)
    except ActionError:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        raise


def _let_run(child: _Child, order: str, more: Any) -> object:
    if order == "record":
        root, most = more
        tracer = Tracer(child.process, root, most=most)
        child.start()
        status = tracer.run()
        child.end(status, killed=tracer.killed)
        return tracer.operations, tracer.killed
    child.start()
    killed = False
    if order == "kill":
        deadline = time.monotonic() + more
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child.process, os.WNOHANG)
            if ended:
                child.end(status)
                return False
            time.sleep(0.0002)
        os.kill(child.process, signal.SIGKILL)
        killed = True
    status = os.waitpid(child.process, 0)[1]
    killed = killed and os.WIFSIGNALED(status)
    child.end(status, killed=killed)
    return killed


class _Child:
    """A forked process that waits for its start, calls something, and tells what it raised."""

    def __init__(self, action: Callable[[], None]) -> None:
        go, self._go = os.pipe()
        self._errors, errors = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._go)
            os.read(go, 1)
            code = 0
            try:
                action()
            except Refused as error:
                os.write(errors, str(error).encode()[:_MOST_TEXT])
                code = _REFUSED
            except BaseException:
                os.write(errors, traceback.format_exc().encode()[-_MOST_TEXT:])
                code = 1
            os._exit(code)
        os.close(go)
        os.close(errors)

    def start(self) -> None:
        os.write(self._go, b"!")
        os.close(self._go)

    def end(self, status: int, *, killed: bool = False) -> None:
        with os.fdopen(self._errors, "rb") as stream:
            error = stream.read().decode()
        if status and not killed:
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _REFUSED:
                raise Refused(error)
            raise ActionError(error or f"the process ended with status {status}")


def _import_what_a_save_imports(implementation: Implementation) -> None:
    """Have a forked process save once, and import here what it had to import.

    Importing most libraries is harmless before a fork; using them is not. Where the imports start
    threads, every forked process makes them anew.

    Raises:
        ActionError: the implementation cannot save.
        CannotRecordError: it cannot in a forked process.
    """

    def save() -> str:
        with _limited(SECONDS_TO_SAVE):
            return _told_by_child(lambda: _modules_of_a_save(implementation))

    try:
        names = save().split()
        if _told_by_child(lambda: str(_threads_after(names))) == "1":
            _import_all(names)
            save()
    except TooLateError as error:
        raise CannotRecordError(f"a forked process cannot save: {error}") from error


def _modules_of_a_save(implementation: Implementation) -> str:
    _save_something(implementation)
    return " ".join(sorted(sys.modules))


def _threads_after(names: Sequence[str]) -> int:
    _import_all(names)
    return len(os.listdir("/proc/self/task"))


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _told_by_child(tell: Callable[[], str]) -> str:
    """What a function returns in a forked process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with os.fdopen(writing, "w") as stream:
                stream.write(tell())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writing)
    try:
        with os.fdopen(reading) as stream:
            told = stream.read()
        if os.waitpid(process, 0)[1]:
            raise ActionError("the implementation cannot save; its error is above")
    except ActionError:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise
    return told


def _save_something(implementation: Implementation) -> None:
    """Two ranks save an array by rows and another of which both hold all: everybody can."""
    rows, both = Array((4, 2), "float32"), Array((5,), "float32")
    whole = Shard(Box((0,), (5,)), np.ones(5, np.float32))
    ranks = [
        {
            "rows": Held(rows, (Shard(Box((row, 0), (2, 2)), np.ones((2, 2), np.float32)),)),
            "both": Held(both, (whole,)),
        }
        for row in (0, 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        implementation.save(Path(folder) / "checkpoint", ranks)
