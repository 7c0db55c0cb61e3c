"""What a target tree asks for, held against what a checkpoint has.

1. `compare` says in words how each target does not fit, `opaque_differences` which take no object
   of its writer's; `unexpected` lists what no target takes.
2. `decide_load` holds the differences of all ranks against the caller's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.plan.alike import check_alike
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.mismatch import MISSING, UNEXPECTED, merged_problems, mismatch
from xckpt.core.plan.report import Strictness
from xckpt.core.problem import Problem
from xckpt.core.targets.numbers import NUMBERS, NumberTarget, number_difference, types_differ
from xckpt.core.targets.objects import NOT_STORED, not_stored
from xckpt.core.text.arguments import named
from xckpt.core.values import value_kind

_OPAQUE: Final = (
    "the checkpoint holds an object that its writer serialised, not a {}; a target of bytes takes "
    "it as it is"
)

_BOTH: Final = 'missing="ignore" loads that one for both'


def compare(
    targets: Mapping[str, TargetLeaf | None],
    metadata: Metadata,
    likes: Mapping[str, object] | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
) -> dict[str, Problem]:
    """Leaf name -> how the target does not fit the checkpoint; empty if everything fits.

    Args:
        targets: leaf name -> target; None for a Python value.
        metadata: the checkpoint's.
        likes: leaf name -> the Python value itself, whose type is compared; None fits any.
        strict: whether a leaf that the checkpoint lacks is a difference.
        cast: whether another dtype is not.

    Example:
        >>> compare({"step": None}, Metadata({}))
        {'step': 'step: wanted, but not in the checkpoint'}
    """
    differing: dict[str, Problem] = {}
    likes = likes or {}
    for name, target in targets.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            kind = MISSING
            difference = not_stored(name, metadata, likes.get(name)) if strict else ""
        else:
            kind, difference = _difference(target, stored, likes.get(name), cast)
        if difference:
            differing[name] = Problem(name, kind=kind, text=difference)
    if any(problem.kind == MISSING for problem in differing.values()):
        from xckpt.core.targets.tied import ties  # most loads lack nothing

        for name, other in ties(targets, metadata.state_dict_metadata).items():
            text = f"{NOT_STORED}; it shares the memory of {other}, which is: {_BOTH}"
            differing[name] = Problem(name, kind=MISSING, text=text)
    if cast:
        differing = _without_scales(targets, metadata) | differing
    return differing


def _difference(
    target: TargetLeaf | None,
    stored: TensorStorageMetadata | BytesStorageMetadata,
    like: object,
    cast: bool,
) -> tuple[str, str]:
    """How a target does not fit the stored leaf: what kind of problem it is, and the words.

    The words are empty if it fits.
    """
    if isinstance(stored, BytesStorageMetadata):
        if target is None:
            return "type", _type_difference(stored.kind, value_kind(like))
        return "value", _value_difference(target, stored.kind, cast)
    if target is None:
        tensor = f"{named(stored.properties.dtype)} tensor of shape {stored.size}"
        return "value", f"the checkpoint holds {tensor}, not a Python value"
    if isinstance(target, NumberTarget):
        return "value", number_difference(target.stored, target.kind, cast=cast)
    if _is_alike(target, stored):
        return "", ""
    words = "; ".join(_tensor_differences(target, stored, cast))
    return words.partition(" ")[0], words


def _without_scales(
    targets: Mapping[str, TargetLeaf | None], metadata: Metadata
) -> dict[str, Problem]:
    """Leaf name -> which scales a weight lacks that is cast; see `cast_with_scales`."""
    dtypes = {
        name: stored.properties.dtype
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    wanted = {name: target.dtype for name, target in targets.items() if target is not None}
    cast = {n: to for n, to in wanted.items() if to and dtypes.get(n, to) != to}
    if not cast:
        return {}
    from xckpt.core.targets.scaled import cast_with_scales  # most loads cast nothing

    return {
        name: Problem(
            name,
            kind="scales",
            text=f"dtype {dtypes[name]} in the checkpoint, {cast[name]} wanted, but not its "
            f"scales, {scales}: its numbers alone are not the weights; load both, and multiply",
        )
        for name, scales in cast_with_scales(dtypes).items()
        if name in cast and scales not in targets
    }


def _value_difference(target: TargetLeaf, kind: str, cast: bool) -> str:
    """Why a stored Python value cannot fill a tensor; empty if it may."""
    if kind == "opaque":
        return _OPAQUE.format("tensor")
    if tuple(target.shape) or kind not in NUMBERS:
        return f"the checkpoint holds a Python {kind}, not a tensor"
    return number_difference(kind, target.dtype, cast=cast) if target.dtype else ""


def _type_difference(stored: str, wanted: str | None) -> str:
    """Why a stored value is of another Python type than the one wanted; empty if it may be.

    Numbers of all kinds are one type. A None on either side fits any value: an optional one may not
    be there yet, such as the last of ``random.getstate()``. Objects that were serialised are left
    to `opaque_differences`.

    Example:
        >>> _type_difference("str", "int"), _type_difference("str", "None")
        ('a Python str in the checkpoint, a Python int wanted', '')
    """
    if wanted is None or wanted == stored or {wanted, stored} <= NUMBERS:
        return ""
    return "" if wanted == "None" or stored in ("None", "opaque") else types_differ(stored, wanted)


def _is_alike(target: TargetLeaf, stored: TensorStorageMetadata) -> bool:
    """Whether a target asks for what is stored, as most do; it is quickly seen."""
    same = target.dtype == stored.properties.dtype and not target.annotation
    return same and target.shape == stored.size


def _tensor_differences(
    target: TargetLeaf, stored: TensorStorageMetadata, cast: bool
) -> Iterator[str]:
    dtype = stored.properties.dtype
    if tuple(target.shape) != tuple(stored.size):
        yield f"shape {tuple(stored.size)} in the checkpoint, {tuple(target.shape)} wanted"
    if target.dtype not in (dtype, ""):
        if not cast:
            yield f"dtype {dtype} in the checkpoint, {target.dtype} wanted (cast=True casts)"
        elif dtype.startswith("complex") and not target.dtype.startswith("complex"):
            yield f"dtype {dtype} in the checkpoint cannot be cast to {target.dtype}"
    # Keys may be read as an array and the other way round, but not as keys of another kind.
    wanted = target.annotation
    if wanted and stored.annotation and wanted != stored.annotation:
        yield f"{stored.annotation} in the checkpoint, {wanted} wanted"


def opaque_differences(likes: Mapping[str, object], metadata: Metadata) -> dict[str, Problem]:
    """Leaf name -> the message that an object stored as bytes does not fit a value of another type.

    Args:
        likes: leaf name -> what it is to be like.
        metadata: the checkpoint's.

    Example:
        >>> stored = Metadata({"a": BytesStorageMetadata("opaque")})
        >>> list(opaque_differences({"a": 0}, stored)), list(opaque_differences({"a": b""}, stored))
        (['a'], [])
    """
    stored = metadata.state_dict_metadata
    return {
        name: Problem(name, kind="value", text=_OPAQUE.format(f"Python {type(like).__name__}"))
        for name, like in likes.items()
        if type(like) in (bool, int, float, complex, str)
        and stored.get(name) == BytesStorageMetadata("opaque")
    }


def stands_for_nothing(containers: Iterable[str], metadata: Metadata) -> list[str]:
    """Names of containers of the target for which the checkpoint holds a None.

    Orbax stores containers without leaves this way, such as ``optax.EmptyState()``.

    Example:
        >>> stored = Metadata({"opt/1": BytesStorageMetadata("None")})
        >>> stands_for_nothing(["opt", "opt/1"], stored)
        ['opt/1']
    """
    leaves = metadata.state_dict_metadata
    return [name for name in containers if leaves.get(name) == BytesStorageMetadata("None")]


def unexpected(left: Iterable[str]) -> list[Problem]:
    """A problem for each leaf of the checkpoint that no rank wants."""
    text = "in the checkpoint, but not wanted"
    return [Problem(name, kind=UNEXPECTED, text=text) for name in left]


def decide_load(
    plans: list[LoadPlan], metadata: Metadata, rules: Strictness, unused: list[str] | None = None
) -> list[LoadPlan]:
    """All ranks' plans, with what no rank wants, if the rules allow their differences.

    Args:
        plans: by rank.
        metadata: the checkpoint's.
        rules: the caller's, for leaves that one side lacks.
        unused: stored leaves that a mapping does not take; None for a load without a mapping.

    Raises:
        TreeMismatchError: lists every difference of every rank; or nothing would be loaded.
        PlanError: ranks want a leaf in different dtypes.
    """
    check_alike(plans)
    mapped = unused is not None
    problems = merged_problems([plan.problems for plan in plans])
    stored = metadata.state_dict_metadata
    alike = dict.fromkeys(plan.names for plan in plans)  # most ranks want the same
    wanted = dict.fromkeys(name for names in alike for name in names)
    left = (*(name for name in stored if name not in wanted), *(unused or ()))
    missing = [name for name in wanted if name not in stored]
    if rules.unexpected == "error":
        problems += unexpected(left)
    if problems:
        raise mismatch(problems, mapped=mapped, both=(name for name in wanted if name in stored))
    if stored and missing and len(missing) == len(wanted):
        # A wrong key looks like this: it must not pass for a load. A target without leaves may, for
        # a module without parameters is one: torch, DCP and Orbax load nothing into it, too.
        gone = [Problem(n, kind=MISSING, text=not_stored(n, metadata)) for n in missing]
        advice = "an error under any rule, since nothing would be loaded"
        raise mismatch([*gone, *unexpected(left)], advice, mapped=mapped)
    rules.warn(missing, left)
    return [replace(plan, left=left) for plan in plans] if left else plans
