"""The page in Chromium: clicks, keys, typing, pictures; the console stays empty."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import xckpt
from tests.viewer.browser import Browser, dark, rectangles, serious
from xckpt.policies import EverySteps, Latest
from xckpt.viewer.server import PageServer

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u2028\u202e{{page}}'\"&"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def sharded(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    rng = np.random.default_rng(0)
    wte = rng.normal(size=(64, 32)).astype(np.float32)
    wte[3, 4], wte[10, 2] = np.nan, np.inf
    state = {
        "model": {
            "wte": sharded(wte, "data", "model"),
            "bias": sharded(np.arange(64, dtype=np.float32), "model"),
            "cube": sharded(np.ones((8, 16, 12), np.float32), None, "data", "model"),
            "replicated": sharded(np.ones((6, 6), np.float32)),
            "scalar": np.float32(3),
        },
        "opt": {"step": 3, HOSTILE: HOSTILE},
    }
    path = tmp_path_factory.mktemp("view") / "ckpt"
    options = xckpt.SaveOptions(chunk_bytes=256, pack_bytes=0)
    xckpt.save(path, state, metadata={HOSTILE: HOSTILE}, options=options)
    return path


@pytest.fixture(scope="module")
def file(saved: Path) -> Path:
    xckpt.view(saved).save(saved.parent / "page.html")
    return saved.parent / "page.html"


@pytest.fixture(scope="module")
def url(saved: Path) -> Iterator[str]:
    with PageServer(xckpt.view(saved)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def test_a_leaf_is_found_by_typing_and_drawn(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.one("body").send_keys("/")
    browser.choose("wte")
    assert browser.text("#leaf-name") == "model/wte"
    shards = rectangles(browser, ".shard")
    assert len(shards) == 8
    assert (8.0, 32.0, 8.0, 32.0) in shards
    # 4 KiB in chunks of 256 bytes, in each shard of 1 KiB: four.
    assert len(rectangles(browser, ".chunk")) == 32
    browser.picture("leaf")


def test_the_plane_follows_the_choice_and_the_slider(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.choose("cube")
    script = "return [...document.querySelectorAll('.shard')].map((s) => s.dataset.devices)"
    assert browser.run(script) == ["0", "4"]
    assert rectangles(browser, ".shard") == [(0, 0, 8, 8), (8, 0, 8, 8)]
    browser.one("input[type=range]").send_keys(Keys.END)
    assert browser.run(script) == ["3", "7"]
    Select(browser.one("#down")).select_by_value("2")
    assert browser.run(script) == list("01234567")
    assert (8, 9, 8, 3) in rectangles(browser, ".shard")
    browser.picture("cube")


def test_the_keyboard_walks_the_tree(browser: Browser, file: Path) -> None:
    browser.open(file)
    rows = browser.one("#rows")
    rows.send_keys(Keys.HOME, Keys.ARROW_LEFT)
    names = browser.run(
        "return [...document.querySelectorAll('#rows [data-at]')].map((r) => r.textContent)"
    )
    assert "wte" not in "".join(names)
    rows.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ENTER)
    assert browser.text("#leaf-name") == "model/wte"


def test_columns_sort(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.one("[data-column=bytes]").click()
    script = "return [...document.querySelectorAll('[data-leaf]')].map((r) => +r.dataset.leaf)"
    assert browser.run(script)[0] == 0
    browser.one("[data-column=bytes]").click()
    assert browser.run(script)[-1] == 0


def test_shardings_sort_as_they_are_shown(browser: Browser, file: Path) -> None:
    browser.open(file)
    head = browser.one("[data-column=sharding]")
    cells = "[...document.querySelectorAll('#rows [data-leaf] > :nth-child(6)')]"
    script = f"return {cells}.map((cell) => cell.textContent)"
    saved = browser.run(script)
    expected = ["data, model", "model", "-, data, model", "whole", "", "", ""]
    assert sorted(saved) == sorted(expected)
    head.click()
    assert browser.run(script) == sorted(expected)
    head.click()
    assert browser.run(script) == sorted(expected, reverse=True)
    titles = browser.run(f"return {cells}.map((cell) => cell.title)")
    assert titles[0] == "PartitionSpec(-, -) on data=2 x model=4"
    head.click()
    assert browser.run(script) == saved


def test_values_are_read_on_request(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.choose("wte")
    browser.one("#read").click()
    browser.wait("return document.querySelector('#values canvas')")
    facts = browser.text("#values dl")
    assert "NaN1" in facts
    assert "+ infinity1" in facts
    browser.run("document.querySelector('#values').scrollIntoView()")
    browser.picture("values")


def test_a_plan_is_typed_and_drawn(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.one("#tab-plan").click()
    text = browser.one("#plan-text")
    assert text.get_attribute("value") == "data, model on data=2 x model=4"
    text.clear()
    text.send_keys("- , tp on tp=3")
    browser.one("#plan-it").click()
    browser.wait("return document.querySelector('#hosts')")
    ranks = browser.run("return document.querySelectorAll('#ranks tbody tr').length")
    assert ranks == 3
    browser.picture("plan")
    browser.one("#tab-leaves").click()
    browser.choose("wte")
    assert rectangles(browser, ".target") == [(0, 0, 11, 64), (11, 0, 11, 64), (22, 0, 10, 64)]
    assert browser.all("#readers tbody tr")
    browser.picture("leaf-with-plan")
    browser.one("#tab-plan").click()
    browser.one("#plan-text").send_keys("?")
    browser.one("#plan-it").click()
    browser.wait("return document.querySelector('#plan .problem')")
    assert "is not a mesh" in browser.text("#plan .problem")
    [refused] = browser.problems()  # Chromium logs every answer of 400.
    assert "400 (Bad Request)" in refused


def test_a_run_and_its_steps(browser: Browser, tmp_path: Path) -> None:
    save, keep = [EverySteps(1)], [Latest(3)]
    with xckpt.CheckpointManager(tmp_path / "run", save=save, keep=keep) as manager:
        for step in range(1, 6):
            metrics = {"loss": 2.0 / step, HOSTILE: step % 2}
            manager.save(step, {"w": np.full(100, step), "v": np.zeros(100)}, metrics=metrics)
    with PageServer(xckpt.view(tmp_path / "run")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(server.url)
        assert browser.run("return document.querySelectorAll('#steps tbody tr').length") == 3
        assert browser.run("return document.querySelectorAll('.chart circle').length") == 6
        # w of each step, and v once.
        taken = "3.1 KiB, which would be 4.7 KiB if no files were shared"
        assert browser.text("#summary") == f"a run of 3 steps, {taken}"
        rows = "[...document.querySelectorAll('#steps tbody tr')]"
        cells = browser.run(f"return {rows}.map((r) => [...r.cells].map((c) => c.textContent))")
        assert [row[0] for row in cells] == [f"step-0000000{n}" for n in (5, 4, 3)]
        assert {tuple(row[2:4]) for row in cells} == {("800 B", "800 B")}
        assert [row[5] for row in cells] == ["0.4", "0.5", "0.666667"]
        assert {row[-1] for row in cells} == {"Latest(3)"}
        assert serious(browser) == []
        browser.picture("run")
        browser.one("#steps a").click()
        browser.wait("return document.querySelector('#search')")
        beside = browser.run("return document.querySelectorAll('#beside option').length")
        assert beside == 2
        browser.one("#summary a").click()
        browser.wait("return document.querySelector('#steps')")
        browser.one("#steps a").click()
        browser.wait("return document.querySelector('#search')")
        # v alone is shared with other steps.
        browser.one("[data-column=shared]").click()
        leaves = "[...document.querySelectorAll('[data-leaf]')]"
        rows = browser.run(f"return {leaves}.map((row) => row.textContent)")
        assert rows[0].startswith("v") and rows[0].endswith("800 B")
        assert not rows[1].endswith("800 B")
        browser.choose("w")
        browser.one("#read").click()
        browser.wait("return document.querySelector('#values canvas')")
        server.shutdown()


def test_a_metric_that_is_not_finite_parts_the_line(browser: Browser, tmp_path: Path) -> None:
    losses = [3.0, 2.0, float("nan"), 1.0, float("inf"), 2.0]
    every = [EverySteps(1)]
    with xckpt.CheckpointManager(tmp_path / "run", save=every, keep=every) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    xckpt.view(tmp_path / "run").save(tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    assert not browser.all("#steps a")
    lines = "[...document.querySelectorAll('.chartline')]"
    ends = browser.run(
        f"return {lines}.map((line) => line.getAttribute('points').split(' ').length)"
    )
    assert ends == [2, 1, 1]
    heights = "[...document.querySelectorAll('.chartdot')].map((dot) => +dot.getAttribute('cy'))"
    high, middle, low, again = browser.run(f"return {heights}")
    assert high < middle == again < low
    titles = "[...document.querySelectorAll('.chartcross')].map((cross) => cross.textContent)"
    assert browser.run(f"return {titles}") == ["step 2: nan", "step 4: inf"]
    label = browser.one(".chart").get_attribute("aria-label")
    assert label == "loss: from 1 to 3 over steps 0 to 5, 2 not finite"
    browser.picture("metrics")


def test_a_pair(browser: Browser, saved: Path, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "other", {"model": {"scalar": np.float32(4)}, "new": np.ones(3)})
    xckpt.view(saved, diff=tmp_path / "other", plan="data on data=2").save(tmp_path / "pair.html")
    browser.open(tmp_path / "pair.html")
    browser.one("#tab-diff").click()
    cells = "[...document.querySelectorAll('#differences td:nth-child(2)')]"
    kinds = browser.run(f"return {cells}.map((cell) => cell.textContent)")
    assert kinds.count("only in the other") == 1
    assert kinds.count("only here") == 6
    assert kinds.count("other elements") == 1
    assert serious(browser) == []
    browser.picture("differences")
    browser.one("#tab-plan").click()
    assert not browser.all("#plan-text")
    assert browser.run("return document.querySelectorAll('#ranks tbody tr').length") == 2


def test_the_overview_leads_to_a_leaf_and_back(browser: Browser, file: Path) -> None:
    browser.open(file)
    rows = "[...document.querySelectorAll('#parts-dtypes tbody tr')].map((row) => row.textContent)"
    # 8,192 + 256 + 6,144 + 144 + 4 bytes of five leaves.
    assert browser.run(f"return {rows}")[0] == "float32514.4 KiB"
    browser.picture("overview")
    browser.one("#largest button").click()
    assert browser.text("#leaf-name") == "model/wte"
    assert browser.run("return document.activeElement.id") == "rows"
    browser.one("#rows").send_keys(Keys.ESCAPE)
    assert browser.all("#largest") and not browser.all("#leaf-name")


def test_keys_reach_everything(browser: Browser, url: str) -> None:
    browser.open(url)
    body = browser.one("body")
    body.send_keys("?")
    assert browser.run("return document.querySelector('#keys').open")
    assert serious(browser) == []
    browser.picture("keys")
    browser.one("#keys button").send_keys(Keys.ESCAPE)
    assert not browser.run("return document.querySelector('#keys').open")
    for number, name in enumerate(("leaves", "plan", "diff", "metadata"), 1):
        body.send_keys(str(number))
        assert browser.run("return document.activeElement.id") == f"tab-{name}"
    body.send_keys("2")
    browser.one("#plan-text").send_keys(Keys.CONTROL, Keys.ENTER)
    browser.wait("return document.querySelector('#hosts')")
    browser.one("#plan-leaves button").send_keys(Keys.ENTER)
    assert browser.text("#leaf-name").startswith("model/")
    body.send_keys("4", "/")
    browser.one("#search").send_keys("bias", Keys.ENTER, Keys.ENTER)
    assert browser.text("#leaf-name") == "model/bias"
    browser.one("#shards tbody tr").send_keys("")  # It takes the focus.
    assert rectangles(browser, ".highlit") == [(0, 0, 16, 1)]


def test_a_search_without_a_hit_says_so(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.one("#search").send_keys("no such leaf")
    assert "No leaf has “no such leaf”" in browser.text("#nothing")
    browser.picture("no-hits")
    browser.one("#search").send_keys(Keys.ESCAPE)
    assert not browser.one("#nothing").is_displayed()


def test_a_position_is_typed(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.choose("cube")
    script = "return [...document.querySelectorAll('.shard')].map((s) => s.dataset.devices)"
    typed = browser.one("input[type=number]")
    for text, devices in (("11", ["3", "7"]), ("99", ["3", "7"]), ("4", ["1", "5"])):
        typed.clear()
        typed.send_keys(text)
        assert browser.run(script) == devices
    assert browser.one("input[type=range]").get_attribute("value") == "4"


def test_another_checkpoint_is_typed(browser: Browser, url: str, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "other", {"model": {"scalar": np.float32(4)}, "new": np.ones(3)})
    browser.open(url)
    browser.one("#tab-diff").click()
    assert serious(browser) == []
    other = browser.one("#diff-other")
    other.send_keys(str(tmp_path / "nowhere"), Keys.ENTER)
    browser.wait("return document.querySelector('#diff .problem')")
    assert "nowhere" in browser.text("#diff .problem")
    [refused] = browser.problems()
    assert "400 (Bad Request)" in refused
    other.clear()
    other.send_keys(str(tmp_path / "other"), Keys.ENTER)
    browser.wait("return document.querySelector('#differences')")
    assert browser.run("return document.querySelectorAll('#differences tbody tr').length") == 9
    assert serious(browser) == []
    browser.picture("typed-diff")
    browser.one("#differences button").click()
    assert browser.text("#leaf-name").startswith("model/")


def test_hostile_names_stay_texts(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.choose("onerror")
    assert "<img src=x onerror=alert(1)>" in browser.text("#leaf-name")
    assert "</script><script>alert(2)</script>" in browser.text("#value")
    browser.one("#tab-metadata").click()
    assert not browser.all("img")
    assert len(browser.all("script")) == 2
    assert "onerror" in browser.text("#panel-metadata")


def test_both_colour_schemes(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.choose("wte")
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    dark(browser, True)
    browser.picture("dark")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != light
