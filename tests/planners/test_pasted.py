"""Each planner to paste stands on its own: public names, no other file, an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import sys
from pathlib import Path

import pytest

import xckpt
import xckpt.metadata
import xckpt.planner

FOLDER = Path(__file__).parents[2] / "examples" / "planners"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PUBLIC = {
    "xckpt": xckpt.__all__,
    "xckpt.metadata": xckpt.metadata.__all__,
    "xckpt.planner": xckpt.planner.__all__,
}


def test_there_is_a_file_for_each_pattern():
    assert NAMES == ["balance", "extra_data", "half_precision", "materialise", "rename"]


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name):
    module = importlib.import_module(f"examples.planners.{name}")
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted >= 3 and found.failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_pasted(name):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0
            if node.module in PUBLIC:
                assert {alias.name for alias in node.names} <= set(PUBLIC[node.module])
            else:
                assert node.module in sys.stdlib_module_names or node.module in (
                    "__future__", "collections.abc",
                )  # fmt: skip
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"torch", *sys.stdlib_module_names}
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert own or not node.attr.startswith("_") or node.attr.endswith("__")
