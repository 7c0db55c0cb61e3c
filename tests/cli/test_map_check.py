"""`xckpt map check` and `xckpt map show`: proofs, faults and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import xckpt
from xckpt.cli.commands import commands
from xckpt.convert import Mapping, Rule
from xckpt.mapping import resolve
from xckpt.mapping.match import Matches, match_rules
from xckpt.mapping.operations import Cast, Drop, Transpose, Untie


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["map", *map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A mapping, and checkpoints that it fits."""
    weights = {f"l.{i}.weight": np.zeros((4, 2), np.float32) for i in range(3)}
    more = {"emb": np.zeros((5, 2), np.float32), "pos": np.arange(7)}
    tied = {"head": np.zeros((5, 2), np.float32)}
    save_file(weights | more | tied, tmp_path / "model.safetensors")
    layers = [{"kernel": np.zeros((2, 4), np.float16)} for _ in range(3)]
    xckpt.save(tmp_path / "flax", {"l": layers, "table": np.zeros((5, 2), np.float32)})
    mapping = Mapping(
        [
            Rule("l.{i}.weight", "l/{i}/kernel", [Transpose((1, 0)), Cast(("float32", "float16"))]),
            Rule(("emb", "head"), "table", [Untie(2)]),
            Rule("pos", (), [Drop(0, arange=0)]),
        ]
    )
    mapping.to_file(tmp_path / "m.toml")
    return tmp_path / "m.toml", tmp_path / "model.safetensors", tmp_path / "flax"


def test_a_mapping_that_fits_is_proven(files: tuple[Path, Path, Path]) -> None:
    result = run("check", *files)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].endswith(
        "4 tensors made of 6 tensors, every element used once and defined once"
    )
    assert "  asserted while reading: tied tensors must be equal (emb + head -> table)" in lines
    assert any(line.startswith("  lossy: cast ['float32', 'float16']: ") for line in lines)
    assert run("check", *files[:2]).exit_code == 0
    assert "idle" not in result.output
    with files[0].open("a") as file:
        file.write('[[rule]]\nsource = "l.{i}.wieght"\ntarget = "v.{i}"\n')
    misspelt = run("check", *files[:2])
    assert misspelt.exit_code == 0
    assert "  idle: 1 rule without a tensor here: l.{i}.wieght -> v.{i}\n" in misspelt.output


def test_the_rules_are_run_once(
    files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no target: what the rules make was found by running them beforehand."""
    runs: list[int] = []

    def counted(rules: Sequence[Rule], names: Iterable[str]) -> Matches:
        runs.append(len(rules))
        return match_rules(rules, names)

    monkeypatch.setattr(resolve, "match_rules", counted)
    assert run("check", *files[:2]).exit_code == 0 and len(runs) == 1
    assert run("check", *files).exit_code == 0 and len(runs) == 2


def test_the_way_back_is_proven_too(files: tuple[Path, Path, Path]) -> None:
    mapping, source, target = files
    result = run("check", mapping, target, source, "--inverse")
    assert result.exit_code == 0, result.output


def test_every_fault_is_printed(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    mapping, source, target = files
    rules = Mapping.from_file(mapping).rules
    Mapping(rules[1:]).to_file(mapping)
    result = run("check", *files)
    assert result.exit_code == 1
    for i in range(3):
        assert f"target 'l/{i}/kernel' has a gap: [0, 2) x [0, 4)" in result.output
        assert f"source 'l.{i}.weight': no rule uses [0, 4) x [0, 2)" in result.output
    found = json.loads(run("check", *files, "--json").stdout)
    assert not found["ok"]
    assert len(found["problems"]) == 6
    mapping.write_text("[[rule]]\nsource = 3")
    assert run("check", *files).exit_code == 2
    assert run("check", tmp_path / "none.toml", source, target).exit_code == 2
    Mapping(rules).to_file(mapping)
    assert run("check", mapping, source, tmp_path / "none").exit_code == 2


def test_a_mapping_is_shown_by_rules_or_by_leaves(files: tuple[Path, Path, Path]) -> None:
    mapping, source, _ = files
    by_rules = " ".join(run("show", mapping).output.split())
    assert "3 rules" in by_rules
    assert "pos drop 0, arange 0 side data" in by_rules
    by_leaves = run("show", mapping, source)
    assert by_leaves.exit_code == 0, by_leaves.output
    assert "float16[2, 4]" in by_leaves.output
    document = json.loads(run("show", mapping, source, "--json").stdout)
    assert [each["sources"] for each in document if each["name"] == "table"] == [["emb"]]
    rules = json.loads(run("show", mapping, "--json").stdout)
    assert Mapping.from_document(rules) == Mapping.from_file(mapping)


def test_the_inverse_is_written(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    mapping, _, _ = files
    back = tmp_path / "back.toml"
    result = run("show", mapping, "--inverse", "--output", back)
    assert result.exit_code == 0, result.output
    assert Mapping.from_file(back) == Mapping.from_file(mapping).inverse()


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """A folder as Hugging Face has them: config.json and safetensors."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    layers = {
        f"model.layers.{i}.mlp.up_proj.weight": np.zeros((6, 4), np.float32) for i in range(2)
    }
    save_file(layers, folder / "model.safetensors")
    return folder


def test_a_folder_that_has_the_familys_name_hides_no_family(
    hugging_face: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hugging_face.rename(hugging_face.parent / "llama").parent)
    result = run("show", "llama", "llama")
    assert result.exit_code == 0, result.output


def test_a_family_takes_the_config_beside_the_checkpoint(hugging_face: Path) -> None:
    for source in (hugging_face, hugging_face / "model.safetensors"):
        result = run("show", "llama", source, "--json", "--choose", "scanned=true")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert [each["shape"] for each in document if "up_proj" in each["name"]] == [[2, 4, 6]]
    assert run("check", "llama", hugging_face).exit_code == 0
    config = hugging_face / "config.json"
    assert "up_proj" in run("show", "llama", "--config", config).output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["show", "lama"], "is neither a file nor a family: bert"),
        (["show", "llama"], "--config"),
        (["show", "none.toml"], "none.toml is not a mapping file"),
        (["show", "llama", "--config", "none.json"], "is not a model's configuration"),
        (["show", "llama", "--config", "CONFIG", "--choose", "scanned"], "KEY=VALUE"),
        (["show", "llama", "--config", "CONFIG", "--choose", "wide=yes"], "no such choice"),
    ],
)
def test_what_names_no_mapping_is_an_error(
    hugging_face: Path, arguments: list[str], words: str
) -> None:
    config = str(hugging_face / "config.json")
    result = run(*(config if each == "CONFIG" else each for each in arguments))
    assert result.exit_code == 2
    assert words in result.output


def test_what_takes_long_says_how_far_it_is(
    files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.progress_bar.PATIENCE", 0.0)
    monkeypatch.setattr("xckpt.convert.conversion.MANY_LEAVES", 1)
    _, source, target = files
    for command, doing in (("infer", "inferring"), ("check", "checking")):
        which = files if command == "check" else (source, target)
        said = CliRunner().invoke(commands, ["map", command, *map(str, which)]).stderr
        assert re.match(rf"{doing}: \d+%, \d+ of \d+ leaves, [\d,]+/s, \S+ left\n", said), said
        assert re.search(r"100%, (\d+) of \1 leaves, [\d,]+/s, after 0:00:\d\d\n$", said), said
