"""Copies of torch tensors that no longer change: the same kind of tensor over copied memory.

1. Elements on the CPU are copied by the stager, in threads, by NumPy.
2. Elements of a device, or that torch has only noted as conjugated or negated, are copied by torch;
   a device writes to pinned memory while the next copy is begun.
3. A parameter stays a parameter; other classes are rebuilt by the module that knows them
   (`RebuildRecipe`). Strides are kept where the memory is copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.leaf import Copyable, Part, RemotePart
from xckpt.torch.leaf import from_numpy, reachable, writable_numpy


@dataclass(frozen=True, slots=True, eq=False)
class RebuildRecipe:
    """A tensor as the plain tensors that hold this rank's elements, and the way back."""

    locals: Sequence[torch.Tensor]
    rebuild: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """The same tensor over others in their place."""


def plain_recipe(leaf: torch.Tensor, local: torch.Tensor) -> RebuildRecipe:
    """A plain tensor or parameter; ``local`` is the same outside autograd."""
    if type(leaf) is torch.Tensor:
        return RebuildRecipe((local,), itemgetter(0))
    return RebuildRecipe((local,), lambda copies: as_parameter(leaf, copies[0]))


def as_parameter(leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, as a parameter if ``leaf`` is one."""
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=leaf.requires_grad)
    return tensor


def to_copyable(recipe: RebuildRecipe, dtype: str) -> Copyable:
    """The tensor's memory as the stager copies it."""

    def rebuild(copies: Sequence[NDArray[np.generic]]) -> torch.Tensor:
        return recipe.rebuild([from_numpy(copy) for copy in copies])

    return Copyable([_part(local, dtype) for local in recipe.locals], rebuild)


def _part(tensor: torch.Tensor, dtype: str) -> Part:
    if reachable(tensor):
        return writable_numpy(tensor)
    pending: list[torch.Event] = []

    def start(memory: NDArray[np.generic]) -> None:
        from_numpy(memory).copy_(tensor, non_blocking=True)
        if tensor.device.type != "cpu":
            event = torch.Event(tensor.device)
            event.record()
            pending.append(event)

    def wait() -> None:
        for event in pending:
            event.synchronize()
        pending.clear()

    return RemotePart(tuple(tensor.shape), numpy_dtype(dtype), start, wait)
