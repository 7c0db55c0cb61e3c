"""Which plane of a tensor is drawn where one does not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.viewer.grids import random_grids
from xckpt.core.manifest.entries import TensorEntry
from xckpt.core.metadata import Sharding
from xckpt.viewer.picture import plane as plane_module
from xckpt.viewer.picture.plane import PicturePlane, picture_of

CUBE = TensorEntry("w", "int8", (4, 6, 8), (2, 6, 4))


def test_the_slowest_two_that_are_cut_are_drawn() -> None:
    assert PicturePlane.of(CUBE) == PicturePlane(0, 2, (0, 0, 0))
    sharding = Sharding(axes=(("a", 2),), spec=((), ("a",), ()))
    whole = TensorEntry("w", "int8", (4, 6, 8), (4, 6, 8), sharding=sharding)
    assert PicturePlane.of(whole) == PicturePlane(0, 1, (0, 0, 0))
    assert PicturePlane.of(TensorEntry("w", "int8", (1, 1, 8, 9), (1, 1, 8, 9))) == PicturePlane(
        2, 3, (0,) * 4
    )


def test_what_is_given_is_kept() -> None:
    assert PicturePlane.of(CUBE, down=1, at=(1, 2, 3)) == PicturePlane(1, 0, (1, 2, 3))
    assert PicturePlane.of(CUBE, across=0) == PicturePlane(2, 0, (0, 0, 0))
    assert PicturePlane.of(CUBE, 2, 0) == PicturePlane(2, 0, (0, 0, 0))
    line = TensorEntry("w", "int8", (4,), (2,))
    assert PicturePlane.of(line) == PicturePlane.of(line, down=0) == PicturePlane(None, 0, (0,))
    assert PicturePlane.of(TensorEntry("w", "int8", (), ())) == PicturePlane(None, None, ())


@pytest.mark.parametrize(
    "down, across, at",
    [(0, 0, None), (3, None, None), (-1, None, None), (0, 1, (0,)), (0, 1, (0, 0, 8))],
)
def test_no_such_plane(down: int | None, across: int | None, at: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"w: of shape .* no plane along"):
        PicturePlane.of(CUBE, down, across, at)


@examples(20)
@given(st.integers(0, 10_000))
def test_every_element_of_a_plane_lies_in_one_chunk(seed: int) -> None:
    manifest, _ = random_grids(seed, count=6)
    for entry in manifest.leaves:
        assert isinstance(entry, TensorEntry)
        picture = picture_of(entry, PicturePlane.of(entry))
        for layer in (picture.chunks, picture.arrays):
            assert sum(width * height for _, _, width, height in layer) == (
                picture.rows * picture.columns
            )


def test_too_many_chunks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_module, "MOST_CELLS", 3)
    with pytest.raises(ValueError, match="4 chunks lie in the plane, too many"):
        picture_of(CUBE, PicturePlane.of(CUBE))
