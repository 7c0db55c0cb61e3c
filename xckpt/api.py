"""The functions that people call with a path: save, save_async, load, load_into, open.

Each is a thin composition over one engine: find the group (`xckpt.engine.adapters`), make storage
and planner, run the steps (`xckpt.engine.save`, `xckpt.engine.load`). `xckpt.state_dict` has
torch's spelling of the same.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.save import SavePlanner
from xckpt.engine.adapters import find_group
from xckpt.engine.background import SaveFuture, begin
from xckpt.engine.group import Group
from xckpt.engine.load import load_state
from xckpt.engine.save import default_planner, save_state, settle
from xckpt.engine.stager import AsyncStager
from xckpt.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from xckpt.formats.reader import FormatsAt
    from xckpt.mapping.mapping import LeafMapping
    from xckpt.storage.checkpoint import Checkpoint

__all__ = [
    "load",
    "load_into",
    "open",
    "save",
    "save_async",
]

Path = str | os.PathLike[str]


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
            arrays and of None, bool, int, float, complex, str and bytes. With torch, an object
            that has ``state_dict`` and ``load_state_dict`` (a module, an optimizer, one of your
            own) stands for what its ``state_dict()`` gives; that is called once.
        overwrite: replace the checkpoint at ``path``. The old one stays readable until the new one
            is committed; then its folder is removed with all that is in it.
        metadata: anything that JSON can carry, stored in the checkpoint; the coordinator's is used.
        planner: how to divide the work; by default every element is written exactly once, and
            replicas share the writing.
        group: the ranks that save together; by default all of torch.distributed or of
            jax.distributed, where one is initialised.
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
    from xckpt.storage.write_checkpoint import ZarrStorageWriter

    options = options or SaveOptions()
    group = find_group() if group is None else group
    return save_state(
        state,
        ZarrStorageWriter(path, overwrite=overwrite, options=options),
        group=group,
        planner=default_planner(options) if planner is None else planner,
        metadata=metadata,
        failure=settle(group),
    )


def save_async(
    path: Path,
    state: object,
    *,
    stager: AsyncStager | None = None,
    overwrite: bool = False,
    metadata: JSONValue = None,
    planner: SavePlanner | None = None,
    group: Group | None = None,
    options: SaveOptions | None = None,
) -> SaveFuture:
    """Save a state in the background; collective, as `save` is.

    The state is copied into host memory (JAX arrays are only held) before this returns, unless the
    stager says otherwise; then training may go on and change it. Saves follow each other: this one
    begins, and its state is copied, when the one before it has ended; `save` waits as well, and so
    does the interpreter's exit. The ranks talk over connections of their own, so training may use
    its process group meanwhile.

    Args:
        path: see `save`.
        state: see `save`.
        stager: makes the copy. By default a `BlockingAsyncStager` that all such saves share; what
            memory it keeps between them the system may take back. Getting the memory makes the
            first save slower than a copy, unless you prepare a stager of your own.
        overwrite: see `save`.
        metadata: see `save`.
        planner: see `save`; it is used from another thread.
        group: see `save`.
        options: see `save`; ``progress`` is called from other threads.

    Returns:
        A future: ``result()`` waits for the commit and returns the checkpoint's metadata, or raises
        what `save` would have raised. If that is never called, the next save raises it.

    Raises:
        XckptError: an earlier asynchronous save failed, and its result was never asked for.

    Example:
        >>> import numpy as np, xckpt
        >>> weights = np.arange(4.0)
        >>> saving = xckpt.save_async("memory://example-async", {"w": weights})
        >>> weights += 1  # the next training step
        >>> _ = saving.result()
        >>> xckpt.load("memory://example-async")
        {'w': array([0., 1., 2., 3.])}
    """
    _check_path(path, "save_async(path, state)")
    options = options or SaveOptions()
    planner = default_planner(options) if planner is None else planner
    kept = copy.deepcopy(metadata)

    def run(state: object, failure: BaseException | None, group: Group) -> Metadata:
        # Here, so that the caller does not wait for TensorStore to be imported.
        from xckpt.storage.write_checkpoint import ZarrStorageWriter

        return save_state(
            state,
            ZarrStorageWriter(path, overwrite=overwrite, options=options),
            group=group,
            planner=planner,
            metadata=kept,
            failure=failure,
        )

    return begin(str(path), state, stager, find_group() if group is None else group, run)


def load(
    path: Path,
    like: object = None,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
) -> Any:  # noqa: ANN401  # a tree like the caller's, as torch.load's is
    """Load a checkpoint into new arrays like the ones given; every rank of the group calls it.

    Args:
        path: where it is; see `save`. safetensors, Orbax and DCP checkpoints and files of
            `torch.save` are loaded the same way.
        like: a tree with a target for each leaf: a torch Tensor, DTensor or ShardedTensor (``meta``
            device too), a jax.Array, a jax.ShapeDtypeStruct with a sharding, a NumPy array, or any
            Python value. Only shape, dtype, device and sharding are read. An object with a
            ``state_dict`` is not changed: in its place comes the loaded state dict, which its
            ``load_state_dict`` takes. None loads everything as NumPy arrays in the saved
            containers.
        strict: missing leaves, and leaves that no rank asks for, are an error; otherwise what both
            sides have is loaded and the rest of ``like`` is returned as it is.
        cast: allow another dtype than the stored one.
        planner: what goes where.
        group: the ranks that load together; found by itself.
        options: threads, memory, progress.
        mapping: how the leaves of the stored model become those of ``like``; see `xckpt.convert`.
            With it, checkpoints of other formats can be loaded too. Without ``like``, nested dicts
            with string keys come back.
        allow_lossy: allow steps of the mapping that do not bring every value back.

    Returns:
        A tree like ``like``.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TreeMismatchError: target and checkpoint differ; every difference is listed.
        CorruptCheckpointError: data are not what was saved; names leaf and range.
        LeafTooLargeError: memory cannot hold what is wanted of a leaf.
        MappingError: the mapping does not fit what is stored, or is lossy and may not be.
        RanksFailedError: any of these, in a group of several ranks.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-load", {"w": np.arange(4.0), "step": 3})
        >>> xckpt.load("memory://example-load")
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    _check_path(path, "load(path, like)")
    return _load(path, like, False, strict, cast, planner, group, options, mapping, allow_lossy)


