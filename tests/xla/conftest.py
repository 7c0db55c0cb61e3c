"""Eight CPU devices under SPMD, set up before anything makes a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.xla.meshes import Transfers


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """Counts what crosses between devices and host from here on."""
    return Transfers(monkeypatch)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new path each time."""
    root = tmp_path_factory.mktemp("checkpoints")
    return (root / str(number) for number in itertools.count())
