"""Query, key and value in one tensor of torch and in three of Flax: equal outputs, or a doubt."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.convert.carrying import carried, numbered
from tests.mapping import toys
from tests.mapping.infer.test_infer import (
    agree,
    flatten_keys,
    initialised,
    is_clean,
    randomised,
    state_of,
)
from tests.mapping.toys import HEADS, WIDTH
from xckpt.convert import with_optimizer
from xckpt.mapping.infer.infer import Inference, infer
from xckpt.mapping.names import specs_of

WORDS = np.random.default_rng(3).standard_normal((2, 5, WIDTH), np.float32)
OTHERS = np.random.default_rng(4).standard_normal((2, 6, WIDTH), np.float32)


def array(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def attention(kernel: tuple[int, ...] = (WIDTH, HEADS, WIDTH // HEADS)) -> dict[str, Any]:
    """Kernels of query, key and value, and of out, with heads or without."""
    kernels = {name: {"kernel": array(*kernel)} for name in ("query", "key", "value")}
    return kernels | {"out": {"kernel": array(*kernel[1:], kernel[0])}}


FUSED = {
    "attn.in_proj_weight": array(3 * WIDTH, WIDTH),
    "attn.out_proj.weight": array(WIDTH, WIDTH),
}
"""The weights of an nn.MultiheadAttention."""


def made_both_ways(module: torch.nn.Module, shapes: Any) -> tuple[Inference, dict[str, Any]]:
    """What is inferred, and the other model's arrays; the way back gives the same bits."""
    inference = infer(module, shapes)
    assert is_clean(inference)
    inference.mapping.check(specs_of(module.state_dict()), specs_of(shapes))
    made = carried(inference.mapping, state_of(module))
    for back in (infer(shapes, module).mapping, inference.mapping.inverse()):
        again = carried(back, made)
        assert {name: each.tobytes() for name, each in again.items()} == {
            name: each.tobytes() for name, each in state_of(module).items()
        }
    return inference, made


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "none"])
def test_linen_attention_gives_the_same_outputs(bias: bool) -> None:
    module: Any = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
    randomised(module)
    linen = nn.MultiHeadDotProductAttention(HEADS, use_bias=bias)
    inference, made = made_both_ways(module, initialised(linen, WORDS, OTHERS))
    [weights] = [each for each in inference.certain if each.sources == ("in_proj_weight",)]
    assert weights.targets == tuple(f"params/{name}/kernel" for name in ("query", "key", "value"))
    words, others = torch.from_numpy(WORDS), torch.from_numpy(OTHERS)
    with torch.no_grad():
        outputs, _ = module(words, others, others)
    agree(outputs, linen.apply(unflatten_dict(made, sep="/"), WORDS, OTHERS))


def test_nnx_attention_gives_the_same_outputs() -> None:
    module: Any = randomised(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    model = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    _, made = made_both_ways(module, nnx.to_pure_dict(state))
    pure = flatten_dict(nnx.to_pure_dict(state))
    leaves = {keys: jnp.asarray(made["/".join(map(str, keys))]) for keys in pure}
    nnx.replace_by_pure_dict(state, unflatten_dict(leaves))
    words, others = torch.from_numpy(WORDS), torch.from_numpy(OTHERS)
    with torch.no_grad():
        outputs, _ = module(words, others, others)
    agree(outputs, nnx.merge(graph, state)(jnp.asarray(WORDS), jnp.asarray(OTHERS)))


def test_keys_and_values_of_other_widths_have_weights_of_their_own_and_one_bias() -> None:
    module: Any = randomised(
        torch.nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=9, batch_first=True)
    )
    assert {"q_proj_weight", "k_proj_weight", "in_proj_bias"} < set(module.state_dict())
    linen = nn.MultiHeadDotProductAttention(HEADS)
    inputs = WORDS, OTHERS[..., :7], OTHERS[..., :9]
    _, made = made_both_ways(module, initialised(linen, *inputs))
    with torch.no_grad():
        outputs, _ = module(*map(torch.from_numpy, inputs))
    agree(outputs, linen.apply(unflatten_dict(made, sep="/"), *inputs))


