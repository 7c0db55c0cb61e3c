"""What the sinks of other libraries' formats share: an output that is staged, and then named.

1. `StagedSink.prepare` plans the whole output, which finds everything that the format cannot carry.
2. It makes a staging folder (`xckpt.storage.commit.output`) and has the format lay its output out
   there; or it attaches to one that another process has begun for the very same output.
3. Boxes are written into the staging folder, by every process that has opened it.
4. `StagedSink.commit` syncs and renames.

The abstract methods are what a format has of its own.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.values import encode_value, value_kind
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.commit.output import OutputPath, StagedOutput
from xckpt.storage.foreign.paths import local_path

__all__ = ["StagedSink", "chunk_of", "other_files", "value_problems"]


class StagedSink(ABC):
    """A `TensorSink` on a local file system.

    Args:
        path: the file or folder to be.
        overwrite: replace what is there, if it is an output of the same format.
    """

    single = False
    """Whether the output is one file and no folder."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = local_path(path)
        self.overwrite = overwrite
        self._staging: StagedOutput | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._values: Mapping[str, object] = {}

    @property
    def folder(self) -> Path:
        """The folder that takes the files, until the output has its name."""
        assert self._staging is not None
        return self._staging.folder

    def prepare(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, object],
        metadata: Mapping[str, str],
        *,
        attach: str = "",
    ) -> str:
        """Check everything and lay it out, or attach to it; see `TensorSink.prepare`."""
        self._specs, self._values = dict(specs), dict(values)
        layout = self._digest(metadata, self._plan(metadata))
        output = OutputPath.of(
            self.path, self._foreign, overwrite=self.overwrite, single=self.single
        )
        if attach:
            self._staging = output.attach(attach, layout)
            self._open()
            return attach
        self._staging = output.begin()
        try:
            self._lay_out()
            self._staging.note(layout)
            self._open()
        except BaseException:
            self.abort()
            raise
        return self._staging.token

    @abstractmethod
    def _plan(self, metadata: Mapping[str, str]) -> object:
        """Decide on everything that will be written of the specs and values; touch nothing.

        Returns:
            What was decided, as JSON: processes write to one output only if they agree on it.

        Raises:
            UnsupportedLeafError: leaves that the format lacks; all are listed.
        """

    def _digest(self, metadata: Mapping[str, str], decided: object) -> bytes:
        """One for each output: what it is made of, and how."""
        specs = [[name, spec.shape, spec.dtype] for name, spec in self._specs.items()]
        values = [[n, value_kind(v), encode_value(v)] for n, v in self._values.items()]
        told = json.dumps([type(self).__name__, specs, values, dict(metadata), decided])
        return blake2b(told.encode(), digest_size=16).digest()

    @abstractmethod
    def _lay_out(self) -> None:
        """Write what is known before any box."""

    @abstractmethod
    def _open(self) -> None:
        """Get ready to write boxes into what is laid out, by this process or by another."""

    @abstractmethod
    def chunks(self, name: str) -> tuple[int, ...]:
        """Elements of each dimension that must be written together; see `TensorSink.chunks`."""

    def write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        """Write a box of whole chunks; see `TensorSink.write`."""
        if data.dtype == np.bool_:
            data = np.asarray(data.view(np.uint8) != 0)  # Memory may hold other bytes than 0 and 1.
        self._write(name, box, data)

    @abstractmethod
    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        """Write a box, whose bools are 0 or 1."""

    def commit(self) -> None:
        """Sync and rename; see `TensorSink.commit`."""
        assert self._staging is not None
        self._close()
        self._staging.publish()

    def abort(self) -> None:
        """Remove what was written."""
        self._close()
        if self._staging is not None:
            self._staging.abort()

    def close(self) -> None:
        """Release files, memory and the claim; what was written stays."""
        self._close()
        if self._staging is not None:
            self._staging.release()

    @abstractmethod
    def _close(self) -> None:
        """Release files and memory."""

    @staticmethod
    @abstractmethod
    def _foreign(path: Path) -> str:
        """Why what is there is no output of this format; empty if it is one."""


def other_files(folder: Path, is_ours: Callable[[str], bool]) -> str:
    """Why a folder is foreign, if files of other kinds lie in it; empty if none do."""
    others = sorted(each.name for each in folder.iterdir() if not is_ours(each.name))
    return f"it holds other files too: {', '.join(others[:5])}" if others else ""


def chunk_of(spec: TensorSpec, target_bytes: int) -> tuple[int, ...]:
    """The shape of chunks of about ``target_bytes``, whole in the fastest dimensions.

    Example:
        >>> chunk_of(TensorSpec((1000, 8, 4), "int8"), 100)
        (2, 8, 4)
        >>> chunk_of(TensorSpec((3, 1000), "float32"), 400)
        (1, 100)
    """
    options = GridOptions(target_bytes)
    grid = choose_grid(spec.shape, item_size(spec.dtype), Boxes.whole(spec.shape), options)
    return tuple(grid.chunks[0].tolist())


def value_problems(values: Mapping[str, object]) -> list[str]:
    """What is to be said of the leaves that are no values of ours.

    Example:
        >>> value_problems({"step": 7, "seen": {1}})
        ['seen: a set is no value that can be written']
    """
    return [
        f"{name}: a {type(value).__qualname__} is no value that can be written"
        for name, value in values.items()
        if value_kind(value) is None
    ]
