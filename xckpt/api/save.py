"""`save` and `save_async`, and what every public call does first.

1. `names_limits` keeps torch's compiler out of the call, and says what to do where the process
   lacks open files, threads or memory.
2. The arguments are checked. If this rank raises meanwhile, all ranks do (`raised_on_all_ranks`).
3. `group_of_call` finds the group. If this rank cannot, all ranks raise that.
4. Storage and planner are made, and `xckpt.engine.save` runs the steps of the save.
   `xckpt.engine.background` runs them beside training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar, cast

from xckpt.core.metadata import JSONValue, Metadata, copied_json
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.save import SavePlanner
from xckpt.core.run.names import OptionalBase
from xckpt.core.storage import absolute, url_parts
from xckpt.core.text.arguments import named
from xckpt.engine.background import SaveFuture, begin
from xckpt.engine.groups import GroupFinder
from xckpt.engine.in_flight import IN_FLIGHT, settle
from xckpt.engine.limits import MAIN_THREAD, Uncompiled, awaited_at_exit, naming_limit
from xckpt.engine.ranks.group import Group, TorchProcesses
from xckpt.engine.ranks.watch import Watch
from xckpt.engine.save import default_planner, save_state
from xckpt.engine.stager import AsyncStager
from xckpt.options import SaveOptions, check_flags, checked_options, is_watched, with_progress

Path = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")


def names_limits(call: Callable[P, T]) -> Callable[P, T]:
    """Have a public call raise `naming_limit` in place of what Python says, and not be compiled."""

    def awaited(*arguments: P.args, **keywords: P.kwargs) -> T:
        if threading.get_ident() == MAIN_THREAD:
            return call(*arguments, **keywords)
        return awaited_at_exit(call, *arguments, **keywords)

    outside = Uncompiled(call, awaited)

    def call_named(*arguments: P.args, **keywords: P.kwargs) -> T:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        try:
            return outside[disable](*arguments, **keywords)
        except (OSError, RuntimeError, MemoryError) as error:
            if (named := naming_limit(error)) is error:
                raise
            raise named from error

    return outside.marked(call_named)


@names_limits
def save(
    path: Path,
    state: object,
    *,
    overwrite: bool = False,
    base: Path | None = None,
    metadata: JSONValue = None,
    planner: SavePlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
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
            is committed. Files of yours beside it are kept; a folder that holds only such files
            needs this too.
        base: an earlier checkpoint, often the last one: what is equal there is not written again.
            On local files an equal chunk is a hard link, in a bucket a copy that it makes itself
            (``pip install "xckpt[buckets]"``), so that each checkpoint is whole by itself; where
            nothing can be shared, all is written, and the log says why (INFO).
        metadata: anything that JSON can carry, stored in the checkpoint; the coordinator's is used.
        planner: how to divide the work; by default every element is written exactly once, and
            replicas share the writing.
        group: the ranks that save together: a torch process group or DeviceMesh, or a `Group`; by
            default all of torch.distributed or of jax.distributed, where one is initialised.
        no_dist: this process saves alone, whatever other processes there are.
        timeout: seconds to wait for a rank that neither answers nor makes progress with what it
            writes; then an error names it. A rank that waits logs a warning after 15 s anyway.
        options: chunk sizes, threads, memory, progress.

    Returns:
        The checkpoint's metadata, the same on every rank.

    Raises:
        CheckpointExistsError: something is at the path, and ``overwrite`` is False.
        NotACheckpointError: there is no checkpoint at ``base``.
        UnsupportedLeafError: leaves that cannot be saved, all listed by name.
        ManifestError: ``metadata`` holds what JSON cannot carry.
        PlanError: shards overlap or are missing, or the ranks disagree.
        StorageError: the storage refused (full, read-only, no answer).
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost. In a group of several ranks
            each of these errors is raised on every rank, with what happened where in ``failures``.
            Nothing is committed.
        TypeError, ValueError: an argument makes no sense; it is named.

    Example:
        >>> import numpy as np, xckpt
        >>> state = {"model": {"w": np.ones((4, 2), np.float32)}, "step": 3}
        >>> xckpt.save("memory://example", state)["model/w"].shape
        (4, 2)
    """
    find = GroupFinder(group, no_dist=no_dist, timeout=timeout)
    with raised_on_all_ranks(find):
        options = _checked("save", path, base, planner, options, overwrite, no_dist)
        from xckpt.storage.write_checkpoint import ZarrStorageWriter

        watch = Watch.of("save", path, options) if is_watched(options) else None
    ranks = group_of_call(find)
    with with_progress(options, "save", ranks.rank, path) as shown:
        # As `raised_on_all_ranks` does, without its frames: each save comes this way.
        try:
            writer = ZarrStorageWriter(path, overwrite=overwrite, options=shown, base=base)
        except Exception as error:
            raise_on_others(find, error)
            raise
        return save_state(
            state,
            writer,
            group=ranks,
            planner=default_planner(options) if planner is None else planner,
            metadata=metadata,
            failure=settle(ranks) if IN_FLIGHT else None,
            watch=watch,
        )