@pytest.mark.parametrize(
    "linen",
    [
        pytest.param(toys.LinenEncoder(), marks=pytest.mark.thorough),
        toys.LinenEncoder(named=False),
        toys.LinenEncoder(scanned=True),
    ],
    ids=["named", "named by Linen", "scanned"],
)
def test_an_encoder_gives_the_same_outputs(linen: nn.Module) -> None:
    module = randomised(toys.torch_encoder())
    inference, made = made_both_ways(module, initialised(linen, WORDS))
    # Each of a layer's twelve leaves is one rule for all layers.
    assert len(inference.mapping.rules) == len(module.state_dict()) / toys.LAYERS == 12
    with torch.no_grad():
        outputs = module(torch.from_numpy(WORDS))
    agree(outputs, linen.apply(unflatten_dict(made, sep="/"), WORDS))


def test_two_attentions_that_nothing_tells_apart_are_ambiguous() -> None:
    layer = torch.nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH)
    target = {f"MultiHeadDotProductAttention_{number}": attention() for number in range(2)}
    state = {name: each for name, each in layer.state_dict().items() if "attn" in name}
    weights = {name: each for name, each in state.items() if "weight" in name}
    for inference in (infer(weights, target), infer(target, weights)):
        assert not inference.certain
        assert not inference.mapping.rules
        assert not len(inference.unmatched)
        fused, out = sorted(inference.ambiguous, key=lambda each: "out" in str(each.targets))
        assert sorted((len(fused.sources), len(fused.targets))) == [2, 6]
        assert len(out.sources) == len(out.targets) == 2


def test_a_layout_that_nothing_decides_is_one_ambiguity_of_the_whole() -> None:
    """Square kernels, and other kernels of the tree that are laid out as in torch."""
    source = FUSED | {"fc.weight": array(5, WIDTH)}
    target = {"attn": attention((WIDTH, WIDTH)), "fc": {"kernel": array(5, WIDTH)}}
    inference = infer(source, target)
    assert [each.sources for each in inference.certain] == [("fc.weight",)]
    [fused] = [each for each in inference.ambiguous if "in_proj" in each.sources[0]]
    assert fused.sources == ("attn.in_proj_weight",)
    assert set(fused.targets) == {f"attn/{name}/kernel" for name in ("query", "key", "value")}
    assert "fits transposed and same" in fused.reason


def test_of_a_leaf_whose_parts_are_not_all_found_nothing_is_certain() -> None:
    target = attention()
    del target["value"]
    inference = infer(FUSED, {"attn": target})
    assert [each.sources for each in inference.certain] == [("attn.out_proj.weight",)]
    [ambiguity] = inference.ambiguous
    assert ambiguity.sources == ("attn.in_proj_weight",)
    assert set(ambiguity.targets) == {"attn/query/kernel", "attn/key/kernel"}
    assert "only 2 of the 3 tensors in one leaf are certain" in ambiguity.reason


def test_parts_that_do_not_fit_are_reported_with_the_whole() -> None:
    inference = infer(FUSED, {"attn": attention((WIDTH, HEADS, WIDTH))})
    assert not inference.certain
    assert "[12, 12] and [12, 3, 12]" in inference.unmatched.source["attn.in_proj_weight"]
    assert "in_proj_weight[12:24] is its name" in inference.unmatched.target["attn/key/kernel"]


