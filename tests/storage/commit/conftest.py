"""What the tests of commits share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections and deletions wait for no late requests: `tests.storage.test_late_requests`."""
    for module in ("collect_keys", "remove"):
        monkeypatch.setattr(f"xckpt.storage.commit.{module}.let_arrive", lambda: None)
