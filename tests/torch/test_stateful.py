"""Objects with state_dict and load_state_dict, in the tree of a save and of a load."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful

import xckpt
from tests.core.test_tree import same, trees
from tests.support.examples import examples
from tests.support.ranks import Ranks
from xckpt.errors import (
    CorruptCheckpointError,
    RanksFailedError,
    TreeMismatchError,
    UnsupportedLeafError,
)


def load(path: str, *args: Any) -> Any:
    """`xckpt.load`, for tests that know what comes back."""
    return xckpt.load(path, *args)


class Keeper:
    """Keeps any state, and counts how often it is asked for it and given one."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked = 0
        self.given: list[Any] = []

    def state_dict(self) -> Any:
        self.asked += 1
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.given.append(state_dict)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}"


def test_an_object_is_asked_once_and_given_once(path: str) -> None:
    app = Keeper({"w": torch.arange(3.0), "groups": [{"lr": 0.1, "on": True}], 0: None, "0": (1,)})
    assert isinstance(app, Stateful)
    xckpt.save(path, {"app": app, "step": 3})
    assert (app.asked, app.given) == (1, [])
    whole = load(path)
    assert same({**whole["app"], "w": 0}, {**app.state, "w": 0})

    other = Keeper({"w": torch.zeros(3), "groups": [{"lr": 0.0, "on": False}], 0: 1, "0": (2,)})
    with pytest.raises(TreeMismatchError, match="app/0: the checkpoint holds a Python None"):
        xckpt.load_into(path, {"app": Keeper({**other.state, 0: torch.zeros(1)}), "step": 0})
    state: dict[str, Any] = {"app": other, "step": 0}
    xckpt.load_into(path, state)
    assert other.asked == len(other.given) == 1
    assert state == {"app": other, "step": 3}
    assert other.given[0]["w"] is other.state["w"]
    assert other.state["w"].tolist() == [0, 1, 2]
    assert same({**other.given[0], "w": 0}, {**app.state, "w": 0})


def test_load_leaves_the_object_alone_and_returns_its_state(path: str) -> None:
    xckpt.save(path, [Keeper({"w": torch.ones(2), "n": 5})])
    like = Keeper({"w": torch.zeros(2), "n": 0})
    (loaded,) = load(path, [like])
    assert like.given == []
    assert like.state["w"].tolist() == [0, 0]
    assert (loaded["w"].tolist(), loaded["n"]) == ([1, 1], 5)


def test_a_number_of_an_object_takes_one_of_another_kind_but_no_text(path: str) -> None:
    state = {"w": torch.ones(2), "lr": 1, "epoch": 2.5, "on": 0, "best": None, "name": "a"}
    xckpt.save(path, {"app": Keeper(state)})
    like = {"w": torch.zeros(2), "lr": 0.5, "epoch": 2, "on": True, "best": 0.5, "name": "b"}
    keeper = Keeper(like)
    xckpt.load_into(path, {"app": keeper})
    assert same({**keeper.given[0], "w": 0}, {**state, "w": 0})
    with pytest.raises(TreeMismatchError, match="app/name: a Python str in the checkpoint"):
        xckpt.load_into(path, {"app": Keeper({**like, "name": 1})})


def test_a_scheduler_that_counts_fractions_of_epochs_goes_on(path: str) -> None:
    def schedule() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1)
        optimizer.step()
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)

    saved, other = schedule(), schedule()
    saved.step(0.5)
    xckpt.save(path, saved)
    xckpt.load_into(path, other)
    assert other.T_cur == 0.5 and other.get_last_lr() == saved.get_last_lr()


def test_an_object_may_be_the_root(path: str) -> None:
    saved, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    xckpt.save(path, saved)
    assert list(xckpt.open(path)) == ["weight", "bias"]
    xckpt.load_into(path, other)
    assert torch.equal(saved.weight, other.weight)


Training = tuple[torch.nn.Module, torch.optim.Optimizer, Any]


def training(seed: int, make: Callable[..., torch.optim.Optimizer]) -> Training:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.0), torch.nn.Linear(7, 3)
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = make([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])


