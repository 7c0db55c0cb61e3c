"""Training goes on in the other framework where it was left; moments follow their parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import xckpt
from tests.convert.carrying import carried, numbered
from tests.mapping import toys
from tests.mapping.training import adamw, optax_adamw, train_optax, train_torch
from xckpt.convert import Rule, TensorSpec, convert, infer, with_optimizer
from xckpt.errors import MappingError
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.names import specs_of
from xckpt.mapping.operations import Pad, Scale, Stack, Tie, Transpose, Untie
from xckpt.mapping.optimizer.states import find_moments

STEPS = 6


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def adam(name: str, of: TensorSpec) -> dict[str, TensorSpec]:
    """torch's state of one parameter."""
    return {f"{name}/exp_avg": of, f"{name}/exp_avg_sq": of, f"{name}/step": spec()}


def started() -> torch.nn.Module:
    """The same model each time."""
    torch.manual_seed(3)
    return toys.TorchTransformer()


def arrays_of(module: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}


def furthest(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(np.asarray(one[k]) - np.asarray(other[k])).max()) for k in one)


def empty_flax_state(model: Any) -> dict[str, Any]:
    """Zeros where a checkpoint will be loaded."""
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 7), int))
    state = {"params": params, "opt_state": jax.eval_shape(optax_adamw().init, params)}
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)


