"""The worked example in spec/example.md: a tiny checkpoint, saved anew and put into the text.

A file is spelled out in a block under a line such as "`ckpt/w/zarr.json`, 123 bytes:": documents as
they are, other files in hexadecimal, 16 bytes a line.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import xckpt
from tests.support.sharded_arrays import rows

BLOCK = re.compile(
    r"^`(ckpt/[^`]+)`, ([0-9,]+) bytes?:\n\n```\w*\n(.*?)```$", re.MULTILINE | re.DOTALL
)


def state() -> dict[str, object]:
    """A regular leaf whose last chunk is padded, a leaf in pieces, a value, a list, odd names."""
    return {
        "w": np.array([[1, -2, 3], [4, 5, 6]], np.int16),
        "a/b": [np.arange(10, 21, dtype=np.uint8)],
        "p": rows(np.arange(13, dtype=np.uint8), 3, 7),
        "step": 7,
    }


def save(path: Path) -> None:
    """Save the example."""
    xckpt.save(path, state(), metadata={"run": "a"}, options=xckpt.SaveOptions(chunk_bytes=6))


def blocks(path: Path) -> dict[str, str]:
    """What each file of a checkpoint is in the text."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {f"ckpt/{file.relative_to(path)}": spelled(file) for file in files}


def spelled(file: Path) -> str:
    """A file's bytes as text."""
    content = file.read_bytes()
    if file.suffix == ".json":
        return content.decode() + "\n"
    lines = [content[start : start + 16] for start in range(0, len(content), 16)]
    return "".join(f"{line.hex(' ')}\n" for line in lines)


def written(text: str, path: Path) -> str:
    """The text with the blocks as the checkpoint at ``path`` has them."""
    found = blocks(path)

    def block(match: re.Match[str]) -> str:
        name = match[1]
        size = (path.parent / name).stat().st_size
        language = "json" if name.endswith(".json") else "text"
        unit = "byte" if size == 1 else "bytes"
        return f"`{name}`, {size:,} {unit}:\n\n```{language}\n{found[name]}```"

    return BLOCK.sub(block, text)
