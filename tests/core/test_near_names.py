"""The names that are meant by one that is not there."""

from __future__ import annotations

import time

import pytest

from tests.support.steps import steps
from tests.support.time_limit import ALLOWANCE
from xckpt.core.near_names import near_names, no_such_name

LAYERS = [f"model/layers.{n}.weight" for n in range(20_000)]


def test_the_end_of_a_name_is_meant_before_similar_ones() -> None:
    assert near_names("wte", ["wta", "model/wte"]) == ["model/wte"]
    assert near_names("model.wte", ["model/wte", "step"]) == ["model/wte"]
    assert near_names("W", ["w", "opt/w", "V"]) == ["w"]
    assert near_names("w", ["W", "m/w"]) == ["m/w"]
    assert near_names("", ["a"]) == near_names("zzz", ["a"]) == []


def test_of_many_names_those_of_another_length_are_not_compared() -> None:
    name, names = "modl/layers.1999.weight", LAYERS[:4000]
    assert "model/layers.1999.weight" in near_names(name, names)
    compared = steps(lambda: near_names(name, names))
    assert 50 * len(names) < compared < 300 * len(names)
    longer = [f"{other}{'x' * 9}" for other in names]
    assert steps(lambda: near_names(name, longer)) < 10 * len(names)


@pytest.mark.thorough
def test_many_names_are_quick() -> None:
    started = time.process_time()
    assert "model/layers.19999.weight" in near_names("modl/layers.19999.weight", LAYERS)
    assert time.process_time() - started < 3 * ALLOWANCE


def test_what_is_said_where_nothing_is_near() -> None:
    assert no_such_name("zzz", ["a"], "run/1") == "run/1 has no leaf 'zzz'"
