"""`progress=True`: a bar on a terminal, on rank 0, and an error where rich is missing."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest

import xckpt
import xckpt.options
from conformance.implementations.threads import ThreadGroup, results

STATE = {"w": np.zeros((512, 256), np.float32)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    path = tmp_path / "[red]ckpt"
    xckpt.save(path, STATE, options=xckpt.SaveOptions(progress=True))
    xckpt.load(path, options=xckpt.LoadOptions(progress=True))
    drawn = terminal.getvalue()
    assert "save" in drawn and "load" in drawn and "KiB" in drawn


def test_only_one_rank_draws() -> None:
    drawing: list[int] = []

    def save(group: ThreadGroup) -> None:
        options = xckpt.SaveOptions(progress=True)
        with xckpt.options.with_progress(options, "save", group.rank) as shown:
            if shown.progress is not None:
                drawing.append(group.rank)

    results(3, save)
    assert drawing == [0]


def test_nothing_is_drawn_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xckpt.save(tmp_path / "ckpt", STATE, options=xckpt.SaveOptions(progress=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [xckpt.SaveOptions, xckpt.LoadOptions])
def test_without_rich_the_error_says_what_to_install(
    kind: type[xckpt.SaveOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        xckpt.options, "find_spec", lambda name: None if name == "rich" else found(name)
    )
    with pytest.raises(ImportError, match=r'progress=True needs rich: pip install "xckpt\[prog'):
        kind(progress=True)
    assert kind(progress=False).progress is False
