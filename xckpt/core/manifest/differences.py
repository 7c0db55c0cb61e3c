"""What differs between two checkpoints, as far as their metadata tell: no data is read.

1. `structural_differences` goes through the leaves of both, in the order of the first: those that
   only one has, then those that are of another type, dtype or shape.
2. Containers are compared by their kind, where both have them or one is more than a plain dict.

How a leaf was sharded or cut into chunks does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.text.printable import printable

Kind = Literal["missing", "added", "container", "type", "dtype", "shape", "content", "metadata"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a second checkpoint differs from a first.

    Example:
        >>> str(Difference("model/w", "dtype", "float32", "bfloat16"))
        'model/w: dtype float32 in the first, bfloat16 in the second'
        >>> str(Difference("step", "missing", "int", ""))
        'step: only in the first (int)'
    """

    name: str
    """The leaf name, or a container's; empty for the root and for user metadata."""
    kind: Kind
    """``missing``: the second lacks it; ``added``: the first lacks it; else what is another."""
    first: str
    """What the first has."""
    second: str
    """What the second has."""

    def __str__(self) -> str:
        return printable(self._line())

    def _line(self) -> str:
        name = "the metadata" if self.kind == "metadata" else self.name or "the root"
        if self.kind == "missing":
            return f"{name}: only in the first ({self.first})"
        if self.kind == "added":
            return f"{name}: only in the second ({self.second})"
        if self.kind == "content" and self.first == self.second:
            return f"{name}: other elements {self.first}"
        what = "" if self.kind in ("content", "metadata") else f"{self.kind} "
        return f"{name}: {what}{self.first} in the first, {self.second} in the second"


def structural_differences(first: Metadata, second: Metadata) -> list[Difference]:
    """Leaves and containers that only one of two checkpoints has, or that are others.

    Example:
        >>> from xckpt.core.metadata import BytesStorageMetadata as Value
        >>> one, other = Metadata({"step": Value("int")}), Metadata({"step": Value("float")})
        >>> [str(each) for each in structural_differences(one, other)]
        ['step: type int in the first, float in the second']
    """
    return [*_leaf_differences(first, second), *_container_differences(first, second)]


def _leaf_differences(first: Metadata, second: Metadata) -> Iterator[Difference]:
    ours, theirs = first.state_dict_metadata, second.state_dict_metadata
    for name, leaf in ours.items():
        other = theirs.get(name)
        if other is None:
            yield Difference(name, "missing", _described(leaf), "")
        else:
            yield from _between(name, leaf, other)
    for name, other in theirs.items():
        if name not in ours:
            yield Difference(name, "added", "", _described(other))


def _between(
    name: str,
    first: TensorStorageMetadata | BytesStorageMetadata,
    second: TensorStorageMetadata | BytesStorageMetadata,
) -> Iterator[Difference]:
    """How two leaves of one name differ."""
    types = _type(first), _type(second)
    if types[0] != types[1]:
        yield Difference(name, "type", *types)
    if not isinstance(first, TensorStorageMetadata):
        return
    if not isinstance(second, TensorStorageMetadata):
        return
    dtypes = first.properties.dtype, second.properties.dtype
    if dtypes[0] != dtypes[1]:
        yield Difference(name, "dtype", *dtypes)
    if tuple(first.size) != tuple(second.size):
        yield Difference(name, "shape", _shape(first), _shape(second))


def _container_differences(first: Metadata, second: Metadata) -> Iterator[Difference]:
    """Containers that only one lists, or of another kind; a plain dict need not be listed."""
    both = (first, second)
    for name in dict.fromkeys((*first.containers, *second.containers)):
        here, there = (each.containers.get(name) for each in both)
        if here == there:
            continue
        if here is None and not _is_container(name, first):
            yield Difference(name, "added", "", str(there))
        elif there is None and not _is_container(name, second):
            yield Difference(name, "missing", str(here), "")
        elif (here or "dict") != (there or "dict"):
            yield Difference(name, "container", here or "dict", there or "dict")


def _is_container(name: str, metadata: Metadata) -> bool:
    """Whether something is below a name that is not listed: then it is a plain dict."""
    below = f"{name}/" if name else ""
    names = (*metadata.state_dict_metadata, *metadata.containers)
    return any(other != name and other.startswith(below) for other in names)


def _type(leaf: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if isinstance(leaf, BytesStorageMetadata):
        return leaf.kind
    return leaf.annotation or "tensor"


def _described(leaf: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if isinstance(leaf, BytesStorageMetadata):
        return leaf.kind
    return f"{leaf.properties.dtype} {_shape(leaf)}"


def _shape(leaf: TensorStorageMetadata) -> str:
    return f"[{', '.join(map(str, leaf.size))}]"
