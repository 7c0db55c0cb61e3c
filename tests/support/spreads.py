"""Tensors cut over meshes of processes, for Hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from hypothesis import strategies as st

from xckpt.core.geometry.spread import MeshProcesses, OnMesh


@st.composite
def on_meshes(draw: st.DrawFn, numbers: Sequence[int]) -> OnMesh:
    """A tensor cut over a mesh of some of the processes, in any order, evenly or not.

    Args:
        numbers: those that the framework gives the processes.
    """
    axes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    while prod(axes) > len(numbers):
        axes[axes.index(max(axes))] -= 1
    chosen = draw(st.permutations(numbers))[: prod(axes)]
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    cuts: list[tuple[int, ...]] = [()] * len(shape)
    for axis in draw(st.permutations(range(len(axes)))):
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        if dim is not None:
            cuts[dim] = (*cuts[dim], axis)
    mesh = MeshProcesses("torch", np.array(chosen, np.int64).reshape(axes))
    return OnMesh(shape, mesh, tuple(cuts))
