"""A save and a load go straight through the house: the packages that they enter, in order.

`xckpt.core`, errors and options are the ground on which all stand and are not counted as packages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.way import Way, in_a_fresh_process, trace
from xckpt.core.geometry.box import Box
from xckpt.storage.location import Location

MOST_FILES = 35


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    return in_a_fresh_process()


@pytest.fixture
def save(ways: dict[str, Way]) -> Way:
    return ways["save_of_a_dtensor"]


@pytest.fixture
def load(ways: dict[str, Way]) -> Way:
    return ways["load_into_a_jax_struct"]


def test_a_save_enters_these_packages(save: Way) -> None:
    assert save.packages == [
        "api",
        "engine",  # the group
        "torch",  # is torch.distributed initialised?
        "storage",  # the writer
        "engine",
        "torch",  # describe the leaves
        "engine",
        "storage",  # stage the save, make the orders
        "engine",
        "storage",  # write
        "torch",  # the data of a leaf
        "storage",  # write, commit
    ]


def test_a_save_enters_few_files(save: Way) -> None:
    """Those of the ground too."""
    assert len(save.distinct_files) <= MOST_FILES, save.distinct_files


def test_a_load_enters_these_packages(load: Way) -> None:
    assert load.packages == [
        "api",
        "engine",  # the group
        "torch",  # is torch.distributed initialised?
        "jax",  # are there several processes?
        "engine",  # has a launcher started several?
        "storage",  # the reader
        "engine",
        "storage",  # the manifest
        "jax",  # the targets
        "storage",  # adjust the plan
        "engine",
        "storage",  # read and verify; from there threads go to the device
        "jax",  # the loaded array
    ]


def test_the_page_names_files_on_the_way(save: Way, load: Way) -> None:
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    for way, title, end in [
        (save, "## The way of a save\n", "A bucket has no renames"),
        (load, "## The way of a load\n", "A chunk that several ranks"),
    ]:
        steps = text.split(title)[1].split(end)[0]
        named = re.findall(r"`([\w/]+\.py)`", steps)
        assert len(named) >= 15
        assert set(named) <= set(way.distinct_files)


def test_the_way_of_a_call() -> None:
    way = trace(lambda: Box((0,), (Location.parse("memory://way").path != "",)).ends)
    assert way.distinct_files == [
        "storage/location.py",
        "core/storage.py",
        "storage/budget.py",
        "options.py",
        "core/geometry/box.py",
    ]
    assert way.packages == ["storage"] and way.moves == 0
