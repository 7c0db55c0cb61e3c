"""From one class of a family to another, and from files of other times: weights alone, no outputs.

Shapes suffice for the Flax side, so nothing is compiled; transformers' own conversion says what the
parameters must be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.carrying import carried
from tests.models import moves
from tests.models.catalogue import CASES
from tests.models.oracle import Arrays, converted, transformers, tree
from xckpt.convert import TensorSpec, family

OTHERS = [
    ("gpt2 without a head", "FlaxGPT2LMHeadModel", "added"),
    ("gpt2", "FlaxGPT2Model", "removed"),
    ("bert BertModel", "FlaxBertForMaskedLM", "added"),
    ("bert BertModel", "FlaxBertForSequenceClassification", "added"),
    ("bert BertForPreTraining", "FlaxBertModel", "removed"),
    ("bert untied", "FlaxBertModel", "removed"),
    ("roberta RobertaModel", "FlaxRobertaForTokenClassification", "added"),
    ("roberta RobertaForMaskedLM", "FlaxRobertaModel", "removed"),
    ("vit", "FlaxViTForImageClassification", "added"),
    ("vit classifier", "FlaxViTModel", "removed"),
]
UNPOOLED = ("FlaxBertForMaskedLM", "FlaxRobertaForTokenClassification")
UNPOOLED += ("FlaxViTForImageClassification",)


def state_of(case: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A configuration, and a `state_dict` of random weights."""
    config = getattr(transformers(), CASES[case].config)(**CASES[case].sizes)
    model = getattr(transformers(), CASES[case].model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return config, dict(model.state_dict())


def arrays_of(state: dict[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in state.items()}


def expected(flax: str, config: Any, state: dict[str, torch.Tensor]) -> Arrays:
    """The parameters that both have, as transformers converts them."""
    return converted(getattr(transformers(), flax)(config, _do_init=False), state)


@pytest.mark.models
@pytest.mark.parametrize("case, flax, base", OTHERS)
def test_between_classes(case: str, flax: str, base: str) -> None:
    config, state = state_of(case)
    arrays = arrays_of(state)
    choices = {"base": base} | ({"pooler": "dropped"} if flax in UNPOOLED else {})
    mapping = family(CASES[case].family, config, **choices)
    made = carried(mapping, arrays)
    moves.same(made, expected(flax, config, state))
    # And back, but for what was dropped.
    back = carried(mapping.inverse(), made)
    moves.same(back, {name: array for name, array in arrays.items() if name in back})
    assert len(back) >= len(made)


@pytest.mark.thorough
def test_the_first_names_of_norms() -> None:
    config, state = state_of("bert BertForPreTraining")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): leaf
        for name, leaf in state.items()
    }
    assert renamed.keys() != state.keys()
    mapping = family("bert", config, legacy=True)
    made = carried(mapping, arrays_of(renamed))
    moves.same(made, expected("FlaxBertForPreTraining", config, renamed))


BUFFERS = [
    ("bert BertModel", "embeddings.position_ids", np.arange(40)[None]),
    ("bert BertForMaskedLM", "bert.embeddings.position_ids", np.arange(40)[None]),
    ("roberta RobertaModel", "embeddings.position_ids", np.arange(40)[None]),
    ("clip", "vision_model.embeddings.position_ids", np.arange(17)[None]),
    ("gpt2", "transformer.h.{}.attn.bias", np.tri(40, dtype=bool)[None, None]),
    ("gpt2", "transformer.h.{}.attn.masked_bias", np.float32(-1e4)),
    (
        "t5",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        np.ones((32, 4), np.float32),
    ),
    ("llama", "model.layers.{}.self_attn.rotary_emb.inv_freq", np.ones(4, np.float32)),
]


@pytest.mark.parametrize("case, name, value", BUFFERS)
def test_buffers_of_older_files_are_dropped(case: str, name: str, value: Any) -> None:
    config, state = state_of(case)
    mapping = family(CASES[case].family, config)
    arrays = arrays_of(state)
    layers = range(3) if "{}" in name else range(1)
    with_buffer = arrays | {name.format(layer): np.asarray(value) for layer in layers}
    moves.same(carried(mapping, with_buffer), carried(mapping, arrays))
    if name.endswith("position_ids"):
        inverse = mapping.inverse().check(tree(carried(mapping, arrays)), with_buffer)
        assert inverse.targets[name] == TensorSpec(value.shape, str(value.dtype))


TIED = ["llama tied", "gemma", "gpt2", "bert BertForMaskedLM", "roberta RobertaForMaskedLM"]


@pytest.mark.parametrize("case", [*TIED, "whisper", "t5"])
def test_files_hold_tied_weights_once(case: str) -> None:
    config, state = state_of(case)
    once: dict[str, torch.Tensor] = {}
    for name, leaf in state.items():
        if leaf.data_ptr() not in [other.data_ptr() for other in once.values()]:
            once[name] = leaf
    assert len(once) < len(state)
    mapping = family(CASES[case].family, config)
    moves.same(carried(mapping, arrays_of(once)), carried(mapping, arrays_of(state)))
    moves.same(carried(mapping.inverse(), carried(mapping, arrays_of(state))), arrays_of(once))
