"""Inferred mappings: what is certain gives the other framework's outputs; the rest is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.convert.carrying import carried, numbered
from tests.mapping import toys
from tests.support.steps import steps
from xckpt.errors import MappingError
from xckpt.mapping.infer.infer import Inference, Match, infer
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import specs_of
from xckpt.mapping.spec import TensorSpec

FLOAT32_ROUNDING = 2e-6


def tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """A flat tree of NumPy arrays; "__" in a name stands for "."."""
    return {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in shapes.items()}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(dict(tree), sep="/")


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """The module in evaluation mode, every tensor of its state random, variances positive."""
    random = torch.Generator().manual_seed(5)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            low = 0.5 if name.endswith("running_var") else -0.4
            tensor.copy_(torch.rand(tensor.shape, generator=random) * 0.8 + low)
    return module.eval()


def state_of(module: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def initialised(module: Any, *inputs: Any) -> Any:
    """The shapes of a Linen module's variables."""
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def found(inference: Inference) -> tuple[Match, ...]:
    """All matches, whatever they assume."""
    return inference.certain + inference.assumed


def is_clean(inference: Inference, *, leftover: tuple[str, ...] = ()) -> bool:
    left = (*inference.unmatched.source, *inference.unmatched.target)
    return not inference.ambiguous and left == leftover


def agree(one: Any, other: Any) -> None:
    left, right = np.asarray(one), np.asarray(other)
    atol = FLOAT32_ROUNDING * max(1.0, float(np.abs(left).max()))
    np.testing.assert_allclose(left, right, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "torch_module, linen_module, inputs, rules",
    [
        (toys.torch_mlp, toys.LinenMlp(), np.linspace(-1, 1, 10).reshape(2, 5), 4),
        pytest.param(
            *(toys.TorchTransformer, toys.LinenTransformer(), np.arange(14).reshape(2, 7) + 3, 18),
            marks=pytest.mark.thorough,
        ),
        (toys.TorchTransformer, toys.LinenTransformer(True), np.arange(14).reshape(2, 7) + 3, 20),
    ],
    ids=["mlp", "transformer", "scanned"],
)
def test_what_is_certain_gives_the_same_outputs(
    torch_module: Callable[[], torch.nn.Module], linen_module: Any, inputs: Any, rules: int
) -> None:
    module = randomised(torch_module())
    fed = torch.from_numpy(inputs)
    fed = fed.float() if fed.is_floating_point() else fed
    shapes = initialised(linen_module, jnp.asarray(fed.numpy()))
    inference = infer(module.state_dict(), shapes)
    assert is_clean(inference)
    assert len(inference.mapping.rules) == rules
    inference.mapping.check(specs_of(module.state_dict()), specs_of(shapes))
    made = carried(inference.mapping, state_of(module))
    with torch.no_grad():
        agree(module(fed), linen_module.apply(unflatten_dict(made, sep="/"), fed.numpy()))
    # And the way back, inferred on its own, gives the same bits again.
    back = infer(shapes, module.state_dict())
    assert is_clean(back)
    again = carried(back.mapping, made)
    assert {k: v.tobytes() for k, v in again.items()} == {
        k: v.tobytes() for k, v in state_of(module).items()
    }


def test_convolutions_and_running_statistics() -> None:
    module = randomised(toys.TorchConvolutions())
    images = np.random.default_rng(1).random((2, 3, 6, 6), np.float32)
    linen = toys.LinenConvolutions()
    shapes = initialised(linen, jnp.zeros((2, 6, 6, 3)))
    inference = infer(module.state_dict(), shapes)
    # Its inputs are (channels, height, width) in torch and (height, width, channels) in Flax.
    [ambiguity] = inference.ambiguous
    assert (ambiguity.sources, ambiguity.targets) == (("fc1.weight",), ("params/Dense_0/kernel",))
    assert "convolution's flattened output" in ambiguity.reason
    assert set(inference.unmatched.source) == {"bn.num_batches_tracked"}
    assert not inference.unmatched.target
    made = carried(inference.mapping, state_of(module))
    weight = state_of(module)["fc1.weight"].reshape(7, 4, 2, 2)
    made["params/Dense_0/kernel"] = weight.transpose(2, 3, 1, 0).reshape(16, 7)
    with torch.no_grad():
        outputs = module(torch.from_numpy(images))
    variables = unflatten_dict(made, sep="/")
    result: Any = linen.apply(variables, images.transpose(0, 2, 3, 1))
    agree(outputs, jnp.moveaxis(result, -1, 1))