@names_limits
def save_async(
    path: Path,
    state: object,
    *,
    stager: AsyncStager | None = None,
    overwrite: bool = False,
    base: Path | None = None,
    metadata: JSONValue = None,
    planner: SavePlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
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
        stager: makes the copy. By default a `BlockingAsyncStager` that all such saves share; the
            system may take back the memory that it keeps between them. The first save is slower,
            because it gets that memory, unless you prepare a stager of your own.
        overwrite: see `save`.
        base: see `save`.
        metadata: see `save`.
        planner: see `save`; it is used from another thread.
        group: see `save`.
        no_dist: see `save`.
        timeout: see `save`.
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
    find, call = GroupFinder(group, no_dist=no_dist, timeout=timeout), "save_async"
    with raised_on_all_ranks(find, _refuse_in_background):
        options = _checked(call, path, base, planner, options, overwrite, no_dist, stager)
        planner = default_planner(options) if planner is None else planner
        kept = copied_json(metadata, "metadata")
        where, known = _from_here(path), None if base is None else _from_here(base)

    def run(state: object, failure: BaseException | None, group: Group) -> Metadata:
        # Here, so that the caller does not wait for TensorStore to be imported.
        from xckpt.storage.write_checkpoint import ZarrStorageWriter

        with with_progress(options, "save", group.rank, path) as shown:
            with raised_on_all_ranks(GroupFinder(group)):
                writer = ZarrStorageWriter(where, overwrite=overwrite, options=shown, base=known)
            return save_state(
                state,
                writer,
                group=group,
                planner=planner,
                metadata=kept,
                failure=failure,
                watch=Watch.of(call, path, options) if is_watched(options) else None,
                call=call,
            )

    return begin(os.fspath(path), state, stager, group_of_call(find, _refuse_in_background), run)


def _refuse(group: Group, error: Exception) -> None:
    # Not on the way of a call that makes sense.
    from xckpt.engine.ranks.compare import refuse

    refuse(group, error)


def _refuse_in_background(group: Group, error: Exception) -> None:
    """As `refuse`, over the connections of saves in the background, in turn with them."""
    if group.size == 1:
        return

    def run(state: object, failure: BaseException | None, background: Group) -> Metadata:
        _refuse(background, error)
        raise error

    begin("a save with a wrong argument", None, None, group, run).result()


def raise_on_others(
    find: GroupFinder,
    error: Exception,
    refuse: Callable[[Group, Exception], None] = _refuse,
) -> None:
    """Have the other ranks raise what went wrong on this one before the first step."""
    refuse(find.likely(), error)


@contextlib.contextmanager
def raised_on_all_ranks(
    find: GroupFinder, refuse: Callable[[Group, Exception], None] = _refuse
) -> Iterator[None]:
    """Around what this rank does before the first step: all ranks raise what it raises."""
    try:
        yield
    except Exception as error:
        raise_on_others(find, error, refuse)
        raise


def group_of_call(find: GroupFinder, refuse: Callable[[Group, Exception], None] = _refuse) -> Group:
    """The group of a call; if this rank's arguments name no group, all ranks raise that.

    Raises:
        NoGroupError, TypeError, ValueError: see `find_group`.
    """
    try:
        return find()
    except Exception as error:
        raise_on_others(find, error, refuse)
        raise


def _checked(
    call: str,
    path: Path,
    base: Path | None,
    planner: object,
    options: SaveOptions | None,
    overwrite: object,
    no_dist: object,
    stager: object = None,
) -> SaveOptions:
    """The options of a save whose arguments make sense.

    Raises:
        TypeError: an argument makes no sense; it is named.
        StorageError: a save in the background begins in a process that can neither read nor write.
    """
    check_path(path, f"{call}(path, state)")
    if base is not None and not isinstance(cast(object, base), str | os.PathLike):
        raise TypeError(f"base= takes the path of a checkpoint, not {named(type(base).__name__)}")
    check_flags(call, overwrite=overwrite, no_dist=no_dist)
    options = checked_options(options, SaveOptions, call)
    check_planner(planner, SavePlanner, call)
    if stager is not None:
        what = stager.__name__ if isinstance(stager, type) else named(type(stager).__name__)
        if isinstance(stager, type) or not callable(getattr(stager, "stage", None)):
            raise TypeError(f"stager= takes an instance of xckpt.staging.AsyncStager, not {what}")
    # A process that was forked from one that has used the storage has imported it.
    if call == "save_async" and "xckpt.storage.location" in sys.modules:
        from xckpt.storage.location import check_process

        check_process()
    return options


def check_path(path: object, call: str, which: str = "first") -> None:
    """Refuse an argument that is not a path.

    Raises:
        TypeError: it is not a path; the message shows how to call ``call``.
        PathError: it is a URL that has lost a slash.
        StorageError: it is relative to a working folder that was deleted.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the {which} argument is the path, got {named(type(path).__name__)}: call {call}"
        )
    if not isinstance(os.fspath(path), str):
        raise TypeError("a path must be a str or a PathLike of str, not of bytes")
    _from_here(path)


def _from_here(path: Path) -> Path:
    """A path that means the same when the working folder has changed; a URL as it is."""
    text = os.fspath(path)
    stays = not text or isinstance(path, OptionalBase) or url_parts(text) is not None
    return path if stays else absolute(text)


def check_planner(planner: object, kind: type[SavePlanner] | type[LoadPlanner], call: str) -> None:
    """Refuse a planner of another kind.

    Raises:
        TypeError: it is not a ``kind``; the message names ``call``.
    """
    if planner is not None and not isinstance(planner, kind):
        name = planner.__name__ if isinstance(planner, type) else named(type(planner).__name__)
        raise TypeError(f"{call} takes an instance of xckpt.planner.{kind.__name__}, not {name}")
