"""An output in another library's format: it is staged, and gets its name once it is complete.

1. `TensorSink.prepare` plans the whole output, which finds everything that the format cannot carry.
2. It makes a staging folder (`xckpt.storage.commit.output`), where the format lays its output out,
   or it continues, or takes part in, what another process has begun for the very same output.
3. Boxes are written into the staging folder, by every process that has opened it.
4. `TensorSink.commit` syncs and renames.

Each format implements the abstract methods.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.names import join_keys
from xckpt.core.text.advice import RENAME
from xckpt.core.text.arguments import named
from xckpt.core.text.printable import in_few
from xckpt.core.values import encode_value, value_kind
from xckpt.errors import UnsupportedLeafError
from xckpt.formats.source import Opaque
from xckpt.mapping.names import keys_of
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.array import plain_bools
from xckpt.storage.commit.folder import real_path
from xckpt.storage.commit.output import OutputPath, StagedOutput
from xckpt.storage.foreign.paths import local_path
from xckpt.storage.location import storage_errors

MOST_CHUNK_BYTES: Final = 1 << 29


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a sink will carry; names are mapping names (`xckpt.mapping.names`)."""

    specs: Mapping[str, TensorSpec]
    """Name -> shape and dtype of every tensor."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Name -> every other leaf: a Python value, or an `Opaque` object."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts for the output."""
    leaf_names: Mapping[str, str] = field(default_factory=dict)
    """Name -> leaf name in the tree; a leaf that is not listed has the name of nested dicts."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """The containers of the tree; see `xckpt.core.tree`."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Name -> what a tensor is beyond an array, such as ``"prng_key:threefry2x32"``."""
    source_chunks: Mapping[str, Shape] = field(default_factory=dict)
    """Name -> elements of each dimension that are read together, if known."""
    chunk_bytes: int = MOST_CHUNK_BYTES
    """Bytes that a chunk may have, where the format is free to choose; its own target may be less.
    """
    origin: bytes = b""
    """A digest of what the tensors' elements are made from."""

    def leaf_name(self, name: str) -> str:
        """The name of a leaf in the tree.

        Example:
            >>> Contents({}).leaf_name("layers/0/a%2Fb")
            'layers/%30/a%2Fb'
        """
        known = self.leaf_names.get(name)
        return join_keys(keys_of(name)) if known is None else known

    def chunk(self, name: str, target_bytes: int) -> Shape:
        """The shape of chunks of about ``target_bytes``, whole in the fastest dimensions.

        A chunk holds whole chunks of the source, so that none of those is read twice.

        Example:
            >>> Contents({"w": TensorSpec((1000, 8, 4), "int8")}).chunk("w", 100)
            (2, 8, 4)
            >>> Contents({"w": TensorSpec((3, 1000), "float32")}).chunk("w", 400)
            (1, 100)
            >>> rows = Contents({"w": TensorSpec((100, 8), "int8")}, source_chunks={"w": (3, 8)})
            >>> rows.chunk("w", 100)
            (12, 8)
        """
        spec = self.specs[name]
        unit = self.source_chunks.get(name) or (1,) * len(spec.shape)
        counts = tuple(-(-size // step) for size, step in zip(spec.shape, unit, strict=True))
        whole = Box.whole(unit).elements * item_size(spec.dtype)
        options = GridOptions(max(1, min(target_bytes, self.chunk_bytes)))
        [steps] = choose_grid(counts, whole, Boxes.whole(counts), options).chunks.tolist()
        shapes = zip(steps, unit, spec.shape, strict=True)
        return tuple(max(1, min(count * step, size)) for count, step, size in shapes)


class TensorSink(ABC):
    """An output of named tensors, written box by box in any order, that appears at once. It lies on
    a local file system.

    Args:
        path: the file or folder to be.
        overwrite: replace what is there, if it is an output of the same format.
    """

    single = False
    """Whether the output is one file and no folder."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path: Final = local_path(path)
        self.overwrite = overwrite
        self._staging: StagedOutput | None = None
        self._contents = Contents({})
        self._opened = ExitStack()
        """Closes what the format holds open."""
        self._chunks: Mapping[str, Shape] = {}
        """The result of `chunks`, which the plan decides."""

    @property
    def folder(self) -> Path:
        """The folder that takes the files, until the output has its name."""
        assert self._staging is not None
        return self._staging.folder

    def prepare(self, contents: Contents, *, attach: str = "", identity: str = "") -> str:
        """Check that the format can carry all this, then lay it out under a temporary name.

        Args:
            contents: what the output is to carry.
            attach: what `prepare` returned elsewhere for the same contents: take part in that
                output, or continue it, instead of laying out another.
            identity: name of a resumable output: if a process that was killed has left one of this
                name and of the same contents, continue it.

        Returns:
            A token for others to attach with.

        Raises:
            UnsupportedLeafError: leaves that the format lacks; all are listed.
            CheckpointExistsError: something is at the path that may not be replaced, or another
                process writes the output of this identity.
            NotACheckpointError: what ``attach`` stands for is gone, or is another output.
            StorageError: the storage refused.
        """
        self._contents = contents
        layout = self._digest(self._plan())
        path = real_path(self.path)
        output = OutputPath(path, self._foreign, self.overwrite, self.single)
        if attach:
            self._staging = output.attach(attach, layout)
            self._open()
            return attach
        self._staging = output.begin(layout, identity)
        try:
            if self._staging.noted() is None:
                self._lay_out()
                self._staging.note(layout)
            self._open()
        except BaseException:
            self.abort()
            raise
        return self._staging.token

    @abstractmethod
    def _plan(self) -> object:
        """Decide on everything that will be written of the contents; touch nothing.

        Returns:
            What was decided, as JSON: processes write to one output only if they agree on it.

        Raises:
            UnsupportedLeafError: leaves that the format lacks; all are listed.
        """

    def _digest(self, decided: object) -> bytes:
        """A digest of what the output is made of, and how."""
        contents = self._contents
        specs = [[name, spec.shape, spec.dtype] for name, spec in contents.specs.items()]
        values = [[name, *_text(value)] for name, value in contents.values.items()]
        origin = contents.origin.hex()
        tree = [dict(contents.containers), dict(contents.annotations)]
        parts = [type(self).__name__, specs, values, dict(contents.metadata), tree, origin, decided]
        return blake2b(json.dumps(parts).encode(), digest_size=16).digest()

    @abstractmethod
    def _lay_out(self) -> None:
        """Write what is known before any box."""

    @abstractmethod
    def _open(self) -> None:
        """Get ready to write boxes into what is laid out, by this process or by another."""

    def chunks(self, name: str) -> Shape:
        """Elements of each dimension that must be written together.

        Each box given to `write` begins at multiples of these, and ends there or with the tensor.
        1 in each dimension where any box can be written.
        """
        return self._chunks[name]

    def write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        """Write a box; from several threads and processes, in any order, again with the same data.

        Raises:
            StorageError: the storage refused.
        """
        self._write(name, box, plain_bools(data))

    @abstractmethod
    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        """Write a box, whose bools are 0 or 1."""

    @abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Have what was written of some tensors survive a power cut.

        Raises:
            StorageError: the storage refused.
        """

    def commit(self) -> None:
        """Sync, and give the output its name; called in one process, when all is written.

        Raises:
            CheckpointExistsError: another writer has taken the path meanwhile.
            StorageError: the storage refused.
        """
        assert self._staging is not None
        with storage_errors(self.path):  # some file systems say only now that a file has no room
            self._opened.close()
        self._staging.publish()

    def abort(self) -> None:
        """Remove what was written; called in one process."""
        with suppress(OSError):
            self._opened.close()
        if self._staging is not None:
            self._staging.abort()

    def close(self) -> None:
        """Release files, memory and the claim to the path; what was written stays.

        Raises:
            StorageError: the storage refused.
        """
        try:
            with storage_errors(self.path):
                self._opened.close()
        finally:
            if self._staging is not None:
                self._staging.release()

    @staticmethod
    @abstractmethod
    def _foreign(path: Path) -> str:
        """Why what is there is no output of this format; empty if it is one."""


def _text(value: object) -> tuple[str, str]:
    if isinstance(value, Opaque):
        return "opaque", ""
    return str(value_kind(value)), encode_value(value)


def other_files(folder: Path, is_ours: Callable[[str], bool]) -> str:
    """Why a folder is foreign: it holds folders or files of other kinds; empty if it holds none.

    Example:
        >>> for name in ("a.bin", "notes.txt"):
        ...     Path(name).touch()
        >>> other_files(Path(), lambda name: name.endswith(".bin"))
        'it holds other files too: notes.txt'
    """
    entries = folder.iterdir()
    return other_names(each.name for each in entries if each.is_dir() or not is_ours(each.name))


def other_names(names: Iterable[str]) -> str:
    """Why a folder with files of these names besides its own is foreign; empty without any.

    Example:
        >>> other_names(["notes.txt"]), other_names([])
        ('it holds other files too: notes.txt', '')
    """
    others = sorted(names)
    return f"it holds other files too: {in_few(others)}" if others else ""


def value_problems(values: Mapping[str, object]) -> list[str]:
    """A line for each leaf that checkpoints cannot carry as a value.

    Example:
        >>> value_problems({"step": 7, "seen": {1}})
        ['seen: a set is not a value that can be written']
    """
    return [
        f"{name}: {named(type(value).__qualname__)} is not a value that can be written"
        for name, value in values.items()
        if value_kind(value) is None
    ]


def flat_names(names: Iterable[str]) -> dict[str, str]:
    """Mapping name -> its keys joined with dots, for a format that has no nesting.

    The other way needs no function: a flat name, dots and all, is one key of a tree.

    Raises:
        UnsupportedLeafError: two names become one; all such are listed.

    Example:
        >>> flat_names(["params/dense/kernel", "model.layers.0.weight"])
        {'params/dense/kernel': 'params.dense.kernel',
         'model.layers.0.weight': 'model.layers.0.weight'}
    """
    joined: dict[str, str] = {}
    owners: dict[str, str] = {}
    problems: list[str] = []
    for name in names:
        joined[name] = ".".join(keys_of(name))
        owner = owners.setdefault(joined[name], name)
        if owner != name:
            problems.append(f"{name}: joined with dots, its name is that of {owner}")
    if problems:
        raise UnsupportedLeafError.listing(
            f"the format has flat names, and some collide; {RENAME}", problems
        )
    return joined
