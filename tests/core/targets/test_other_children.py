"""Containers of a class of their own keep it when a load gives them other children."""

from __future__ import annotations

import time
from typing import Any

import torch

import xckpt
from tests.support.jobs import fresh_path
from xckpt.core.targets.assign import assign
from xckpt.core.tree import rebuild


class Sizes(tuple[int, ...]):
    """A tuple of another class, with attributes."""


class Stages(list[int]):
    """A list of another class, with attributes."""


def test_tuples_and_lists_stay_of_their_class() -> None:
    sizes, stages = Sizes((1, 2)), Stages([3])
    sizes.unit = stages.unit = "rows"  # type: ignore[attr-defined]
    tree: Any = {"sizes": sizes, "stages": stages, "when": time.gmtime(0)}
    new: Any = rebuild(tree, lambda name, leaf: 7)
    assert [type(each) for each in new.values()] == [Sizes, Stages, time.struct_time]
    assert (new["sizes"], new["stages"], tuple(new["when"])) == ((7, 7), [7], (7,) * 9)
    assert new["sizes"].unit == new["stages"].unit == "rows"
    assert (sizes, stages) == ((1, 2), [3])


def test_a_tuple_replaced_in_place_stays_of_its_class() -> None:
    tree: Any = {"sizes": Sizes((1, 2))}
    assign(tree, {"sizes/0": 5, "sizes/1": 2})
    assert type(tree["sizes"]) is Sizes and tree["sizes"] == (5, 2)


def test_the_shape_of_a_tensor_comes_back_as_one() -> None:
    path = fresh_path()
    saved = {"shape": torch.Size([2, 3]), "top": torch.tensor([[1.0, 3.0]]).max(1)}
    xckpt.save(path, saved)
    like = {"shape": torch.Size([0, 0]), "top": torch.zeros(1, 2).max(1)}
    loaded: Any = xckpt.load(path, like)
    assert type(loaded["shape"]) is torch.Size and loaded["shape"] == (2, 3)
    assert loaded["top"].values.tolist() == [3] and loaded["top"].indices.tolist() == [1]


def test_a_class_that_does_not_take_the_elements_gives_a_plain_tuple() -> None:
    assert rebuild(torch.Size([2]), lambda name, leaf: "a") == ("a",)
