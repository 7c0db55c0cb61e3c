"""Leaves of one side alone: errors, warnings, what is kept and left, and the report of it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.jobs import fresh_path
from xckpt import LoadReport
from xckpt.core.plan.report import Severity, Strictness
from xckpt.errors import TreeMismatchError
from xckpt.planner import DefaultLoadPlanner

SAVED = {"model": {"w": np.arange(3, dtype=np.float32)}, "opt": {"mu": np.ones(3)}, "step": 5}


@pytest.fixture
def path() -> str:
    path = fresh_path()
    xckpt.save(path, SAVED)
    return path


def test_a_report_says_what_became_of_each_leaf(path: str) -> None:
    like = {"model": {"w": np.zeros(3), "bias": np.full(2, 7.0)}, "step": np.int32(0)}
    reports: list[LoadReport] = []
    loaded = xckpt.load(path, like, strict=False, cast=True, report=reports.append)
    assert reports == [
        LoadReport(
            loaded=("model/w", "step"),
            cast={"model/w": ("float32", "float64"), "step": ("int", "int32")},
            kept=("model/bias",),
            left=("opt/mu",),
        )
    ]
    assert not reports[0].complete
    assert loaded["model"]["bias"] is like["model"]["bias"]  # type: ignore[index]
    assert str(reports[0]).splitlines() == [
        "loaded 2 leaves",
        "cast 2 leaves: model/w (float32 to float64), step (int to int32)",
        "kept 1 leaf: model/bias",
        "left 1 leaf: opt/mu",
    ]
    assert repr(reports[0]) == "LoadReport(2 loaded, 2 cast, 1 kept, 1 left)"


def test_a_load_in_place_returns_its_report(path: str) -> None:
    state = {"model": {"w": np.zeros(3, np.float32)}}
    report = xckpt.load_into(path, state, unexpected="ignore")
    assert report == LoadReport(("model/w",), left=("opt/mu", "step"))
    assert state["model"]["w"].tolist() == [0, 1, 2]


def test_the_report_of_a_part_has_the_names_of_the_part(path: str) -> None:
    report = xckpt.load_into(path, {"w": np.zeros(3, np.float32), "b": 1}, at="model", strict=False)
    assert report == LoadReport(("w",), kept=("b",))


def test_the_report_of_a_whole_load_is_complete(path: str) -> None:
    reports: list[LoadReport] = []
    xckpt.load(path, report=reports.append)
    assert reports == [LoadReport(("model/w", "opt/mu", "step"))]
    assert reports[0].complete


@pytest.mark.parametrize("rule", ["error", "warn", "ignore"])
def test_a_missing_leaf(path: str, rule: Severity) -> None:
    like = {**SAVED, "head": np.full(2, 7.0)}

    def load() -> object:
        return xckpt.load(path, like, missing=rule)

    if rule == "error":
        with pytest.raises(TreeMismatchError, match="head: wanted, but not in the checkpoint"):
            load()
    elif rule == "warn":
        with pytest.warns(UserWarning, match="1 leaf kept as before, not in the checkpoint: head"):
            load()
    else:
        load()


@pytest.mark.parametrize("rule", ["error", "warn", "ignore"])
def test_an_unexpected_leaf(path: str, rule: Severity) -> None:
    like = {"model": SAVED["model"]}

    def load() -> object:
        return xckpt.load(path, like, unexpected=rule)

    if rule == "error":
        with pytest.raises(TreeMismatchError, match="opt/mu: in the checkpoint, but not wanted"):
            load()
    elif rule == "warn":
        with pytest.warns(
            UserWarning, match="2 leaves left in the checkpoint, not wanted: opt/mu, step"
        ):
            load()
    else:
        load()


def test_each_rule_leaves_the_other_alone(path: str) -> None:
    like = {"model": {"w": np.zeros(3, np.float32), "b": np.zeros(1)}}
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load(path, like, unexpected="ignore")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["model/b"]
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load(path, like, missing="ignore")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["opt/mu", "step"]
    xckpt.load(path, like, strict=False)
    with pytest.raises(TreeMismatchError, match="model/b: wanted"):
        xckpt.load(path, like, strict=False, missing="error")


def test_a_load_that_finds_nothing_is_an_error_even_when_both_are_ignored(path: str) -> None:
    for call in (xckpt.load, xckpt.load_into):
        with pytest.raises(TreeMismatchError, match="since nothing would be loaded"):
            call(path, {"modle": {"w": np.zeros(3)}}, strict=False)
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load(path, {"modle": 0, "steps": 1}, strict=False)
    leaves = [problem.leaf for problem in caught.value.problems]
    assert leaves == ["modle", "steps", "model/w", "opt/mu", "step"]


@pytest.mark.parametrize("like", [{}, {"a": [], "b": {}}], ids=["empty", "containers"])
def test_a_target_without_leaves_loads_nothing_where_that_is_allowed(
    path: str, like: object
) -> None:
    """As of a module without parameters."""
    with pytest.raises(TreeMismatchError, match="3 leaves in the checkpoint but not wanted"):
        xckpt.load_into(path, like)
    report = xckpt.load_into(path, like, unexpected="ignore")
    assert report == xckpt.LoadReport((), left=("model/w", "opt/mu", "step"))
    assert xckpt.load(path, like, strict=False) == like
    with pytest.warns(UserWarning, match="3 leaves left in the checkpoint, not wanted: model/w"):
        xckpt.load(path, like, unexpected="warn")


def test_an_empty_tree_loads_from_an_empty_checkpoint() -> None:
    path = fresh_path()
    xckpt.save(path, {"a": []})
    assert xckpt.load(path, {"a": []}) == {"a": []}


def test_a_misspelt_rule_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r'missing must be "error", "warn" or "ignore", not .no.'):
        xckpt.load(path, SAVED, missing="no")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="are for the planner: give them to it"):
        xckpt.load(path, SAVED, missing="warn", planner=DefaultLoadPlanner())


def test_ranks_that_want_different_leaves_see_the_same_rest(path: str) -> None:
    """A rank finds in the report what it has loaded itself, and what no rank has asked for."""
    names = ("model", "opt")

    def run(group: ThreadGroup) -> LoadReport:
        like = {names[group.rank]: SAVED[names[group.rank]], f"new{group.rank}": 1}
        return xckpt.load_into(path, like, strict=False, group=group)

    first, second = results(2, run)
    assert first == LoadReport(("model/w",), kept=("new0",), left=("step",))
    assert second == LoadReport(("opt/mu",), kept=("new1",), left=("step",))


def test_one_warning_of_all_ranks_leaves(path: str) -> None:
    def run(group: ThreadGroup) -> None:
        like = {"model": SAVED["model"], f"new{group.rank}": 1}
        xckpt.load_into(path, like, missing="warn", unexpected="warn", group=group)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results(2, run)
    assert sorted(str(each.message) for each in caught) == [
        "2 leaves kept as before, not in the checkpoint: new0, new1",
        "2 leaves left in the checkpoint, not wanted: opt/mu, step",
    ]


def test_what_is_found_by_one_rank_is_enough(path: str) -> None:
    """The stage of a pipeline that has only a new head."""

    def run(group: ThreadGroup) -> LoadReport:
        like = {"head": 1} if group.rank else {"model": SAVED["model"]}
        return xckpt.load_into(path, like, strict=False, group=group)

    assert [len(report.loaded) for report in results(2, run)] == [1, 0]


def test_long_lists_are_cut() -> None:
    names = tuple(f"layer{i}" for i in range(25))
    assert str(LoadReport(left=names)).endswith("layer18, layer19 and 5 more")
    with pytest.warns(UserWarning, match="25 leaves .* layer19 and 5 more$"):
        Strictness("warn", "error").warn(names, [])
