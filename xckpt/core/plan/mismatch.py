"""How a tree of targets differs from a checkpoint, in words for each leaf."""

from __future__ import annotations

from collections.abc import Mapping

from xckpt.core.leaf import TargetLeaf
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata


def compare(
    targets: Mapping[str, TargetLeaf | None],
    metadata: Metadata,
    *,
    strict: bool = True,
    cast: bool = False,
) -> dict[str, str]:
    """Leaf name -> how the target does not fit the checkpoint; empty if everything fits.

    Args:
        targets: leaf name -> target; None for a Python value.
        metadata: the checkpoint's.
        strict: whether a leaf that the checkpoint doesn't have is a difference.
        cast: whether another dtype is not.

    Example:
        >>> compare({"step": None}, Metadata({}))
        {'step': 'step: wanted, but not in the checkpoint'}
    """
    differing: dict[str, str] = {}
    for name, target in targets.items():
        stored = metadata.state_dict_metadata.get(name)
        label = name or "the root"
        if stored is None:
            if strict:
                differing[name] = f"{label}: wanted, but not in the checkpoint"
        elif isinstance(stored, BytesStorageMetadata):
            if target is not None:
                differing[name] = (
                    f"{label}: the checkpoint holds a Python {stored.kind}, not a tensor"
                )
        elif target is None:
            differing[name] = (
                f"{label}: the checkpoint holds a {stored.properties.dtype} tensor of shape "
                f"{stored.size}, not a Python value"
            )
        else:
            differences = _tensor_differences(target, stored, cast)
            if differences:
                differing[name] = f"{label}: {'; '.join(differences)}"
    return differing


def _tensor_differences(target: TargetLeaf, stored: TensorStorageMetadata, cast: bool) -> list[str]:
    texts: list[str] = []
    dtype = stored.properties.dtype
    if tuple(target.shape) != tuple(stored.size):
        texts.append(f"shape {tuple(stored.size)} in the checkpoint, {tuple(target.shape)} wanted")
    if target.dtype not in (dtype, ""):
        if not cast:
            texts.append(
                f"dtype {dtype} in the checkpoint, {target.dtype} wanted (cast=True casts)"
            )
        elif dtype.startswith("complex") and not target.dtype.startswith("complex"):
            texts.append(f"dtype {dtype} in the checkpoint cannot be cast to {target.dtype}")
    # Keys may be read as an array and the other way round, but not as keys of another kind.
    wanted = target.annotation
    if wanted and stored.annotation and wanted != stored.annotation:
        texts.append(f"{stored.annotation} in the checkpoint, {wanted} wanted")
    return texts


def unexpected(metadata: Metadata, wanted: set[str]) -> list[str]:
    """A line for each leaf of the checkpoint that no rank wants."""
    return [
        f"{name or 'the root'}: in the checkpoint, but not wanted"
        for name in metadata.state_dict_metadata
        if name not in wanted
    ]
