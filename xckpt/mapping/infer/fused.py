"""Leaves that hold several tensors in a row, where the other tree has each on its own.

torch's nn.MultiheadAttention keeps the weights of query, key and value in one ``in_proj_weight`` of
(3E, E), and their biases in one ``in_proj_bias``; Flax has three kernels of (E, heads, head_dim).

1. A fused leaf is taken apart before anything is compared: its parts are called what they would be
   called on their own, ``q_proj``, ``k_proj`` and ``v_proj``, and are found like any other leaf.
2. Where both trees have fused leaves these are leaves like any other.
3. `xckpt.mapping.infer.findings` puts together what was found of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from xckpt.mapping.infer.leaf_names import FusedPart, ModelLeaf
from xckpt.mapping.spec import TensorSpec

FUSED = {"inprojweight": "weight", "inprojbias": "bias"}
"""What a fused leaf is called, as a role -> the role of its parts."""

PARTS = ("qproj", "kproj", "vproj")
"""The layers whose parameters lie in a fused leaf, in their order."""


def taken_apart(leaves: Sequence[ModelLeaf], others: Sequence[ModelLeaf]) -> list[ModelLeaf]:
    """The leaves of a tree with the parts of fused ones in their place.

    Args:
        leaves: of the tree.
        others: of the tree that it is compared with.

    Example:
        >>> fused = ModelLeaf.of("attn.in_proj_weight", TensorSpec((12, 4), "float32"))
        >>> for part in taken_apart([fused], []):
        ...     print(part.name, part.path, part.spec)
        attn.in_proj_weight[0:4] ('attn', 'qproj') float32[4, 4]
        attn.in_proj_weight[4:8] ('attn', 'kproj') float32[4, 4]
        attn.in_proj_weight[8:12] ('attn', 'vproj') float32[4, 4]
        >>> taken_apart([fused], [fused]) == [fused]
        True
    """
    if any(_is_fused(leaf) for leaf in others):
        return list(leaves)
    return [part for leaf in leaves for part in (_parts(leaf) if _is_fused(leaf) else [leaf])]


def _is_fused(leaf: ModelLeaf) -> bool:
    """Whether it is (3E, E) or (3E,) and called so."""
    if leaf.role not in FUSED or len(leaf.shape) != (2 if FUSED[leaf.role] == "weight" else 1):
        return False
    rows, *columns = leaf.shape
    return rows % len(PARTS) == 0 and columns in ([], [rows // len(PARTS)])


def _parts(leaf: ModelLeaf) -> list[ModelLeaf]:
    size = leaf.shape[0] // len(PARTS)
    spec = TensorSpec((size, *leaf.shape[1:]), leaf.spec.dtype)
    role = FUSED[leaf.role]
    return [
        ModelLeaf(
            f"{leaf.name}[{number * size}:{(number + 1) * size}]",
            spec,
            (*leaf.path, layer),
            role,
            role,
            FusedPart(leaf.name, number, (size,) * len(PARTS)),
        )
        for number, layer in enumerate(PARTS)
    ]
