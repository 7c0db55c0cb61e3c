"""`load` and `load_into`: find the group, make storage and planner, run the steps.

The steps are in `xckpt.engine.load`. Other libraries' checkpoints and mappings are imported when a
load needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from xckpt.api.save import Path, check_path
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.engine.adapters import find_group
from xckpt.engine.group import Group
from xckpt.engine.load import load_state
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.formats.reader import FormatsAt
    from xckpt.mapping.mapping import LeafMapping


def load(
    path: Path,
    like: object = None,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: object = None,
    no_dist: bool = False,
    timeout: float | None = None,
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
        group: the ranks that load together: a `Group` or a torch process group; by default all of
            torch.distributed or of jax.distributed, where one is initialised.
        no_dist: this process loads alone, whatever other processes there are.
        timeout: seconds to wait for a silent rank in one step, at least as long as the slowest rank
            reads; then an error names it. A rank that waits logs a warning after 15 s anyway.
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
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost. In a group of several ranks
            each of these errors is raised on every rank, with what happened where in ``failures``.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-load", {"w": np.arange(4.0), "step": 3})
        >>> xckpt.load("memory://example-load")
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    check_path(path, "load(path, like)")
    ranks = partial(find_group, group, no_dist=no_dist, timeout=timeout)
    return _load(path, like, False, strict, cast, planner, ranks, options, mapping, allow_lossy)


def load_into(
    path: Path,
    state: object,
    *,
    strict: bool = True,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: object = None,
    no_dist: bool = False,
    timeout: float | None = None,
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
        no_dist: see `load`.
        timeout: see `load`.
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
    check_path(path, "load_into(path, state)")
    if state is None:
        raise TypeError("there is nothing to load into: give the state that is to be filled")
    ranks = partial(find_group, group, no_dist=no_dist, timeout=timeout)
    _load(path, state, True, strict, cast, planner, ranks, options, mapping, allow_lossy)


def _load(
    path: Path,
    like: object,
    in_place: bool,
    strict: bool,
    cast: bool,
    planner: LoadPlanner | None,
    ranks: Callable[[], Group],
    options: LoadOptions | None,
    mapping: LeafMapping | None,
    allow_lossy: bool,
) -> Any:  # noqa: ANN401  # a tree like the caller's
    if mapping is not None and planner is not None:
        raise ValueError("give a mapping or a planner; a MappedLoadPlanner can have both")
    from xckpt.storage.read_checkpoint import ZarrStorageReader

    reader = ZarrStorageReader(path, options=options)
    group = ranks()
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
