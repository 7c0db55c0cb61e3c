"""Saving and loading a state dict through a storage, as torch's users know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

from xckpt.api.load_call import check_filled, check_state
from xckpt.api.save import check_planner, names_limits, raised_on_all_ranks
from xckpt.core.metadata import Metadata
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.save import SavePlanner
from xckpt.core.storage import StorageReader, StorageWriter
from xckpt.core.text.arguments import named
from xckpt.engine.groups import GroupFinder
from xckpt.engine.in_flight import settle
from xckpt.engine.load import load_state
from xckpt.engine.ranks.group import Group
from xckpt.engine.ranks.watch import Watch
from xckpt.engine.save import default_planner, save_state
from xckpt.options import LoadOptions, SaveOptions, check_flags, is_watched, with_progress

__all__ = ["load_state_dict", "save_state_dict"]


@names_limits
def save_state_dict(
    state_dict: Mapping[str, object],
    storage_writer: StorageWriter,
    *,
    process_group: object = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save a state dict through a storage writer, as `save` does to a path; collective.

    Args:
        state_dict: any tree that `save` takes.
        storage_writer: where to; `xckpt.storage.ZarrStorageWriter` or your own.
        process_group: the ranks that save together: a torch process group or a `Group`; found by
            itself (see `xckpt.engine.groups.find_group`).
        coordinator_rank: the rank within the process group that decides and commits.
        no_dist: this process saves alone, whatever other processes there are.
        planner: how to divide the work; by default what `save` does with the writer's ``options``.

    Returns:
        The checkpoint's metadata, the same on every rank.

    Raises:
        XckptError: as `save`.
        TypeError: the writer is not a `StorageWriter`, or the planner not a `SavePlanner`.

    Example:
        >>> import numpy as np, xckpt
        >>> writer = xckpt.storage.ZarrStorageWriter("memory://example-state-dict")
        >>> saved = xckpt.save_state_dict({"w": np.ones((4, 2), np.float32), "step": 3}, writer)
        >>> saved.state_dict_metadata["w"].size
        (4, 2)
    """
    find = _finder(process_group, coordinator_rank, no_dist)
    with raised_on_all_ranks(find):
        _check_storage(storage_writer, StorageWriter, "ZarrStorageWriter")
        check_flags("save_state_dict", no_dist=no_dist)
        check_planner(planner, SavePlanner, "save_state_dict")
        if planner is None:
            options = getattr(storage_writer, "options", None)
            options = options if isinstance(options, SaveOptions) else SaveOptions()
            planner = default_planner(options)
        group = find()
    failure = settle(group)
    with _seen("save_state_dict", storage_writer, SaveOptions, group) as watch:
        return save_state(
            state_dict,
            storage_writer,
            group=group,
            planner=planner,
            failure=failure,
            watch=watch,
        )


@names_limits
def load_state_dict(
    state_dict: MutableMapping[str, Any],
    storage_reader: StorageReader,
    *,
    process_group: object = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> Metadata:
    """Load a checkpoint into the torch tensors and NumPy arrays of a state dict, in place.

    Python values are replaced in the dicts and lists that hold them.

    Args:
        state_dict: what to fill.
        storage_reader: where from; `xckpt.storage.ZarrStorageReader` or your own.
        process_group: see `save_state_dict`.
        coordinator_rank: see `save_state_dict`.
        no_dist: see `save_state_dict`.
        planner: what goes where; by default every leaf must fit (`DefaultLoadPlanner()`, which
            takes ``strict=`` and ``cast=``).

    Returns:
        The checkpoint's metadata, the same on every rank.

    Raises:
        XckptError: as `load`; after an error some tensors may be filled already.
        TypeError: the reader is not a `StorageReader`, the planner not a `LoadPlanner`, or
            ``state_dict`` is None.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-load-state-dict", {"w": np.arange(4.0), "step": 3})
        >>> state = {"w": np.zeros(4), "step": 0}
        >>> reader = xckpt.storage.ZarrStorageReader("memory://example-load-state-dict")
        >>> metadata = xckpt.load_state_dict(state, reader)
        >>> state, list(metadata.state_dict_metadata)
        ({'w': array([0., 1., 2., 3.]), 'step': 3}, ['w', 'step'])
    """
    find = _finder(process_group, coordinator_rank, no_dist)
    with raised_on_all_ranks(find):
        _check_storage(storage_reader, StorageReader, "ZarrStorageReader")
        check_flags("load_state_dict", no_dist=no_dist)
        check_state(state_dict)
        check_planner(planner, LoadPlanner, "load_state_dict")
        group = find()
    with _seen("load_state_dict", storage_reader, LoadOptions, group) as watch:
        loaded = load_state(
            state_dict,
            storage_reader,
            group=group,
            planner=DefaultLoadPlanner() if planner is None else planner,
            in_place=True,
            watch=watch,
        )
    if planner is None:
        check_filled(loaded.tree, state_dict)
    return loaded.metadata


def _finder(process_group: object, coordinator_rank: int, no_dist: bool) -> GroupFinder:
    # As in torch, no_dist passes over the process group.
    return GroupFinder(None if no_dist else process_group, coordinator_rank, no_dist)


def _check_storage(storage: object, kind: type, ours: str) -> None:
    if not isinstance(storage, kind):
        such = f"such as xckpt.storage.{ours}(path), not {named(type(storage).__name__)}"
        raise TypeError(f"give {named(kind.__name__)}, {such}")


@contextmanager
def _seen(
    call: str,
    storage: StorageWriter | StorageReader,
    kind: type[SaveOptions] | type[LoadOptions],
    group: Group,
) -> Iterator[Watch | None]:
    """The watch of a call, and its progress bar, where the storage's own options ask for them."""
    places = (getattr(storage, name, None) for name in ("location", "target"))
    where = str(next(filter(None, places), type(storage).__name__))
    options = getattr(storage, "options", None)
    if not isinstance(options, kind):
        unset = kind()
        yield Watch.of(call, where, unset) if is_watched(unset) else None
        return
    either = cast(SaveOptions, options)
    with with_progress(either, call, group.rank, where) as shown:
        storage.options = shown  # pyright: ignore[reportAttributeAccessIssue]  # it has some
        try:
            yield Watch.of(call, where, options) if is_watched(options) else None
        finally:
            storage.options = options  # pyright: ignore[reportAttributeAccessIssue]
