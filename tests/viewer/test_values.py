"""Values of planes: every dtype, every plane, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import xckpt
from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.viewer import values
from xckpt.viewer.values import BINS, SIDE, heat_map, plane_values


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(dtype: str) -> None:
    least = 0.5 if dtype == "float8_e8m0fnu" else 0.0  # It has no zero.
    array = np.array([[least, 1, 1], [1, least, 1]]).astype(numpy_dtype(dtype))
    xckpt.save(f"memory://test-values-{dtype}", {"w": array})
    found = plane_values(xckpt.open(f"memory://test-values-{dtype}").array("w"), 0, 1, (0, 0))
    assert (found.count, found.nans, found.rows, found.columns) == (6, 0, 2, 3)
    assert found.cells == [least, 1, 1, 1, least, 1]
    assert (found.bins[0], found.bins[-1], sum(found.bins)) == (2, 4, 6)


@pytest.mark.parametrize("down, across", [(0, 1), (1, 0), (2, 0), (None, 2)])
def test_planes(down: int | None, across: int) -> None:
    array = np.arange(60.0).reshape(3, 4, 5)
    xckpt.save(f"memory://test-planes-{down}-{across}", {"w": array})
    stored = xckpt.open(f"memory://test-planes-{down}-{across}").array("w")
    at = (2, 1, 3)
    key = tuple(slice(None) if d in (down, across) else at[d] for d in range(3))
    plane = array[key]
    plane = plane.T if down is not None and down > across else plane
    found = plane_values(stored, down, across, at)
    assert np.array_equal(np.array(found.cells), plane.reshape(-1))
    assert (found.least, found.largest, found.mean) == (plane.min(), plane.max(), plane.mean())


def test_only_a_part_of_a_large_plane_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_ELEMENTS", 100)
    xckpt.save("memory://test-values-part", {"w": np.ones((50, 30)), "v": np.ones(400)})
    checkpoint = xckpt.open("memory://test-values-part")
    found = plane_values(checkpoint.array("w"), 0, 1, (0, 0))
    assert (found.count, found.part) == (90, "the first 3 rows and 30 columns")
    assert plane_values(checkpoint.array("v"), None, 0, (0,)).count == 100


@pytest.mark.parametrize(
    "down, across, part",
    [
        (0, 1, "the first 16 rows and 32 columns"),  # four chunks across, so two down
        (1, 0, "the first 16 rows and 32 columns"),
        (0, 2, ""),
        (None, 0, ""),
    ],
)
def test_chunks_that_are_read_whole_are_counted(
    down: int | None, across: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plane that cuts every chunk of a leaf, only a part is read."""
    place = f"memory://test-values-chunks-{down}-{across}"
    xckpt.save(place, {"w": np.ones((32, 32, 16))})
    monkeypatch.setattr(values, "MOST_READ", 8 * 8 * (8 * 8 * 16))
    stored = xckpt.open(place).array("w")
    assert plane_values(stored, down, across, (0, 0, 0), unit=(8, 8, 16)).part == part


def test_a_scalar_and_no_elements() -> None:
    xckpt.save("memory://test-values-few", {"s": np.float32(2), "e": np.zeros((0, 3))})
    checkpoint = xckpt.open("memory://test-values-few")
    assert plane_values(checkpoint.array("s"), None, None, ()).cells == [2.0]
    empty = plane_values(checkpoint.array("e"), 0, 1, (0, 0))
    assert (empty.count, empty.cells, empty.bins, empty.least) == (0, [], [], None)


def test_cells_are_means_and_bins_count_all() -> None:
    rng = np.random.default_rng(0)
    plane = rng.normal(size=(300, 7))
    plane[0, 0] = np.nan
    cells = heat_map(plane, np.isfinite(plane))
    assert cells.shape == (SIDE, 7)
    cuts = np.arange(SIDE) * 300 // SIDE
    assert cells[5, 3] == pytest.approx(plane[cuts[5] : cuts[6], 3].mean())
    xckpt.save("memory://test-values-bins", {"w": plane})
    found = plane_values(xckpt.open("memory://test-values-bins").array("w"), 0, 1, (0, 0))
    assert (len(found.bins), sum(found.bins)) == (BINS, 300 * 7 - 1)
