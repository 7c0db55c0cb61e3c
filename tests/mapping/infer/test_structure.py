"""Modules that structure pairs: as much work for each, however many there are."""

from __future__ import annotations

from tests.support.steps import steps
from xckpt.mapping.infer.infer import infer
from xckpt.mapping.spec import TensorSpec

Specs = dict[str, TensorSpec]


def of_one_shape(layers: int) -> tuple[Specs, Specs]:
    """Layers of modules that all have one shape, and names that say nothing of each other."""

    def tree(prefix: str, words: tuple[str, ...], role: str) -> Specs:
        return {
            f"{prefix}.{layer}.{word}.{role}": TensorSpec((8, 8), "int8")
            for layer in range(layers)
            for word in words
        }

    one = tree("model.layers", ("alpha", "beta"), "weight")
    return one, tree("net.stages", ("one", "other"), "kernel")


def test_a_module_costs_the_same_among_many() -> None:
    few, many = of_one_shape(10), of_one_shape(50)
    assert steps(lambda: infer(*many)) / 50 < 1.2 * steps(lambda: infer(*few)) / 10


def test_what_may_belong_together_is_said_of_thousands_of_modules_too() -> None:
    sources, targets = of_one_shape(1001)
    [doubt] = infer(sources, targets).ambiguous
    assert (set(doubt.sources), set(doubt.targets)) == (set(sources), set(targets))
