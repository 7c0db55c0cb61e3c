"""The set-up that other tests rely on holds."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase


def test_jax_sees_eight_cpu_devices() -> None:
    import jax

    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_processes_are_spawned() -> None:
    assert multiprocessing.get_start_method() == "spawn"


def test_the_seed_of_the_run_is_known(pytestconfig: pytest.Config) -> None:
    from hypothesis import core

    assert str(core.global_force_seed) == str(pytestconfig.getoption("hypothesis_seed"))


def test_examples_are_counted_and_not_timed() -> None:
    assert settings().deadline is None
    assert settings().max_examples >= 100


def test_what_was_found_is_kept() -> None:
    database = settings().database
    assert isinstance(database, DirectoryBasedExampleDatabase)
    assert database.path.parent == Path(__file__).parents[2] / ".hypothesis"


def test_no_two_files_save_to_one_name_in_memory() -> None:
    """What is at ``memory://`` lives as long as the process, which runs tests of many files."""
    root, named = Path(__file__).parents[2], r'(?:save\w*|parse)\(\s*"memory://([\w/-]+)"'
    files: defaultdict[str, set[str]] = defaultdict(set)
    for folder in ("tests", "xckpt"):
        for file in (root / folder).rglob("*.py"):
            for name in re.findall(named, file.read_text("utf-8")):
                files[name].add(file.relative_to(root).as_posix())
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
