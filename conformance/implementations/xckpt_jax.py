"""xckpt through JAX: what all ranks hold is one `jax.Array` over the devices of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import xckpt
from conformance.implementation import Box, Held, Refused, Wanted
from conformance.implementations.jax_arrays import abstract, array_of, boxes_of, wide_numbers
from conformance.implementations.meshes import by_name
from conformance.implementations.xckpt import Xckpt

__all__ = ["IMPLEMENTATION", "XckptJax"]

Data = NDArray[np.generic]


class XckptJax(Xckpt):
    """xckpt over `jax.Array`."""

    name = f"{Xckpt.name} through JAX"
    even = True
    limits: Sequence[str] = (
        "shards that no NamedSharding over eight devices gives",
        "saying which rank wrote what: one process plays them all",
    )

    @wide_numbers()
    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        state = {name: array_of(held) for name, held in by_name(ranks).items()}
        arrays = {name: held[0].array for name, held in by_name(ranks).items()}
        xckpt.save(path, state, overwrite=overwrite, options=self.save_options(arrays))

    @wide_numbers()
    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        wanted = by_name(ranks)
        likes: dict[str, Any] = {name: abstract(wishes) for name, wishes in wanted.items()}
        arrays = {name: wishes[0].array for name, wishes in wanted.items()}
        loaded = xckpt.load(path, likes, strict=False, options=self.load_options(arrays))
        boxes = {name: boxes_of(loaded[name], wishes) for name, wishes in wanted.items()}
        return [{name: boxes[name].pop(0) for name in rank} for rank in ranks]

    def written(self, path: Path) -> dict[str, Sequence[tuple[int, Box]]]:
        raise Refused("one process plays all ranks")


IMPLEMENTATION = XckptJax()
