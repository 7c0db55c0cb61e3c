"""A process that takes a line of JSON on stdin and answers by a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

ROOT = Path(__file__).parents[2]


class LineProcess:
    """A module of the tests that runs in a process of its own, seen from a test.

    Args:
        module: what runs, by its name.
        environment: its environment; this process's own by default.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
        )

    def ask(self, message: msgspec.Struct) -> bytes:
        """Send a message; the line that comes back."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
