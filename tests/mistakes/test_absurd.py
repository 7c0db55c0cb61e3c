"""Arguments without any sense: each is a TypeError or a ValueError, or is taken; none escapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from xckpt.convert import convert
from xckpt.core.text.arguments import shown_value
from xckpt.torch.dcp import export_checkpoint, import_checkpoint

STATE = {"w": np.arange(6.0).reshape(2, 3), "step": 3}
LONG = 10**5000
"""An int that neither a float holds nor Python writes as decimal digits."""


class Silent:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    xckpt.save(tmp_path / "saved", STATE)
    return str(tmp_path / "saved")


@pytest.mark.parametrize("value", [LONG, Silent(), [LONG]], ids=["int", "object", "list"])
def test_an_argument_that_cannot_be_shown(saved: str, value: Any):
    assert type(value).__name__ in shown_value(value)
    calls: list[Callable[..., object]] = [
        lambda: xckpt.LoadOptions(share_reads=value),
        lambda: xckpt.SaveOptions(serialise=value),
        lambda: xckpt.SaveOptions(crc32c=value),
        lambda: xckpt.load(saved, strict=value),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=rf"the {type(value).__name__} "):
            call()
    if not isinstance(value, list):
        with pytest.raises(KeyError, match="no leaf"):
            xckpt.open(saved)[value]


@pytest.mark.parametrize("value", [1e300, math.inf, LONG], ids=["float", "infinite", "int"])
@pytest.mark.parametrize("name", ["timeout", "request_timeout"])
@pytest.mark.parametrize("place", ["{}", "memory://absurd"])
def test_times_beyond_all_clocks(place: str, name: str, value: Any, tmp_path: Path):
    place = place.format(tmp_path / "new")
    given: dict[str, Any] = {name: value}
    xckpt.save(place, STATE, overwrite=True, options=xckpt.SaveOptions(**given))
    options = xckpt.LoadOptions(**given)
    assert xckpt.load(place, options=options)["step"] == 3
    assert xckpt.open(place, options=options).array("w")[1].tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", ["retries", "concurrency"])
def test_counts_beyond_all_counters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {name: 10**30}
    xckpt.save(tmp_path / "new", STATE, options=xckpt.SaveOptions(**given))
    monkeypatch.setenv(f"XCKPT_{name.upper()}", "1" + 30 * "0")
    xckpt.save(tmp_path / "another", STATE)
    assert xckpt.load(tmp_path / "another")["step"] == 3


def test_timeouts_of_calls(saved: str, tmp_path: Path):
    assert xckpt.load(saved, timeout=LONG)["step"] == 3
    assert xckpt.save_async(tmp_path / "new", STATE).result(LONG)
    assert xckpt.gc(tmp_path, older_than=LONG) == []
    wrong: list[Any] = [float, "5", np.arange(3), torch.ones(2)]
    later: list[Any] = [*wrong, timedelta(seconds=5)]
    for value in later:
        with pytest.raises(TypeError, match="seconds"):
            xckpt.load(saved, timeout=value)
    for value in wrong:
        with pytest.raises(TypeError, match="older_than must be seconds"):
            xckpt.gc(tmp_path, older_than=value)
    with pytest.raises(ValueError, match="negative"):
        xckpt.gc(tmp_path, older_than=-LONG)
    with pytest.raises(TypeError, match="a number of files a second"):
        xckpt.CheckpointManager(tmp_path / "run", delete_rate=wrong[0])
    with pytest.raises(TypeError, match="takes minutes"):
        xckpt.policies.EveryMinutes(wrong[2])


@pytest.mark.parametrize("value", [np.arange(3), torch.ones(2)], ids=["array", "tensor"])
def test_arrays_where_something_else_is_taken(saved: str, value: Any, tmp_path: Path):
    with pytest.raises(TypeError, match="readers"):
        xckpt.SaveOptions(readers=value)
    with pytest.raises(TypeError, match="no_dist"):
        xckpt.load(saved, no_dist=value)
    with pytest.raises(ValueError, match="missing must be"):
        xckpt.load(saved, missing=value)
    with pytest.raises(TypeError, match="export_checkpoint takes options="):
        export_checkpoint(saved, tmp_path / "dcp", options=value)


def test_paths_that_no_system_holds(tmp_path: Path):
    long, new = "x" * 5000, tmp_path / "new"
    calls: list[Callable[[], object]] = [
        lambda: xckpt.gc(long),
        lambda: import_checkpoint(long, new),
        *(
            lambda format=format: convert(long, new, source_format=format)
            for format in ("xckpt", "safetensors", "orbax", "dcp", "torch")
        ),
    ]
    for call in calls:
        with pytest.raises(xckpt.StorageError, match="File name too long"):
            call()
    for call in (xckpt.load, xckpt.open, xckpt.delete, lambda path: convert(path, new)):
        with pytest.raises(xckpt.PathError, match="not UTF-8"):
            call("memory://\udc80")
