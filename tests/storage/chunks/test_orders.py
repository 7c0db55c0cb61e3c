"""Where a save is staged comes to each rank as it is, in few bytes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from xckpt.options import SaveOptions
from xckpt.storage.budget import Access
from xckpt.storage.chunks.orders import WriteOrders
from xckpt.storage.location import Location


@pytest.mark.parametrize("path", ["memory://orders-of-ranks", "/data/run/7", "s3://bucket/run/7"])
@pytest.mark.parametrize("options", [SaveOptions(), SaveOptions(retries=2, timeout=7.0)])
@pytest.mark.parametrize("unsynced", [False, True])
def test_a_place_comes_as_it_is(path: str, options: SaveOptions, unsynced: bool):
    location = replace(Location.parse(path, options), unsynced=unsynced)
    location.access.start()
    location.access.heard = 3.0
    sent = msgspec.msgpack.encode(WriteOrders(location, (), ()).place())
    came = msgspec.convert(msgspec.msgpack.decode(sent), Location)
    assert came == location
    assert came.access == replace(location.access, heard=0.0)
    if options == SaveOptions() and not unsynced:
        assert len(sent) <= len(path) + 40


def test_what_is_usual_is_not_said():
    location = Location("file", "/data", access=Access())
    assert WriteOrders(location, (), ()).place() == {"driver": "file", "path": "/data"}
