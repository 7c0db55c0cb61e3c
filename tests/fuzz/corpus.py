"""The saved corpus: for each target the inputs that reach all that was reached, one a line.

A line is an input in base64. libFuzzer wants a folder of files, which `unpack` makes and `pack`
reads back.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["CORPUS", "inputs", "pack", "unpack"]

CORPUS = Path(__file__).parent / "corpus"


def inputs(target: str) -> list[bytes]:
    """The saved inputs of a target."""
    file = CORPUS / f"{target}.txt"
    lines = file.read_text().split() if file.exists() else []
    return [base64.b64decode(line, validate=True) for line in lines]


def unpack(target: str, folder: Path) -> None:
    """Put each saved input into a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for content in inputs(target):
        (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)


def pack(target: str, contents: Iterable[bytes]) -> None:
    """Save inputs, the shortest first."""
    lines = [base64.b64encode(each).decode() for each in sorted(set(contents), key=_order)]
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines if line))


def _order(content: bytes) -> tuple[int, bytes]:
    return len(content), content
