"""torch.distributed.checkpoint (DCP) and xckpt's format.

`XckptStorageWriter` and `XckptStorageReader` are one argument of `dcp.save`, `dcp.async_save` and
`dcp.load`; everything else, planners included, stays DCP's.

    dcp.save(state, storage_writer=XckptStorageWriter("s3://bucket/run/step-1000"))
    dcp.load(state, storage_reader=XckptStorageReader("s3://bucket/run/step-1000"))

`import_checkpoint` and `export_checkpoint` turn folders that torch's own storage writes and reads
into checkpoints, and back: they are calls of `convert`.

`install` is for callers that only pass ``checkpoint_id=``; `uninstall` undoes it.
"""

from __future__ import annotations

import os

from xckpt.core.metadata import JSONValue, Metadata
from xckpt.engine.groups import GroupFinder
from xckpt.engine.ranks.group import Group
from xckpt.options import STORAGE, LoadOptions, SaveOptions, checked_options
from xckpt.torch.dcp.install import install, installed, uninstall
from xckpt.torch.dcp.reader import XckptStorageReader
from xckpt.torch.dcp.writer import XckptStorageWriter

__all__ = [
    "XckptStorageReader",
    "XckptStorageWriter",
    "export_checkpoint",
    "import_checkpoint",
    "install",
    "installed",
    "uninstall",
]


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
    which torch keeps the key paths. Nothing is unpickled and no class is imported. What an
    interrupted import has written is kept and used by the next one; see `xckpt.convert.convert`.

    Args:
        dcp_folder: a folder with a ``.metadata``, as torch's FileSystemWriter writes it: a local
            path, or a URL as `xckpt.save` takes it.
        path: where the checkpoint goes; see `xckpt.save`.
        overwrite: replace the checkpoint at ``path``, once the new one is committed.
        opaque: keep the bytes of entries that hold anything else, such as instances of classes,
            as they are; by default such entries are refused by name.
        metadata: anything that JSON can carry, kept with the checkpoint.
        group: the ranks that share the work; see `xckpt.save`.
        options: chunk sizes, threads, memory, progress, metrics.

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
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost. Nothing is committed.

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
    # Writers and readers of DCP are not to wait for the import of conversions.
    from xckpt.convert.run import convert

    converted = convert(
        dcp_folder,
        path,
        format="xckpt",
        source_format="dcp",
        overwrite=overwrite,
        opaque=opaque,
        metadata=metadata,
        group=group,
        options=options,
    )
    assert converted.metadata is not None
    return converted.metadata


def export_checkpoint(
    path: str | os.PathLike[str],
    dcp_folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    group: Group | None = None,
    options: LoadOptions | None = None,
) -> None:
    """Turn a checkpoint into a folder that `torch.distributed.checkpoint.load` reads; collective.

    Values come back as they were, opaque ones as the bytes that they are. torch's own rules hold
    for the tree: int keys of dicts become strings, empty dicts vanish, a tuple is one entry, and a
    namedtuple becomes a tuple. Shardings and other annotations are not kept. What an interrupted
    export has written is kept and used by the next one; see `xckpt.convert.convert`.

    Args:
        path: the checkpoint; see `xckpt.load`.
        dcp_folder: a local folder that is new or empty; on a file system that all ranks share.
        overwrite: replace a DCP folder that is there, once the new one is whole.
        group: the ranks that share the work; see `xckpt.save`.
        options: threads, memory, progress and metrics.

    Raises:
        NotACheckpointError: no committed checkpoint is at ``path``.
        CheckpointExistsError: something is at ``dcp_folder`` that is not to be replaced.
        UnsupportedLeafError: leaves that torch cannot hold, or two that torch gives one name; all
            are listed.
        CorruptCheckpointError: data are not what was saved; names leaf and range.
        StorageError: the storage refused (full, read-only, no answer).
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://export", {"w": np.ones((2, 3), np.float32), "step": 7})
        >>> export_checkpoint("memory://export", "dcp")
        >>> sorted(os.listdir("dcp"))
        ['.metadata', '__0_0_0_0.distcp', '__0_1.distcp']
    """
    # Writers and readers of DCP are not to wait for the import of conversions.
    from xckpt.convert.run import convert, raised_on_all_ranks

    with raised_on_all_ranks(GroupFinder(group)):
        options = checked_options(options, LoadOptions, "export_checkpoint")
    convert(
        path,
        dcp_folder,
        format="dcp",
        source_format="xckpt",
        overwrite=overwrite,
        opaque=True,
        group=group,
        options=SaveOptions(
            threads=options.threads,
            memory_bytes=options.memory_bytes,
            progress=options.progress,
            metrics=options.metrics,
            **{name: getattr(options, name) for name in STORAGE},
        ),
    )
