"""What is public fits a screen, however large it is; HTML is escaped and whole."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from tests.support.sharded_arrays import rows
from xckpt.core.text.shown import MOST_HTML_LEAVES, ShownLeaf, facts_html, outline, tree_html
from xckpt.planner import DefaultSavePlanner

SCREEN = 2000
"""Characters."""


class Tags(HTMLParser):
    """Checks that every tag is closed in order; collects the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def large_state() -> dict[str, object]:
    """Many leaves, a leaf of many pieces, a long value and a long name."""
    cuts = np.unique(np.random.default_rng(0).integers(1, 3000, 300)).tolist()
    return {
        "model": {f"layer{n}": {"w": np.zeros(4, np.float32)} for n in range(300)},
        "table": rows(np.zeros((3001, 3)), *cuts),
        "note": "x" * 3000,
        "n" * 3000: 1,
    }


def test_everything_public_fits_a_screen(tmp_path: Path) -> None:
    state = large_state()
    names = {f"model/layer{n}/w": ("out",) for n in range(300)}
    options = xckpt.SaveOptions(dimension_names=names)
    future = xckpt.save_async(tmp_path / "ckpt", state, metadata=[*range(9999)], options=options)
    saved = future.result()
    opened = xckpt.open(tmp_path / "ckpt")
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    local = planner.create_local_plan()
    (plan,), planned = planner.create_global_plan([local])
    target = {"model": {f"layer{n}": {"w": np.zeros(4, np.float32)} for n in range(300)}}
    report = xckpt.load_into(tmp_path / "ckpt", target, strict=False)
    for each in (
        *(saved, saved["table"], opened, opened.manifest, *opened.manifest.leaves[299:302]),
        *(opened["table"], opened.chunk_source, options, xckpt.LoadOptions(), future, local, plan),
        *(local.items, local.items[0], planned, report),
    ):
        assert 10 < len(repr(each)) < SCREEN, type(each)
    assert len(str(opened)) < SCREEN and "model/: 300 leaves, 4.7 KiB" in str(opened)
    assert repr(saved) == (
        "<Metadata of 303 leaves: 'model/layer0/w', 'model/layer1/w', 'model/layer2/w', ...>"
    )
    one = saved["table"]
    assert repr(xckpt.Metadata({"w": one})) == "<Metadata of 1 leaf: 'w'>"
    assert repr(xckpt.Metadata({})) == "<Metadata of 0 leaves>"


def test_a_notebook_shows_a_checkpoint_and_an_array(tmp_path: Path) -> None:
    state = {"model": {"<b>": np.zeros((2, 3), np.int8)}, "step": 7, "text": "<script>"}
    named = xckpt.SaveOptions(dimension_names={"model/<b>": ("out", "in")})
    xckpt.save(tmp_path / "ckpt", state, options=named)
    opened = xckpt.open(tmp_path / "ckpt")
    page = Tags(opened._repr_html_())
    assert page.seen.count("details") == 2 and "script" not in page.seen and "b" in page.seen
    for text in ("<b> int8 (2, 3), 6 B", "step int", "text str", "model/ 1 leaf, 6 B"):
        assert text in page.text
    stored = opened["model/<b>"]
    assert isinstance(stored, xckpt.StoredArray)
    table = Tags(stored._repr_html_())
    assert table.text.startswith("model/<b>") and "('out', 'in')" in table.text


@given(st.lists(st.text(max_size=5), unique=True, max_size=20))
@examples(50)
def test_any_name_is_shown_escaped_in_a_whole_tree(names: list[str]) -> None:
    leaves = [ShownLeaf(f"{number}/{name}", f"<{name}>", 1) for number, name in enumerate(names)]
    page = Tags(tree_html("<title>", leaves))
    assert set(page.seen) <= {"details", "summary", "b", "ul", "li", "code"}
    assert page.seen.count("code") >= len(leaves)
    Tags(facts_html("<w>", [(name, name) for name in names]))


def test_what_is_too_long_is_cut_and_said() -> None:
    leaves = [ShownLeaf(str(number), "int8 ()", 1) for number in range(MOST_HTML_LEAVES + 5)]
    assert "and 5 more leaves" in tree_html("a", leaves)
    assert outline(leaves)[-1] == f"... {MOST_HTML_LEAVES - 15:,} more"


@pytest.mark.parametrize("state", [{}, np.arange(3)])
def test_the_smallest_checkpoints_are_shown(tmp_path: Path, state: object) -> None:
    xckpt.save(tmp_path / "ckpt", state)
    opened = xckpt.open(tmp_path / "ckpt")
    Tags(opened._repr_html_())
    assert str(opened).startswith("<Checkpoint ")
