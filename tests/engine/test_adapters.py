"""Adapters are found by the framework that a leaf can only come from if it was imported."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import xckpt
import xckpt.numpy
from conformance.implementations import sharded_arrays
from conformance.implementations.threads import ThreadGroup, results
from tests.support.sharded_arrays import cut
from xckpt.convert import convert
from xckpt.core.adapter import Adapters
from xckpt.engine import adapters as registry
from xckpt.engine import groups
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.run import preemption
from xckpt.torch.dcp import export_checkpoint, import_checkpoint

W = np.arange(6.0).reshape(2, 3)


class Thing:
    """A leaf of a framework that is yet to be imported."""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))


def test_a_framework_that_was_never_imported_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    """Its adapter does not even exist; it is looked for once the framework is there."""
    registry._MODULES["some_framework"] = "tests.no_such_adapter"
    before = loaded_adapters()
    assert before.describe(object(), "w") is None
    monkeypatch.setitem(sys.modules, "some_framework", ModuleType("some_framework"))
    with pytest.raises(ModuleNotFoundError, match="no_such_adapter"):
        loaded_adapters()
    with pytest.raises(ModuleNotFoundError, match="no_such_adapter"):
        before.describe(object(), "w")
    assert before.describe(W, "w") is not None


def test_a_framework_whose_import_is_forbidden_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """Tests hide a package so; it looked like one that was imported."""
    known = {*registry._MODULES, *groups._GROUPS, *preemption._NOTICES} - {"numpy"}
    for framework in sorted(known):
        monkeypatch.setitem(sys.modules, framework, None)
    xckpt.save("memory://forbidden-frameworks", {"w": W})
    assert preemption.preemption_notices() == []
    assert np.array_equal(xckpt.load("memory://forbidden-frameworks")["w"], W)
    assert loaded_adapters().describe(object(), "w") is None


def test_what_is_imported_during_a_save_is_found(monkeypatch: pytest.MonkeyPatch):
    """A planner may import a framework in one of its hooks."""

    class Late(xckpt.numpy.NumpyAdapter):
        leaves = (Thing,)  # type: ignore[assignment]

        def to_numpy(self, data: object) -> np.ndarray:
            return W

    home = ModuleType("late_adapter")
    home.ADAPTER = Late()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_adapter", home)
    registry._MODULES["late_framework"] = "late_adapter"
    before = loaded_adapters()
    with pytest.raises(TypeError, match="Thing"):
        before.to_numpy(Thing(), "a")
    monkeypatch.setitem(sys.modules, "late_framework", ModuleType("late_framework"))
    assert before.to_numpy(Thing(), "a") is W
    assert (*before.known, home.ADAPTER) == loaded_adapters().known


def test_registered_adapters_come_first():
    known = loaded_adapters().known
    assert known.index(sharded_arrays.ADAPTER) < known.index(xckpt.numpy.ADAPTER)
    sharded = cut(W, [((0, 0), (1, 3))])
    assert loaded_adapters().owner(sharded) is sharded_arrays.ADAPTER


def test_two_frameworks_may_share_an_adapter():
    registry._MODULES["tests"] = "xckpt.numpy"
    assert loaded_adapters().known.count(xckpt.numpy.ADAPTER) == 1


def test_it_is_a_value():
    assert loaded_adapters() == loaded_adapters() != Adapters()


@pytest.mark.parametrize(
    "variable",
    ["WORLD_SIZE", "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"],
)
def test_several_processes_that_no_group_joins_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "4")
    path = f"memory://alone-{variable}"
    with pytest.raises(xckpt.NoGroupError) as caught:
        xckpt.save(path, {"step": 1})
    text = str(caught.value)
    assert f"{variable} says that there are 4 processes" in text
    assert "group=xckpt.LocalGroup()" in text and "init_process_group" in text
    for call in (
        lambda: xckpt.load(path),
        lambda: xckpt.load_into(path, {"step": 0}),
        lambda: xckpt.save_async(path, {"step": 1}),
    ):
        with pytest.raises(xckpt.NoGroupError, match=variable):
            call()
    xckpt.save(path, {"step": 1}, group=xckpt.LocalGroup())
    assert xckpt.load(path, no_dist=True) == {"step": 1}


def test_conversions_ask_for_the_group_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.ones(3)})
    alone = xckpt.LocalGroup()
    monkeypatch.setenv("WORLD_SIZE", "2")
    export_checkpoint(tmp_path / "a", tmp_path / "dcp", group=alone)
    with ThreadPoolExecutor(1) as executor:
        for call in (
            lambda: convert(tmp_path / "a", tmp_path / "no"),
            lambda: convert(tmp_path / "a", tmp_path / "no", executor=executor),
            lambda: export_checkpoint(tmp_path / "a", tmp_path / "no"),
            lambda: import_checkpoint(tmp_path / "dcp", tmp_path / "no"),
        ):
            with pytest.raises(xckpt.NoGroupError, match=r"WORLD_SIZE says .* 2 processes"):
                call()
        assert not (tmp_path / "no").exists()
        convert(tmp_path / "a", tmp_path / "b", executor=executor, group=alone)
    import_checkpoint(tmp_path / "dcp", tmp_path / "c", group=alone)


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_one_process_is_no_job_of_several(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # a batch script is one process
    assert groups.find_group().size == 1


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_is_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds"):
        xckpt.save("memory://timeout", {"step": 1}, timeout=timeout)
    with (
        ThreadPoolExecutor() as executor,
        pytest.raises(ValueError, match="timeout must be more than 0 seconds"),
    ):
        convert("memory://timeout", "memory://other", executor=executor, timeout=timeout)


def test_a_group_without_timeouts_says_so() -> None:
    def run(group: ThreadGroup) -> None:
        with pytest.raises(TypeError, match="a ThreadGroup has no method `within`"):
            xckpt.save("memory://timeout", {"step": 1}, group=group, timeout=3)

    results(2, run)


def test_no_dist_takes_no_group() -> None:
    with pytest.raises(ValueError, match="give no group with it"):
        xckpt.save("memory://alone", {"step": 1}, group=xckpt.LocalGroup(), no_dist=True)
