"""Processes that save: forked from one that has imported everything, or started fresh.

Starting Python with an implementation takes seconds, forking milliseconds; but a library with
threads of its own survives no fork once it was used, and some do not even before. So:

1. `serve` is a process that imports the implementation and what it needs, and uses nothing.
2. If a forked process of it can save, it forks one for each order; if that hangs, it starts one.
3. The process runs free, or under a `Tracer`, or until it is killed at a moment in seconds.

Functions and arguments travel by pickle between processes of this program; functions are named, so
they must stand at the top of a module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle  # between processes of this program, as multiprocessing does
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from conformance.crash.tracing import CannotRecordError, Tracer
from conformance.implementation import Array, Box, Held, Implementation, Refused, Shard, find

__all__ = ["SECONDS", "ActionError", "CannotRecordError", "TooLateError", "serve"]

SECONDS = 60
"""How long an action may take."""

SECONDS_TO_SAVE = 20
"""How long a new process may take to save a few bytes."""

_REFUSED = 77
_MOST_TEXT = 60_000
"""How much a pipe holds before its reader starts; bytes."""


class ActionError(Exception):
    """An action raised; the message is its traceback."""


class TooLateError(ActionError):
    """It took too long."""


def serve(pipe: Connection, portable: Implementation | str) -> None:
    """Say whether processes are forked, and carry out orders until the pipe is closed."""
    try:
        implementation = implementation_of(portable)
        forks = _can_fork(implementation)
        if not forks:
            _started_once(portable)
        pipe.send(("done", forks))
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
                if forks:
                    child: _Child = _Forked(partial(function, implementation, *args))
                else:
                    child = _Started(portable, function, args)
                answer = _carry_out(child, order, more)
            pipe.send(("done", answer))
        except (CannotRecordError, TooLateError) as error:
            # A hang of the library looks the same here as a hang of its forked process alone.
            pipe.send(("cannot", str(error)))
        except Refused as error:
            pipe.send(("refused", str(error)))
        except ActionError as error:
            pipe.send(("failed", str(error)))


def implementation_of(portable: Implementation | str) -> Implementation:
    """An implementation, or the one that a module names."""
    return find(portable) if isinstance(portable, str) else portable


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


class _Child(Protocol):
    """A process that waits for its start, calls something, and tells what it raised."""

    process: int

    def start(self) -> None: ...

    def end(self, status: int, *, killed: bool = False) -> None:
        """Raise what it raised."""
        ...


def _carry_out(child: _Child, order: str, more: Any) -> object:
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


def _act(action: Callable[[], None], go: int, errors: int) -> None:
    """What the process does; it never returns."""
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


class _Forked:
    """A forked process."""

    def __init__(self, action: Callable[[], None]) -> None:
        go, self._go = os.pipe()
        self._errors, errors = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._go)
            _act(action, go, errors)
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


class _Started(_Forked):
    """A new interpreter that has imported the implementation."""

    def __init__(
        self, portable: Implementation | str, function: Callable[..., None], args: Any
    ) -> None:
        go, self._go = os.pipe()
        self._errors, errors = os.pipe()
        reading, writing = os.pipe()
        ends = (go, errors, writing)
        command = [sys.executable, "-W", "ignore", "-m", __name__, *map(str, ends)]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=ends)
        self.process = started.pid
        assert started.stdin is not None
        with started.stdin as stream:
            stream.write(pickle.dumps((portable, function, args)))
        for each in ends:
            os.close(each)
        with os.fdopen(reading) as ready:
            ready.read()
        started.returncode = 0  # it is waited for by its number, not by subprocess


def _main(go: int, errors: int, ready: int) -> None:
    """What a started process does."""
    portable, function, args = pickle.load(sys.stdin.buffer)
    implementation = implementation_of(portable)
    os.close(ready)
    _act(partial(function, implementation, *args), go, errors)


def _started_once(portable: Implementation | str) -> None:
    """Have a started process save.

    Raises:
        ActionError: the implementation cannot save.
        CannotRecordError: it takes too long.
    """
    try:
        with _limited(SECONDS):
            _carry_out(_Started(portable, save_something, ()), "do", None)
    except TooLateError as error:
        raise CannotRecordError(f"a new process cannot save: {error}") from error


def _can_fork(implementation: Implementation) -> bool:
    """Have a forked process save once, and import here what it had to import.

    Importing most libraries is harmless before a fork; using them is not. Where the imports start
    threads, every forked process makes its own.

    Returns:
        Whether it could save.

    Raises:
        ActionError: the implementation cannot save.
    """

    def save() -> str:
        with _limited(SECONDS_TO_SAVE):
            return _result_in_child(lambda: _modules_of_a_save(implementation))

    try:
        names = save().split()
        if _result_in_child(lambda: str(_threads_after(names))) == "1":
            _import_all(names)
            save()
    except TooLateError:
        return False
    return True


def _modules_of_a_save(implementation: Implementation) -> str:
    save_something(implementation)
    return " ".join(sorted(sys.modules))


def _threads_after(names: Sequence[str]) -> int:
    _import_all(names)
    return len(os.listdir("/proc/self/task"))


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _result_in_child(function: Callable[[], str]) -> str:
    """What a function returns in a forked process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with os.fdopen(writing, "w") as stream:
                stream.write(function())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writing)
    try:
        with os.fdopen(reading) as stream:
            text = stream.read()
        if os.waitpid(process, 0)[1]:
            raise ActionError("the implementation cannot save; its error is above")
    except ActionError:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise
    return text


def save_something(implementation: Implementation) -> None:
    """Two ranks save an array by rows, or if that is refused one of which both hold all."""
    rows, both = Array((4, 2), "float32"), Array((6,), "float32")
    whole = Shard(Box((0,), (6,)), np.ones(6, np.float32))
    ranks = [
        {
            "rows": Held(rows, (Shard(Box((row, 0), (2, 2)), np.ones((2, 2), np.float32)),)),
            "both": Held(both, (whole,)),
        }
        for row in (0, 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            implementation.save(Path(folder) / "checkpoint", ranks)
        except Refused:
            wholes = [{"both": held["both"]} for held in ranks]
            implementation.save(Path(folder) / "checkpoint", wholes)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