def torch_names(params: Any, mapping: LeafMapping) -> dict[str, np.ndarray[Any, Any]]:
    """Flax parameters under torch's names and in its layout."""
    flat = {
        "/".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return carried(mapping.inverse(), flat)


def test_training_goes_on_in_optax_as_it_would_have_in_torch(tmp_path: Path) -> None:
    flax = toys.LinenTransformer(scanned=True)
    like = empty_flax_state(flax)
    module = started()
    mapping = infer(module.state_dict(), like["params"]).mapping.accept()
    # Both frameworks from the start: as far as rounding alone takes them apart.
    begun = carried(mapping, arrays_of(module))
    params = optax_params(begun, like["params"])
    alone, _ = train_optax(flax, params, optax_adamw().init(params), 0, 2 * STEPS)

    optimizer = adamw(module)
    train_torch(module, optimizer, 0, STEPS)
    state = {"model": module, "optim": optimizer}
    names = [name for name, _ in module.named_parameters()]
    whole = with_optimizer(mapping, state, like, parameters=names)
    xckpt.save(tmp_path / "torch", state)
    loaded: Any = xckpt.load(tmp_path / "torch", like, mapping=whole, unexpected="ignore")
    assert [int(count) for count in counts(loaded["opt_state"])] == [STEPS, STEPS]
    resumed, _ = train_optax(flax, loaded["params"], loaded["opt_state"], STEPS, STEPS)

    train_torch(module, optimizer, STEPS, STEPS)
    rounding = furthest(torch_names(alone, mapping), arrays_of(module))
    assert furthest(torch_names(resumed, mapping), arrays_of(module)) < max(2 * rounding, 2e-6)
    assert rounding < 1e-4


def optax_params(arrays: Mapping[str, Any], like: Any) -> Any:
    """Parameters by name, as the tree."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(arrays["/".join(key.key for key in path)]), like
    )


def counts(state: Any) -> list[Any]:
    found = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in found if getattr(path[-1], "name", "") == "count"]


@pytest.mark.thorough
def test_training_goes_on_in_torch_as_it_would_have_in_optax(tmp_path: Path) -> None:
    flax = toys.LinenTransformer()
    module = started()
    like = empty_flax_state(flax)
    mapping = infer(like["params"], module.state_dict()).mapping.accept()
    params = optax_params(carried(mapping.inverse(), arrays_of(module)), like["params"])
    halfway = train_optax(flax, params, optax_adamw().init(params), 0, STEPS)
    xckpt.save(tmp_path / "flax", {"params": halfway[0], "opt_state": halfway[1]})
    whole_way, _ = train_optax(flax, *halfway, STEPS, STEPS)
    alone = started()
    train_torch(alone, adamw(alone), 0, 2 * STEPS)

    optimizer = adamw(module)
    state: Any = {
        "model": module.state_dict(),
        "optim": get_optimizer_state_dict(module, optimizer),
    }
    both = with_optimizer(mapping, like, state)
    state = xckpt.load(tmp_path / "flax", state, mapping=both, missing="ignore")
    steps = {float(slots["step"]) for slots in state["optim"]["state"].values()}
    assert steps == {STEPS}
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optim"])
    train_torch(module, optimizer, STEPS, STEPS)

    expected = carried(mapping, flattened(whole_way))
    rounding = furthest(arrays_of(alone), expected)
    assert furthest(arrays_of(module), expected) < max(2 * rounding, 2e-6)
    assert rounding < 1e-4


def flattened(params: Any) -> dict[str, Any]:
    return {
        "/".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.parametrize("form", ["numbers", "numbers with names", "names", "flat names"])
def test_each_form_of_a_torch_optimizer_gives_the_same(form: str) -> None:
    module = started()
    optimizer = adamw(module, named=form == "numbers with names")
    train_torch(module, optimizer, 0, 1)
    like = empty_flax_state(toys.LinenTransformer())
    like["opt_state"] = optax.adam(0.1).init(like["params"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "numbers": lambda: optimizer.state_dict(),
        "numbers with names": lambda: optimizer.state_dict(),
        "names": lambda: get_optimizer_state_dict(module, optimizer),
        "flat names": lambda: get_optimizer_state_dict(module, optimizer, options=options),
    }[form]()
    tree = {"model": module.state_dict(), "optim": state}
    names = [name for name, _ in module.named_parameters()] if form == "numbers" else None
    mapping = infer(module.state_dict(), like["params"]).mapping.accept()
    whole = with_optimizer(mapping, tree, like, parameters=names)
    source = specs_of(tree)
    whole.check(source, specs_of(like))
    assert LeafMapping.from_document(whole.to_document()) == whole
    arrays = numbered(source) | {name: np.float32(5) for name in source if name.endswith("step")}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    made = carried(whole, arrays)
    weight = "layers.1.self_attn.o_proj.weight"
    owner = list(dict(module.named_parameters())).index(weight)
    key = f"state.{weight}." if form == "flat names" else f"state/{weight}/"
    is_named = form.endswith("names") and "numbers" not in form
    prefix = f"optim/{key}" if is_named else f"optim/state/{owner}/"
    slots = {"mu": "exp_avg", "nu": "exp_avg_sq"}
    for slot, torch_slot in slots.items():
        moment = made[f"opt_state/0/{slot}/params/layers_1/attention/out/kernel"]
        expected = arrays[f"{prefix}{torch_slot}"].T.reshape(moment.shape)
        np.testing.assert_array_equal(moment, expected)
    assert made["opt_state/0/count"] == 5
    assert made["opt_state/0/count"].dtype == np.int32
    # A rule of twelve layers stays one rule for their moments.
    assert len(whole.rules) == 3 * len(mapping.rules) + 1
    back = carried(whole.inverse(), made)
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in arrays.items()}


MODEL = {"model/w.weight": spec(4, 2)}
TORCH = MODEL | adam("optim/state/w.weight", spec(4, 2))
OPTAX = {
    "params/w/kernel": spec(2, 4),
    "opt_state/0/mu/w/kernel": spec(2, 4),
    "opt_state/0/nu/w/kernel": spec(2, 4),
    "opt_state/0/count": spec(dtype="int32"),
}
TRANSPOSED = Rule("w.weight", "w/kernel", [Transpose((1, 0))])


def test_a_lossy_operation_is_not_applied_to_moments() -> None:
    rule = Rule("w.weight", "w/kernel", [Transpose((1, 0)), Scale(0.5)])
    with pytest.raises(MappingError, match=r"w/kernel: scale 0\.5.* lossy on a parameter"):
        with_optimizer(LeafMapping([rule]), TORCH, OPTAX)


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    state = numbered(TORCH | adam("optim/state/b.weight", spec(4)) | {"model/b.weight": spec(4)})
    state |= {name: np.zeros((), np.float32) for name in state if name.endswith("step")}
    state["optim/state/b.weight/step"] += 1
    wanted = OPTAX | {
        f"{root}/b/scale": spec(4) for root in ("params", "opt_state/0/mu", "opt_state/0/nu")
    }
    mapping = LeafMapping([TRANSPOSED, Rule("b.weight", "b/scale")])
    whole = with_optimizer(mapping, specs_of(nested(state)), wanted)
    xckpt.save(tmp_path / "torch", nested(state))
    with pytest.raises(MappingError, match=r"tied tensors must be equal.*count"):
        convert(tmp_path / "torch", tmp_path / "flax", mapping=whole)
    assert not (tmp_path / "flax").exists()


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        node = tree
        *above, last = name.split("/")
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def test_a_count_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    state = numbered(TORCH) | {"optim/state/w.weight/step": np.array(2.5, np.float32)}
    xckpt.save(tmp_path / "torch", nested(state))
    whole = with_optimizer(LeafMapping([TRANSPOSED]), TORCH, OPTAX)
    with pytest.raises(MappingError, match=r"come back from int32 as the same float32.*step"):
        convert(tmp_path / "torch", tmp_path / "flax", mapping=whole)


def test_numbers_without_names_are_refused() -> None:
    state = MODEL | adam("optim/state/0", spec(4, 2))
    with pytest.raises(MappingError, match=r"parameter number 0 is; pass parameters="):
        with_optimizer(LeafMapping([TRANSPOSED]), state, OPTAX)


def grouped() -> tuple[Any, dict[str, Any], list[list[str]]]:
    """A model, its state with moments that tell their parameter, and names by group."""
    module = started()
    named = dict(module.named_parameters())
    ranks = [
        [name for name, each in named.items() if (each.dim() > 1) == matrix] for matrix in (0, 1)
    ]
    groups = [ranks[0], ranks[1][:-1], ranks[1][-1:]]
    options: list[Any] = [
        {"params": [named[name] for name in group], "lr": 0.1 / (1 + number)}
        for number, group in enumerate(groups)
    ]
    optimizer = torch.optim.Adam(options)
    for number, parameter in enumerate(named.values()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return module, {"model": module.state_dict(), "optim": optimizer.state_dict()}, groups


def test_moments_follow_the_order_of_the_parameter_groups(tmp_path: Path) -> None:
    module, state, groups = grouped()
    like = empty_flax_state(toys.LinenTransformer())
    like["opt_state"] = optax.adam(0.1).init(like["params"])
    mapping = infer(module.state_dict(), like["params"]).mapping.accept()
    whole = with_optimizer(mapping, state, like, parameters=groups)
    xckpt.save(tmp_path / "torch", state)
    loaded: Any = xckpt.load(tmp_path / "torch", like, mapping=whole, unexpected="ignore")
    moments = carried(mapping.inverse(), flattened(loaded["opt_state"][0].mu))
    for number, name in enumerate(dict(module.named_parameters())):
        np.testing.assert_allclose(moments[name], 0.1 * (number + 1), rtol=1e-6)


@pytest.mark.parametrize("wrong", ["flat", "one short", "another cut"])
def test_names_that_are_not_those_of_the_groups_are_refused(wrong: str) -> None:
    module, state, groups = grouped()
    like = empty_flax_state(toys.LinenTransformer())
    mapping = infer(module.state_dict(), like["params"]).mapping.accept()
    names: Any = {
        "flat": [name for group in groups for name in group],
        "one short": groups[:-1],
        "another cut": [groups[0][1:], [*groups[1], groups[0][0]], groups[2]],
    }[wrong]
    with pytest.raises(MappingError, match=r"has 3 parameter groups, of \d+, \d+, 1 .*each group"):
        with_optimizer(mapping, state, like, parameters=names)


def test_the_maximum_of_amsgrad_is_not_carried_over() -> None:
    moments = adam("optim/state/w.weight", spec(4, 2))
    torch_state = MODEL | moments | {"optim/state/w.weight/max_exp_avg_sq": spec(4, 2)}
    optax_state = OPTAX | {"opt_state/0/nu_max/w/kernel": spec(2, 4)}
    mapping = LeafMapping([TRANSPOSED])
    for states in [
        (mapping, torch_state, optax_state),
        (mapping.inverse(), optax_state, torch_state),
    ]:
        with pytest.raises(MappingError, match="AMSGrad's maximum cannot be carried over"):
            with_optimizer(*states)
    renamed = LeafMapping([Rule("w.weight", "v.weight")])
    other = {name.replace("w.weight", "v.weight"): each for name, each in torch_state.items()}
    whole = with_optimizer(renamed, torch_state, other)
    assert any(rule.source[0].endswith("max_exp_avg_sq") for rule in whole.rules)


def test_numbers_that_follow_no_pattern_are_refused() -> None:
    shapes = {f"model/layers.{n}.w": spec(2) for n in range(3)}
    torch_state = dict(shapes)
    for number in range(3):
        torch_state |= adam(f"optim/state/{number}", spec(2))
    roots = ("params", "opt_state/0/mu", "opt_state/0/nu")
    optax_state = {f"{root}/w": spec(3, 2) for root in roots}
    optax_state["opt_state/0/count"] = spec(dtype="int32")
    mapping = LeafMapping([Rule("layers.{layer}.w", "w", [Stack("layer")])])
    order = ["layers.0.w", "layers.2.w", "layers.1.w"]
    with pytest.raises(MappingError, match="numbers that follow from the indices"):
        with_optimizer(mapping, torch_state, optax_state, parameters=order)
    whole = with_optimizer(mapping, torch_state, optax_state, parameters=sorted(order))
    assert "optim/state/{layer}/exp_avg" in {rule.source[0] for rule in whole.rules}


def test_numbered_moments_of_layers_with_a_gap() -> None:
    layers = (0, 1, 3)
    torch_state = {f"model/layers.{n}.w": spec(2) for n in layers}
    optax_state = {"opt_state/0/count": spec(dtype="int32")}
    for n in layers:
        torch_state |= adam(f"optim/state/{n}", spec(2))
        roots = ("params", "opt_state/0/mu", "opt_state/0/nu")
        optax_state |= {f"{root}/layers/{n}/w": spec(2) for root in roots}
    mapping = LeafMapping([Rule("layers.{layer}.w", "layers/{layer}/w")])
    order = [f"layers.{n}.w" for n in range(4)]
    whole = with_optimizer(mapping, torch_state, optax_state, parameters=order)
    whole.check(torch_state, optax_state)


def test_a_tied_weight_has_one_moment() -> None:
    """torch keeps one state for a tensor of two names."""
    torch_state = TORCH | {"model/head.weight": spec(4, 2)}
    rule = Rule(("w.weight", "head.weight"), "w/kernel", [Untie(2), Transpose((1, 0))])
    whole = with_optimizer(LeafMapping([rule]), torch_state, OPTAX)
    whole.check(torch_state, OPTAX)
    back = with_optimizer(LeafMapping([rule]).inverse(), OPTAX, torch_state)
    back.check(OPTAX, torch_state)
    [moments] = [rule for rule in back.rules if rule.source[0].startswith("opt_state/0/mu")]
    assert Tie not in {type(each) for each in moments.operations}


def test_the_moments_of_a_pad_are_zeros() -> None:
    padded = {name: spec(2, 6) if of.shape else of for name, of in OPTAX.items()}
    rule = Rule("w.weight", "w/kernel", [Transpose((1, 0)), Pad(2, axis=1, value=-1)])
    whole = with_optimizer(LeafMapping([rule]), TORCH, padded)
    whole.check(TORCH, padded)
    made = carried(whole, numbered(TORCH))
    assert (made["params/w/kernel"][:, 4:] == -1).all()
    assert (made["opt_state/0/mu/w/kernel"][:, 4:] == 0).all()


def test_layers_called_mu_and_buffers_are_no_moments() -> None:
    torch_state = TORCH | {"model/mu.weight": spec(3), "model/running_mean": spec(5)}
    optax_state = OPTAX | {"params/mu/scale": spec(3), "batch_stats/mean": spec(5)}
    found = find_moments(optax_state)
    assert set(found.slots["first moment"]) == {"params/w/kernel"}
    rules = [TRANSPOSED, Rule("mu.weight", "mu/scale")]
    whole = with_optimizer(LeafMapping(rules), torch_state, optax_state)
    assert len(whole.rules) == 2 + 2 + 1


def test_states_without_moments_in_common() -> None:
    with pytest.raises(MappingError, match="no moments in common"):
        with_optimizer(LeafMapping([TRANSPOSED]), MODEL, OPTAX)


def test_a_mapping_that_fits_nothing() -> None:
    with pytest.raises(MappingError, match="source names fit no part of the source state"):
        with_optimizer(LeafMapping([Rule("x", "y")]), TORCH, OPTAX)


def test_moments_of_nothing() -> None:
    state = TORCH | adam("optim/state/gone", spec(2))
    with pytest.raises(MappingError, match="its parameter 'gone' is no parameter"):
        with_optimizer(LeafMapping([TRANSPOSED]), state, OPTAX)


def test_two_moments_of_one_parameter_are_refused() -> None:
    for state in (TORCH | adam("other/state/w.weight", spec(4, 2)), OPTAX | twice(OPTAX)):
        with pytest.raises(MappingError, match=r"both are of (model|params)/w"):
            find_moments(state)


def twice(state: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """A second optimizer in a chain."""
    return {name.replace("opt_state/0", "opt_state/1"): each for name, each in state.items()}


@pytest.mark.parametrize("first", ["g", "d"])
def test_two_optimizers_have_numbers_of_their_own(first: str) -> None:
    weight, kernel = np.zeros((4, 2), "f4"), np.zeros((2, 4), "f4")
    names = (first, "d" if first == "g" else "g")
    torch_state: dict[str, Any] = {"model": {f"{name}.weight": weight for name in names}}
    for name in names:
        moments = {"exp_avg": weight, "exp_avg_sq": weight, "step": np.zeros((), "f4")}
        group = {"params": [0], "param_names": [f"{name}.weight"]}
        torch_state[f"opt_{name}"] = {"state": {0: moments}, "param_groups": [group]}
    found = find_moments(torch_state)
    assert {owner: place.leaf for owner, place in found.slots["first moment"].items()} == {
        f"model/{name}.weight": f"opt_{name}/state/0/exp_avg" for name in names
    }
    with pytest.raises(MappingError, match="has the optimizers opt_d/, opt_g/"):
        find_moments(torch_state, ["g.weight", "d.weight"])
    rules = [Rule(f"{name}.weight", f"{name}/kernel", [Transpose((1, 0))]) for name in names]
    params = {name: {"kernel": kernel} for name in names}
    flax_state = {"params": params, "opt": {"count": np.int32(0), "mu": params, "nu": params}}
    sources = {
        rule.source[0] for rule in with_optimizer(LeafMapping(rules), torch_state, flax_state).rules
    }
    assert {"opt_g/state/0/exp_avg", "opt_d/state/0/exp_avg"} <= sources