def test_nnx_modules_and_states() -> None:
    module = randomised(toys.TorchLayers())
    words = np.arange(9) + 2
    model = toys.NnxLayers(nnx.Rngs(0))
    graph, state = nnx.split(model)
    inference = infer(module, nnx.eval_shape(lambda: toys.NnxLayers(nnx.Rngs(0))))
    assert is_clean(inference, leftover=("bn.num_batches_tracked",))
    assert {str(rule) for rule in inference.mapping.rules if "layers" in str(rule)} == {
        "layers.{layer}.weight -> layers/{layer}/kernel/value",
        "layers.{layer}.bias -> layers/{layer}/bias/value",
    }
    made = carried(infer(module, nnx.to_pure_dict(state)).mapping, state_of(module))
    pure = nnx.to_pure_dict(state)
    names = {"/".join(map(str, keys)): keys for keys in flatten_dict(pure)}
    nnx.replace_by_pure_dict(
        state, unflatten_dict({keys: jnp.asarray(made[name]) for name, keys in names.items()})
    )
    with torch.no_grad():
        agree(module(torch.from_numpy(words)), nnx.merge(graph, state)(jnp.asarray(words)))


def test_equinox_keeps_the_layout_of_torch() -> None:
    source = tensors(
        layers__0__weight=(6, 6), layers__0__bias=(6,), conv__weight=(5, 6, 3), conv__bias=(5,)
    )
    target = {
        "layers": [{"weight": np.zeros((6, 6), "f4"), "bias": np.zeros(6, "f4")}],
        "conv": {"weight": np.zeros((5, 6, 3), "f4"), "bias": np.zeros((5, 1), "f4")},
    }
    inference = infer(source, target)
    assert is_clean(inference)
    assert {match.sources[0]: match.layout for match in inference.certain} == {
        "layers.0.weight": "same",
        "layers.0.bias": "same",
        "conv.weight": "same",
        "conv.bias": "reshaped",
    }


@pytest.mark.parametrize(
    "source, target",
    [
        ({"a": 1}, {"model.a": 1}),
        ({"bert.layers.0.a": 1, "cls.b": 1}, {"layers/0/a": 1}),
        ({"module._orig_mod.a_b.c": 1}, {"params/aB/c": 1}),
        ({"model.h.0.x": 1, "model.h.1.x": 1}, {"transformer/h_0/x": 1, "transformer/h_1/x": 1}),
        ({"model.layers.0.SelfAttention.q": 1}, {"layers_0/self_attn/query": 1}),
    ],
    ids=["added", "left out", "wrapped", "exchanged", "concepts"],
)
def test_names_that_say_the_same(source: dict[str, int], target: dict[str, int]) -> None:
    one = {f"{name}.weight": np.zeros((4, 3), "f4") for name in source}
    other = flatten_keys({f"{name}/kernel": np.zeros((3, 4), "f4") for name in target})
    inference = infer(one, other)
    assert not inference.ambiguous
    assert len(found(inference)) == len(target)
    assert not inference.unmatched.target
    for match in found(inference):
        assert match.layout == "transposed"


def flatten_keys(tree: dict[str, Any]) -> dict[str, Any]:
    return unflatten_dict({tuple(name.split("/")): leaf for name, leaf in tree.items()})


def test_two_prefixes_that_fit_alike_are_ambiguous() -> None:
    names = [f"{side}.{part}.weight" for side in ("query", "key") for part in ("a.fc", "b.fc")]
    source = {name: np.zeros((4, 3), "f4") for name in names}
    target = {part: {"fc": {"kernel": np.zeros((3, 4), "f4")}} for part in "ab"}
    inference = infer(source, target)
    assert not inference.certain
    assert {(frozenset(each.sources), each.targets) for each in inference.ambiguous} == {
        (frozenset(("query.a.fc.weight", "key.a.fc.weight")), ("a/fc/kernel",)),
        (frozenset(("query.b.fc.weight", "key.b.fc.weight")), ("b/fc/kernel",)),
    }


