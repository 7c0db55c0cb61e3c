"""What pyproject.toml admits is what is tried: its lowest releases, and those of the tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def pinned(file: str) -> dict[str, Version]:
    """Name -> the one version that a file of constraints has of it."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if "==" in line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("-", "_"): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    """What xckpt needs, and what its extras for frameworks do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["torch"], *extras["jax"], *extras["zarr"]]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_lowest_release_is_the_one_that_is_tried(requirement: Requirement) -> None:
    floors = [each.version for each in requirement.specifier if each.operator == ">="]
    assert [pinned("tests/lowest.txt")[requirement.name.lower()]] == [Version(v) for v in floors]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_tests_use_a_release_that_is_admitted(requirement: Requirement) -> None:
    assert pinned("tests/constraints.txt")[requirement.name.lower()] in requirement.specifier
