"""From a folder that torch.distributed.checkpoint wrote to a checkpoint of ours.

1. The coordinator reads ``.metadata``; all ranks get its bytes and describe them without unpickling
   (`pickled_metadata`).
2. Each rank takes its share of the chunks: the largest first, to the rank with the fewest bytes.
   A chunk larger than a rank's fair share is offered by all, and the planner cuts it.
3. Each rank finds the elements of its chunks and checks them (`xckpt.formats.dcp.folder`).
   Every fault is reported before anything is written.
4. The tree is saved like any other. A chunk is a `LazySource`: when the engine writes it, the file
   is mapped and its pages are read, so that no more memory is needed than for any save.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from xckpt.core.geometry.grid import GridOptions
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.group import Group, LocalGroup
from xckpt.engine.save import save_state
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.formats.dcp.folder import parse_metadata, raw_bytes, read_metadata, read_tree
from xckpt.options import SaveOptions
from xckpt.storage.foreign.paths import find_path
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.torch.group import current_group

__all__ = ["import_checkpoint"]

FIND = "read the metadata of the DCP folder; nothing was written"
LOOK = "find the entries of the DCP folder; nothing was written"


def import_checkpoint(
    dcp_folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    opaque: bool = False,
    metadata: JSONValue = None,
    group: Group | None = None,
    options: SaveOptions | None = None,
) -> Metadata:
    """Turn a folder that `torch.distributed.checkpoint.save` wrote into a checkpoint; collective.

    Tensors, chunk by chunk, and plain values (None, bool, int, float, complex, str, bytes, and
    dicts, lists and tuples of these and of tensors) become leaves of the tree that was saved, of
    which torch keeps the key paths. Nothing is unpickled and no class is imported.

    Args:
        dcp_folder: a folder with a ``.metadata``, as torch's FileSystemWriter leaves it: a local
            path, or a URL as `xckpt.save` takes it.
        path: where the checkpoint goes; see `xckpt.save`.
        overwrite: replace the checkpoint at ``path``, once the new one is committed.
        opaque: keep the bytes of entries that hold anything else, such as instances of classes,
            as they are; by default such entries are refused by name.
        metadata: anything that JSON can carry, kept with the checkpoint.
        group: the ranks that share the work; torch.distributed's if it is initialised.
        options: chunk sizes, threads, memory, progress.

    Returns:
        The checkpoint's metadata, the same on every rank.

    Raises:
        NotACheckpointError: there is no ``.metadata``.
        UnsafePickleError: ``.metadata`` or a tensor's entry names a class or function that has no
            place there.
        ManifestError: ``.metadata`` is truncated, damaged, or not what torch writes.
        CorruptCheckpointError: a file is missing, truncated or damaged, or a chunk has another
            shape or dtype than the metadata say; all are listed.
        UnsupportedLeafError: entries that cannot become leaves; all are listed.
        PlanError: chunks overlap, or elements are in none.
        CheckpointExistsError: something is at ``path``, and ``overwrite`` is False.
        StorageError: the storage refused (full, read-only, no answer).
        RanksFailedError: any of these, in a group of several ranks. Nothing is committed.

    Example:
        >>> import numpy as np
        >>> import xckpt
        >>> from xckpt.torch.dcp import export_checkpoint
        >>> state = {"model": {"w": np.ones((2, 3), np.float32)}, "step": 7}
        >>> _ = xckpt.save("memory://to-dcp", state)
        >>> export_checkpoint("memory://to-dcp", "dcp")
        >>> saved = import_checkpoint("dcp", "memory://from-dcp")
        >>> checkpoint = xckpt.open("memory://from-dcp")
        >>> checkpoint["model/w"][1], checkpoint["step"]
        (array([1., 1., 1.], dtype=float32), 7)
    """
    folder = find_path(dcp_folder)
    group = group or current_group() or LocalGroup()
    options = options or SaveOptions()
    data = broadcast(group, FIND, lambda: read_metadata(folder))
    found: list[object] = []

    def look() -> bytes:
        found.append(
            read_tree(folder, parse_metadata(folder, data), opaque, group.rank, group.size)
        )
        return b""

    all_reduce(group, LOOK, look, lambda _: b"")
    planner = DefaultSavePlanner(
        grid=GridOptions(options.chunk_bytes, options.shard_bytes), serialise=raw_bytes
    )
    tree: Mapping[str, object] = found[0]  # type: ignore[assignment]  # our planners take any tree
    writer = ZarrStorageWriter(path, overwrite=overwrite, options=options)
    return save_state(tree, writer, group=group, planner=planner, metadata=metadata)
