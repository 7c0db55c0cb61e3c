"""The process group that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks for all tests; none may leave them broken."""
    with Ranks(4) as ranks:
        yield ranks
