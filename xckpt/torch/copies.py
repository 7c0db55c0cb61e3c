"""How to get torch tensors that no longer change: the same kind of tensor over copied memory.

1. Elements on the CPU are copied by whoever stages the state, in threads, by NumPy.
2. Elements of a device, or that torch has only noted as conjugated or negated, are copied by torch;
   into pinned memory a device writes while the next copy is begun.
3. A parameter stays a parameter; other classes are put together by the module that knows them
   (`Anew`). Strides stay as they are, as far as the memory is copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.staged import Copyable, Part, Remote
from xckpt.torch.buffers import from_numpy, reachable, writable_numpy

__all__ = ["Anew", "as_parameter", "pinned_memory", "plain_anew", "to_copyable"]


@dataclass(frozen=True, slots=True, eq=False)
class Anew:
    """A tensor as the plain tensors that hold this rank's elements, and the way back."""

    held: Sequence[torch.Tensor]
    over: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """The same tensor with others in their place."""


def plain_anew(leaf: torch.Tensor, local: torch.Tensor) -> Anew:
    """A plain tensor or parameter; ``local`` is the same outside autograd."""
    if type(leaf) is torch.Tensor:
        return Anew((local,), _itself)
    return Anew((local,), lambda made: as_parameter(leaf, made[0]))


def as_parameter(leaf: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made``, as a parameter if the leaf is one."""
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=leaf.requires_grad)
    return made


def to_copyable(anew: Anew, dtype: str) -> Copyable:
    """The tensor's memory, as whoever stages the state wants it."""

    if anew.over is _itself and reachable(anew.held[0]):
        return Copyable((writable_numpy(anew.held[0]),), _plain_over)

    def rebuild(copies: Sequence[NDArray[np.generic]]) -> torch.Tensor:
        return anew.over([from_numpy(each) for each in copies])

    return Copyable([_part(each, dtype) for each in anew.held], rebuild)


def _itself(made: Sequence[torch.Tensor]) -> torch.Tensor:
    return made[0]


def _plain_over(copies: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    return from_numpy(copies[0])


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

    return Remote(tuple(tensor.shape), numpy_dtype(dtype), start, wait)


def pinned_memory(size: int) -> NDArray[np.uint8] | None:
    """Page-locked host memory; None without an accelerator."""
    if not torch.accelerator.is_available():
        return None
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
