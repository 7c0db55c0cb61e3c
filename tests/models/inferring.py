"""Inferred mappings against the oracle's own conversion, leaf by leaf and bit by bit.

``python -m tests.models.inferring`` prints the table for every model of the catalogue.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tests.convert.carrying import carried
from tests.models.catalogue import CASES, Case
from tests.models.oracle import Arrays, Pair, difference, flat, tree
from xckpt.convert import Inference, infer

RESNET = Case(
    "resnet",
    "ResNetConfig",
    "ResNetForImageClassification",
    {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
    "image",
)

INFERRED: dict[str, Case] = {
    name: case
    for name, case in CASES.items()
    # The oracle has no Mixtral in Flax, and no layout but one of Llama's.
    if not case.options and case.family != "mixtral"
}


@dataclass(frozen=True)
class Inferred:
    """An inference in one direction, held against the oracle."""

    direction: str
    inference: Inference
    wrong: tuple[str, ...]
    """Leaves that were called certain or assumed and are not the oracle's."""
    left: tuple[str, ...]
    """Leaves of the target that nothing was said of, and that no other leaf of it equals."""


def inferred(case: Case) -> Iterator[Inferred]:
    """Both directions of a model."""
    pair = Pair.of(case)
    state = {name: tensor.numpy() for name, tensor in pair.state().items()}
    expected = pair.converted()
    yield _held("torch to Flax", infer(pair.state(), tree(expected)), state, expected)
    params = pair.random_params()
    back = pair.expected_back(params)
    yield _held("Flax to torch", infer(params, pair.state()), flat(params), back)


def resnet_differences() -> Iterator[tuple[Inference, float]]:
    """Both directions of a ResNet by its outputs, relative to the largest of them.

    The oracle's own conversion of it leaves 40 of 52 tensors out: Flax calls its layers
    ``layer/layer_0`` and torch ``layer.0``.
    """
    pair = Pair.of(RESNET)
    state = pair.state()
    for name, tensor in state.items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    shapes = pair.flax_model.params_shape_tree
    to_flax = infer(state, shapes)
    params = carried(to_flax.mapping, {name: leaf.numpy() for name, leaf in state.items()})
    yield to_flax, _apart(pair.run_torch(), pair.run_flax(tree(params)))
    # Other values for the way back.
    params = {name: array * np.float32(1.25) for name, array in params.items()}
    to_torch = infer(shapes, state)
    made = {name: torch.from_numpy(a) for name, a in carried(to_torch.mapping, params).items()}
    counts = {name: leaf for name, leaf in state.items() if name.endswith("num_batches_tracked")}
    yield to_torch, _apart(pair.run_flax(tree(params)), pair.run_torch(made | counts))


def _apart(one: Arrays, other: Arrays) -> float:
    largest = max(float(np.abs(array).max()) for array in one.values())
    return difference(one, other) / max(1.0, largest)


def _held(direction: str, inference: Inference, source: Arrays, expected: Arrays) -> Inferred:
    made = carried(inference.mapping, source)
    wrong = [name for name, array in made.items() if not _same(array, expected[name])]
    left = [
        name
        for name in inference.unmatched.target
        if not name.endswith("num_batches_tracked")
        # torch's tied weights have two names.
        and not any(_same(expected[name], array) for array in made.values())
    ]
    matches = inference.certain + inference.assumed
    assert {target for match in matches for target in match.targets} == made.keys()
    return Inferred(direction, inference, tuple(wrong), tuple(left))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    other = np.asarray(other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def main(names: list[str]) -> None:
    """Print the table of the models named, or of all."""
    table = Table("model", "direction", title="Inferred, against transformers' own conversion")
    for title in ("certain", "assumed", "wrong", "rules", "ambiguous", "left over"):
        table.add_column(title, justify="right")
    warnings.simplefilter("ignore")
    for name in names or INFERRED:
        for each in inferred(INFERRED[name]):
            found = each.inference
            counts = (
                len(found.certain),
                len(found.assumed),
                len(each.wrong),
                len(found.mapping.rules),
                len(found.ambiguous),
                len(found.unmatched),
            )
            table.add_row(name, each.direction, *map(str, counts))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
