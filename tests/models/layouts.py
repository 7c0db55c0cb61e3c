"""Llama and Mixtral in layouts that transformers has no Flax class for, made by hand.

`arranged` makes the parameters of a torch `state_dict` with NumPy alone, name by name, so that a
mapping's result can be compared bit for bit; `Arranged` is the pair of models, whose second one is
the decoder beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.models import decoder
from tests.models.catalogue import Case
from tests.models.oracle import Arrays, inputs_of, transformers, tree


def arranged(state: Mapping[str, torch.Tensor], config: Any, options: Mapping[str, Any]) -> Arrays:
    """The parameters by "/"-joined names."""
    found: Arrays = {}
    layers: dict[str, list[Any]] = {}
    for name, tensor in state.items():
        array = tensor.numpy()
        if ".experts.0." in name:
            several = [
                state[name.replace(".experts.0.", f".experts.{i}.")]
                for i in range(99)
                if name.replace(".experts.0.", f".experts.{i}.") in state
            ]
            array, name = np.stack([each.numpy() for each in several]), name.replace(".0.w", ".w")
        elif ".experts." in name:
            continue
        if options.get("rope") == "pairs" and ("q_proj" in name or "k_proj" in name):
            array = _in_pairs(array, config.hidden_size // config.num_attention_heads)
        *path, last = name.split(".")
        if name == "model.embed_tokens.weight":
            last = "embedding"
        elif last == "weight" and array.ndim > 1:
            array, last = np.swapaxes(array, -1, -2), "kernel"
        if options.get("scanned") and path[:2] == ["model", "layers"]:
            layers.setdefault("/".join([*path[:2], *path[3:], last]), []).append(array)
        else:
            found["/".join([*path, last])] = np.ascontiguousarray(array)
    return found | {name: np.stack(arrays) for name, arrays in layers.items()}


def _in_pairs(array: Any, channels: int) -> Any:
    """Rows in another order: of each head row 0, its partner in the other half, row 1, …"""
    half = channels // 2
    order = [
        head + offset
        for head in range(0, len(array), channels)
        for i in range(half)
        for offset in (i, half + i)
    ]
    return array[order]


@dataclass(frozen=True)
class Arranged:
    """A torch model, and the decoder in JAX that runs the same weights in another layout."""

    case: Case
    config: Any
    torch_model: Any
    other_model: Any
    """Another torch model of the same kind: where parameters to begin with come from."""

    @classmethod
    def of(cls, case: Case) -> Arranged:
        """The models, with random weights."""
        config = getattr(transformers(), case.config)(**case.sizes)
        torch.manual_seed(7)
        models = [getattr(transformers(), case.model)(config).eval() for _ in range(2)]
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape), alpha=0.05)
        return cls(case, config, *models)

    def state(self) -> dict[str, torch.Tensor]:
        """The torch model's `state_dict`."""
        return dict(self.torch_model.state_dict())

    def converted(self) -> Arrays:
        """The torch weights in the layout, made by hand."""
        return arranged(self.state(), self.config, self.case.options)

    def random_params(self) -> dict[str, Any]:
        """Other weights in the layout."""
        return tree(arranged(self.other_model.state_dict(), self.config, self.case.options))

    def expected_back(self, params: Mapping[str, Any]) -> Arrays:
        """What `random_params` is in torch."""
        return {name: leaf.numpy() for name, leaf in self.other_model.state_dict().items()}

    def run_torch(self, state: Mapping[str, torch.Tensor] | None = None) -> Arrays:
        """The torch model's logits, with the weights of a `state_dict` or its own."""
        model = self.torch_model
        if state is not None:
            model = type(model)(self.config).eval()
            model.load_state_dict(state, strict=True)
        feed = {name: torch.from_numpy(array) for name, array in inputs_of(self.case).items()}
        with torch.no_grad():
            return {"logits": model(**feed).logits.numpy()}

    def run_flax(self, params: Mapping[str, Any]) -> Arrays:
        """The decoder's logits."""
        feed = {name: array.astype(np.int32) for name, array in inputs_of(self.case).items()}
        run = jax.jit(decoder.logits, static_argnames=("config", "rope"))
        rope = self.case.options.get("rope", "halves")
        ids, mask = map(jnp.asarray, feed.values())
        return {"logits": np.asarray(run(dict(params), _Hashed(self.config), ids, mask, rope=rope))}


class _Hashed:
    """A configuration as jit wants its static arguments."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
