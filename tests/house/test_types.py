"""What a type checker makes of the calls: `make lint` checks this file, and here it runs."""

from __future__ import annotations

from typing import Any, TypedDict, assert_type

import numpy as np
from numpy.typing import NDArray

import xckpt
from tests.support.jobs import fresh_path


class State(TypedDict):
    """A state whose leaves a type checker knows."""

    w: NDArray[np.float32]
    step: int


def test_a_load_has_the_type_of_its_like() -> None:
    path = fresh_path()
    state: State = {"w": np.ones(3, np.float32), "step": 3}
    xckpt.save(path, state)
    loaded = assert_type(xckpt.load(path, state), State)
    assert_type(loaded["step"], int)
    assert loaded["w"].shape == (3,) and loaded["step"] == 3
    assert_type(xckpt.load(path, {"w": state["w"], "step": 0}, strict=False), dict[str, Any])
    assert_type(xckpt.load(path), Any)
    assert_type(xckpt.load(path, None, cast=True), Any)
    assert_type(xckpt.load_into(path, state), xckpt.LoadReport)


def test_a_restore_has_the_type_of_its_like() -> None:
    state: State = {"w": np.ones(3, np.float32), "step": 3}
    with xckpt.CheckpointManager(fresh_path()) as checkpoints:
        assert_type(checkpoints.restore(state, default=state), State)
        assert_type(checkpoints.save(3, state, {"loss": np.float32(1)}), bool)
        checkpoints.wait()
        assert assert_type(checkpoints.restore(state, cast=True), State)["step"] == 3
        assert_type(checkpoints.restore(select="step"), Any)
        assert_type(checkpoints.best("loss"), xckpt.StepRecord | None)
