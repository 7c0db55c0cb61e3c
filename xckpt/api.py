"""The functions that people call: save, load, load_into, open.

Each is a thin composition: find the group, make planner and storage, run the engine. Frameworks are
registered here, by name only: their adapters load when a leaf of theirs can exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from xckpt.core.grid import GridOptions
from xckpt.core.leaves import register_adapter
from xckpt.core.load_planner import DefaultLoadPlanner, LoadPlanner
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.save_planner import DefaultSavePlanner, SavePlanner
from xckpt.group import Group, LocalGroup
from xckpt.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint

__all__ = ["find_group", "load", "load_into", "open", "save"]

Path = str | os.PathLike[str]

register_adapter("torch", "xckpt.torch.tensors")
register_adapter("jax", "xckpt.jax.arrays")
register_adapter("numpy", "xckpt.numpy")


def find_group() -> Group:
    """The processes that work together.

    They are torch.distributed's if it is initialised, else JAX's if there are several, else this
    process alone.
    """
    finders: list[Callable[[], Group | None]] = []
    if "torch.distributed" in sys.modules:
        from xckpt.torch.group import current_group as torch_group

        finders.append(torch_group)
    if "jax" in sys.modules:
        from xckpt.jax.group import current_group as jax_group

        finders.append(jax_group)
    for find in finders:
        group = find()
        if group is not None:
            return group
    return LocalGroup()


def save(
    path: Path,
    state: object,
    *,
    overwrite: bool = False,
    metadata: JSONValue = None,
    planner: SavePlanner | None = None,
    group: Group | None = None,
    options: SaveOptions | None = None,
) -> Metadata:
    """Save a state; every rank of the group calls it with its own view of the same state.

    Args:
        path: a local path, or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL.
        state: dicts, lists, tuples, namedtuples and registered JAX pytrees of torch, jax and NumPy
            arrays and of None, bool, int, float, complex, str and bytes.
        overwrite: replace the checkpoint at ``path``. The old one stays readable until the new one
            is committed; then everything in its folder is gone.
        metadata: anything that JSON can carry, kept with the checkpoint; the coordinator's counts.
        planner: how to divide the work; by default every element is written exactly once, and
            replicas share the writing.
        group: the ranks that save together; found by itself where torch.distributed or
            jax.distributed are initialised.
        options: chunk sizes, threads, memory, progress.

    Returns:
        The checkpoint's metadata, the same on every rank.

    Raises:
        CheckpointExistsError: something is at the path, and ``overwrite`` is False.
        UnsupportedLeafError: leaves that cannot be saved, all listed by name.
        ManifestError: ``metadata`` holds what JSON cannot carry.
        PlanError: shards overlap or are missing, or the ranks disagree.
        StorageError: the storage refused (full, read-only, no answer).
        RanksFailedError: any of these, in a group of several ranks. Nothing is committed.

    Example:
        >>> import numpy as np, xckpt
        >>> state = {"model": {"w": np.ones((4, 2), np.float32)}, "step": 3}
        >>> saved = xckpt.save("memory://example", state)
        >>> saved.state_dict_metadata["model/w"].size
        (4, 2)
    """
    _check_path(path, "save(path, state)")
    options = options or SaveOptions()
    if planner is None:
        planner = DefaultSavePlanner(
            grid=GridOptions(options.chunk_bytes, options.shard_bytes),
            compare_replicas=options.compare_replicas,
            serialise=options.serialise,
        )
    from xckpt.engine import save_state_dict
    from xckpt.storage.writer import ZarrStorageWriter

    tree: Mapping[str, object] = state  # type: ignore[assignment]  # our planners take any tree
    return save_state_dict(
        tree,
        ZarrStorageWriter(path, overwrite=overwrite, options=options),
        group=group or find_group(),
        planner=planner,
        metadata=metadata,
    )


def load(
    path: Path,
    like: object = None,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | None = None,
    options: LoadOptions | None = None,
) -> Any:  # noqa: ANN401  # a tree like the caller's, as torch.load's is
    """Load a checkpoint into new arrays like the ones given; every rank of the group calls it.

    Args:
        path: where it is; see `save`.
        like: a tree with a target for each leaf: a torch Tensor or DTensor (``meta`` device too),
            a jax.Array, a jax.ShapeDtypeStruct with a sharding, a NumPy array, or any Python value.
            Only shape, dtype, device and sharding are read. None loads everything as NumPy arrays
            in the saved containers.
        strict: missing leaves, and leaves that no rank asks for, are an error; otherwise what both
            sides have is loaded and the rest of ``like`` is returned as it is.
        cast: allow another dtype than the stored one.
        planner: what goes where.
        group: the ranks that load together; found by itself.
        options: threads, memory, progress.

    Returns:
        A tree like ``like``.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TreeMismatchError: target and checkpoint differ; every difference is listed.
        CorruptCheckpointError: data are not what was saved; names leaf and range.
        RanksFailedError: any of these, in a group of several ranks.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-load", {"w": np.arange(4.0), "step": 3})
        >>> xckpt.load("memory://example-load")
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    _check_path(path, "load(path, like)")
    planner = planner or DefaultLoadPlanner(strict=strict, cast=cast)
    _load(path, like, planner, group, options)
    return planner.result()


def load_into(
    path: Path,
    state: object,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | None = None,
    options: LoadOptions | None = None,
) -> None:
    """Load a checkpoint into the torch tensors and NumPy arrays of ``state``, in place.

    Python values are replaced in the dicts and lists that hold them. Arguments and errors are those
    of `load`; after an error some tensors may be filled already.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-into", {"w": np.arange(4.0), "step": 3})
        >>> state = {"w": np.zeros(4), "step": 0}
        >>> xckpt.load_into("memory://example-into", state)
        >>> state
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    _check_path(path, "load_into(path, state)")
    planner = planner or DefaultLoadPlanner(strict=strict, cast=cast, in_place=True)
    _load(path, state, planner, group, options)
    planner.result()


def open(path: Path, *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts of it; see `Checkpoint`.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
    """
    _check_path(path, "open(path)")
    from xckpt.storage.checkpoint import Checkpoint

    return Checkpoint(path, options=options)


def _load(
    path: Path,
    like: object,
    planner: LoadPlanner,
    group: Group | None,
    options: LoadOptions | None,
) -> None:
    from xckpt.engine import load_state_dict
    from xckpt.storage.reader import ZarrStorageReader

    reader = ZarrStorageReader(path, options=options)
    tree: Mapping[str, object] | None = like  # type: ignore[assignment]  # our planners take any
    load_state_dict(tree, reader, group=group or find_group(), planner=planner)


def _check_path(path: object, call: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the first argument is the path, got a {type(path).__name__}: call {call}")
