"""The page in Chromium while what it shows changes, ends or takes long; and on narrow screens."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import xckpt
from tests.viewer.browser import Browser, serious
from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.policies import EverySteps
from xckpt.viewer.server import PageServer
from xckpt.viewer.view import CheckpointView

pytestmark = pytest.mark.browser

LONG = "a_long_name_of_a_module/" * 8 + "weight" * 20
STATE = {
    "w": np.arange(64.0).reshape(8, 8),
    "tall": np.ones((5000, 2)),
    "notes": "first line\n<b>second</b> line\n" * 300,
    "complex128": np.ones(3, np.complex128),
    LONG: np.zeros(3),
}


@contextmanager
def serving(path: Path) -> Iterator[PageServer]:
    with PageServer(xckpt.view(path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "ckpt", STATE)
    return tmp_path / "ckpt"


def read(browser: Browser, leaf: str) -> str:
    """What the page says once it is asked for the values of a leaf."""
    browser.choose(leaf)
    browser.one("#read").click()
    browser.wait("return document.querySelector('#values dl, #values .problem')")
    return browser.text("#values")


def test_a_page_says_that_it_is_old_and_shows_the_new_one(browser: Browser, path: Path) -> None:
    with serving(path) as server:
        browser.open(server.url)
        assert "NaN0" in read(browser, "w")
        xckpt.save(path, {"w": np.full((8, 8), 5.0)}, overwrite=True)
        assert "reload the page" in read(browser, "w")
        [refused] = browser.problems()
        assert "409 (Conflict)" in refused
        browser.open(server.url)
        assert "Mean5" in read(browser, "w")
        assert browser.text("#hits") == "1 leaf"


def test_a_page_whose_server_has_ended_says_so(browser: Browser, path: Path) -> None:
    command = [sys.executable, "-m", "xckpt", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        browser.open(process.stdout.readline().decode().split()[0])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert "the server of this page has ended" in read(browser, "w")
    assert all("ERR_CONNECTION_REFUSED" in each for each in browser.problems())


def test_a_long_comparison_says_how_far_it_is(
    browser: Browser, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = CheckpointView.diff

    def slow(view: CheckpointView, other: str, progress: Any = None) -> Any:
        progress(xckpt.Progress(1 << 29, 1 << 31))
        time.sleep(3)
        return compare(view, other, progress)

    monkeypatch.setattr(CheckpointView, "diff", slow)
    with serving(path) as server:
        browser.open(server.url)
        browser.one("#tab-diff").click()
        browser.one("#diff-other").send_keys(str(path), Keys.ENTER)
        browser.wait("return document.querySelector('#comparing')?.textContent.includes('%')")
        said = browser.text("#comparing")
        assert said.startswith("comparing: 25%, 512.0 MiB of 2.0 GiB, 0:0")
        assert said.endswith(" left")
        browser.wait("return document.querySelector('#diff .good')")


def test_a_stored_text_is_read(browser: Browser, path: Path) -> None:
    with serving(path) as server:
        browser.open(server.url)
        browser.choose("notes")
        browser.one("#read-text").click()
        browser.wait("return document.querySelector('#value pre')")
        assert browser.text("#value pre").startswith("first line\n<b>second</b> line")
        assert serious(browser) == []


def overlaps(browser: Browser) -> list[str]:
    """Cells of the list that do not lie below their head, or beyond the screen's edge."""
    script = """
        const shown = (each) => each.getBoundingClientRect().width > 0;
        const heads = [...document.querySelectorAll(".head > span")].filter(shown);
        const wrong = [];
        for (const row of document.querySelectorAll("#rows [data-at]")) {
            const cells = [...row.children].filter(shown);
            if (cells.length !== heads.length) wrong.push(`${cells.length} cells`);
            cells.forEach((cell, at) => {
                const [a, b] = [cell, heads[at]].map((each) => each.getBoundingClientRect());
                const apart = Math.abs(a.left - b.left) > 1.5;
                if (apart || a.right > innerWidth + 1) wrong.push(cell.textContent);
            });
        }
        return wrong;
    """
    return list(browser.run(script))


@pytest.mark.parametrize("width, height", [(390, 780), (760, 900), (1360, 860), (2200, 1200)])
def test_every_width(browser: Browser, path: Path, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        with serving(path) as server:
            browser.open(server.url)
            assert overlaps(browser) == []
            # The tree does not push out what stands beside or below it; nothing is too wide.
            seen = "document.querySelector('#detail').getBoundingClientRect()"
            assert browser.run(f"return {seen}.height") > height / 4
            assert browser.run("return document.documentElement.scrollWidth") <= width
            read(browser, "tall")
            heat = browser.run(
                "return document.querySelector('.heat').getBoundingClientRect().width"
            )
            assert heat >= 24
            browser.picture(f"width-{width}")
            for tab in browser.all("[role=tab]"):
                tab.click()
                assert browser.run("return document.documentElement.scrollWidth") <= width
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_columns_that_say_nothing_are_left_out(browser: Browser, path: Path) -> None:
    with serving(path) as server:
        browser.open(server.url)
        heads = browser.run(
            "return [...document.querySelectorAll('[data-column]')].map((e) => e.dataset.column)"
        )
        assert heads == ["name", "dtype", "shape", "bytes", "chunks"]


def test_each_column_sorts_both_ways(browser: Browser, tmp_path: Path) -> None:
    state = {
        "b": np.zeros((2, 3), np.int16),
        "a": np.zeros((4, 4), np.float32),
        "c": np.zeros(100, np.uint8),
    }
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(chunk_bytes=16))
    orders = {
        "name": "abc",
        "dtype": "abc",
        "shape": "bac",  # by elements
        "bytes": "cab",  # numbers begin with the largest
        "chunks": "cab",
    }
    with serving(tmp_path / "ckpt") as server:
        browser.open(server.url)
        script = "[...document.querySelectorAll('#rows [data-leaf] [role=gridcell]:first-child')]"
        rows = f"return {script}.map((each) => each.textContent).join('')"
        for column, order in orders.items():
            head = browser.one(f"[data-column={column}]")
            head.click()
            assert browser.run(rows) == order, column
            head.click()
            assert browser.run(rows) == order[::-1], column
            head.click()
            assert browser.run(rows) == "bac", column


