"""xckpt saves; the independent reader of the format, which imports nothing of xckpt's, loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from conformance.cases import numpy_dtype
from conformance.implementation import Array, Box, Wanted
from conformance.implementations.xckpt import Xckpt
from conformance.reader import Checkpoint
from conformance.strict_reader import StrictCheckpoint

__all__ = ["IMPLEMENTATION", "SavedAndRead"]

Data = NDArray[np.generic]


class SavedAndRead(Xckpt):
    """Everything but saving and deleting is the reader's."""

    name = f"{Xckpt.name}, read by the independent reader"
    golden_readers = "conformance.implementations.reader_golden"

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        checkpoint = Checkpoint(path)
        leaves = {unquote(name): name for name in checkpoint.leaves}
        stored = {name: checkpoint.leaves[leaf]["dtype"] for name, leaf in leaves.items()}

        def read(name: str, box: Box) -> Data:
            # It gives integers where NumPy alone has no such dtype.
            found = checkpoint.read(leaves[name], box.offsets, box.sizes)
            return found.view(numpy_dtype(stored[name]))

        return [
            {name: [read(name, box) for box in wanted.boxes] for name, wanted in rank.items()}
            for rank in ranks
        ]

    def list(self, path: Path) -> dict[str, Array]:
        leaves = Checkpoint(path).leaves
        return {
            unquote(name): Array(tuple(leaf["shape"]), leaf["dtype"])
            for name, leaf in leaves.items()
        }

    def verify(self, path: Path) -> Sequence[str]:
        return StrictCheckpoint(path).verify()


IMPLEMENTATION = SavedAndRead()