def test_parts_of_other_dtypes_have_operations_of_their_own() -> None:
    target = attention()
    target["key"] = {"kernel": target["key"]["kernel"].astype("float16")}
    inference = infer(FUSED, {"attn": target})
    assert is_clean(inference)
    arrays = numbered(specs_of(FUSED))
    made = carried(inference.mapping, arrays)
    assert {str(made[f"attn/{name}/kernel"].dtype) for name in ("query", "value")} == {"float32"}
    key = arrays["attn.in_proj_weight"][WIDTH : 2 * WIDTH].T.astype("float16")
    np.testing.assert_array_equal(made["attn/key/kernel"], key.reshape(WIDTH, HEADS, -1))


def test_layers_of_which_some_are_fused_are_no_stack_that_is_certain() -> None:
    source = {"layers.0.attn.in_proj_weight": array(3 * WIDTH, WIDTH)}
    source |= {f"layers.1.attn.{name}_proj.weight": array(WIDTH, WIDTH) for name in "qkv"}
    stacked = {name: {"kernel": array(2, WIDTH, HEADS, 4)} for name in ("query", "key", "value")}
    inference = infer(source, {"layers": {"attn": stacked}})
    assert not inference.certain
    assert not len(inference.unmatched)
    assert "layers.0.attn.in_proj_weight" in inference.ambiguous[0].sources


@pytest.mark.parametrize(
    "shape", [(3 * WIDTH, WIDTH + 1), (3 * WIDTH + 1, WIDTH), (3 * WIDTH, WIDTH, 1), ()], ids=str
)
def test_other_shapes_of_that_name_are_leaves_like_any_other(shape: tuple[int, ...]) -> None:
    source = {"attn.in_proj_weight": array(*shape)}
    assert set(infer(source, {"attn": attention()}).unmatched.source) == set(source)


def test_where_both_trees_are_fused_nothing_is_taken_apart() -> None:
    names = {f"model.{name}": each for name, each in FUSED.items()}
    inference = infer(FUSED, names)
    assert is_clean(inference)
    assert {each.sources: each.targets for each in inference.certain} == {
        (name,): (f"model.{name}",) for name in FUSED
    }


def test_torch_with_three_layers_is_split_as_well() -> None:
    names = flatten_keys({f"attn/{name}_proj/weight": array(WIDTH, WIDTH) for name in "qkv"})
    inference = infer({"attn.in_proj_weight": FUSED["attn.in_proj_weight"]}, names)
    [rule] = inference.mapping.to_document()["rule"]
    assert rule["operations"] == [{"split": [WIDTH] * 3}]
    assert rule["target"] == [f"attn/{name}_proj/weight" for name in "qkv"]


@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scanned"])
def test_moments_are_split_as_their_parameter_is(scanned: bool) -> None:
    weights = state_of(toys.torch_encoder())
    params: Any = initialised(toys.LinenEncoder(scanned=scanned), WORDS)
    mapping = infer(weights, params).mapping
    slots = {"exp_avg": "mu", "exp_avg_sq": "nu"}
    steps = {"step": array()}
    moments = {name: {**dict.fromkeys(slots, each), **steps} for name, each in weights.items()}
    source = {"model": weights, "optim": {"state": moments}}
    adam = {"count": array(dtype="int32"), **dict.fromkeys(slots.values(), params)}
    whole = with_optimizer(mapping, source, {"params": params, "opt_state": [adam]})
    arrays = numbered(specs_of(source))
    made = carried(whole, arrays)
    for slot, other in slots.items():
        own = {name: arrays[f"optim/state/{name}/{slot}"] for name in weights}
        for name, expected in carried(mapping, own).items():
            np.testing.assert_array_equal(made[f"opt_state/0/{other}/{name}"], expected)


def test_the_shapes_alone_are_enough() -> None:
    """torch's meta device and JAX's abstract values."""
    with torch.device("meta"):
        module = torch.nn.MultiheadAttention(WIDTH, HEADS)
    shapes = jax.eval_shape(
        nn.MultiHeadDotProductAttention(HEADS).init, jax.random.key(0), WORDS, WORDS
    )
    assert is_clean(infer(module, shapes))
