"""Each command prints JSON with ``--json``, and `xckpt/cli/schema.json` says what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from referencing import Registry, Resource

import xckpt
from tests.support.states import SIGNALLING, signalling_nans
from xckpt.cli.commands import commands
from xckpt.policies import EverySteps

SCHEMA = json.loads((Path(xckpt.__file__).parent / "cli" / "schema.json").read_text())
PAGE = json.loads((Path(xckpt.__file__).parent / "viewer" / "schema.json").read_text())
NO_ANSWER = {"completion", "man"}
"""Their output is for another program: a shell, `man`."""

CALLS = {
    "ls": [["ckpt"], ["run"]],
    "info": [["ckpt"], ["ckpt", "m/w"], ["ckpt", "m/w", "--box", "0:2"], ["ckpt", "step"]],
    "cat": [["ckpt", "m/w"], ["ckpt", "step"], ["ckpt", "bf", "--box", "0:1"], ["ckpt", "one"]],
    "head": [["ckpt", "m/w", "-n", "1"], ["ckpt", "z"], ["ckpt", "note"]],
    "stats": [["ckpt"]],
    "diff": [["ckpt", "ckpt"], ["ckpt", "other"]],
    "cp": [["ckpt", "again"]],
    "rm": [["gone", "--yes"]],
    "gc": [["."]],
    "verify": [["ckpt"]],
    "convert": [["other", "made"]],
    "map infer": [["other", "ckpt"]],
    "map check": [["rules.toml", "other"]],
    "map show": [["rules.toml"], ["rules.toml", "other"]],
    "view": [["ckpt"], ["ckpt", "--plan", "a on a=2", "--diff", "other"], ["run"]],
    "doctor": [["."], ["nowhere/yet"], ["memory://doctor-as-json"]],
}
RULES = 'version = 1\n[[rule]]\nsource = "w"\ntarget = "v"\n'


REGISTRY: Registry[Any] = Registry().with_resource(PAGE["$id"], Resource.from_contents(PAGE))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA, registry=REGISTRY)


def leaves(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json")
    state = {
        "m": {"w": np.arange(12.0).reshape(3, 4)},
        "bf": np.array([1, np.nan, np.inf], ml_dtypes.bfloat16),
        "z": np.array([1 + 2j, np.nan]),
        "one": np.ones((), bool),
        "step": 3,
        "note": "a\x1bb",
    }
    xckpt.save(path / "ckpt", state, metadata={"by": "hand"})
    xckpt.save(path / "gone", {"w": np.ones(2)})
    xckpt.save(path / "other", {"w": np.arange(4, dtype=np.int32)})
    (path / "rules.toml").write_text(RULES)
    with xckpt.CheckpointManager(path / "run", save=[EverySteps(1)]) as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5})
    return path


def test_every_command_has_the_option_and_a_schema() -> None:
    every = dict(leaves(commands))
    lacking = {
        name
        for name, each in every.items()
        if "--json" not in {o for p in each.params for o in p.opts}
    }
    assert lacking <= NO_ANSWER
    assert set(every) - lacking == set(SCHEMA["properties"]) == set(CALLS)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_printed_fits_the_schema(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for arguments in CALLS[name]:
        result = CliRunner().invoke(commands, [*name.split(), *arguments, "--json"])
        assert result.exit_code == int(arguments == ["ckpt", "other"]), result.output
        document = json.loads(result.stdout)
        VALIDATOR.validate({name: document})
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({name: {"unknown": document}})


def test_elements_are_numbers_and_what_is_no_number_is_a_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    def values(*arguments: str) -> object:
        return json.loads(CliRunner().invoke(commands, [*arguments, "--json"]).stdout)["values"]

    assert values("cat", "ckpt", "m/w", "--box", "1:2, 1:3") == [[5.0, 6.0]]
    assert values("cat", "ckpt", "bf") == [1.0, "nan", "inf"]
    assert values("cat", "ckpt", "z") == [[1.0, 2.0], ["nan", 0.0]]
    assert values("cat", "ckpt", "one") is True
    assert values("head", "ckpt", "m/w", "-n", "1") == [[0.0, 1.0, 2.0, 3.0]]


def test_a_signalling_nan_is_printed_without_a_warning(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {name: signalling_nans(name) for name in SIGNALLING})
    for name in SIGNALLING:
        result = CliRunner().invoke(
            commands, ["head", str(tmp_path / "a"), name, "-n", "8", "--json"]
        )
        assert json.loads(result.stdout)["values"] == ["nan"] * 8, result.stderr


def test_too_many_elements_are_refused(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "large", {"w": np.zeros(1_000_001, np.int8)})
    result = CliRunner().invoke(commands, ["cat", str(tmp_path / "large"), "w", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1,000,001 elements are too many for JSON" in result.stderr
