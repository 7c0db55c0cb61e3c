"""`load` and `load_into`: their arguments in words, for people and for type checkers.

`xckpt.api.load_call` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from xckpt.api.load_call import LoadCall, check_filled, check_state, strictness_of
from xckpt.api.parts import PartialLoad, Patterns
from xckpt.api.save import Path, check_path, names_limits, raised_on_all_ranks
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import LoadReport, Severity
from xckpt.core.text.arguments import named
from xckpt.engine.groups import GroupFinder
from xckpt.engine.ranks.group import Group, TorchProcesses
from xckpt.options import LoadOptions, check_flags

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping

Tree = TypeVar("Tree")
"""A tree of targets, and what is loaded into one like it."""


@overload
def load(
    path: Path,
    like: None = None,
    *,
    at: str = "",
    select: Patterns | None = None,
    framework: str | None = None,
    device: object = None,
    strict: bool = True,
    missing: Severity | None = None,
    unexpected: Severity | None = None,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
    report: Callable[[LoadReport], object] | None = None,
) -> Any: ...  # noqa: ANN401  # what the checkpoint holds


@overload
def load(
    path: Path,
    like: Tree,
    *,
    at: str = "",
    select: Patterns | None = None,
    strict: bool = True,
    missing: Severity | None = None,
    unexpected: Severity | None = None,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
    report: Callable[[LoadReport], object] | None = None,
) -> Tree: ...


@names_limits
def load(
    path: Path,
    like: object = None,
    *,
    at: str = "",
    select: Patterns | None = None,
    framework: str | None = None,
    device: object = None,
    strict: bool = True,
    missing: Severity | None = None,
    unexpected: Severity | None = None,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
    report: Callable[[LoadReport], object] | None = None,
) -> Any:
    """Load a checkpoint into new arrays like the ones given; every rank of the group calls it.

    Args:
        path: where it is; see `save`. safetensors, Orbax and DCP checkpoints and files of
            `torch.save` are loaded the same way.
        like: a tree with a target for each leaf: a torch Tensor, DTensor or ShardedTensor (``meta``
            device too), a jax.Array, a jax.ShapeDtypeStruct, a JAX sharding or PartitionSpec, a
            NumPy array, or any Python value. Only shape, dtype, device and sharding are read. An
            object with a ``state_dict`` is not changed: the loaded state dict comes back in its
            place, for its ``load_state_dict``. Of tied weights (two tensors of one dict that share
            their memory, in a module or its state dict) the checkpoint may hold one: one new tensor
            comes back for both. None loads everything in the saved containers, as
            NumPy arrays or what ``framework`` says; a dict has its keys in the saved order, those
            of empty containers last. A jax.ShapeDtypeStruct without a sharding goes whole to JAX's
            default device, with a warning over 1 GiB in all. A sharding takes the stored shape and
            dtype; a PartitionSpec is laid over the mesh of ``jax.set_mesh``.
            Functions come back untouched, as do other settings among the leaves of a class that is
            registered with JAX (an Equinox module). An ``nnx.Variable`` and its value are one.
            A Python number and a 0-d array are one leaf: a saved int fills an int32 or float32
            array, a saved 0-d float32 array a Python float, where no value changes. ``cast`` also
            lets a float be rounded, and a number become one of another kind if it stays the same.
            Between two Python numbers the stored one comes back as it was. Any other Python value
            of another type, a str for an int, is an error as another dtype is; a None on either
            side fits any Python value, and what is stored comes back.
        at: name of a container or leaf of the checkpoint, such as ``"model"``: only what is below
            it is loaded, ``like`` is a tree of that, and leaf names count from there.
        select: patterns of leaf names: only what fits one is loaded, the rest of ``like`` is
            returned as it is, and the rest of the checkpoint is not missed. ``*`` is any text
            without a ``/``, ``**`` any text, ``?`` one character; a container's name stands for
            all in it. Without ``like`` a list that is not loaded as a whole becomes a dict.
        framework: ``"torch"``, ``"jax"`` or ``"numpy"``: whose arrays come back where there is no
            ``like``. Every rank gets the whole of each.
        device: with ``framework``, where they are: a device or its name. None is the CPU for
            torch, the default device for JAX.
        strict: missing leaves, and leaves that no rank asks for, are an error; otherwise what both
            sides have is loaded and the rest of ``like`` is returned as it is. Another shape or
            type is an error in any case.
        missing: what to do about leaves of ``like`` that the checkpoint lacks, whatever ``strict``
            says: ``"error"``, ``"ignore"``, or ``"warn"``, which ignores them with a warning. Where
            the checkpoint has none of them at all, that is always an error.
        unexpected: the same for leaves of the checkpoint that no rank asks for.
        cast: allow another dtype than the stored one.
        planner: what goes where.
        group: the ranks that load together; see `save`.
        no_dist: this process loads alone, even if there are other processes.
        timeout: seconds to wait for a rank that neither answers nor makes progress with what it
            reads; then an error names it. A rank that waits logs a warning after 15 s anyway.
        options: threads, memory, progress.
        mapping: how the leaves of the stored model become those of ``like``; see `xckpt.convert`.
            With it, checkpoints of other formats can be loaded too. Without ``like``, nested dicts
            with string keys come back.
        allow_lossy: allow steps of the mapping that do not bring every value back.
        report: called with a `LoadReport` once all is loaded, on every rank: which leaves were
            loaded, cast, kept as they were, and left in the checkpoint. ``report=print`` shows it.

    Returns:
        A tree like ``like``; to a type checker, of its type. A `jax.ShapeDtypeStruct` is replaced
        by a `jax.Array`, which the type of a tree cannot express: annotate the result, or give
        arrays as ``like``.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TreeMismatchError: target and checkpoint differ; every difference is listed.
        CorruptCheckpointError: data are not what was saved; names leaf and range.
        StorageError: the storage refused; or a file of another library's checkpoint was written
            while it was read.
        LeafTooLargeError: memory cannot hold what is wanted of a leaf.
        MappingError: the mapping does not fit what is stored, or is lossy and may not be.
        NoGroupError: a launcher started several processes, but no process group joins them.
        RanksFailedError: ranks failed for several causes, or were lost. In a group of several ranks
            each of these errors is raised on every rank, with what happened where in ``failures``.
        TypeError, ValueError: an argument makes no sense; it is named.
        ImportError: the framework is not installed.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-load", {"model": {"w": np.arange(4.0)}, "step": 3})
        >>> xckpt.load("memory://example-load")
        {'model': {'w': array([0., 1., 2., 3.])}, 'step': 3}
        >>> xckpt.load("memory://example-load", {"w": np.zeros(4)}, at="model")
        {'w': array([0., 1., 2., 3.])}
        >>> xckpt.load("memory://example-load", framework="torch", select="model")
        {'model': {'w': tensor([0., 1., 2., 3.], dtype=torch.float64)}}
        >>> xckpt.load("memory://example-load", {"step": 0}, unexpected="ignore", report=print)
        loaded 1 leaf
        left 1 leaf: model/w
        {'step': 3}
    """
    find = GroupFinder(group, no_dist=no_dist, timeout=timeout)
    with raised_on_all_ranks(find):
        flags = {"no_dist": no_dist, "strict": strict, "cast": cast, "allow_lossy": allow_lossy}
        _check_load(path, report, flags)
        call = LoadCall(
            path=path,
            in_place=False,
            wanted=PartialLoad.asked(at, select, framework, device, like=like, cast=cast),
            strictness=strictness_of(strict, missing, unexpected, planner),
            cast=cast,
            allow_lossy=allow_lossy,
            planner=planner,
            mapping=mapping,
            options=options,
        )
    tree, done = call.run(like, find)
    if report is not None:
        report(done)
    return tree


@names_limits
def load_into(
    path: Path,
    state: object,
    *,
    at: str = "",
    select: Patterns | None = None,
    strict: bool = True,
    missing: Severity | None = None,
    unexpected: Severity | None = None,
    cast: bool = False,
    planner: LoadPlanner | None = None,
    group: Group | TorchProcesses | None = None,
    no_dist: bool = False,
    timeout: float | None = None,
    options: LoadOptions | None = None,
    mapping: LeafMapping | None = None,
    allow_lossy: bool = False,
) -> LoadReport:
    """Load a checkpoint into the torch tensors and NumPy arrays of ``state``, in place.

    Python values are replaced in the dicts and lists that hold them.

    An object with a ``state_dict`` (a module, an optimizer) is filled through it: its tensors in
    place, and then, once every rank has read its part, its ``load_state_dict`` is called with the
    loaded state. Where the object has a None, an empty dict or a list or tuple without tensors, the
    checkpoint decides what is there, so that a new optimizer receives the moments that it has not
    made yet. A torch optimizer that was saved before its first step has none: loaded, it takes them
    from an optimizer that has stepped, as torch's own ``load_state_dict`` does. A checkpoint of
    more or fewer parameters, or groups of them, than the optimizer has is an error before that.

    Of tied weights (two names of one dict, one memory) the checkpoint may hold one, as the files of
    safetensors do: it fills both.

    Args:
        path: where the checkpoint is; every format that `load` reads.
        state: what to fill, a tree or one object; a leaf that cannot be filled in place, such as
            a jax.Array, is refused.
        at: see `load`; ``state`` is what the checkpoint has there.
        select: see `load`; what does not fit stays as it is.
        strict: see `load`; where it is False, leaves that the checkpoint lacks stay as they are.
        missing: see `load`.
        unexpected: see `load`.
        cast: allow another dtype than the stored one; ``state`` keeps its own.
        planner: what goes where; it loads in place whatever its own ``in_place`` says.
        group: see `load`.
        no_dist: see `load`.
        timeout: see `load`.
        options: see `load`.
        mapping: see `load`; it takes the place of a planner.
        allow_lossy: see `load`.

    Returns:
        Which leaves were loaded, cast, kept as they were, and left in the checkpoint.

    Raises:
        XckptError: as `load`; after an error some tensors may be filled already, but no
            ``load_state_dict`` was called, unless one has failed: its error names the object, and
            every rank raises one.
        UnsupportedLeafError: a leaf cannot be filled in place; or leaves share memory (tied
            weights, overlapping views) for which the checkpoint holds different elements. Nothing
            was written then. Or the root is a value, or a tuple with values in it.
        TypeError: ``state`` is None.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://example-into", {"w": np.arange(4.0), "step": 3})
        >>> state = {"w": np.zeros(4), "step": 0}
        >>> xckpt.load_into("memory://example-into", state)
        LoadReport(2 loaded, 0 cast, 0 kept, 0 left)
        >>> state
        {'w': array([0., 1., 2., 3.]), 'step': 3}
    """
    find = GroupFinder(group, no_dist=no_dist, timeout=timeout)
    with raised_on_all_ranks(find):
        check_path(path, "load_into(path, state)")
        check_flags("load_into", no_dist=no_dist, strict=strict, cast=cast, allow_lossy=allow_lossy)
        check_state(state)
        call = LoadCall(
            path=path,
            in_place=True,
            wanted=PartialLoad.asked(at, select),
            strictness=strictness_of(strict, missing, unexpected, planner),
            cast=cast,
            allow_lossy=allow_lossy,
            planner=planner,
            mapping=mapping,
            options=options,
        )
    loaded, done = call.run(state, find)
    if planner is None:
        check_filled(loaded, state)
    return done


def _check_load(path: object, report: object, flags: Mapping[str, object]) -> None:
    """Refuse arguments of a load that make no sense, before anything is loaded.

    Raises:
        TypeError: an argument makes no sense; it is named.
    """
    check_path(path, "load(path, like)")
    check_flags("load", **flags)
    if report is not None and not callable(report):
        kind = type(report).__name__
        raise TypeError(f"load(report=) takes a function of a LoadReport, not {named(kind)}")
