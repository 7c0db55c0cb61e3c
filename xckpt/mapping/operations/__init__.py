"""The operations of the mapping language.

Each is a frozen value with an inverse, and is typed: a *bijection*; a bijection *with side data*,
which the rule states and which is asserted where it would be lost; or *lossy*, with a stated bound.
"""

from xckpt.core.struct_types import prepare_structs
from xckpt.mapping.operations.base import OPERATIONS, Each, Exactness, Operation
from xckpt.mapping.operations.lossy import Add, Cast, Scale
from xckpt.mapping.operations.parts import (
    Concatenate,
    Deinterleave,
    GroupedDeinterleave,
    GroupedInterleave,
    Interleave,
    Split,
    Stack,
    Unstack,
)
from xckpt.mapping.operations.shapes import Rearrange, Reshape, Rope, Transpose
from xckpt.mapping.operations.side_data import Constant, Drop, Pad, Strip, Tie, Untie

__all__ = [
    "Add",
    "Cast",
    "Concatenate",
    "Constant",
    "Deinterleave",
    "Drop",
    "Each",
    "Exactness",
    "GroupedDeinterleave",
    "GroupedInterleave",
    "Interleave",
    "Operation",
    "Pad",
    "Rearrange",
    "Reshape",
    "Rope",
    "Scale",
    "Split",
    "Stack",
    "Strip",
    "Tie",
    "Transpose",
    "Unstack",
    "Untie",
]

prepare_structs(*OPERATIONS.values())
