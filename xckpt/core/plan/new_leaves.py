"""The targets of a load that is given no tree: for each stored leaf a new one of the same kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.leaf import TargetPlace
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.errors import UnsupportedLeafError

NewLeaves = Callable[[Metadata], Mapping[str, object]]
"""From a checkpoint's metadata: leaf name -> something like the leaf; None for a Python value."""


def numpy_leaves(metadata: Metadata) -> Mapping[str, object]:
    """For each stored tensor a NumPy array of its shape and dtype that takes no memory."""
    return {
        name: weightless(tuple(stored.size), stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata)
        else None
        for name, stored in metadata.state_dict_metadata.items()
    }


@functools.lru_cache(maxsize=1024)
def weightless(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """An array of one element's memory, whatever its shape; made once for all that are alike.

    Example:
        >>> weightless((1 << 40,), "bfloat16").base.nbytes
        2
    """
    return np.broadcast_to(np.zeros((), numpy_dtype(dtype)), shape)


def leaves_of(adapter: Adapter[Any], place: Callable[[str], TargetPlace]) -> NewLeaves:
    """Has an adapter make a target for each stored tensor, at a place that its name decides."""

    def new_leaves(metadata: Metadata) -> Mapping[str, object]:
        likes: dict[str, object] = {}
        problems: list[str] = []
        for name, stored in metadata.state_dict_metadata.items():
            likes[name] = None
            if isinstance(stored, TensorStorageMetadata):
                try:
                    likes[name] = adapter.like(stored, name, place(name))
                except UnsupportedLeafError as error:
                    problems.append(str(error))
        if problems:
            raise UnsupportedLeafError.leaves("cannot be loaded this way", problems)
        return likes

    return new_leaves
