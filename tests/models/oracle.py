"""The oracle: transformers' own torch and Flax models, and its own conversion between the two.

1. `Pair.of(case)` builds both models from a case's configuration; nothing is downloaded.
2. Every parameter is moved by noise of its own, so that no two tensors are alike, as they are
   when biases begin as 0 and norms as 1.
3. `converted` is transformers' conversion of torch weights to Flax, `Pair.expected_back`
   that of Flax parameters to torch.
4. `run_torch` and `run_flax` run a model with given weights on given inputs.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import NDArray

from tests.models.catalogue import BATCH, TOKENS, VOCABULARY, Case

Arrays = dict[str, NDArray[Any]]


class _OlderNumpy:
    """`jax.numpy` with the names of `clip`'s arguments that transformers 4.57's T5 uses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(array: Any, a_min: Any = None, a_max: Any = None) -> jax.Array:
        return jnp.clip(array, min=a_min, max=a_max)


@functools.cache
def transformers() -> Any:
    """The library, imported at the first call: it takes seconds, and every worker collects this."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from transformers.models.t5 import modeling_flax_t5

    # Each Flax class says that it is deprecated, each conversion which weights it used.
    transformers.logging.set_verbosity_error()
    modeling_flax_t5.jnp = _OlderNumpy()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers


def inputs_of(case: Case, seed: int = 0) -> Arrays:
    """Random inputs by the names that the models give them."""
    random = np.random.default_rng(seed)
    mask = np.ones((BATCH, TOKENS), np.int64)
    mask[0, TOKENS - 4 :] = 0
    # Token 0 and 1 are padding in some models; the last ends a text of CLIP.
    ids = random.integers(3, VOCABULARY - 1, (BATCH, TOKENS))
    ids[:, TOKENS // 2] = VOCABULARY - 1
    text = {"input_ids": ids, "attention_mask": mask}
    image = {"pixel_values": random.standard_normal((BATCH, 3, 16, 16), np.float32)}
    sound = {"input_features": random.standard_normal((BATCH, 8, 40), np.float32)}
    reply = {"decoder_input_ids": random.integers(3, VOCABULARY - 1, (BATCH, TOKENS - 3))}
    return {
        "text": text,
        "image": image,
        "both": text | image,
        "sound": sound | reply,
        "sound alone": sound,
        "pair": text | reply,
    }[case.inputs]


@dataclass(frozen=True)
class Pair:
    """One model twice."""

    case: Case
    config: Any
    torch_model: Any
    flax_model: Any

    @classmethod
    def of(cls, case: Case) -> Pair:
        """Both models, with random weights that have nothing to do with each other."""
        config = getattr(transformers(), case.config)(**case.sizes)
        torch.manual_seed(7)
        torch_model = getattr(transformers(), case.model)(config).eval()
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in torch_model.parameters():  # each once, tied or not
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        flax_model = getattr(transformers(), f"Flax{case.model}")(config, _do_init=False)
        return cls(case, config, torch_model, flax_model)

    def state(self) -> dict[str, torch.Tensor]:
        """The torch model's `state_dict`."""
        return dict(self.torch_model.state_dict())

    def converted(self) -> Arrays:
        """The torch weights as transformers makes Flax parameters of them, by "/"-joined names."""
        return converted(self.flax_model, self.state())

    def random_params(self) -> dict[str, Any]:
        """Flax parameters of their own, tied where the configuration ties them."""
        random = np.random.default_rng(10)
        shapes: dict[str, Any] = flatten_dict(self.flax_model.params_shape_tree, sep="/")
        arrays = {name: _random(name, leaf.shape, random) for name, leaf in shapes.items()}
        # FlaxLlama has a head of its own even where torch's is the embedding.
        if getattr(self.config, "tie_word_embeddings", False) and "lm_head/kernel" in arrays:
            arrays["lm_head/kernel"] = arrays["model/embed_tokens/embedding"].T.copy()
        return tree(arrays)

    def expected_back(self, params: Mapping[str, Any]) -> Arrays:
        """Flax parameters as transformers makes a `state_dict` of them, tied copies included."""
        from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model

        model = type(self.torch_model)(self.config)
        with warnings.catch_warnings():
            # transformers hands torch arrays of JAX, which are not written to here.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            load_flax_weights_in_pytorch_model(model, dict(params))
        model.tie_weights()
        return {name: leaf.numpy() for name, leaf in model.state_dict().items()}

    def run_torch(self, state: Mapping[str, torch.Tensor] | None = None) -> Arrays:
        """The torch model's outputs, with the weights of a `state_dict` or its own."""
        model = self.torch_model
        if state is not None:
            model = type(model)(self.config).eval()
            model.load_state_dict(state, strict=True)
        feed = {name: torch.from_numpy(array) for name, array in inputs_of(self.case).items()}
        with torch.no_grad():
            return _arrays(model(**feed))

    def run_flax(self, params: Mapping[str, Any]) -> Arrays:
        """The Flax model's outputs with given parameters."""
        feed = {name: jnp.asarray(array) for name, array in inputs_of(self.case).items()}
        with warnings.catch_warnings():
            # Inputs are int64 in torch; JAX has 32 bits.
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            return _arrays(self.flax_model(**feed, params=dict(params)))


def _random(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Values as large as before training, and no two alike; a norm's are near 1."""
    near_one = name.endswith("scale") or "norm/weight" in name
    return (0.05 * random.standard_normal(shape) + near_one).astype(np.float32)


def converted(flax_model: Any, state: Mapping[str, torch.Tensor]) -> Arrays:
    """A `state_dict` as transformers makes Flax parameters of it, by "/"-joined names.

    What the Flax model has no place for (tied copies, buffers, another head) is left out.
    """
    from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

    shapes = flax_model.params_shape_tree
    model = SimpleNamespace(params=shapes, base_model_prefix=flax_model.base_model_prefix)
    made = flat(convert_pytorch_state_dict_to_flax(dict(state), model))
    return {name: made[name] for name in flatten_dict(shapes, sep="/") if name in made}


def flat(params: Mapping[str, Any]) -> Arrays:
    """Parameters by "/"-joined names, as NumPy arrays."""
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(dict(params), sep="/").items()}


def tree(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of "/"-joined names."""
    return unflatten_dict(dict(arrays), sep="/")


def _arrays(output: Any) -> Arrays:
    """The tensors of an output by name; what holds others (caches, inner outputs) is left out."""
    return {
        name: np.asarray(value, np.float32)
        for name, value in output.items()
        if isinstance(value, torch.Tensor | jax.Array)
    }


def difference(left: Arrays, right: Arrays) -> float:
    """The largest absolute difference between outputs of the same names.

    Raises:
        AssertionError: nothing to compare, other shapes, or a value that is not a number.
    """
    names = left.keys() & right.keys()
    assert names, (sorted(left), sorted(right))
    worst = 0.0
    for name in names:
        assert left[name].shape == right[name].shape, name
        assert np.isfinite(left[name]).all() and np.isfinite(right[name]).all(), name
        assert np.ptp(left[name]) > 0 or left[name].size == 1, f"{name} says nothing"
        worst = max(worst, float(np.abs(left[name] - right[name]).max(initial=0)))
    return worst
