"""Both conversions of a case, through xckpt, each held against the oracle's.

1. `to_flax`: two torch ranks save a `state_dict` as DTensors; it is loaded through the family's
   mapping into arrays on eight JAX devices. They must be the oracle's arrays bit for bit, in the
   shardings asked for, and give torch's outputs.
2. `to_torch`: parameters on eight devices are saved; two ranks load them through the inverse into
   DTensors. They must be the oracle's tensors bit for bit, and give the JAX model's outputs.
"""

from __future__ import annotations

from pathlib import Path

import jax
import torch

import xckpt
from tests.models import moves
from tests.models.catalogue import Case
from tests.models.layouts import Arranged
from tests.models.oracle import Arrays, Pair, difference, flat, tree
from tests.models.outcomes import Outcome
from tests.support.ranks import Ranks
from xckpt.convert import family


def models(case: Case) -> Pair | Arranged:
    """The two models of a case."""
    if case.options or case.family == "mixtral":
        return Arranged.of(case)
    return Pair.of(case)


def to_flax(name: str, pair: Pair | Arranged, folder: Path, ranks: Ranks) -> Outcome:
    """Torch's weights into JAX.

    Raises:
        AssertionError: the arrays are not the oracle's, or not where they were wanted.
    """
    expected = pair.converted()
    like = moves.targets(tree(expected))
    mapping = family(pair.case.family, pair.config, **pair.case.options)
    path = folder / "torch"
    ranks.run(moves.on_rank_save, path, {k: leaf.numpy() for k, leaf in pair.state().items()})
    params, seconds, peak = moves.measured(lambda: xckpt.load(path, like, mapping=mapping))
    for target, leaf in zip(jax.tree.leaves(like), jax.tree.leaves(params), strict=True):
        assert leaf.sharding == target.sharding
    moves.same(flat(params), expected)
    outputs = pair.run_torch()
    apart = difference(outputs, pair.run_flax(jax.device_get(params)))
    return Outcome(name, "torch to Flax", apart, _scale(outputs), seconds, peak)


def to_torch(name: str, pair: Pair | Arranged, folder: Path, ranks: Ranks) -> Outcome:
    """JAX's parameters into torch.

    Raises:
        AssertionError: the tensors are not the oracle's.
    """
    params = pair.random_params()
    mapping = family(pair.case.family, pair.config, **pair.case.options).inverse()
    path = folder / "flax"
    xckpt.save(path, moves.placed(params))
    wanted = {k: (tuple(leaf.shape), leaf.dtype) for k, leaf in pair.state().items()}
    answers = ranks.run(moves.on_rank_load, path, wanted, mapping.to_document())
    expected = pair.expected_back(params)
    for state, _, _ in answers:
        moves.same(state, expected)
    state, seconds, peak = answers[0]
    outputs = pair.run_flax(params)
    tensors = {k: torch.from_numpy(array) for k, array in state.items()}
    apart = difference(pair.run_torch(tensors), outputs)
    return Outcome(name, "Flax to torch", apart, _scale(outputs), seconds, peak)


def _scale(outputs: Arrays) -> float:
    return max(float(abs(array).max()) for array in outputs.values())
