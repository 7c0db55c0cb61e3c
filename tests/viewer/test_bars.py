"""What the page promises in figures: speed with 100,000 leaves, and what axe-core finds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.support.time_limit import ALLOWANCE
from tests.viewer.browser import Browser, dark, serious
from xckpt.core.manifest.entries import Manifest, TensorEntry, ValueEntry
from xckpt.core.metadata import Sharding
from xckpt.core.values import encode_value
from xckpt.viewer.leaves import checkpoint_page
from xckpt.viewer.model import Page
from xckpt.viewer.page import page_html
from xckpt.viewer.server import PageServer

pytestmark = pytest.mark.browser

LEAVES = 100_000
PAINT_SECONDS, TYPING_SECONDS = 2.0 * ALLOWANCE, 0.1 * ALLOWANCE
PAGE_BYTES = 20 << 20

# From the input event to the frame that shows what it found, in milliseconds.
TYPE = """
const [text, done] = arguments;
const search = document.querySelector("#search");
search.value = text;
const start = performance.now();
search.dispatchEvent(new Event("input", { bubbles: true }));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sharding = Sharding(axes=(("data", 8), ("model", 16)), spec=(("model",), ("data",)))
    kinds = ("attention/query/kernel", "attention/out/kernel", "mlp/up/kernel", "mlp/down/kernel")
    leaves = [
        TensorEntry(
            f"model/layers.{n // 8:05}/{kinds[n % 4]}/{'mu' if n % 8 > 3 else 'value'}",
            "bfloat16",
            (1024 + n % 97, 4096),
            (64, 512),
            sharding=sharding,
        )
        for n in range(LEAVES - 1)
    ]
    manifest = Manifest((*leaves, ValueEntry("step", "int", encode_value(7))), "")
    path = tmp_path_factory.mktemp("many") / "page.html"
    page = Page("many", "many", "xckpt", checkpoint=checkpoint_page(manifest))
    path.write_text(page_html(page), encoding="utf-8")
    return path


def opened(browser: Browser, page: Path) -> float:
    """Seconds from opening a page until it has drawn and painted."""
    browser.open(page)
    browser.wait("return performance.getEntriesByName('first-contentful-paint').length")
    entries = "return performance.getEntriesByName(arguments[0])[0].startTime / 1000"
    return max(browser.run(entries, name) for name in ("drawn", "first-contentful-paint"))


def slowest_letter(browser: Browser, typed: str) -> float:
    """Seconds that the page takes to answer the letter that takes it longest."""
    ends = range(1, len(typed) + 1)
    return max(browser.driver.execute_async_script(TYPE, typed[:end]) / 1000 for end in ends)


def best(measured: Callable[[], float], bar: float) -> float:
    """The least of 5 measurements, of up to 20 while none is below the bar.

    Other jobs on the machine slow single rounds down, and none makes one quicker.
    """
    found = [measured() for _ in range(5)]
    while min(found) >= bar and len(found) < 20:
        found.append(measured())
    return min(found)


def test_a_hundred_thousand_leaves(
    browser: Browser, many: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    paint = best(lambda: opened(browser, many), PAINT_SECONDS)
    browser.driver.set_script_timeout(20)
    slowest = best(lambda: slowest_letter(browser, "layers.00777/mlp"), TYPING_SECONDS)
    assert browser.text("#hits") == "4 leaves"
    size = many.stat().st_size
    for name, value in (("paint", paint), ("typing", slowest), ("bytes", size)):
        print(f"{name}: {value:,.3f}")
        record_testsuite_property(name, value)
    assert paint < PAINT_SECONDS
    assert slowest < TYPING_SECONDS
    assert size < PAGE_BYTES
    rows = browser.run("return document.querySelectorAll('#rows [data-at]').length")
    assert rows < 100
    browser.picture("many")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = {"w": np.arange(64.0).reshape(8, 8), "inner": {"v": np.ones((3, 4, 5)), "step": 3}}
    path = tmp_path_factory.mktemp("axe") / "ckpt"
    xckpt.save(path, state, metadata={"a": 1}, options=xckpt.SaveOptions(chunk_bytes=64))
    with PageServer(xckpt.view(path)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious(browser: Browser, url: str, is_dark: bool) -> None:
    dark(browser, is_dark)
    browser.open(url)
    assert serious(browser) == []
    browser.choose("w")
    browser.one("#read").click()
    browser.wait("return document.querySelector('#values canvas')")
    assert serious(browser) == []
    for tab in browser.all("[role=tab]")[1:]:
        tab.click()
        assert serious(browser) == []


def test_axe_would_notice(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.run(
        "document.querySelector('#search').removeAttribute('aria-label');"
        "document.querySelector('#search').removeAttribute('placeholder')"
    )
    assert any(found.startswith("label") for found in serious(browser))
