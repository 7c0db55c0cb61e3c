"""What a mapping knows of a tensor: shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its elements.

    Example:
        >>> TensorSpec((4, 2), "bfloat16")
        TensorSpec(shape=(4, 2), dtype='bfloat16')
    """

    shape: tuple[int, ...]
    """Elements of each dimension."""
    dtype: str
    """The format's name of the element type."""
