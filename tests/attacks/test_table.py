"""Each attack and each promise names tests that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.attacks.table import ATTACKS, MORE, PROMISES, Attack

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The functions of a module."""
    parsed = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in parsed.body if isinstance(node, ast.FunctionDef))


def missing(tests: tuple[str, ...]) -> list[str]:
    """Those that are not there."""
    parts = [test.partition("::") for test in tests]
    return [f"{file}::{name}" for file, _, name in parts if name not in functions_of(file)]


def test_there_are_72_attacks() -> None:
    assert [row.number for row in ATTACKS] == list(range(1, 73))


@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: f"{row.number} {row.attack}")
def test_each_attack_has_a_test(row: Attack) -> None:
    assert row.tests and missing(row.tests) == []


def test_each_later_attack_has_a_test() -> None:
    assert [test for tests in MORE.values() for test in missing(tests)] == []


def test_the_promises_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "why" / "promises.md").read_text()
    begun = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
    assert begun == list(PROMISES)


def test_each_promise_has_a_test() -> None:
    assert [test for tests in PROMISES.values() for test in missing(tests)] == []


def test_security_names_tests_that_are_there() -> None:
    named = re.findall(r"`tests/([\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert named and missing(tuple(f"{file}::{name}" for file, name in named)) == []
