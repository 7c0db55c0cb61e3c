"""Loading by a mapping: into targets of any sharding, reading what they need and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from tests.convert.test_run import HIDDEN, LAYERS, MAPPING, WIDTH, flax_like, same, torch_like
from xckpt.convert import Mapping, Rule
from xckpt.errors import MappingError, TreeMismatchError
from xckpt.mapping.operations import Cast, Pad, Transpose, Untie


def empty_like(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: empty_like(value) for key, value in tree.items()}
    return np.empty(tree.shape, tree.dtype) if isinstance(tree, np.ndarray) else tree


@pytest.fixture(params=[300, 1 << 23])
def stored(request: pytest.FixtureRequest) -> str:
    options = xckpt.SaveOptions(chunk_bytes=request.param)
    xckpt.save("memory://mapped", torch_like(), options=options, overwrite=True)
    return "memory://mapped"


def test_the_whole_model_without_a_target(stored: str) -> None:
    same(xckpt.load(stored, mapping=MAPPING), flax_like(torch_like()))


def test_into_new_arrays_and_into_given_ones(stored: str) -> None:
    expected = flax_like(torch_like())
    same(xckpt.load(stored, empty_like(expected), mapping=MAPPING), expected)
    state = empty_like(expected)
    state["step"] = 0
    xckpt.load_into(stored, state, mapping=MAPPING)
    same(state, expected)


def test_into_arrays_of_any_order_and_into_torch(stored: str) -> None:
    expected = flax_like(torch_like())
    state = empty_like(expected)
    state["layers"]["up"]["kernel"] = torch.empty(LAYERS, WIDTH, HIDDEN)
    state["embed"]["embedding"] = np.empty(expected["embed"]["embedding"].shape[::-1], "f4").T
    xckpt.load_into(stored, state, mapping=MAPPING)
    state["layers"]["up"]["kernel"] = state["layers"]["up"]["kernel"].numpy()
    same(state, expected)


def test_lists_where_the_mapping_has_numbers() -> None:
    xckpt.save("memory://numbers", {"l.0.w": np.ones(2), "l.1.w": np.zeros(3)}, overwrite=True)
    mapping = Mapping([Rule("l.{i}.w", "layers/{i}/kernel")])
    like = {"layers": [{"kernel": np.empty(2)}, {"kernel": np.empty(3)}]}
    loaded = xckpt.load("memory://numbers", like, mapping=mapping)
    assert repr(loaded) == repr({"layers": [{"kernel": np.ones(2)}, {"kernel": np.zeros(3)}]})


def test_a_cast_of_the_target_needs_leave(stored: str) -> None:
    expected = flax_like(torch_like())
    like = empty_like(expected)
    like["embed"]["embedding"] = np.empty(like["embed"]["embedding"].shape, np.float16)
    with pytest.raises(TreeMismatchError, match=r"embed/embedding: dtype .* float16 wanted"):
        xckpt.load(stored, like, mapping=MAPPING)
    loaded = xckpt.load(stored, like, mapping=MAPPING, cast=True)
    expected["embed"]["embedding"] = expected["embed"]["embedding"].astype(np.float16)
    same(loaded, expected)


def test_what_does_not_fit_is_listed(stored: str) -> None:
    like = empty_like(flax_like(torch_like()))
    del like["embed"]
    like["layers"]["up"]["kernel"] = np.empty((LAYERS, HIDDEN, WIDTH), np.float32)
    like["head"] = np.empty(3)
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load(stored, like, mapping=MAPPING)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "layers/up/kernel",
        "head",
        "embed/embedding",
    ]
    loaded = xckpt.load(stored, {"head": 5, "step": 0}, mapping=MAPPING, strict=False)
    assert loaded == {"head": 5, "step": 11}


@pytest.mark.parametrize("strict", [True, False])
def test_a_value_of_another_type_is_refused(strict: bool) -> None:
    xckpt.save("memory://typed", {"w": np.ones((2, 3)), "step": 3}, overwrite=True)
    mapping = Mapping([Rule("w", "k", [Transpose((1, 0))])])
    like: dict[str, Any] = {"k": np.zeros((3, 2)), "step": "three"}
    with pytest.raises(TreeMismatchError, match="step: a Python int in the checkpoint, a Python"):
        xckpt.load("memory://typed", like, mapping=mapping, strict=strict)
    assert xckpt.load("memory://typed", like | {"step": None}, mapping=mapping)["step"] == 3


def test_tied_weights_that_differ_are_an_error_before_anything_is_loaded() -> None:
    words = np.arange(12, dtype=np.float32).reshape(4, 3)
    mapping = Mapping([Rule(["embed", "head"], "embed/kernel", [Untie(2), Transpose((1, 0))])])
    xckpt.save("memory://tied", {"embed": words, "head": words}, overwrite=True)
    loaded = xckpt.load("memory://tied", mapping=mapping)
    same(loaded, {"embed": {"kernel": words.T}})
    other = words.copy()
    other[2, 1] = -1
    xckpt.save("memory://tied", {"embed": words, "head": other}, overwrite=True)
    target = {"embed": {"kernel": np.full((3, 4), 7, np.float32)}}
    with pytest.raises(MappingError, match=r"head: \[2, 3\) x \[1, 2\)"):
        xckpt.load_into("memory://tied", target, mapping=mapping)
    assert (target["embed"]["kernel"] == 7).all()


def test_lossy_steps_need_leave() -> None:
    xckpt.save("memory://lossy", {"w": np.linspace(0, 1, 7, dtype=np.float32)}, overwrite=True)
    mapping = Mapping([Rule("w", "v", [Cast(("float32", "float16"))])])
    with pytest.raises(MappingError, match="allow_lossy=True"):
        xckpt.load("memory://lossy", mapping=mapping)
    loaded = xckpt.load("memory://lossy", mapping=mapping, allow_lossy=True)
    same(loaded, {"v": np.linspace(0, 1, 7, dtype=np.float32).astype(np.float16)})


def test_constants_are_filled_in_and_checked_on_the_way_back() -> None:
    words = np.arange(12, dtype=np.int32).reshape(4, 3)
    xckpt.save("memory://padded", {"w": words}, overwrite=True)
    mapping = Mapping([Rule("w", "padded", [Pad(2, axis=0, value=-5), Transpose((1, 0))])])
    loaded = xckpt.load("memory://padded", mapping=mapping)
    expected = np.concatenate([words, np.full((2, 3), -5, np.int32)]).T
    same(loaded, {"padded": expected})
    xckpt.save("memory://padded", loaded, overwrite=True)
    same(xckpt.load("memory://padded", mapping=mapping.inverse()), {"w": words})
    loaded["padded"][1, 5] = 0
    xckpt.save("memory://padded", loaded, overwrite=True)
    with pytest.raises(MappingError, match=r"padded: "):
        xckpt.load("memory://padded", mapping=mapping.inverse())


def test_python_values_follow_the_rules_of_any_load(tmp_path: Path) -> None:
    """An optimizer's rates may have no counterpart in the other's: the caller says so."""
    xckpt.save(tmp_path / "saved", {"w": np.arange(3.0), "lr": 0.1, "step": 7, "note": "here"})
    like = {"v": np.zeros(3), "step": 0, "betas": [0.9, 0.99]}
    mapping = Mapping([Rule("w", "v")])
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load(tmp_path / "saved", like, mapping=mapping)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "betas/0",
        "betas/1",
        "lr",
        "note",
    ]
    with pytest.raises(TreeMismatchError, match="strict=False loads without them\\)"):
        xckpt.load(tmp_path / "saved", {"v": np.zeros(3), "step": 0}, mapping=mapping)
    reports: list[xckpt.LoadReport] = []
    loaded: Any = xckpt.load(
        tmp_path / "saved",
        like,
        mapping=mapping,
        missing="ignore",
        unexpected="ignore",
        report=reports.append,
    )
    assert loaded["v"].tolist() == [0.0, 1.0, 2.0]
    assert (loaded["step"], loaded["betas"]) == (7, [0.9, 0.99])
    assert set(loaded) == {"v", "step", "betas"}
    assert reports == [xckpt.LoadReport(("v", "step"), {}, ("betas/0", "betas/1"), ("lr", "note"))]
    whole: Any = xckpt.load(tmp_path / "saved", mapping=mapping)
    assert (whole["lr"], whole["note"]) == (0.1, "here")


def test_a_tensor_that_no_rule_takes_is_unexpected(tmp_path: Path) -> None:
    path, mapping = tmp_path / "saved", Mapping([Rule("w", "v")])
    xckpt.save(path, {"w": np.arange(3.0), "head": np.ones(2)})
    with pytest.raises(MappingError, match="source 'head': no rule uses"):
        xckpt.load(path, {"v": np.zeros(3)}, mapping=mapping, missing="ignore")
    state = {"v": np.zeros(3)}
    with pytest.warns(UserWarning, match="1 leaf left in the checkpoint, not wanted: head"):
        report = xckpt.load_into(path, state, mapping=mapping, unexpected="warn")
    assert report == xckpt.LoadReport(("v",), left=("head",))
    assert state["v"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(TreeMismatchError, match="since nothing would be loaded"):
        xckpt.load(path, {"vv": np.zeros(3)}, mapping=mapping, strict=False)


def test_numbers_and_0d_arrays_are_exchanged_beside_a_mapping(tmp_path: Path) -> None:
    path, mapping = tmp_path / "saved", Mapping([Rule("w", "v"), Rule("step", "step")])
    xckpt.save(path, {"w": np.arange(3.0), "step": np.int32(7), "epoch": 2})
    like = {"v": np.zeros(3), "step": 0, "epoch": np.int64(0)}
    loaded = xckpt.load(path, like, mapping=mapping)
    assert loaded["step"] == 7 and isinstance(loaded["step"], int)
    assert loaded["epoch"] == 2 and loaded["epoch"].dtype == np.int64  # type: ignore[union-attr]
