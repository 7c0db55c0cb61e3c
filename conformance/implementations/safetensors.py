"""safetensors: whole tensors in one file, of which any slice can be read.

It knows no shards: a rank that holds the whole of a tensor gives it, and anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from conformance.implementation import Array, Held, Refused, Wanted
from conformance.implementations.meshes import by_name

__all__ = ["IMPLEMENTATION", "Safetensors"]

Data = NDArray[np.generic]

KINDS = {
    "BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}  # fmt: skip
"""safetensors' names other than a letter and a number of bits, as NumPy and ml_dtypes have them."""
LETTERS = {"F": "float", "I": "int", "U": "uint"}


class Safetensors:
    """`save_file` and `safe_open`."""

    name = f"safetensors {version('safetensors')}"
    limits: Sequence[str] = (
        "shards: a tensor is saved whole",
        "dtypes that it lacks (complex128, int4)",
        "saying which rank wrote what: one process writes the file",
        "verify: its files carry no checksums",
    )

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        tensors = {name: _whole(held) for name, held in by_name(ranks).items()}
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            if "dtype" not in str(error):
                raise
            raise Refused("a dtype that it lacks") from error

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        with safe_open(path, framework="np") as file:
            whole = {name: file.get_tensor(name) for name in by_name(ranks)}
        return [
            {
                name: [whole[name][(*box.region, ...)] for box in wanted.boxes]
                for name, wanted in rank.items()
            }
            for rank in ranks
        ]

    def list(self, path: Path) -> dict[str, Array]:
        with safe_open(path, framework="np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Array(tuple(stored.get_shape()), _numpy_name(stored.get_dtype()))
                for name, stored in found.items()
            }

    def delete(self, path: Path) -> None:
        path.unlink()

    def verify(self, path: Path) -> Sequence[str]:
        raise Refused("verify: its files carry no checksums")


def _whole(ranks: Sequence[Held]) -> Data:
    """A tensor that one of the ranks holds all of.

    Raises:
        Refused: none does, or the ranks contradict each other.
    """
    array = ranks[0].array
    if any(held.array != array for held in ranks):
        raise Refused("ranks that contradict each other: one process writes the file")
    boxes = {shard.box: shard.data for held in ranks for shard in held.shards}
    if [box.sizes for box in boxes] != [array.shape]:
        raise Refused("shards: a tensor is saved whole")
    return np.ascontiguousarray(*boxes.values()).reshape(array.shape)


def _numpy_name(kind: str) -> str:
    return KINDS.get(kind) or f"{LETTERS[kind[0]]}{kind[1:]}"


IMPLEMENTATION = Safetensors()
