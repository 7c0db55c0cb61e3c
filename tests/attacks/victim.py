"""A call under attack, and what came of it.

`outcome` makes a call here; `attempt` makes it in a process of its own, which may die, hang, or be
spoilt. What is fair is success, an error of xckpt, or a refused argument; nothing else.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import xckpt
from tests.support.fork_server import context

REFUSED = (TypeError, ValueError)
"""What a wrong argument raises."""


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    kind: str
    """"done", the class of the error, "hang", or "died"."""
    text: str = ""
    value: Any = None
    """What the call returned."""
    seconds: float = 0.0
    xckpt: bool = False
    """Whether the error is one of xckpt's."""
    code: int = 0
    """How the process ended."""

    @property
    def fair(self) -> bool:
        """Whether it is success, an error of xckpt, or a refused argument."""
        return self.kind == "done" or self.xckpt or self.kind in ("TypeError", "ValueError")


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    """Make a call in this process."""
    began = time.monotonic()
    try:
        value = call(*arguments, **named)
    except Exception as error:
        seconds = time.monotonic() - began
        ours = isinstance(error, xckpt.XckptError)
        return Outcome(type(error).__name__, str(error), None, seconds, ours)
    return Outcome("done", "", value, time.monotonic() - began)


def attempt(function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> Outcome:
    """Call a function of a module in a process of its own; what it returns is plain JSON.

    The process is forked from one that has imported all and used nothing, and killed after some
    seconds.
    """
    here, there = context().Pipe(duplex=False)
    process = context().Process(target=_serve, args=(there, dict(os.environ), function, arguments))
    began = time.monotonic()
    process.start()
    there.close()
    try:
        return _answer(here, process, began, seconds)
    finally:
        process.kill()
        process.join()
        here.close()


def _answer(pipe: Connection, process: BaseProcess, began: float, seconds: float) -> Outcome:
    if not pipe.poll(seconds):
        return Outcome("hang", seconds=time.monotonic() - began)
    taken = time.monotonic() - began
    try:
        kind, text, value, ours = json.loads(pipe.recv())
    except (EOFError, ConnectionResetError):
        process.join(seconds)
        return Outcome("died", seconds=taken, code=process.exitcode or 0)
    process.join(seconds)
    code = -999 if process.exitcode is None else process.exitcode
    return Outcome(kind, text, value, taken, ours, code)


def _serve(
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        answer = ("done", "", function(*arguments), False)
    except BaseException as error:
        text = str(error) if isinstance(error, xckpt.XckptError) else traceback.format_exc()
        answer = (type(error).__name__, text, None, isinstance(error, xckpt.XckptError))
    pipe.send(json.dumps(answer))
