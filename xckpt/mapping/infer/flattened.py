"""Layers around a convolution's flattened images: their channels are first in torch, last in Flax.

A layer with more inputs than a convolution has output channels, and a multiple of them, may read
its flattened images. It does not where

1. a convolution has as many channels (its images are pooled), or a normalisation has; or
2. a layer *near* it has as many outputs: one of its numbered block, or before it in a list.

Where nothing has that width it is in doubt. Where a layer elsewhere has, it is assumed not to read
images: that layer may be of another branch, or behind it. Likewise a layer is assumed not to write
images where its outputs are n x n places for each input channel of a convolution, and no layer near
it reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isqrt

from xckpt.mapping.infer.align import Pair
from xckpt.mapping.infer.assumptions import in_torch
from xckpt.mapping.infer.leaves import Components, ModelLeaf


class Images:
    """The convolutions among some pairs, and the widths that layers share.

    Args:
        pairs: all that were found, with their first layouts.

    Example:
        >>> from xckpt.mapping.infer.align import align
        >>> from xckpt.mapping.infer.leaves import leaves_of
        >>> from xckpt.mapping.spec import TensorSpec
        >>> def tree(**shapes):
        ...     return leaves_of({name: TensorSpec(of, "int8") for name, of in shapes.items()})
        >>> torch = tree(**{"conv.weight": (8, 3, 3, 3), "fc.weight": (10, 128)})
        >>> flax = tree(**{"conv/kernel": (3, 3, 3, 8), "fc/kernel": (128, 10)})
        >>> pairs = align(torch, flax).pairs
        >>> print(Images(pairs).doubt(pairs[1]))
        its 128 inputs may be a convolution's flattened output, channels first in torch and ...
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._convolved: set[Components] = set()
        self._channels: tuple[set[int], set[int]] = set(), set()
        self._pooled: set[int] = set()
        self._givers: dict[int, list[Components]] = defaultdict(list)
        self._takers: dict[int, list[Components]] = defaultdict(list)
        for pair in pairs:
            leaf = in_torch(pair)
            if leaf.role == "weight" and leaf.shape:
                self._add(pair, leaf)

    def _add(self, pair: Pair, leaf: ModelLeaf) -> None:
        if pair.layouts[0].kind == "convolution":
            self._convolved.add(leaf.path)
            for channels, size in zip(self._channels, leaf.shape, strict=False):
                channels.add(size)
            self._pooled.add(leaf.shape[0])
        elif len(leaf.shape) == 1:
            self._pooled.add(leaf.shape[0])
        elif "embedding" in {each.flavour for each in pair.first}:
            self._pooled.add(leaf.shape[-1])
        else:
            self._givers[leaf.shape[0]].append(leaf.path)
            self._takers[leaf.shape[-1]].append(leaf.path)

    def doubt(self, pair: Pair) -> str:
        """Why a layer's inputs may be in another order; empty if they are not."""
        if not self._may_read(pair) or self._givers[in_torch(pair).shape[-1]] != []:
            return ""
        return (
            f"its {in_torch(pair).shape[-1]} inputs may be a convolution's flattened output, "
            f"channels first in torch and last in Flax"
        )

    def assumption(self, pair: Pair) -> str:
        """What a pair assumes of its inputs or outputs; empty if nothing."""
        if self._may_read(pair):
            return "its inputs are no convolution's flattened output, whose order differs"
        if self._may_write(pair):
            return "its outputs are not cut into images for a convolution, whose order differs"
        return ""

    def _may_read(self, pair: Pair) -> bool:
        leaf = in_torch(pair)
        inputs = leaf.shape[-1] if pair.layouts[0].kind == "transposed" else 0
        outputs, _ = self._channels
        return (
            any(inputs > each and inputs % each == 0 for each in outputs)
            and inputs not in self._pooled
            and not any(self._is_near(giver, leaf.path) for giver in self._givers[inputs])
        )

    def _may_write(self, pair: Pair) -> bool:
        leaf = in_torch(pair)
        is_layer = pair.layouts[0].kind == "transposed" or leaf.role == "bias"
        size = leaf.shape[0] if is_layer and leaf.shape else 0
        _, inputs = self._channels
        return (
            leaf.path in self._givers[size]
            and any(_are_places(size, each) for each in inputs)
            and not any(self._is_near(leaf.path, taker) for taker in self._takers[size])
        )

    def _is_near(self, before: Components, after: Components) -> bool:
        """Whether two layers, in this order, lie in one block or list without convolutions."""
        if before == after:
            return False
        if (block := _block(before)) and block == _block(after):
            return not any(path[: len(block)] == block for path in self._convolved)
        *above, first = before
        *beside, last = after
        if above != beside or not isinstance(first, int) or not isinstance(last, int):
            return False
        between = {path[-1] for path in self._convolved if [*path[:-1]] == above}
        return first < last and not any(
            first < each < last for each in between if isinstance(each, int)
        )


def _block(path: Components) -> Components:
    """The numbered module that holds a layer, such as ``("layers", 3)``; empty if there is none."""
    above = path[:-1]
    while above and not isinstance(above[-1], int):
        above = above[:-1]
    return above


def _are_places(size: int, channels: int) -> bool:
    """Whether a size is that of images of n x n places, with n at least 2."""
    places, rest = divmod(size, max(1, channels))
    return rest == 0 and places >= 4 and isqrt(places) ** 2 == places
