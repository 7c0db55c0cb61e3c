"""What docs/mappings.md shows is so: its file is a mapping, its code runs, its table is whole."""

from __future__ import annotations

import re
import tomllib
from contextlib import chdir
from pathlib import Path

import pytest
from click import Group

from tests.mapping.test_operations import ONE_OF_EACH
from xckpt.cli.commands import commands
from xckpt.convert import Mapping
from xckpt.mapping.operations import Operation
from xckpt.mapping.operations.base import operation_from_document

PAGE = (Path(__file__).parents[2] / "docs" / "mappings.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROWS = re.findall(r"^\| `(\{ .*? \})` \| ([\w ]+) \| `(\{ .*? \})` \|", PAGE, re.MULTILINE)


def operation(text: str) -> Operation:
    return operation_from_document(tomllib.loads(f"operation = {text}")["operation"])


def test_the_code_runs_in_order(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with chdir(tmp_path):
        for language, code in BLOCKS:
            if language == "toml":
                Path("mine.toml").write_text(code)
            else:
                exec(compile(code, "docs/mappings.md", "exec"), names)
    assert isinstance(names["mapping"], Mapping)
    assert len(names["mapping"].rules) == 3


@pytest.mark.parametrize("text, exactness, inverse", ROWS, ids=[row[0] for row in ROWS])
def test_an_operation_has_this_type_and_this_inverse(
    text: str, exactness: str, inverse: str
) -> None:
    shown = operation(text)
    assert shown.inverse() == operation(inverse)
    assert exactness in (shown.exactness, "as its own")


def test_every_operation_is_listed() -> None:
    listed = {type(operation(text)) for row in ROWS for text in (row[0], row[2])}
    assert listed == {type(each) for each in ONE_OF_EACH}


def test_the_commands_exist() -> None:
    group = commands.commands["map"]
    assert isinstance(group, Group)
    assert set(re.findall(r"`xckpt map (\w+)`", PAGE)) == set(group.commands)
