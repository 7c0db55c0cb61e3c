"""The independent reader as a reader of golden checkpoints: alone, and as strict as it must be."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from conformance.laws.golden import Read
from conformance.reader import Broken, Checkpoint
from conformance.strict_reader import StrictCheckpoint

__all__ = ["ALONE", "READERS", "IndependentReader"]


class IndependentReader:
    """NumPy, JSON and zarr-python."""

    name = "the independent reader"
    errors: tuple[type[Exception], ...] = (Broken,)
    open: type[Checkpoint] = Checkpoint

    def load(self, path: Path) -> dict[str, Read]:
        checkpoint = self.open(path)
        found: dict[str, Read] = {}
        for name, leaf in checkpoint.leaves.items():
            if leaf["kind"] == "tensor":
                data = checkpoint.read(name)
                found[name] = Read(leaf["dtype"], data.shape, data.tobytes())
            else:
                kind = "bytes" if leaf["type"] == "opaque" else leaf["type"]
                found[name] = Read(kind, None, plain(checkpoint.value(name)))
        return found

    def verify(self, path: Path) -> Sequence[str]:
        return StrictCheckpoint(path).verify()

    def digest(self, data: bytes) -> str:
        return xxhash.xxh3_128_hexdigest(data)


class StrictReader(IndependentReader):
    """It refuses all that a reader must refuse."""

    name = "the independent reader, strict"
    open = StrictCheckpoint


def plain(value: object) -> bytes:
    """A value as ``expected.json`` has it."""
    if value is None:
        return b""
    if isinstance(value, bool | int):
        return str(int(value)).encode()
    if isinstance(value, float | complex):
        parts = [value] if isinstance(value, float) else [value.real, value.imag]
        return struct.pack(f"<{len(parts)}d", *parts)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return bytes(np.frombuffer(value, np.uint8))  # type: ignore[call-overload]


READERS = (StrictReader(),)
ALONE = IndependentReader()
