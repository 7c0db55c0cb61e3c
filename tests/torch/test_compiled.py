"""Calls inside functions that `torch.compile` compiles run as Python runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it loads its compiler
def test_a_compiled_step_saves_and_loads(tmp_path: Path) -> None:
    path, saving = tmp_path / "a", list[xckpt.SaveFuture]()

    def step(tensor: torch.Tensor) -> torch.Tensor:
        twice = tensor * 2
        xckpt.save(path, {"w": twice, "n": 1}, overwrite=True)
        saving.append(xckpt.save_async(tmp_path / "b", {"w": twice}, overwrite=True))
        state = {"w": twice, "n": 0}
        xckpt.load_into(path, state)
        try:
            xckpt.load(path, {"v": twice})
        except xckpt.TreeMismatchError:
            return xckpt.load(path, state)["w"] + state["n"]
        return tensor

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    for value in (1.0, 5.0):
        assert compiled(torch.full((4,), value)).tolist() == [2 * value + 1] * 4
    assert [len(each.result().state_dict_metadata) for each in saving] == [1, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_waits_for_a_save_and_reads_slices(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": torch.arange(8.0)})
    opened: Any = xckpt.open(tmp_path / "a")
    array, name = opened["w"], "w"

    def step(tensor: torch.Tensor) -> torch.Tensor:
        twice = tensor * 2
        saving = xckpt.save_async(tmp_path / "b", {"w": twice}, overwrite=True)
        saving.staged()
        saving.result()
        assert saving.done() and saving.exception() is None and not opened.verify()
        read = float(array[1:3][1]) + float(array.oindex[[3]][0]) + float(array.vindex[[4]][0])
        return twice + read + float(opened[name][5])

    torch._dynamo.reset()
    assert torch.compile(step, backend="eager")(torch.ones(2)).tolist() == [16.0, 16.0]
    assert xckpt.load(tmp_path / "b")["w"].tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_that_must_be_whole_says_why_it_is_not(tmp_path: Path) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        xckpt.save(tmp_path / "a", {"w": tensor})
        return tensor

    with pytest.raises(RuntimeError, match="xckpt saves and loads outside of compiled code"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(4))
    assert not list(tmp_path.iterdir())