def load_into(
    path: Path,
    state: object,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
) -> None:
    """Load a checkpoint into the torch tensors and NumPy arrays of ``state``, in place.

    Python values are replaced in the dicts and lists that hold them.

    An object with a ``state_dict`` (a module, an optimizer) is filled through it: its tensors in
    place, and then, once every rank has read its part, its ``load_state_dict`` is called with the
    loaded state. Where the object has a None, an empty dict or a list or tuple without tensors, the
    checkpoint decides what is there, so that a new optimizer receives the moments that it has not
    made yet.

    Args:
        path: where the checkpoint is; every format that `load` reads.
        state: what to fill, a tree or one object; a leaf that cannot be filled in place, such as
            a jax.Array, is refused.
        strict: see `load`; where it is False, leaves that the checkpoint lacks stay as they are.
        cast: allow another dtype than the stored one; ``state`` keeps its own.
        planner: what goes where; it loads in place whatever its own ``in_place`` says.
        group: see `load`.
        options: see `load`.
        mapping: see `load`; it takes the place of a planner.
        allow_lossy: see `load`.

    Raises:
        XckptError: as `load`; after an error some tensors may be filled already, but no
            ``load_state_dict`` was called.
        TypeError: ``state`` is None.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-into", {"w": np.arange(4.0), "step": 3})
        >>> state = {"w": np.zeros(4), "step": 0}
        >>> xckpt.load_into("memory://example-into", state)
        >>> state
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    _check_path(path, "load_into(path, state)")
    if state is None:
        raise TypeError("there is nothing to load into: give the state that is to be filled")
    _load(path, state, True, strict, cast, planner, group, options, mapping, allow_lossy)


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
    in_place: bool,
    strict: bool,
    cast: bool,
    planner: LoadPlanner | None,
    group: Group | None,
    options: LoadOptions | None,
    mapping: LeafMapping | None,
    allow_lossy: bool,
) -> Any:  # noqa: ANN401  # a tree like the caller's
    if mapping is not None and planner is not None:
        raise ValueError("give a mapping or a planner; a MappedLoadPlanner can have both")
    from xckpt.storage.read_checkpoint import ZarrStorageReader

    reader = ZarrStorageReader(path, options=options)
    group = find_group() if group is None else group
    others = cache(partial(_formats_at, path, options))
    if mapping is not None:
        from xckpt.convert.mapped_load import MappedLoadPlanner

        planner = MappedLoadPlanner(
            mapping,
            lambda: others().open_source(),
            strict=strict,
            cast=cast,
            allow_lossy=allow_lossy,
            rank=group.rank,
            ranks=group.size,
            options=options,
        )
    planner = DefaultLoadPlanner(strict=strict, cast=cast) if planner is None else planner
    tree: Mapping[str, object] | None = like  # type: ignore[assignment]  # our planners take any
    return load_state(
        tree, reader, group=group, planner=planner, in_place=in_place, others=others
    ).tree


def _formats_at(path: Path, options: LoadOptions | None) -> FormatsAt:
    # Imported when there is no checkpoint of ours, or a mapping.
    from xckpt.formats.reader import FormatsAt

    return FormatsAt(path, options)


def _check_path(path: object, call: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the first argument is the path, got a {type(path).__name__}: call {call}")
