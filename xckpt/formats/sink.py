"""Where a conversion writes to, when that is no checkpoint of ours: the protocol of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.mapping.spec import TensorSpec

__all__ = ["TensorSink"]


@runtime_checkable
class TensorSink(Protocol):
    """An output that takes named tensors box by box, in any order, and is there at once.

    Names are mapping names (`xckpt.mapping.names`).
    """

    def prepare(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, object],
        metadata: Mapping[str, str],
        *,
        attach: str = "",
    ) -> str:
        """Check that the format can carry all this, then lay it out under a temporary name.

        Args:
            specs: name -> shape and dtype of every tensor.
            values: name -> every leaf that is a Python value.
            metadata: texts that the output is to carry.
            attach: what `prepare` returned elsewhere for the same arguments: take part in that
                output, or go on with it, instead of laying out another.

        Returns:
            A token for others to attach with.

        Raises:
            UnsupportedLeafError: leaves that the format lacks; all are listed.
            CheckpointExistsError: something is at the path that may not be replaced.
            NotACheckpointError: what ``attach`` stands for is gone, or is another output.
            StorageError: the storage refused.
        """
        ...

    def chunks(self, name: str) -> tuple[int, ...]:
        """Elements of each dimension that must be written together.

        Each box given to `write` begins at multiples of these, and ends there or with the tensor.
        1 in each dimension where any box can be written.
        """
        ...

    def write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        """Write a box; from several threads and processes, in any order, again with the same data.

        Raises:
            StorageError: the storage refused.
        """
        ...

    def commit(self) -> None:
        """Give the output its name; called in one process, when every element is written.

        Raises:
            CheckpointExistsError: somebody else has taken the path meanwhile.
            StorageError: the storage refused.
        """
        ...

    def abort(self) -> None:
        """Remove what was written; called in one process."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...
