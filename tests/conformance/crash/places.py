"""xckpt where it commits in other ways, and xckpt with faults; all can be sent to a process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import xckpt
from conformance.implementation import Array, Held
from conformance.implementations.xckpt import Xckpt
from xckpt.core import commit
from xckpt.core.geometry.shards import inner
from xckpt.storage.chunks import plain_files, write_chunks
from xckpt.storage.commit import batch, staging


class Patched(Xckpt):
    """xckpt with one function of its commit replaced while it saves."""

    function = ""
    replacement: Callable[..., object]

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(staging, self.function, type(self).replacement):
            super().save(path, ranks, overwrite=overwrite)


def _no(*_: object) -> bool:
    return False


class Generations(Patched):
    """On a file system that cannot exchange folders."""

    name = "xckpt, generations"
    function = "can_exchange"
    replacement = staticmethod(_no)


class InPlace(Patched):
    """At a mount point, which cannot be renamed."""

    name = "xckpt, in place"
    function = "can_rename"
    replacement = staticmethod(_no)


class Slabs(Xckpt):
    """Every leaf written as a large one is: past TensorStore, slab by slab."""

    name = "xckpt, slabs"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        small = mock.patch.object(write_chunks, "SMALL_BYTES", 0)
        with small, mock.patch.object(plain_files, "SLAB_BYTES", 16):
            super().save(path, ranks, overwrite=overwrite)

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        # A padded chunk too, and nothing that TensorStore would encode.
        return xckpt.SaveOptions(chunk_bytes=64)


class ForReaders(Slabs):
    """Shards of chunks that are cut along several dimensions, for other readers."""

    name = "xckpt, shards for other readers"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        least = dict.fromkeys(("LEAST_SHARD", "LEAST_CHUNK", "LEAST_ROW"), 1)
        with mock.patch.multiple(inner, **least):
            super().save(path, ranks, overwrite=overwrite)

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        return xckpt.SaveOptions(chunk_bytes=256, readers=4, pack_bytes=0)


class SlabsNotSynced(Slabs):
    """A fault: a chunk may be cut off after a power cut."""

    name = "xckpt, slabs not synced"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(plain_files, "sync", _nothing):
            super().save(path, ranks, overwrite=overwrite)


class NamesNotSynced(Slabs):
    """A fault: a chunk may be missing after a power cut."""

    name = "xckpt, names of slabs not synced"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(plain_files, "sync_folder", _nothing):
            super().save(path, ranks, overwrite=overwrite)


def _nothing(*_: object) -> None:
    pass


class Together(Slabs):
    """Files are synced together, as those of many leaves are."""

    name = "xckpt, synced together"
    exchanges = True

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        exchanging = staging.can_exchange if self.exchanges else _no
        many = mock.patch.object(commit, "MANY", 1)
        with many, mock.patch.object(staging, "can_exchange", exchanging):
            super().save(path, ranks, overwrite=overwrite)


class TogetherBeside(Together):
    """The same, where folders cannot be exchanged."""

    name = "xckpt, synced together beside"
    exchanges = False


class NotSyncedTogether(Together):
    """A fault: nothing of it is synced."""

    name = "xckpt, not synced together"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(batch, "sync_all", _nothing):
            super().save(path, ranks, overwrite=overwrite)


class TreeNotSynced(Patched):
    """A fault: folders may be missing after a power cut."""

    name = "xckpt, folders not synced"
    function = "sync_tree"
    replacement = staticmethod(_nothing)


class ParentNotSynced(Patched):
    """A fault: a committed checkpoint may vanish with the power."""

    name = "xckpt, parent folder not synced"
    function = "sync_folder"
    replacement = staticmethod(_nothing)


def _swap(one: Path, other: Path) -> None:
    aside = Path(f"{other}.aside")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


class TwoSteps(Patched):
    """A fault: a moment without a checkpoint."""

    name = "xckpt, exchange in steps"
    function = "exchange"
    replacement = staticmethod(_swap)


class Rewriting(Xckpt):
    """A fault: the old checkpoint is removed before the new one is written."""

    name = "xckpt, overwriting in place"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        if overwrite and path.exists():
            shutil.rmtree(path)
        super().save(path, ranks, overwrite=overwrite)
