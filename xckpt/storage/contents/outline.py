"""A stored tensor as text: all elements if there are few, else those at the ends, as NumPy prints.
Only elements that are shown are read.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.storage.stored_array import StoredArray

FEW: Final = 1000
"""A part of up to this many elements is shown whole."""

EDGE: Final = 3
"""Elements at each end of a dimension that are shown of a larger part."""


def outline(stored: StoredArray, box: Box, width: int = 75) -> str:
    """The text of a part of a tensor.

    Args:
        stored: the tensor.
        box: which part.
        width: characters of a line, where an element is not longer.

    Raises:
        CorruptCheckpointError: a chunk is not what was saved.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://outline", {"w": np.arange(4000).reshape(40, 100)})
        >>> print(outline(xckpt.open("memory://outline")["w"], Box((20, 0), (20, 100))))
        [[2000 2001 2002 ... 2097 2098 2099]
         [2100 2101 2102 ... 2197 2198 2199]
         [2200 2201 2202 ... 2297 2298 2299]
         ...
         [3700 3701 3702 ... 3797 3798 3799]
         [3800 3801 3802 ... 3897 3898 3899]
         [3900 3901 3902 ... 3997 3998 3999]]
    """
    few = box.elements <= FEW
    ends = [_ends(size, few) for size in box.sizes]
    # NumPy prints dots where a dimension is longer than its two ends.
    sizes = [size if few else min(size, 2 * EDGE + 1) for size in box.sizes]
    dtype = numpy_dtype(stored.pieces[0].dtype) if stored.pieces else np.dtype(np.float64)
    shown = np.zeros(sizes, dtype)
    for corner in product(*ends):
        part = Box(tuple(low for low, _, _ in corner), tuple(size for _, size, _ in corner))
        place = Box(tuple(at for _, _, at in corner), part.sizes)
        stored.read(part.shifted(box.offsets), shown[(*place.slices(), ...)])
    return np.array2string(shown, threshold=FEW if few else 0, edgeitems=EDGE, max_line_width=width)


def _ends(size: int, few: bool) -> list[tuple[int, int, int]]:
    """The parts of a dimension that are shown: first element, length, and where they are shown.

    Example:
        >>> _ends(100, False), _ends(7, False)
        ([(0, 3, 0), (97, 3, 4)], [(0, 7, 0)])
    """
    if few or size <= 2 * EDGE + 1:
        return [(0, size, 0)]
    return [(0, EDGE, 0), (size - EDGE, EDGE, EDGE + 1)]
