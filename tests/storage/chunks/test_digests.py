"""Digests of a long file: few requests, and the same digests as the file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.core.geometry.grid import ZarrArray
from xckpt.storage.chunks import digests
from xckpt.storage.chunks.digests import Digests
from xckpt.storage.location import Location

counts = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@examples(40)
@given(counts, st.data())
def test_digests_are_those_of_the_file_in_whatever_order_they_are_asked_for(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], data: st.DataObject
) -> None:
    folder, total = tmp_path_factory.mktemp("digests"), sum(counts)
    content = np.arange(total * 4, dtype=np.uint32).tobytes()
    (folder / "xckpt.digests").write_bytes(content)
    stored: list[ZarrArray] = []
    for number, count in enumerate(counts):
        first = sum(counts[:number])
        stored.append(ZarrArray(f"w{number}", 0, "int8", (0,), (count,), (1,), None, first))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FEW_BYTES": -1, "BLOCK": 16, "GAP_BYTES": 48}.items():
            patch.setattr(digests, name, value)
        patch.setattr(digests, "RANGE_BYTES", 20 * 16)
        opened = Digests(Location.parse(folder), total, "")
        for some in data.draw(st.lists(st.sets(st.sampled_from(range(len(stored)))), max_size=4)):
            opened.prepare([stored[number] for number in some])
            for array in (stored[number] for number in some):
                first = array.first * 16
                expected = content[first : first + array.count * 16]
                assert b"".join(opened.blocks(array)) == expected
                assert b"".join(opened.of(array, n) for n in range(array.count)) == expected
                rows, found = opened.rows(array.first + np.arange(array.count))
                stored_rows = np.frombuffer(expected, np.uint8).reshape(-1, 16)
                assert np.array_equal(rows[found], stored_rows[found])
                assert found.all() or array.count > 16


def test_the_digests_of_many_arrays_take_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 70_000
    (tmp_path / "xckpt.digests").write_bytes(bytes(many * 16))
    asked: list[tuple[int, int]] = []
    ask = Digests._ask

    def counted(self: Digests, first: int, count: int) -> Any:
        asked.append((first, count))
        return ask(self, first, count)

    monkeypatch.setattr(Digests, "_ask", counted)
    opened = Digests(Location.parse(tmp_path), many, "")
    arrays = [ZarrArray("w", 0, "int8", (0,), (1,), (1,), None, first) for first in range(many)]
    opened.prepare(arrays[::2])
    opened.prepare(arrays)
    assert asked == [(0, many - 1), (many - 1, 1)]