def train(of: Training, first: int, last: int) -> None:
    model, optimizer, schedule = of
    for number in range(first, last):
        torch.manual_seed(number)
        loss = model(torch.randn(8, 5)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(lambda loss=loss: loss)
        schedule.step()


def state_of(of: Training, step: int) -> dict[str, Any]:
    return {"model": of[0], "optim": of[1], "schedules": [of[2]], "step": step}


def equal(one: Any, other: Any) -> bool:
    """Equal trees of tensors and values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(equal, one, other)) and len(one) == len(other)
    return one == other and type(one) is type(other)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam with the largest": lambda *args, **options: torch.optim.Adam(
        *args, amsgrad=True, foreach=False, **options
    ),
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda *args, **options: torch.optim.SGD(*args, momentum=0.9, **options),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "tensor rate": lambda groups, lr: torch.optim.Adam(groups, lr=torch.tensor(lr)),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("stepped", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_if_uninterrupted(
    path: str, make: Callable[..., torch.optim.Optimizer], stepped: int, steps: int
) -> None:
    """Into a new optimizer or a used one, also from before the first step."""
    straight, resumed = training(0, make), training(1, make)
    train(straight, 0, steps)
    xckpt.save(path, state_of(straight, steps))
    train(resumed, 0, stepped)
    state = state_of(resumed, 0)
    xckpt.load_into(path, state)
    assert state["step"] == steps
    assert equal(resumed[1].state_dict(), straight[1].state_dict())
    assert equal(resumed[2].state_dict(), straight[2].state_dict())
    train(straight, steps, steps + 3)
    train(resumed, steps, steps + 3)
    for part in range(3):
        assert equal(resumed[part].state_dict(), straight[part].state_dict())


def test_a_state_dict_and_its_object_are_one_thing(path: str) -> None:
    """Saved as one, loaded as the other; and in NumPy."""
    saved, other = training(0, torch.optim.AdamW), training(1, torch.optim.AdamW)
    train(saved, 0, 2)
    plain = {"model": saved[0].state_dict(), "optim": saved[1].state_dict()}
    xckpt.save(path, plain)
    xckpt.load_into(path, {"model": other[0], "optim": other[1]})
    assert equal(other[1].state_dict(), plain["optim"])
    xckpt.save(path, {"model": saved[0], "optim": saved[1]}, overwrite=True)
    into = copy.deepcopy(plain)
    xckpt.load_into(path, into)
    assert equal(into, plain)
    here = load(path)
    assert here["optim"]["param_groups"] == plain["optim"]["param_groups"]
    assert list(here["optim"]["state"]) == list(plain["optim"]["state"]) == list(range(6))
    moments = here["optim"]["state"][0]["exp_avg"]
    np.testing.assert_array_equal(moments, plain["optim"]["state"][0]["exp_avg"].numpy())


ADAM = ("step", "exp_avg", "exp_avg_sq")


def stepped_adam() -> torch.optim.Adam:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    return optimizer


def test_a_state_from_before_the_first_step_empties_that_of_an_optimizer(path: str) -> None:
    """As `torch.optim.Optimizer.load_state_dict` does; only where it is asked for."""
    new = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], lr=0.5)
    xckpt.save(path, {"optim": new, "step": 1})
    ways: list[dict[str, Any]] = [{}, {"strict": False}, {"select": ["optim", "step"]}]
    for options in ways:
        optimizer = stepped_adam()
        assert not load(path, {"optim": optimizer, "step": 0})["optim"]["state"]
        assert optimizer.state_dict()["state"]
        report = xckpt.load_into(path, {"optim": optimizer, "step": 0}, **options)
        assert equal(optimizer.state_dict(), new.state_dict()) and report.complete
        assert report.cleared == tuple(f"optim/state/0/{name}" for name in ADAM)
        assert str(report).endswith("cleared 3 leaves: " + ", ".join(report.cleared))
        assert repr(report).endswith(" 0 left, 3 cleared)")
    optimizer = stepped_adam()
    xckpt.load_into(path, optimizer, at="optim")
    assert equal(optimizer.state_dict(), new.state_dict())
    for part in ("step", "optim/param_groups"):
        optimizer = stepped_adam()
        report = xckpt.load_into(path, {"optim": optimizer, "step": 0}, select=part)
        assert report.cleared == ()
        assert equal(optimizer.state_dict()["state"], stepped_adam().state_dict()["state"])


def test_an_optimizers_state_that_is_missing_otherwise_is_an_error(path: str) -> None:
    """An empty dict that is stored for an optimizer says that it is empty; nothing else does."""
    new = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    optimizer, groups = stepped_adam(), new.state_dict()["param_groups"]
    two = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
    stored: list[tuple[Any, str]] = [
        ({"param_groups": groups}, "optim/state/0/exp_avg: wanted, but not in the"),
        ({"state": None, "param_groups": groups}, "optim/state/0/exp_avg: wanted, but not in the"),
        ({"state": [], "param_groups": groups}, "optim/state/0/exp_avg: wanted, but not in the"),
        ({"state": {}}, "optim/param_groups/0/lr: wanted, but not in the"),
        (two, "optim/param_groups/0/params: 2 in the checkpoint, 1 in the target"),
    ]
    for state, words in stored:
        xckpt.save(path, {"optim": state}, overwrite=True)
        with pytest.raises(TreeMismatchError, match=words):
            xckpt.load_into(path, {"optim": optimizer})
    xckpt.save(path, {"app": Keeper({"state": {}})}, overwrite=True)
    keeper = Keeper({"state": {0: torch.ones(2)}})
    with pytest.raises(TreeMismatchError, match="app/state/0: wanted, but not in the"):
        xckpt.load_into(path, {"app": keeper})
    assert equal(optimizer.state_dict(), stepped_adam().state_dict()) and not keeper.given


def grouped(*sizes: int, kind: type[torch.optim.Adam] = torch.optim.Adam) -> Any:
    """An optimizer that has stepped, with groups of so many parameters."""
    groups = [[torch.nn.Parameter(torch.zeros(2)) for _ in range(size)] for size in sizes]
    for parameter in (each for group in groups for each in group):
        parameter.grad = torch.ones(2)
    optimizer: Any = kind([{"params": group} for group in groups])
    optimizer.step()
    return optimizer


class Merging(torch.optim.Adam):
    """Takes the states of other parameters than its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.given = state_dict


@given(
    saved=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    target=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    strict=st.booleans(),
)
@example(saved=[2], target=[1], strict=False)
@example(saved=[2, 1], target=[3], strict=False)
@examples(15, 300)
def test_an_optimizer_takes_as_many_parameters_as_it_has(
    saved: list[int], target: list[int], strict: bool
) -> None:
    """torch refused them when all was loaded, in words that named neither count nor leaf."""
    path = "memory://grouped"
    xckpt.save(path, {"optim": grouped(*saved), "w": torch.ones(2)}, overwrite=True)
    state = {"optim": grouped(*target), "w": torch.zeros(2)}
    if saved == target:
        xckpt.load_into(path, state, strict=strict)
        return
    before = torch.clone(state["optim"].state_dict()["state"][0]["exp_avg"])
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load_into(path, state, strict=strict)
    counts = {
        f"optim/param_groups/{number}/params": f"{size} in the checkpoint, {mine} in the target"
        for number, (size, mine) in enumerate(zip(saved, target, strict=False))
        if size != mine
    }
    if len(saved) != len(target):
        counts["optim/param_groups"] = f"{len(saved)} in the checkpoint, {len(target)} in the"
    said = {each.leaf: each for each in caught.value.problems if each.kind == "length"}
    assert counts.keys() <= said.keys()
    assert all(words in said[leaf] for leaf, words in counts.items())
    assert not state["w"].any()
    assert torch.equal(state["optim"].state_dict()["state"][0]["exp_avg"], before)


def test_an_optimizer_that_merges_states_takes_more_parameters(path: str) -> None:
    """So does a load that hands nothing over."""
    xckpt.save(path, {"optim": grouped(2)})
    merging = grouped(1, kind=Merging)
    xckpt.load_into(path, {"optim": merging}, unexpected="ignore")
    assert merging.given["param_groups"][0]["params"] == [0, 1]
    hooked = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    hooked.register_load_state_dict_pre_hook(lambda _, given: first_of(given))
    xckpt.load_into(path, {"optim": hooked})
    assert list(hooked.state_dict()["state"]) == [0]
    loaded = load(path, {"optim": torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])})
    assert loaded["optim"]["param_groups"][0]["params"] == [0, 1]


