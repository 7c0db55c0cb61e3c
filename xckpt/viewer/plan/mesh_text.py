"""The mesh and the specs of a reader, as typed text.

In one line, for all tensors, as xckpt prints shardings::

    data+model, - on data=2 x model=4
    Shard(0), Replicate() on dp=2 x tp=2

or line by line, where the first pattern that fits a leaf counts, and other leaves are whole
everywhere::

    mesh data=2 x model=4
    hosts 2
    **/bias: -
    model:   data, model
    opt/*/mu: data

A pattern is one of `xckpt.core.part.selection.NamePattern`, as ``select=`` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from xckpt.core.geometry.shard_cuts import DimensionCuts, dimension_cuts
from xckpt.core.metadata import Sharding
from xckpt.core.part.selection import NamePattern

MOST_RANKS: Final = 4096
"""Ranks of a mesh that is planned for."""

_AXIS = re.compile(r"([\w.-]+)\s*=\s*(\d{1,7})")
_BETWEEN = re.compile(r"[\s,x]*")


@dataclass(frozen=True, slots=True)
class ReaderMesh:
    """Who loads, and how each leaf is cut."""

    axes: tuple[tuple[str, int], ...]
    """Name and size of each mesh axis, slowest first."""
    rules: tuple[tuple[str, str], ...]
    """Pattern of leaf names -> spec; the first that fits counts."""
    hosts: int = 1
    """Hosts that share the ranks evenly, in order."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return prod(size for _, size in self.axes)

    def spec(self, name: str) -> str:
        """The spec of a leaf; empty if it is whole everywhere."""
        return next((spec for pattern, spec in self.rules if NamePattern(pattern).fits(name)), "")

    def cuts(self, spec: str, shape: Sequence[int]) -> tuple[DimensionCuts, ...]:
        """The cuts of a shape by a spec; entries for dimensions that it lacks are left out.

        Raises:
            ValueError: the spec names an axis or a dimension that there is not.
        """
        parts = _split(spec)
        if any("(" in part for part in parts):
            sharding = Sharding(axes=self.axes, placements=tuple(parts))
        else:
            dimensions = [() if part in ("-", "None") else tuple(part.split("+")) for part in parts]
            unknown = {axis for axes in dimensions for axis in axes} - {
                name for name, _ in self.axes
            }
            if unknown:
                raise ValueError(f"{spec}: the mesh has no axis {', '.join(sorted(unknown))}")
            sharding = Sharding(axes=self.axes, spec=tuple(dimensions[: len(shape)]))
        cuts = dimension_cuts(sharding, shape)
        if cuts is None:
            raise ValueError(f"{spec!r} does not fit a tensor of {len(shape)} dimensions")
        return cuts


def reader_mesh(text: str) -> ReaderMesh:
    """What a text says.

    Raises:
        ValueError: it cannot be understood.

    Example:
        >>> reader_mesh("data, model on data=2 x model=4")
        ReaderMesh(axes=(('data', 2), ('model', 4)), rules=(('*', 'data, model'),), hosts=1)
        >>> mesh = reader_mesh("mesh tp=8\\nhosts 2\\n**/bias: -\\n*: tp")
        >>> mesh.hosts, mesh.spec("a/b/bias"), mesh.spec("a/kernel")
        (2, '-', 'tp')
    """
    axes: tuple[tuple[str, int], ...] = ()
    hosts, rules = 1, list[tuple[str, str]]()
    for line in _lines(text):
        spec, on, mesh = line.rpartition(" on ")
        first, _, rest = line.partition(" ")
        if first == "mesh":
            axes = _axes(rest)
        elif first == "hosts":
            hosts = int(rest) if rest.strip().isdecimal() else 0
        elif on and ":" not in line:
            axes = _axes(mesh)
            rules.append(("*", spec.strip()))
        elif ":" in line:
            pattern, _, spec = line.rpartition(":")
            rules.append((pattern.strip(), spec.strip()))
        else:
            raise ValueError(f"{line!r} is not 'mesh name=size ...', 'hosts n' or 'pattern: spec'")
    if not axes:
        raise ValueError("no mesh: write for instance 'data, model on data=2 x model=4'")
    found = ReaderMesh(axes, tuple(rules), hosts)
    if not 1 <= found.ranks <= MOST_RANKS:
        raise ValueError(f"a mesh of {found.ranks:,} ranks; up to {MOST_RANKS:,} are planned for")
    if hosts < 1 or found.ranks % hosts:
        raise ValueError(
            f"{found.ranks} ranks cannot be shared evenly by hosts: give 1, or a divisor"
        )
    return found


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        kept = line.partition("#")[0].strip()
        if kept:
            yield kept


def _axes(text: str) -> tuple[tuple[str, int], ...]:
    """Names and sizes; each axis once."""
    axes = tuple((each[1], int(each[2])) for each in _AXIS.finditer(text))
    is_mesh = _BETWEEN.fullmatch(_AXIS.sub("", text))
    if not is_mesh or len({name for name, _ in axes}) != len(axes):
        raise ValueError(f"{text!r} is not a mesh: write for instance data=2 x model=4")
    return axes


def _split(spec: str) -> list[str]:
    """The entries of a spec: commas within brackets belong to an entry.

    Example:
        >>> _split("_StridedShard(dim=0, sf=2), Shard(0)"), _split("")
        (['_StridedShard(dim=0, sf=2)', 'Shard(0)'], [])
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", spec) if part.strip()]
