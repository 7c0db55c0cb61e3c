"""A network that alters what ranks send to those of other hosts."""

from __future__ import annotations

from typing import Any

import pytest

from xckpt.storage.host.far import FarRanks

__all__ = ["altered_parcels"]


@pytest.fixture
def altered_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last byte of each chunk or block that comes from another host has another bit."""
    send = FarRanks.send

    def altered(far: FarRanks, rank: int, parcel: Any) -> None:
        chunk, memory, sent = parcel
        wrong = memory.copy()
        wrong[-1] ^= 1
        send(far, rank, (chunk, wrong, sent))

    monkeypatch.setattr(FarRanks, "send", altered)