def first_of(given: dict[str, Any]) -> dict[str, Any]:
    """The state of the first parameter alone."""
    [group] = given["param_groups"]
    return {"state": {0: given["state"][0]}, "param_groups": [{**group, "params": [0]}]}


def test_moments_of_another_shape_than_their_parameter_are_refused(path: str) -> None:
    """They were given to a new optimizer, whose first step failed."""
    layers = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
    optimizer = torch.optim.AdamW([layer.weight for layer in layers])
    layers[1](layers[0](torch.ones(1, 5))).sum().backward()
    optimizer.step()
    xckpt.save(path, {"optim": optimizer})
    turned = torch.optim.AdamW([layer.weight for layer in layers[::-1]])
    with pytest.raises(TreeMismatchError, match=r"optim/state/0/exp_avg: shape \(7, 5\) in the"):
        xckpt.load_into(path, {"optim": turned})
    assert not turned.state_dict()["state"]


def test_the_versions_of_modules_survive(path: str) -> None:
    """torch keeps them beside the state dict's items, and converts old states by them."""
    saved: Any = training(0, torch.optim.SGD)[0]
    xckpt.save(path, {"model": saved})
    loaded: Any = load(path, {"model": saved})["model"]
    assert type(loaded) is type(saved.state_dict()) is OrderedDict
    assert vars(loaded) == vars(saved.state_dict())
    assert "_metadata" in vars(loaded)