def test_modules_that_only_their_order_in_the_file_could_tell_are_ambiguous() -> None:
    source = tensors(**{f"attn__{name}__weight": (4, 4) for name in "abc"})
    target = {"attn": {f"Dense_{n}": {"kernel": np.zeros((4, 4), "f4")} for n in range(3)}}
    inference = infer(source, target)
    assert not inference.certain
    [ambiguity] = inference.ambiguous
    assert len(ambiguity.sources) == len(ambiguity.targets) == 3


def test_other_numbers_for_the_same_layers_are_not_taken_for_equal() -> None:
    """0, 2, 4 are the first, second and third here; 2 is the third there."""
    source = {f"layers.{n}.weight": np.zeros((4, 4), "f4") for n in (0, 2, 4)}
    target = {"layers": [{"kernel": np.zeros((4, 4), "f4")} for _ in range(3)]}
    inference = infer(source, target)
    assert {match.sources + match.targets for match in found(inference)} == {
        (f"layers.{2 * n}.weight", f"layers/{n}/kernel") for n in range(3)
    }
    [rule] = inference.mapping.rules
    assert str(rule) == "layers.{2*layer}.weight -> layers/{layer}/kernel"


def test_numbers_that_begin_elsewhere_are_not_taken_for_equal_under_a_prefix() -> None:
    """norm1 and norm2 are Linen's LayerNorm_0 and LayerNorm_1: the first, the second of a layer."""
    pairs = [(layer, number) for layer in range(2) for number in range(2)]
    source = {f"layers.{i}.norm{n + 1}.weight": np.zeros(4, "f4") for i, n in pairs}
    source |= {name.replace("weight", "bias"): each for name, each in source.items()}
    target = flatten_keys(
        {
            f"layers_{i}/LayerNorm_{n}/{role}": np.zeros(4, "f4")
            for i, n in pairs
            for role in ("scale", "bias")
        }
    )
    inference = infer(source, target)
    assert is_clean(inference)
    assert {each.sources + each.targets for each in found(inference)} >= {
        (f"layers.{i}.norm{n + 1}.bias", f"layers_{i}/LayerNorm_{n}/bias") for i, n in pairs
    }


def test_a_leaf_that_is_certain_is_no_rival_of_another() -> None:
    """The decoder is found by what it alone has; the encoder is then the other one."""
    shapes = {"up": (4, 6), "down": (6, 4), "cross": (4, 4)}
    parts = {"encoder": ("up", "down"), "decoder": ("up", "down", "cross")}
    source = tensors(
        **{
            f"{side}__layers__{n}__{part}__weight": shapes[part]
            for side, names in parts.items()
            for n in range(2)
            for part in names
        }
    )
    target = flatten_keys(
        {
            f"{side}_layers_{n}/{part}/kernel": np.zeros(shapes[part][::-1], "f4")
            for side, names in parts.items()
            for n in range(2)
            for part in names
        }
    )
    inference = infer(source, target)
    assert is_clean(inference)
    for match in inference.certain:
        assert match.sources[0].split(".")[0] == match.targets[0].split("_")[0]


def test_what_each_side_lacks_is_not_taken_for_one_another() -> None:
    source = tensors(pooler__weight=(4, 4), a__weight=(3, 4))
    target = {
        "teacher": {"kernel": np.zeros((4, 4), "f4")},
        "a": {"kernel": np.zeros((4, 3), "f4")},
    }
    inference = infer(source, target)
    assert [match.sources for match in inference.certain] == [("a.weight",)]
    [ambiguity] = inference.ambiguous
    assert (ambiguity.sources, ambiguity.targets) == (("pooler.weight",), ("teacher/kernel",))


def test_fewer_layers_are_the_first_ones() -> None:
    layers = [{"kernel": np.zeros((4, 4), "f4")} for _ in range(3)]
    first = {f"layers.{n}.weight": np.zeros((4, 4), "f4") for n in range(2)}
    assert len(found(infer(first, {"layers": layers}))) == 2
    other = {f"layers.{n}.weight": np.zeros((4, 4), "f4") for n in (0, 2)}
    assert not found(infer(other, {"layers": layers}))


