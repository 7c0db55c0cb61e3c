"""Pairs of models whose names and shapes suggest a mapping that gives other weights, for layers of
which one side has a stack: each is refused, as it is for a single layer.
"""

from __future__ import annotations

import pytest

from tests.mapping.infer import test_names_and_shapes, test_traps
from xckpt.errors import MappingError
from xckpt.mapping.infer.infer import infer
from xckpt.mapping.spec import TensorSpec

Shapes = dict[str, tuple[int, ...]]
LAYERS = 5
TRAPS = {**test_traps.TRAPS, **test_names_and_shapes.TRAPS}


def stacked(shapes: Shapes) -> dict[str, TensorSpec]:
    """Each leaf of the layers in one array."""
    return {f"blocks/{name}": TensorSpec((LAYERS, *of), "float32") for name, of in shapes.items()}


def apart(shapes: Shapes) -> dict[str, TensorSpec]:
    """Each leaf of each layer."""
    layers = range(LAYERS)
    return {
        f"blocks/{n}/{name}": TensorSpec(of, "float32")
        for name, of in shapes.items()
        for n in layers
    }


def is_certain(source: dict[str, TensorSpec], target: dict[str, TensorSpec]) -> bool:
    """Whether a mapping is proposed that is whole and assumes nothing."""
    mapping = infer(source, target).mapping
    try:
        mapping.check(source, target)
    except MappingError:
        return False
    return not mapping.assumed


@pytest.mark.parametrize("backwards", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("is_target", [False, True], ids=["of the source", "of the target"])
def test_a_trap_is_refused_in_a_stack(is_target: bool, backwards: bool) -> None:
    """What is assumed was read from the stack's shape, and a scale less one was certain there."""
    certain: list[str] = []
    for trap in TRAPS:
        one, other = reversed(TRAPS[trap]) if backwards else TRAPS[trap]
        sides = (apart(one), stacked(other)) if is_target else (stacked(one), apart(other))
        certain += [trap] if is_certain(*sides) else []
    assert certain == []
