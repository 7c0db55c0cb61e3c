"""The pictures of docs/how-to/view.md, of a small model; they stay in build/reports/screenshots.

Who changes what the page looks like copies them to docs/images.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.viewer.browser import ROOT, Browser, dark
from xckpt.policies import Best, EverySteps, Latest
from xckpt.viewer.server import PageServer

pytestmark = pytest.mark.browser

NAMES = ("view-leaf", "view-plan", "view-run", "view-overview", "view-diff")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    folder = tmp_path_factory.mktemp("pictures")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    rng = np.random.default_rng(0)

    def sharded(shape: tuple[int, ...], *spec: str | None) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    blocks = {
        f"block_{n}": {
            "attention": {"qkv": sharded((256, 768), "data", "model")},
            "mlp": {"up": sharded((256, 1024), None, "model"), "bias": sharded((1024,), "model")},
            "norm": {"scale": sharded((256,))},
        }
        for n in range(3)
    }
    state = {"params": {"wte": sharded((512, 256), "data", "model"), **blocks}, "step": 500}
    options = xckpt.SaveOptions(chunk_bytes=1 << 15)
    xckpt.save(folder / "ckpt", state, metadata={"data": "v2"}, options=options)
    later = {**blocks, "block_3": blocks["block_2"]}
    del later["block_0"]
    later["block_1"] = {**blocks["block_1"], "norm": {"scale": sharded((256,))}}
    state = {"params": {"wte": sharded((512, 256), "data", "model"), **later}, "step": 900}
    xckpt.save(folder / "later", state, metadata={"data": "v3"}, options=options)
    keep = [Latest(2), Best("loss", 1, "min"), EverySteps(300)]
    with xckpt.CheckpointManager(folder / "run", save=[EverySteps(1)], keep=keep) as manager:
        for step in range(100, 1100, 100):
            loss = 2.0 + 3.0 * np.exp(-step / 300) + 0.1 * np.cos(step)
            small = {"w": np.full(100_000, step), "frozen": np.zeros(100_000)}
            manager.save(step, small, metrics={"loss": float(loss)})
    return folder


@contextmanager
def served(path: str, diff: str | None = None) -> Iterator[str]:
    with PageServer(xckpt.view(path, diff=diff)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def test_the_pictures_of_the_page(
    browser: Browser, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    browser.driver.set_window_size(1280, 800)
    with served("ckpt") as url:
        browser.open(url)
        browser.picture(NAMES[3])
        browser.choose("wte")
        search = browser.one("#search")
        search.clear()
        search.send_keys(" ")
        browser.picture(NAMES[0])
        browser.one("#tab-plan").click()
        text = browser.one("#plan-text")
        text.clear()
        text.send_keys("mesh model=3\n*/up: -, model\n*: model")
        browser.one("#plan-it").click()
        browser.wait("return document.querySelector('#hosts')")
        browser.picture(NAMES[1])
    with served("ckpt", diff="later") as url:
        browser.open(url)
        browser.one("#tab-diff").click()
        browser.wait("return document.querySelector('#differences')")
        browser.picture(NAMES[4])
    with served("run") as url:
        dark(browser, True)
        browser.open(url)
        browser.picture(NAMES[2])
    browser.driver.set_window_size(1360, 860)
    for name in NAMES:
        assert (ROOT / "docs" / "images" / f"{name}.png").stat().st_size < 200_000