def test_square_kernels_go_as_the_others_of_the_model_do() -> None:
    """GPT-2's Conv1D is (in, out) in torch: where Flax has it so too, nothing is transposed."""
    source = tensors(a__c_attn__weight=(4, 12), a__c_proj__weight=(4, 4), head__weight=(9, 4))
    kernels = {"c_attn": (4, 12), "c_proj": (4, 4)}
    target = {
        "a": {name: {"kernel": np.zeros(shape, "f4")} for name, shape in kernels.items()},
        "head": {"kernel": np.zeros((4, 9), "f4")},
    }
    inference = infer(source, target)
    assert {match.sources[0]: match.layout for match in inference.certain} == {
        "a.c_attn.weight": "same",
        "head.weight": "transposed",
    }
    [ambiguity] = inference.ambiguous
    assert ambiguity.sources == ("a.c_proj.weight",)
    # With nothing against it, the convention decides.
    del source["a.c_attn.weight"], target["a"]["c_attn"]
    assert {match.layout for match in infer(source, target).certain} == {"transposed"}


def test_a_stack_that_fits_along_two_axes_needs_another_to_tell() -> None:
    source = {f"layers.{n}.fc.weight": np.zeros((5, 3), "f4") for n in range(3)}
    stacked: dict[str, Any] = {"kernel": np.zeros((3, 3, 5), "f4")}
    target = {"layers": {"fc": stacked}}
    [ambiguity] = infer(source, target).ambiguous
    assert "axes [0, 1]" in ambiguity.reason
    source |= {f"layers.{n}.fc.bias": np.zeros(5, "f4") for n in range(3)}
    stacked["bias"] = np.zeros((5, 3), "f4")
    inference = infer(source, target)
    assert is_clean(inference)
    made = carried(inference.mapping, numbered(specs_of(source)))
    weights = [numbered(specs_of(source))[f"layers.{n}.fc.weight"] for n in range(3)]
    np.testing.assert_array_equal(
        made["layers/fc/kernel"], np.stack([each.T for each in weights], axis=1)
    )


def test_a_transposed_convolution_is_left_open() -> None:
    source, target = (
        tensors(up_transpose__weight=(4, 4, 3, 3)),
        {"up_transpose": {"kernel": np.zeros((3, 3, 4, 4), "f4")}},
    )
    [ambiguity] = infer(source, target).ambiguous
    assert "flipped" in ambiguity.reason


def test_shapes_that_do_not_fit_are_reported() -> None:
    inference = infer(tensors(wte__weight=(10, 4)), {"wte": {"embedding": np.zeros((12, 4), "f4")}})
    assert not inference.certain
    assert "[10, 4] and [12, 4] do not fit" in inference.unmatched.source["wte.weight"]
    assert "[10, 4] and [12, 4] do not fit" in inference.unmatched.target["wte/embedding"]


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(MappingError, match="layers/0/w"):
        infer({"layers": {0: {"w": np.zeros(2)}, "0": {"w": np.zeros(2)}}}, {})


def test_nothing_at_all() -> None:
    inference = infer({}, {})
    assert inference.mapping == LeafMapping()
    assert not inference.certain
    assert not inference.ambiguous
    assert not len(inference.unmatched)


def test_scalars_are_carried() -> None:
    source, target = {"logit_scale": np.array(2.5)}, {"logit_scale": np.array(0.0)}
    made = carried(infer(source, target).mapping, source)
    assert made["logit_scale"] == 2.5


def renamed(leaves: int, prefix: str) -> dict[str, TensorSpec]:
    """A model of numbered layers, each of eight weights."""
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    return {
        f"{prefix}.{layer}.{word}.weight": TensorSpec((16, 16), "float32")
        for layer in range(leaves // len(words))
        for word in words
    }


def test_a_leaf_of_a_renamed_model_costs_the_same_however_many_there_are() -> None:
    def count(leaves: int) -> float:
        both = renamed(leaves, "model.layers"), renamed(leaves, "net.blocks")
        return steps(lambda: infer(*both)) / leaves

    few = count(160)
    assert count(800) < 1.1 * few < 1700


def test_it_reports_how_far_it_is() -> None:
    seen: list[float] = []
    infer(renamed(80, "model.layers"), renamed(80, "net.blocks"), progress=seen.append)
    assert len(seen) > 6
    assert seen == sorted(seen)
    assert 0.0 < seen[0] < seen[-1] == 1.0
