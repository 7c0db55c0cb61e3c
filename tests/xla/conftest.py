"""Eight CPU devices under SPMD, set up before anything makes a tensor."""

from __future__ import annotations

from collections.abc import Iterator

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
