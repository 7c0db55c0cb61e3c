"""Which mesh axes cut which dimension of a tensor, whatever framework wrote the sharding down."""

from __future__ import annotations

import re
from collections.abc import Collection

from xckpt.core.metadata import Sharding

_SHARD = re.compile(r"(_Strided)?Shard\((?:dim=)?(-?\d+)")


def cut_axes(sharding: Sharding | None, rank: int) -> tuple[tuple[str, ...], ...]:
    """For each dimension of a tensor the names of the mesh axes that cut it, the outermost first.

    Example:
        >>> mesh = (("dp", 2), ("tp", 4))
        >>> cut_axes(Sharding(axes=mesh, spec=(("dp", "tp"), ())), 2)
        (('dp', 'tp'), ())
        >>> cut_axes(Sharding(axes=mesh, placements=("Shard(dim=0)", "Shard(1)")), 2)
        (('dp',), ('tp',))
        >>> strided = ("_StridedShard(dim=0, sf=4)", "Shard(dim=0)")
        >>> cut_axes(Sharding(axes=mesh, placements=strided), 1)
        (('tp', 'dp'),)
    """
    axes: list[list[str]] = [[] for _ in range(rank)]
    if sharding is None:
        return tuple(map(tuple, axes))
    if sharding.spec is not None:
        for dimension, names in enumerate(sharding.spec[:rank]):
            axes[dimension] += names
        return tuple(map(tuple, axes))
    cuts = list(zip(sharding.axes, map(_SHARD.match, sharding.placements or ()), strict=False))
    # What torch calls strided was cut after the others.
    for strided in (False, True):
        for (name, _), cut in cuts:
            if cut is not None and bool(cut[1]) is strided and -rank <= int(cut[2]) < rank:
                axes[int(cut[2])].append(name)
    return tuple(map(tuple, axes))


def refuse_other_axes(
    cuts: Collection[Collection[str]], mesh_axes: Collection[str], name: str
) -> None:
    """Refuse a mesh that lacks an axis by which a tensor is cut.

    Raises:
        ValueError: names the axes and the leaf.

    Example:
        >>> refuse_other_axes([["tp"], []], ["data"], "w")
        Traceback (most recent call last):
        ValueError: w: it was saved in shards along the mesh axes tp, but the mesh has only data; \
give a mesh with these axes, or sharding=
    """
    missing = [axis for of_dimension in cuts for axis in of_dimension if axis not in mesh_axes]
    if missing:
        raise ValueError(
            f"{name}: it was saved in shards along the mesh axes {', '.join(missing)}, but the "
            f"mesh has only {', '.join(mesh_axes)}; give a mesh with these axes, or sharding="
        )
