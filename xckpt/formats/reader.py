"""Loading straight from any source of tensors: a `StorageReader` over a `TensorSource`.

`FormatsAt` finds another library's checkpoint if a load finds none of xckpt's. Then:

1. The coordinator opens the source and sends its identity; every rank opens it too and compares, so
   that all read the same.
2. A planner sees each tensor as one stored array, cut where reading is cheap, and plans as usual.
3. Each rank reads its items part by part, in threads, straight into their destinations. Where those
   have another dtype or cannot be reached from the host, parts go through scratch memory.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from functools import partial
from math import isinf, prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.grid import Grid
from xckpt.core.geometry.slabs import blocks
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.plan.items import LoadItemType, LoadPlan, ReadItem
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.reads.items import needs_no_items
from xckpt.core.targets.casting import CastingCopies
from xckpt.core.text.printable import printable_lines
from xckpt.core.values import encode_value, value_kind
from xckpt.errors import StorageError, UnsupportedLeafError, XckptError
from xckpt.formats.detect import detect, open_source
from xckpt.formats.source import TensorSource, user_of
from xckpt.options import LoadOptions
from xckpt.storage.budget import Pool, ProgressCounter, share_of
from xckpt.storage.chunks.chunk import allocate
from xckpt.storage.chunks.read_chunks import Destination
from xckpt.storage.location import Location
from xckpt.storage.refusals import is_denied

OURS = "xckpt"

PART_BYTES = 1 << 24
"""Bytes that one thread reads at a time, if the source can be cut so finely."""


class SourceReader:
    """Reads a load's items from a source of tensors.

    Args:
        open_source: opens it; called on every rank.
        name: its name in errors.
        options: threads, memory, progress.

    Example:
        >>> import xckpt
        >>> from xckpt.formats.xckpt import XckptSource
        >>> _ = xckpt.save("memory://any-source", {"w": np.arange(3)})
        >>> reader = SourceReader(lambda: XckptSource("memory://any-source"))
        >>> state = {"w": np.zeros(3, int)}
        >>> _ = xckpt.load_state_dict(state, reader)
        >>> state["w"]
        array([0, 1, 2])
    """

    def __init__(
        self,
        open_source: Callable[[], TensorSource],
        name: str = "the source",
        *,
        options: LoadOptions | None = None,
    ) -> None:
        self.name = name
        self.options: Final = options or LoadOptions()
        self._open = open_source
        self._source: TensorSource | None = None
        self._state = b""
        """The source's, before anything is read."""
        self._names: dict[str, str] = {}
        self.host_ranks = 1
        """Ranks of the load on a host, at most: they share its memory."""

    @property
    def source(self) -> TensorSource:
        """The open source."""
        if self._source is None:
            self._source = self._open()
        return self._source

    def read_metadata(self) -> bytes:
        """The source's identity: every rank compares its own with it.

        Objects that are neither tensors nor values are not loaded; one warning names them.
        """
        if skipped := self.source.skipped:
            listed = "".join(f"\n  - {name}: {why}" for name, why in skipped.items())
            warnings.warn(
                printable_lines(
                    f"{self.name}: objects that are neither tensors nor plain values are not "
                    f"loaded; a conversion with opaque=True keeps their bytes:{listed}"
                ),
                stacklevel=2,
            )
        return self.source.identity()

    def set_up_storage_reader(self, manifest: bytes, ranks: int) -> Metadata:
        """Compare this rank's source with the coordinator's, and describe it.

        Raises:
            StorageError: this rank sees another.
        """
        if self.source.identity() != manifest:
            raise StorageError(f"{self.name}: this rank sees other contents than the coordinator")
        source = self.source
        self._state = source.state()
        self._names = {source.leaf_names[name]: name for name in (*source.specs, *source.values)}
        described = {leaf: self._described(name) for leaf, name in self._names.items()}
        return Metadata(described, source.containers, user_metadata=user_of(source.metadata))

    def _described(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        spec = self.source.specs.get(name)
        if spec is None:
            kind = value_kind(self.source.values[name])
            if kind is None:
                raise UnsupportedLeafError(f"{name}: not a value that can be loaded")
            return BytesStorageMetadata(kind)
        whole = Boxes.whole(spec.shape)
        chunk = np.array([self.source.chunks(name)], np.int64).reshape(1, len(spec.shape))
        grid = Grid(whole, chunk) if (chunk > 1).any() else None
        return TensorStorageMetadata(
            TensorProperties(spec.dtype),
            spec.shape,
            whole,
            grid,
            annotation=self.source.annotations.get(name, ""),
        )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    @needs_no_items
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: each rank reads for itself."""
        return plans

    def same_digests(self, one: str, other: str) -> bool:
        """False: other libraries' formats have no digests."""
        return False

    def read_part(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor; see `TensorSource.read`."""
        self.source.read(self._names[name], box, into)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read this rank's items.

        Raises:
            StorageError: the storage refused, or a file was written meanwhile.
        """
        tensors: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                tensors.append(item)
                continue
            text = encode_value(self.source.values[self._names[item.storage_index.fqn]])
            planner.load_bytes(item, io.BytesIO(text.encode("utf-8", "surrogatepass")))
        sizes = (prod(item.lengths) * item_size(self._dtype(item)) for item in tensors)
        progress = ProgressCounter(sum(sizes), self.options.progress)
        threads = self.options.threads or self.source.threads
        casts = CastingCopies()
        budget = share_of(self.options.memory_bytes, self.host_ranks)
        with self.source.unchanged(self._state, self.name):
            with Pool(threads=threads, budget=budget) as pool:
                for item in tensors:
                    if not pool.failed:
                        self._submit(item, planner, pool, progress, casts)
            casts.check()

    def _dtype(self, item: ReadItem) -> str:
        return self.source.specs[self._names[item.storage_index.fqn]].dtype

    def _submit(
        self,
        item: ReadItem,
        planner: LoadPlanner,
        pool: Pool,
        progress: ProgressCounter,
        casts: CastingCopies,
    ) -> None:
        """Have an item's parts read; scratch memory, for all of it or a part, is in the budget."""
        name, dtype = self._names[item.storage_index.fqn], numpy_dtype(self._dtype(item))
        most = max(1, PART_BYTES // dtype.itemsize)
        wanted = Box(item.storage_offsets, item.lengths)
        boxes = [*blocks(wanted, self.source.chunks(name), most)] or [wanted]
        destination = Destination(planner, item, dtype, len(boxes))
        memory = destination.memory()
        scratch = memory.nbytes if destination.is_scratch else 0
        pool.reserve(scratch)
        is_cast = memory.dtype != dtype  # where it is scratch, it is of the same dtype

        def read(box: Box) -> None:
            into = memory[(*box.slices(item.storage_offsets), ...)]
            if is_cast:
                data = allocate(box.sizes, dtype, item.dest_index.fqn)
                self.source.read(name, box, data)
                casts.copy(item.dest_index.fqn, into, data, box.offsets)
            else:
                self.source.read(name, box, into)
            progress.add(box.elements * dtype.itemsize)
            if destination.landed():
                pool.release(scratch)

        for box in boxes:
            pool.submit(partial(read, box), box.elements * dtype.itemsize if is_cast else 0)

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()
            self._source = None


class FormatsAt:
    """The checkpoint at a path; the coordinator of a load detects its format once.

    Args:
        path: see `xckpt.load`.
        options: threads, memory, progress.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": np.zeros(3)}, "found.safetensors")
        >>> FormatsAt("found.safetensors", None).find()
        'safetensors'
    """

    def __init__(self, path: str | os.PathLike[str], options: LoadOptions | None) -> None:
        place = Location.parse(path, options)
        if isinf(place.access.until):  # no call has begun with it yet
            place.access.start()
        self.path: str | os.PathLike[str] = place if place.bucket else path
        """What was given; in a bucket the location, which is asked as the options say, from now."""
        self._options = options
        self._format = OURS

    def find(self) -> str | None:
        """On the coordinator, if there is no manifest: the format found there, if it is known.

        Raises:
            StorageError: the storage could not say what is there, other than for lack of rights.
        """
        try:
            format = detect(self.path)
        except StorageError as error:
            if is_denied(error):
                return None
            raise
        except XckptError:
            return None
        return None if format == OURS else format

    def reader(self, format: str) -> SourceReader:
        """The reader of the format that the coordinator has found."""
        self._format = format
        return SourceReader(self.open_source, str(self.path), options=self._options)

    def open_source(self) -> TensorSource:
        """Open what is there: an xckpt checkpoint unless another format was found."""
        return open_source(self.path, self._format, options=self._options, skip_objects=True)
