"""Which folders an environment can test, and fixtures of many of them.

torch_xla, the trainers and the site need one each: `make test-xla`, `make test-integrations`,
`make test-docs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = {"xla": "torch_xla", "integrations": "lightning", "docs/site": "sphinx"}

collect_ignore = [folder for folder, package in NEEDS.items() if not find_spec(package)]


@pytest.fixture(autouse=True, scope="session")
def _a_slow_machine_shows_no_progress() -> Iterator[None]:
    """Commands that take seconds write lines of progress; what tests read holds none."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if find_spec("rich"):
            monkeypatch.setattr("xckpt.progress_bar.PATIENCE", 3600.0)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new path each time."""
    root = tmp_path_factory.mktemp("checkpoints")
    return (root / str(number) for number in itertools.count())
