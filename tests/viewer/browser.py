"""Chromium without a window, and what tests ask of a page in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "reports" / "screenshots"
AXE = ROOT / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
SECONDS = 20


class Browser:
    """A page in Chromium.

    Args:
        driver: what drives it.
    """

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str | Path) -> None:
        """Go to a URL or a file; the page has drawn when this returns."""
        self.driver.get(url.as_uri() if isinstance(url, Path) else url)
        self.wait("return performance.getEntriesByName('drawn').length === 1")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """What a script returns, once it returns something true."""
        return WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(
            lambda _: self.run(script)
        )

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return cast(Any, self.driver.execute_script(script, *arguments))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def choose(self, name: str) -> None:
        """Type a leaf's name and click on the row that is found."""
        search = self.one("#search")
        search.clear()
        search.send_keys(name)
        self.one("[data-leaf]").click()

    def problems(self) -> list[str]:
        """What the console has logged since the last time: errors and warnings."""
        entries = cast(list[dict[str, str]], self.driver.get_log("browser"))
        return [entry["message"] for entry in entries]

    def picture(self, name: str) -> Path:
        """Keep a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


def dark(browser: Browser, is_dark: bool) -> None:
    """Have pages believe that one prefers dark colours, or light ones."""
    feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@contextmanager
def chromium(width: int = 1360, height: int = 860) -> Iterator[Browser]:
    """A Chromium of Debian's packages; nothing is downloaded.

    Raises:
        FileNotFoundError: it is not installed.
    """
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        raise FileNotFoundError("install Debian's packages chromium and chromium-driver")
    options = ChromeOptions()
    options.binary_location = str(programs[0])
    for argument in ("--headless=new", "--disable-gpu", f"--window-size={width},{height}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses a sandbox to root.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(programs[1]))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def rectangles(browser: Browser, layer: str) -> list[tuple[float, ...]]:
    """(x, y, width, height) in elements of the rectangles of a layer of the picture."""
    script = """
        const read = (each) => ["x", "y", "width", "height"].map((n) => +each.getAttribute(n));
        return JSON.stringify([...document.querySelectorAll(arguments[0])].map(read));
    """
    return [tuple(each) for each in json.loads(browser.run(script, f"#figure {layer}"))]


def serious(browser: Browser) -> list[str]:
    """What axe-core finds in the page as it stands, of serious and critical impact."""
    browser.run(AXE.read_text(encoding="utf-8"))
    browser.driver.set_script_timeout(60)
    script = """
        const done = arguments[0];
        const failed = (error) => done([{ id: String(error), impact: "critical", nodes: [] }]);
        axe.run().then((results) => done(results.violations), failed);
    """
    found = browser.driver.execute_async_script(script)
    return [
        f"{each['id']}: {each['nodes'][0]['html'] if each['nodes'] else ''}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
