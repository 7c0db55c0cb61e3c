"""How the torch at hand cuts a ``_StridedShard``: releases up to 2.9 differ from later ones.

A cut of six rows shows which: in two pieces of two parts each, torch's second rank holds rows 2 and
5 in one way, rows 2 and 3 in the other.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.distributed.tensor.placement_types import _StridedShard

from xckpt.core.geometry.placements import StridedRows, literal, striped


@cache
def strided_rows() -> StridedRows:
    """`literal` or `striped`, whichever torch does.

    Example:
        >>> strided_rows() in (literal, striped)
        True
    """
    placement = _StridedShard(0, split_factor=2)
    rows = torch.arange(6, device="cpu")  # whatever device is the user's default
    parts, _ = placement._split_tensor(rows, 2, with_padding=False)  # pyright: ignore[reportPrivateUsage]
    return striped if parts[1].tolist() == [2, 3] else literal
