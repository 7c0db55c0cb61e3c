"""From a checkpoint of ours to a folder that torch.distributed.checkpoint reads.

1. The tree is built with tensors on the meta device in place of the stored ones, and torch's own
   planner flattens it, so that names and key paths are those that `dcp.load` will look for.
2. Each stored array is cut into boxes of whole chunks, small enough for the memory budget; the
   ranks share them.
3. torch's FileSystemWriter writes them, and asks for one box at a time, which is read and verified
   then. It keeps what it has written until a file is complete, so a rank writes several files.
4. Everything is written beside the target, which appears (or is replaced) as a whole at the end.
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import cells
from xckpt.core.manifest.codec import BytesEntry
from xckpt.core.tree import unflatten
from xckpt.engine.group import Group, LocalGroup
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import (
    CheckpointExistsError,
    RankFailure,
    RanksFailedError,
    StorageError,
    UnsupportedLeafError,
)
from xckpt.options import LoadOptions
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.location import Location
from xckpt.storage.stored_array import StoredArray
from xckpt.torch.buffers import from_numpy, torch_dtype
from xckpt.torch.dcp.split_writer import SplitWriter, item_bytes
from xckpt.torch.group import current_group

__all__ = ["export_checkpoint"]

NAMES_ONLY = ("int2", "int4")
"""dtypes that torch has, but no tensor of which it can save."""

PREPARE = "prepare the export; nothing was written"
WRITE = "write the DCP folder; nothing is at the target"
PUBLISH = "put the DCP folder in its place"


def export_checkpoint(
    path: str | os.PathLike[str],
    dcp_folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: LoadOptions | None = None,
) -> None:
    """Turn a checkpoint into a folder that `torch.distributed.checkpoint.load` reads; collective.

    Values come back as they were, opaque ones as the bytes that they are. torch's own rules hold
    for the tree: int keys of dicts become strings, empty dicts vanish, a tuple is one entry, and a
    namedtuple becomes a tuple. Shardings and other annotations are not kept.

    Args:
        path: the checkpoint; see `xckpt.load`.
        dcp_folder: a local folder that is new or empty; on a file system that all ranks share, if
            torch.distributed is initialised.
        overwrite: replace a DCP folder that is there, once the new one is whole.
        options: memory and progress.

    Raises:
        NotACheckpointError: no committed checkpoint is at ``path``.
        CheckpointExistsError: something is at ``dcp_folder`` that is not to be replaced.
        UnsupportedLeafError: leaves that torch cannot hold, or two that torch gives one name; all
            are listed.
        CorruptCheckpointError: data are not what was saved; names leaf and range.
        StorageError: the storage refused (full, read-only, no answer).
        RanksFailedError: any of these, in a group of several ranks.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://export", {"w": np.ones((2, 3), np.float32), "step": 7})
        >>> export_checkpoint("memory://export", "dcp")
        >>> sorted(os.listdir("dcp"))
        ['.metadata', '__0_0_0.distcp']
    """
    target = _local(dcp_folder)
    group: Group = current_group() or LocalGroup()
    options = options or LoadOptions()
    staging = Path(
        broadcast(group, PREPARE, lambda: os.fsencode(_staging(target, overwrite))).decode()
    )
    planner = _ExportPlanner(path, options, group.rank, group.size)
    try:
        all_reduce(group, PREPARE, planner.open, lambda _: b"")
        _save(planner, staging, max(1, options.memory_bytes // 4))
        group.barrier()
    except BaseException:
        if group.rank == group.coordinator:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    broadcast(group, PUBLISH, lambda: _publish(staging, target))


def _local(folder: str | os.PathLike[str]) -> Path:
    found = Location.parse(folder).folder
    if found is None:
        raise StorageError(
            f"{folder}: a DCP folder is written on a local file system only; write it there and "
            f"copy it"
        )
    return found


def _staging(target: Path, overwrite: bool) -> Path:
    """A new folder beside the target, in which the export is made."""
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
        if taken and not overwrite:
            raise CheckpointExistsError(
                f"{target} exists already; choose another folder, or pass overwrite=True to "
                f"replace the DCP folder there"
            )
        if taken and not (target / ".metadata").is_file():
            raise CheckpointExistsError(
                f"{target} is no DCP folder (there is no .metadata in it), so it is not replaced"
            )
        staging = target.parent / f".{target.name}.{secrets.token_hex(4)}"
        staging.mkdir(parents=True)
    except CheckpointExistsError:
        raise
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror}") from error
    return staging


def _publish(staging: Path, target: Path) -> bytes:
    """Give the export its name; what was there goes."""
    old = staging.with_name(f"{staging.name}.replaced")
    try:
        if target.exists():
            target.rename(old)
        staging.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise StorageError(f"{target}: {error.strerror}; the export is in {staging}") from error
    shutil.rmtree(old, ignore_errors=True)
    return b""


def _save(planner: _ExportPlanner, folder: Path, file_bytes: int) -> None:
    """Have torch write the folder.

    Raises:
        RanksFailedError: some rank failed (groups of several).
        XckptError: the failure itself, in a group of one.
    """
    writer = SplitWriter(folder, file_bytes)
    try:
        with warnings.catch_warnings():
            # torch says that it works in a single process where no process group is initialised.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(planner.tree, storage_writer=writer, planner=planner)
    except dcp.CheckpointException as error:
        failures = {rank: fault for rank, (fault, _) in error.failures.items()}
        if planner.size == 1:
            fault = failures[0]
            if isinstance(fault, OSError) and not isinstance(fault, StorageError):
                raise StorageError(f"{folder.parent}: {fault.strerror or fault}") from error
            raise fault from error
        raise RanksFailedError.of(
            WRITE,
            [RankFailure(r, type(fault).__name__, str(fault)) for r, fault in failures.items()],
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Opaque:
    """A value whose bytes are written as they are."""

    name: str


class _ExportPlanner(dcp.DefaultSavePlanner):
    """Offers a checkpoint's leaves to torch, and reads each when torch wants to write it."""

    def __init__(
        self, path: str | os.PathLike[str], options: LoadOptions, rank: int, size: int
    ) -> None:
        super().__init__()
        self.path = path
        self.options = options
        self.rank = rank
        self.size = size
        self.tree: dict[str, object] = {}
        self._stored: dict[int, StoredArray] = {}
        self._progress = ProgressCounter(0, None)

    def open(self) -> bytes:
        """Open the checkpoint and build its tree, with tensors on the meta device.

        Raises:
            NotACheckpointError: no committed checkpoint is at the path.
            UnsupportedLeafError: leaves that torch cannot hold; all are listed.
        """
        checkpoint = Checkpoint(self.path, options=self.options)
        self._checkpoint = checkpoint
        opaque = {
            entry.name: _Opaque(entry.name)
            for entry in checkpoint.manifest.leaves
            if isinstance(entry, BytesEntry) and entry.type == "opaque"
        }
        problems: list[str] = []
        leaves: dict[str, object] = {}
        for name in checkpoint:
            leaf = opaque.get(name) or checkpoint[name]
            leaves[name] = leaf
            if isinstance(leaf, StoredArray):
                dtype = torch_dtype(leaf.dtype)
                if dtype is None or leaf.dtype in NAMES_ONLY:
                    problems.append(f"{name}: torch cannot save dtype {leaf.dtype}")
                    continue
                leaves[name] = torch.empty(leaf.shape, dtype=dtype, device="meta")
                self._stored[id(leaves[name])] = leaf
        tree = _plain(unflatten(leaves, checkpoint.metadata.containers))
        if not isinstance(tree, dict):
            problems.append(f"the root is a {type(tree).__name__}; torch saves dicts only")
        if problems:
            raise UnsupportedLeafError.listing("the checkpoint cannot be exported", problems)
        assert isinstance(tree, dict)
        self.tree = tree
        self._check_names()
        return b""

    def _check_names(self) -> None:
        try:
            self.set_up_planner(self.tree)
        except ValueError as error:
            raise UnsupportedLeafError(
                f"torch joins keys with dots, and so gives two leaves one name: {error}"
            ) from error
        broken = [
            f"{name}: an opaque value inside a tuple, which torch pickles as a whole"
            for name, leaf in self.state_dict.items()
            if not isinstance(leaf, _Opaque) and _holds_opaque(leaf)
        ]
        if broken:
            raise UnsupportedLeafError.listing("the checkpoint cannot be exported", broken)

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the tree as torch does."""
        super().set_up_planner(dict(state_dict), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """This rank's share of the boxes, and of the values."""
        items = [item for name, leaf in self.state_dict.items() for item in self._items(name, leaf)]
        loads = [0] * self.size
        mine: list[WriteItem] = []
        for item in items:
            taker = loads.index(min(loads))
            loads[taker] += max(1, item_bytes(item))
            if taker == self.rank:
                mine.append(item)
        total = sum(item_bytes(item) for item in mine)
        self._progress = ProgressCounter(total, self.options.progress)
        self.plan = SavePlan(mine, planner_data=self.mappings)
        return self.plan

    def _items(self, name: str, leaf: object) -> Iterator[WriteItem]:
        if not isinstance(leaf, torch.Tensor):
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            return
        properties = TensorProperties(dtype=leaf.dtype)
        most = max(1, self.options.memory_bytes // 4)
        for number, (offsets, sizes) in enumerate(_boxes(self._stored[id(leaf)], most)):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            yield WriteItem(
                MetadataIndex(name, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, leaf.size()),
            )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A box, read and verified; or a value as bytes."""
        leaf = self.state_dict[write_item.index.fqn]
        if write_item.tensor_data is not None:
            chunk = write_item.tensor_data.chunk
            tensor = self._read(leaf, tuple(chunk.offsets), tuple(chunk.sizes))
            self._progress.add(tensor.nbytes)
            return tensor
        if isinstance(leaf, _Opaque):
            return io.BytesIO(cast(bytes, self._checkpoint[leaf.name]))
        content = io.BytesIO()
        torch.save(self._loaded(leaf), content)
        content.seek(0)
        return content

    def _loaded(self, value: object) -> object:
        """A value with its tensors in memory."""
        if isinstance(value, torch.Tensor):
            return self._read(value, (0,) * value.ndim, tuple(value.shape))
        if isinstance(value, dict):
            return {key: self._loaded(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._loaded(part) for part in value]
        if isinstance(value, tuple):
            return tuple(self._loaded(part) for part in value)
        return value

    def _read(self, leaf: object, low: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored[id(leaf)]
        region = tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))
        return from_numpy(stored[region] if region else stored[...])


def _boxes(stored: StoredArray, most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of whole chunks, of at most ``most`` bytes where a chunk is no larger."""
    if 0 in stored.shape:
        yield (0,) * len(stored.shape), stored.shape
        return
    for piece in stored.pieces:
        step = _step(piece.shape, piece.shard or piece.chunk, most // item_size(stored.dtype))
        zeros = (0,) * len(piece.shape)
        for box in cells(zeros, piece.shape, piece.shape, step)[1]:
            offsets = tuple(a + b for a, b in zip(piece.offset, box.offsets, strict=True))
            yield offsets, box.sizes


def _step(shape: Sequence[int], chunk: Sequence[int], most: int) -> tuple[int, ...]:
    """The size of boxes of whole chunks with at most ``most`` elements, long in fast dimensions.

    Example:
        >>> _step((100, 8), (3, 8), 100), _step((100, 8), (3, 8), 1)
        ((9, 8), (3, 8))
    """
    counts = [-(-size // step) for size, step in zip(shape, chunk, strict=True)]

    def sizes() -> list[int]:
        return [min(n * step, s) for n, step, s in zip(counts, chunk, shape, strict=True)]

    while prod(sizes()) > most and max(counts) > 1:
        slowest = next(d for d, count in enumerate(counts) if count > 1)
        counts[slowest] = -(-counts[slowest] // 2)
    return tuple(count * step for count, step in zip(counts, chunk, strict=True))


def _plain(node: object) -> object:
    """A tree whose tuples are plain ones: torch would pickle the class of any other by name."""
    if isinstance(node, Mapping):
        return {key: _plain(child) for key, child in node.items()}
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if isinstance(node, tuple):
        return tuple(_plain(child) for child in node)
    return node


def _holds_opaque(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_opaque(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_opaque(part) for part in value)
    return isinstance(value, _Opaque)
