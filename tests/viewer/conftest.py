"""One Chromium for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.viewer.browser import Browser, chromium, dark


@pytest.fixture(scope="session")
def running_chromium() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(running_chromium: Browser) -> Iterator[Browser]:
    """A browser whose console stays empty."""
    running_chromium.problems()
    dark(running_chromium, False)
    yield running_chromium
    assert running_chromium.problems() == []
