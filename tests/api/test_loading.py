"""Reader and planner of a load: what lies at the path is found out once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from xckpt.convert import Mapping, Rule
from xckpt.formats import reader
from xckpt.mapping.operations import Untie
from xckpt.planner import DefaultLoadPlanner

TIED = Mapping([Rule(["w", "head"], "w", [Untie(2)])])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model in another format, with tied weights."""
    array = np.arange(4.0)
    safetensors.numpy.save_file({"w": array, "head": array}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path whose format is asked for."""
    asked: list[str] = []
    detect = reader.detect

    def noting(path: str | os.PathLike[str]) -> str:
        asked.append(os.fspath(path))
        return detect(path)

    monkeypatch.setattr(reader, "detect", noting)
    return asked


@pytest.mark.parametrize("mapping", [None, TIED], ids=["as it is", "mapped"])
def test_another_format_is_looked_at_once(
    path: Path, looks: list[str], mapping: Mapping | None
) -> None:
    """Though a mapping opens it a second time, to compare what it takes to be tied."""
    state = {"w": np.zeros(4)} if mapping else {"w": np.zeros(4), "head": np.zeros(4)}
    loaded = xckpt.load(path, state, mapping=mapping)
    assert looks == [str(path)]
    xckpt.load_into(path, state, mapping=mapping)
    assert looks == [str(path)] * 2
    for tree in (loaded, state):
        assert all(np.array_equal(array, np.arange(4.0)) for array in tree.values())


@pytest.mark.parametrize("coordinator", [0, 1])
def test_only_the_coordinator_looks(path: Path, looks: list[str], coordinator: int) -> None:
    """The other ranks get the format with the manifest."""

    def load(group: ThreadGroup) -> list[float]:
        state = {"w": np.zeros(4), "head": np.zeros(4)}
        xckpt.load_into(path, state, group=group)
        return state["w"].tolist()

    assert results(2, load, coordinator=coordinator) == [[0, 1, 2, 3]] * 2
    assert looks == [str(path)]


def test_what_only_the_coordinator_sees_is_an_error_of_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(reader.FormatsAt):
        def reader(self, format: str) -> reader.SourceReader:
            if threading.current_thread() is not coordinator:
                self.path = path.with_name("elsewhere.safetensors")
            return super().reader(format)

    coordinator: threading.Thread | None = None
    monkeypatch.setattr(reader, "FormatsAt", Blind)

    def load(group: ThreadGroup) -> None:
        nonlocal coordinator
        if group.rank == group.coordinator:
            coordinator = threading.current_thread()
        with pytest.raises(xckpt.NotACheckpointError, match=r"rank 1.*elsewhere") as caught:
            xckpt.load_into(path, {"w": np.zeros(4), "head": np.zeros(4)}, group=group)
        assert [failure.rank for failure in caught.value.failures] == [1]

    results(2, load)


def test_our_own_needs_no_look(tmp_path: Path, looks: list[str]) -> None:
    xckpt.save(tmp_path / "ours", {"w": np.arange(4.0)})
    xckpt.load(tmp_path / "ours")
    xckpt.load(tmp_path / "ours", mapping=Mapping([Rule("w", "v")]))
    assert looks == []


@pytest.mark.parametrize("mapping", [None, TIED], ids=["as it is", "mapped"])
def test_an_unknown_folder_is_no_checkpoint(tmp_path: Path, mapping: Mapping | None) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    for name in ("notes", "nowhere"):
        with pytest.raises(xckpt.NotACheckpointError, match=name):
            xckpt.load(tmp_path / name, mapping=mapping)


def test_a_mapping_takes_the_place_of_a_planner(path: Path) -> None:
    for call in (xckpt.load, xckpt.load_into):
        with pytest.raises(ValueError, match="give a mapping or a planner"):
            call(path, {"w": np.zeros(4)}, mapping=TIED, planner=DefaultLoadPlanner())
