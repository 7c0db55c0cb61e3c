"""`xckpt map infer`: what it prints, and the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import xckpt
from xckpt.cli.commands import commands
from xckpt.convert import Mapping, infer


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["map", "infer", *map(str, arguments)])


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Safetensors from torch, and a checkpoint of a Flax model."""
    layers = {f"model.layers.{n}.fc.weight": np.zeros((4, 2), np.float32) for n in range(12)}
    more = {f"odd.{n}": np.zeros(3, np.float32) for n in range(2)}
    more |= {f"a.{name}.weight": np.zeros((5, 5), np.float32) for name in "xy"}
    save_file(layers | more, tmp_path / "model.safetensors")
    flax = {
        "layers": [{"fc": {"kernel": np.zeros((2, 4), np.float16)}} for _ in range(12)],
        "a": {name: {"kernel": np.zeros((5, 5), np.float32)} for name in ("left", "right")},
    }
    xckpt.save(tmp_path / "flax", flax)
    return tmp_path / "model.safetensors", tmp_path / "flax"


def test_it_prints_what_is_certain_ambiguous_and_left_over(both: tuple[Path, Path]) -> None:
    result = run(*both)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "12 certain, in 1 rule" in lines
    rule = "model.layers.{layer}.fc.weight layers/{layer}/fc/kernel transpose [1, 0]; cast"
    assert any(line.startswith(rule) for line in lines), result.output
    assert "1 ambiguous" in lines
    assert any(line.startswith("a.x.weight, a.y.weight a/left/kernel") for line in lines)
    assert "2 left over of the source" in lines
    assert "odd.* 2" in lines


def test_what_fits_nothing_is_printed_without_gaps(tmp_path: Path) -> None:
    save_file({"fc.weight": np.zeros((4, 2), np.float32)}, tmp_path / "one.safetensors")
    save_file({"conv.weight": np.zeros((3, 3, 3), np.float32)}, tmp_path / "other.safetensors")
    result = run(tmp_path / "one.safetensors", tmp_path / "other.safetensors")
    lines = [line.split("  ")[0] for line in result.output.splitlines()]
    assert lines == [
        *("0 certain, in 0 rules", "", "1 left over of the source", "name", "fc.weight"),
        *("", "1 left over of the target", "name", "conv.weight"),
    ]


def test_it_writes_the_rules_to_a_file(both: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "mapping.toml"
    result = run(*both, "--output", path)
    assert result.exit_code == 0, result.output
    assert str(path) in result.output
    [rule] = Mapping.from_file(path).rules
    assert rule.source == ("model.layers.{layer}.fc.weight",)


def test_it_prints_json(both: tuple[Path, Path]) -> None:
    document = json.loads(run(*both, "--json").output)
    assert len(document["certain"]) == 12
    assert set(document["unmatched"]["source"]) == {"odd.0", "odd.1"}
    assert len(document["ambiguous"][0]["sources"]) == 2
    assert Mapping.from_document(document["mapping"]).rules


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    result = run(tmp_path / "none", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "none" in result.output


def test_the_rules_printed_are_those_of_the_function() -> None:
    inference = infer({"fc.bias": np.zeros(2)}, {"fc": {"bias": np.zeros(2)}})
    assert [str(rule) for rule in inference.mapping.rules] == ["fc.bias -> fc/bias"]


def test_a_file_that_cannot_be_written_is_an_error(both: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "none" / "mapping.toml"
    result = run(*both, "--output", path)
    assert result.exit_code == 2
    assert f"Error: {path} cannot be written: No such file or directory" in result.stderr