def test_small_numbers_fit_into_the_labels_of_a_chart(browser: Browser, tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path / "run", save=[EverySteps(1)]) as run:
        for step in (1, 2, 3):
            metrics = {"rate": 1.23456789e-5 * step, "large": -1.5e20 * step}
            run.save(step, {"w": np.ones(2)}, metrics=metrics)
    with serving(tmp_path / "run") as server:
        browser.open(server.url)
        script = """
            return [...document.querySelectorAll(".chart")].map((chart) => {
                const left = chart.getBoundingClientRect().left - 1;
                const texts = [...chart.querySelectorAll("text")];
                return texts.every((text) => text.getBoundingClientRect().left >= left);
            });
        """
        assert set(browser.run(script)) == {True}
        cells = browser.text("#steps tbody tr")
        assert "3.7037e-5" in cells
        assert "-4.5e20" in cells


def test_the_heat_map_and_the_histogram_are_the_numbers(browser: Browser, path: Path) -> None:
    elements = np.array([[0.0, 1.0, 2.0], [np.nan, 4.0, np.inf]])
    xckpt.save(path, {"w": elements}, overwrite=True)
    with serving(path) as server:
        browser.open(server.url)
        read(browser, "w")
        script = """
            const canvas = document.querySelector(".heat");
            const context = canvas.getContext("2d");
            const pixels = [...context.getImageData(0, 0, canvas.width, canvas.height).data];
            return [canvas.width, canvas.height, pixels];
        """
        width, height, pixels = browser.run(script)
        assert (width, height) == (3, 2)
        colours = np.array(pixels).reshape(2, 3, 4)[..., :3].tolist()
        assert colours[0][0] == [68, 1, 84]  # the least
        assert colours[1][1] == [253, 231, 37]  # the largest
        assert colours[0][2] == [33, 145, 140]  # in the middle
        assert colours[1][0] == colours[1][2] == [213, 94, 0]  # not finite
        bars = browser.run(
            "return [...document.querySelectorAll('#values rect.barfill')].map((bar) =>"
            " [+bar.getAttribute('x'), +bar.getAttribute('height')])"
        )
        assert [round(x / 10) for x, tall in bars if tall] == [0, 12, 24, 47]  # of 48 bins
        assert {tall for _, tall in bars} == {0, 120}


def test_one_nan_of_many_elements_is_seen_where_it_lies(browser: Browser, path: Path) -> None:
    elements = np.random.default_rng(0).normal(size=(600, 300)).astype(np.float32)
    elements[450, 30] = np.nan
    xckpt.save(path, {"w": elements}, overwrite=True)
    with serving(path) as server:
        browser.open(server.url)
        assert "Cells in orange hold NaN" in read(browser, "w")
        script = """
            const canvas = document.querySelector(".heat");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const colour = (_, at) => data.slice(4 * at, 4 * at + 3).join();
            const pixels = Array.from({ length: width * height }, colour);
            const box = canvas.getBoundingClientRect();
            return [pixels, width, box.height / box.width];
        """
        pixels, columns, proportion = browser.run(script)
        [at] = [number for number, pixel in enumerate(pixels) if pixel == "213,94,0"]
        cuts = [np.arange(128) * size // 128 for size in elements.shape]
        place = [
            int(np.searchsorted(c, at, "right")) - 1 for c, at in zip(cuts, (450, 30), strict=True)
        ]
        assert [at // columns, at % columns] == place
        assert proportion == pytest.approx(2, rel=0.05)
        # Means of ten elements lie close to zero, and yet all colours are used.
        assert {"68,1,84", "253,231,37"} < set(pixels)


def test_every_dtype_and_shape_is_shown(browser: Browser, path: Path) -> None:
    state: dict[str, Any] = {
        dtype: np.ones((3, 4)).astype(numpy_dtype(dtype)) for dtype in sorted(DTYPES)
    }
    shapes = ((), (0,), (4, 0, 2), (1, 1, 1), (2, 3, 4, 5, 6), (100_000, 1), (1, 100_000))
    state |= {f"of {shape}": np.ones(shape, np.float32) for shape in shapes}
    values = {
        "none": None,
        "no": False,
        "huge": 10**30,
        "z": 1 + 2j,
        "raw": b"\x00ab",
        "nan": np.nan,
    }
    xckpt.save(path, {"arrays": state, "values": {**values, "text": "x\ny"}}, overwrite=True)
    with serving(path) as server:
        browser.open(server.url)
        script = "return [...document.querySelectorAll('#rows [data-leaf]')].length"
        assert browser.run(script) > 10
        for name, array in state.items():
            browser.choose(f"arrays/{name}")
            assert browser.text("#leaf-name") == f"arrays/{name}"
            if array.size:
                browser.one("#read").click()
                browser.wait("return document.querySelector('#values dl, #values .problem')")
                plane = int(np.prod(array.shape[:2]))
                assert browser.text("#values dd") == f"{plane:,}", name
            else:
                assert "no elements" in browser.text("#detail")
        for name in (*values, "text"):
            browser.choose(f"values/{name}")
            assert browser.text("#value"), name
