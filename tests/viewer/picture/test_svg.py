"""SVG files of 200 random leaves: their rectangles are the boxes of the plan."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import xckpt
from tests.viewer.grids import random_grids
from xckpt.core.manifest.entries import TensorEntry
from xckpt.viewer.picture.plane import PicturePlane, picture_of
from xckpt.viewer.picture.svg import svg


def test_rectangles_are_the_boxes_of_the_plan() -> None:
    manifest, expected = random_grids(seed=3, count=200)
    for entry, drawn in zip(manifest.leaves, expected, strict=True):
        assert isinstance(entry, TensorEntry)
        plane = PicturePlane.of(entry, drawn.down, drawn.across, drawn.at)
        root = ElementTree.fromstring(svg(picture_of(entry, plane)))
        kinds = ("chunk", "unit", "array", "shard")
        found: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in kinds}
        hatched = list[tuple[int, ...]]()
        for each in root.iter("{http://www.w3.org/2000/svg}rect"):
            place = tuple(int(each.attrib[name]) for name in ("x", "y", "width", "height"))
            found[each.attrib["class"]].append(place)
            if "hatch" in each.attrib.get("style", ""):
                hatched.append(place)
        assert sorted(found["chunk"]) == sorted(drawn.chunks)
        assert sorted(found["unit"]) == sorted(drawn.units)
        assert sorted(found["array"]) == sorted(drawn.arrays)
        assert sorted(found["shard"]) == sorted(drawn.shards or ())
        several = [place for place, devices in (drawn.shards or {}).items() if " " in devices]
        assert sorted(hatched) == sorted(several)


def test_a_view_gives_it() -> None:
    name = "<script>&w"
    xckpt.save("memory://test-svg", {name: np.zeros((4, 6)), "step": 3, "none": np.zeros((0, 2))})
    view = xckpt.view("memory://test-svg")
    root = ElementTree.fromstring(view.svg(name))
    assert root[0].text == name
    for other, words in (("step", "no tensor"), ("none", "no elements"), ("x", "no tensor")):
        with pytest.raises(ValueError, match=words):
            view.svg(other)
    with pytest.raises(ValueError, match="no plane"):
        view.svg(name, down=0, across=0)