def without(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with some parts that are not there yet."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([None, {}, [], ()]))
    if isinstance(tree, dict):
        return {key: without(draw, child) for key, child in tree.items()}
    if isinstance(tree, list):
        kept = tree[: draw(st.integers(0, len(tree)))]
        return [without(draw, child) for child in kept] + [0] * draw(st.integers(0, 2))
    return tree


@st.composite
def grown(draw: st.DrawFn) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A state, and one that an object may have before that state is loaded."""
    keys = st.one_of(st.integers(-3, 3), st.text(max_size=3))
    state = draw(st.dictionaries(keys, trees, max_size=4))
    return state, {key: without(draw, child) for key, child in state.items()}


@given(case=grown())
@example(case=({"": {"": 1}}, {"": None}))
@example(case=({"a": [1, {"b": None}], "a-b": 2}, {"a": [], "a-b": None}))
@example(case=({0: {"0": (1, ())}, "0": b""}, {0: (), "0": b"x"}))
@examples(40, 1000)
def test_the_checkpoint_decides_where_there_is_nothing(
    case: tuple[dict[Any, Any], dict[Any, Any]],
) -> None:
    """For any tree of values, whatever of it the object does not have yet."""
    state, before = case
    xckpt.save("memory://grown", {"o": Keeper(state), "o2": 1}, overwrite=True)
    keeper = Keeper(before)
    xckpt.load_into("memory://grown", {"o": keeper, "o2": 0})
    assert same(keeper.given, [state])
    if state:
        xckpt.save("memory://grown", Keeper(state), overwrite=True)
        empty = Keeper({})
        xckpt.load_into("memory://grown", empty)
        assert same(empty.given, [state])


def test_tensors_that_the_object_has_not_yet(path: str) -> None:
    kept = {"lbfgs": [torch.ones(2), torch.zeros(())], "half": torch.ones(3).half(), "none": None}
    xckpt.save(path, {"o": Keeper(kept)})
    keeper = Keeper({"lbfgs": [], "half": None, "none": None})
    xckpt.load_into(path, {"o": keeper})
    assert equal(keeper.given[0], kept)
    # A list that has tensors is a tree like any other.
    with pytest.raises(TreeMismatchError, match="o/lbfgs/1: in the checkpoint, but not wanted"):
        xckpt.load_into(path, {"o": Keeper({**kept, "lbfgs": [torch.ones(2)]})})


def test_a_tensor_in_place_of_an_optimizers_states(path: str) -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    groups = optimizer.state_dict()["param_groups"]
    xckpt.save(path, {"opt": {"state": np.ones(3), "param_groups": groups}})
    with pytest.raises(AttributeError, match="items") as caught:
        xckpt.load_into(path, {"opt": optimizer})
    assert "opt: its load_state_dict() failed." in caught.value.__notes__


def test_every_difference_of_a_module_is_listed_before_anything_is_given(path: str) -> None:
    xckpt.save(path, {"model": torch.nn.Linear(3, 2), "app": Keeper({"a": 1})})
    app, more = Keeper({"a": 0}), torch.ones(2)
    model = torch.nn.Bilinear(2, 3, 2, bias=False)
    model.register_buffer("more", more)
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load_into(path, {"model": model, "app": app})
    assert set(caught.value.problems) == {
        "model/weight: shape (2, 3) in the checkpoint, (2, 2, 3) wanted",
        "model/more: wanted, but not in the checkpoint",
        "model/bias: in the checkpoint, but not wanted",
    }
    assert app.given == []
    xckpt.save(path, {"model": {"weight": torch.zeros(2, 2, 3)}}, overwrite=True)
    xckpt.load_into(path, {"model": model, "app": app}, strict=False)
    assert not model.weight.any()
    assert more.tolist() == [1, 1]
    assert app.given == [{"a": 0}]


def test_what_is_no_state_is_refused_by_name(path: str) -> None:
    states: dict[str, Any] = {
        "list": Keeper([1, 2]),
        "within": Keeper({"model": torch.nn.Linear(1, 1)}),
        "class": torch.nn.Linear,
        "meta": torch.nn.Linear(2, 2, device="meta"),
        "sparse": Keeper({"w": torch.eye(2).to_sparse()}),
        "key": Keeper({(1, 2): 1}),
    }
    expected = {
        "list": "list: state_dict() of this Keeper gives a list; it must be a dict",
        "within": "within/model: a Linear in the state of another object; call its state_dict()",
        "class": "class: a builtins.type is neither a tensor nor a plain Python value",
        "meta": "meta/weight: a tensor on the meta device has no elements to save",
        "sparse": "sparse/w: a sparse or otherwise packed tensor",
        "key": "key: dict key (1, 2) is a tuple",
    }
    for name, words in expected.items():
        with pytest.raises(UnsupportedLeafError) as caught:
            xckpt.save(path, {name: states[name], "fine": 1})
        assert words in str(caught.value)
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.load(path)
    xckpt.save(path, {"meta": torch.nn.Linear(2, 2)})
    with pytest.raises(UnsupportedLeafError, match=r"meta/weight: .* no memory to load into"):
        xckpt.load_into(path, {"meta": states["meta"]})


class Sticky(Keeper):
    """Fails on one rank, at a save or at a load."""

    def state_dict(self) -> Any:
        if self.state.get("fail"):
            raise RuntimeError("the key is lost")
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if self.state["n"] == 2:
            raise KeyError("n")
        super().load_state_dict(state_dict)


def on_rank_fail(rank: int, path: Path) -> list[Any]:
    """A rank whose object fails, at a save and at a load; and failures before any is filled."""
    texts: list[Any] = []
    with pytest.raises(RanksFailedError) as caught:
        xckpt.save(path / "no", {"app": Sticky({"fail": rank == 2, "n": 1})})
    texts.append(str(caught.value))
    xckpt.save(path / "yes", {"app": Sticky({"n": 1}), "w": torch.ones(3)})
    app = Sticky({"n": 0})
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load_into(path / "yes", {"app": app, "w": torch.ones(3 + (rank == 1))})
    texts.append(str(caught.value))
    with pytest.raises(RanksFailedError) as caught:
        xckpt.load_into(path / "yes", {"app": Sticky({"n": rank}), "w": torch.ones(3)})
    texts.append(str(caught.value))
    dist.barrier()
    if rank == 0:
        chunk = path / "yes" / "w" / "c" / "0"
        chunk.write_bytes(b"\1" * len(chunk.read_bytes()))
    dist.barrier()
    with pytest.raises(CorruptCheckpointError) as caught:
        xckpt.load_into(path / "yes", {"app": app, "w": torch.ones(3)})
    return [*texts, str(caught.value), app.given]


def test_no_object_is_given_anything_when_a_rank_fails(four_ranks: Ranks, tmp_path: Path) -> None:
    for save, misfit, refused, damaged, received in four_ranks.run(on_rank_fail, tmp_path):
        assert "rank 2: RuntimeError: the key is lost\n      app: its state_dict() failed" in save
        assert "w: shape (3,) in the checkpoint, (4,) wanted" in misfit
        assert "rank 2: KeyError: 'n'\n      app: its load_state_dict() failed" in refused
        assert "w: [0, 3)" in damaged
        assert received == []
    assert not (tmp_path / "no").exists()
