"""Saved through one framework, loaded through another: NumPy, torch, JAX, the independent reader.

The pair follows from the leaves of a case, so that the cases come to all pairs, and the same case
always to the same. A framework that cannot hold a case's dtype or boxes refuses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.implementation import Array, Held, Wanted
from conformance.implementations import reader, xckpt, xckpt_jax, xckpt_torch
from conformance.implementations.xckpt import Xckpt

__all__ = ["IMPLEMENTATION", "Crossed"]

Data = NDArray[np.generic]

SAVERS = (xckpt.IMPLEMENTATION, xckpt_torch.IMPLEMENTATION, xckpt_jax.IMPLEMENTATION)
LOADERS = (*SAVERS, reader.IMPLEMENTATION)
PAIRS = tuple(product(SAVERS, LOADERS))


class Crossed:
    """A pair of frameworks for each case."""

    name = f"{Xckpt.name}, from NumPy, torch or JAX to these or the independent reader"
    even = True
    limits: Sequence[str] = ("dtypes that torch lacks, where torch has a part",)

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        saver, _ = _pair((name, held.array) for rank in ranks for name, held in rank.items())
        saver.save(path, ranks, overwrite=overwrite)

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        _, loader = _pair((name, wish.array) for rank in ranks for name, wish in rank.items())
        return loader.load(path, ranks)

    def list(self, path: Path) -> dict[str, Array]:
        return xckpt.IMPLEMENTATION.list(path)

    def delete(self, path: Path) -> None:
        xckpt.IMPLEMENTATION.delete(path)

    def verify(self, path: Path) -> Sequence[str]:
        return reader.IMPLEMENTATION.verify(path)


def _pair(arrays: Iterable[tuple[str, Array]]) -> tuple[Xckpt, Xckpt]:
    text = repr(sorted({(name, array.shape, array.dtype) for name, array in arrays}))
    return PAIRS[zlib.crc32(text.encode()) % len(PAIRS)]


IMPLEMENTATION = Crossed()
