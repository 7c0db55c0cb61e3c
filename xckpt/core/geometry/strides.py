"""Whether each element of a strided view has memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FEW = 1 << 16
"""Elements whose places are looked at one by one, where strides alone do not tell."""


def is_one_to_one(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Whether no two elements of a view share memory; False also where that is not known.

    1. Axes are put in the order of their strides. Where each steps over all that the faster ones
       reach, no two elements meet. Every view made by slicing and transposing is so.
    2. Else the places of all elements are compared, if they are few.

    Args:
        shape: of the view.
        strides: of the view, in bytes, or in elements.
        item: what an element takes, in the unit of the strides.

    Example:
        >>> is_one_to_one((4, 3), (1, 8)), is_one_to_one((4, 3), (0, 1))
        (True, False)
        >>> is_one_to_one((2, 3), (3, 2)), is_one_to_one((2, 3), (4, 2))
        (True, False)
    """
    if 0 in shape:
        return True
    axes = sorted((abs(step), size) for size, step in zip(shape, strides, strict=True) if size > 1)
    reach = item
    for step, size in axes:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return True
    if np.prod([size for _, size in axes], dtype=float) > _FEW:
        return False
    places = np.zeros(1, np.int64)
    for step, size in axes:
        places = np.add.outer(places, step * np.arange(size)).reshape(-1)
    return bool(np.all(np.diff(np.sort(places)) >= item))
