"""An optimizer says in which order its parameters are, in a tree and in an open checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from xckpt.convert import Mapping, Rule, with_optimizer
from xckpt.errors import MappingError
from xckpt.mapping.operations import Transpose

LAYERS = 3
NAMES = [f"{number}.weight" for number in range(LAYERS)]
MAPPING = Mapping([Rule("{i}.weight", "{i}/kernel", [Transpose((1, 0))])])


def state_of(groups: Any) -> dict[str, Any]:
    """The state of square layers after a step, with an optimizer of some groups of them."""
    layers = (torch.nn.Linear(4, 4, bias=False) for _ in range(LAYERS))
    module = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(groups(list(module.named_parameters())))
    module(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optim": optimizer.state_dict()}


def wanted() -> dict[str, Any]:
    params = {str(number): {"kernel": np.zeros((4, 4), np.float32)} for number in range(LAYERS)}
    count = np.zeros((), np.int32)
    return {"params": params, "opt_state": [{"count": count, "mu": params, "nu": params}]}


def given(state: dict[str, Any], path: Path, opened: bool) -> object:
    """The state, or the checkpoint of it that is open."""
    if not opened:
        return state
    xckpt.save(path / "torch", state)
    return xckpt.open(path / "torch")


@pytest.mark.parametrize("opened", [False, True])
def test_groups_in_another_order_than_the_model_need_their_own_names(
    tmp_path: Path, opened: bool
) -> None:
    state = state_of(lambda named: [{"params": [each]} for _, each in reversed(named)])
    with pytest.raises(MappingError, match=r"has 3 parameter groups, of 1, 1, 1 .*each group"):
        with_optimizer(MAPPING, given(state, tmp_path, opened), wanted(), parameters=NAMES)


@pytest.mark.parametrize("opened", [False, True])
def test_names_in_another_order_than_the_optimizers_are_refused(
    tmp_path: Path, opened: bool
) -> None:
    state = state_of(lambda named: named[::-1])
    with pytest.raises(MappingError, match=r"place 0: 0\.weight, where the optimizer has 2\.weig"):
        with_optimizer(MAPPING, given(state, tmp_path, opened), wanted(), parameters=NAMES)


@pytest.mark.parametrize("opened", [False, True])
def test_the_names_that_the_optimizer_has_are_taken(tmp_path: Path, opened: bool) -> None:
    state = state_of(lambda named: named)
    whole = with_optimizer(MAPPING, given(state, tmp_path, opened), wanted())
    xckpt.save(tmp_path / "whole", state)
    loaded = xckpt.load(tmp_path / "whole", wanted(), mapping=whole, unexpected="ignore")
    for number in range(LAYERS):
        moment = state["optim"]["state"][number]["exp_avg"].numpy()
        np.testing.assert_array_equal(loaded["opt_state"][0]["mu"][str(number)]["kernel"], moment.T)
