"""The state that every contender saves: the tensors of a GPT-2-medium, float32.

1. ``shapes`` lists the 340 tensors of the published model file: token and position embeddings,
   24 blocks of 14 tensors (two of them the causal mask and its fill value, which that file
   carries), and the final layer norm: 1.4 GiB.  ``quick`` keeps the 340 tensors and shrinks them.
2. ``random_arrays`` fills them with random bits below the exponent: no two pages are equal, every
   value is finite, and no contender can profit from zeros.
3. ``as_torch`` and ``as_jax`` hold the same values in another framework's arrays; torch shares the
   memory, JAX has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import jax
    import torch

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Arrays: TypeAlias = dict[str, np.ndarray]
Tensors: TypeAlias = "dict[str, torch.Tensor]"
JaxArrays: TypeAlias = "dict[str, jax.Array]"

LAYERS = 24
FULL_WIDTH = 1024
QUICK_WIDTH = 64
FULL_VOCABULARY = 50257
QUICK_VOCABULARY = 3142
PAGE = 4096


def shapes(quick: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the 340 tensors, in elements.

    >>> len(shapes()), shapes()["wte.weight"]
    (340, (50257, 1024))
    """
    width = QUICK_WIDTH if quick else FULL_WIDTH
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (QUICK_VOCABULARY if quick else FULL_VOCABULARY, width),
        "wpe.weight": (width, width),
    }
    for layer in range(LAYERS):
        found |= {f"h.{layer}.{name}": shape for name, shape in _block(width).items()}
    return found | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def _block(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.bias": (1, 1, width, width),
        "attn.masked_bias": (),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }


def matrices(quick: bool = False) -> dict[str, tuple[int, int]]:
    """Return the shapes of the two-dimensional tensors alone: what the resharding moves."""
    return {n: (s[0], s[1]) for n, s in shapes(quick).items() if len(s) == 2}


def size_of(shapes: Shapes) -> int:
    """Return the bytes that float32 tensors of these shapes hold.

    >>> size_of({"a": (2, 3), "b": ()})
    28
    """
    return sum(4 * int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def random_arrays(shapes: Shapes, seed: int = 0) -> Arrays:
    """Return an array of random finite float32 for each shape."""
    generator = np.random.Generator(np.random.SFC64(seed))
    return {name: _random(generator, shape) for name, shape in shapes.items()}


def _random(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, dtype=np.float32)
    generator.random(dtype=np.float32, out=array)
    return array


def empty_arrays(shapes: Shapes) -> Arrays:
    """Return an array for each shape whose pages are all mapped: memory that exists."""
    arrays = {name: np.empty(shape, dtype=np.float32) for name, shape in shapes.items()}
    clear(arrays)
    return arrays


def use_memory(shapes: Shapes) -> None:
    """Take memory for the arrays and give it back: the machine gives it out again at usual speed.

    A virtual machine that returns free memory to its host has to ask for it again: the first touch
    of a page then takes up to ten times as long, in any library.
    """
    empty_arrays(shapes).clear()


def clear(arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrite every element, so that a load that does nothing cannot pass for one that did."""
    for array in arrays.values():
        array.fill(-1.0)


def touch(arrays: Mapping[str, np.ndarray]) -> float:
    """Read one element of each page, so that lazily mapped data is really there."""
    step = PAGE // 4
    return sum(float(array.reshape(-1)[::step].sum()) for array in arrays.values())


def as_torch(arrays: Arrays) -> Tensors:
    """Return torch tensors that share the arrays' memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_jax(arrays: Arrays) -> JaxArrays:
    """Return JAX arrays that hold a copy of the arrays, on the first CPU device."""
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready({name: jnp.array(array) for name, array in arrays.items()})


def differing(arrays: Mapping[str, np.ndarray], expected: Arrays) -> list[str]:
    """Return the names whose bits differ, and those that only one side has."""
    names = arrays.keys() ^ expected.keys()
    for name in arrays.keys() & expected.keys():
        # As integers: a NaN that came back as it was is no difference.
        if not np.array_equal(arrays[name].view(np.uint32), expected[name].view(np.uint32)):
            names |= {name}
    return sorted(names)
