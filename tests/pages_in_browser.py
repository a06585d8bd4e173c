"""A page in Chromium, for tests: the browser, what it asks for and complains about, text that can hardly be read."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobasin.report import write_report
from path_documents import Document

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver import ActionChains as ActionChains  # noqa: E402
from selenium.webdriver import Keys as Keys  # noqa: E402

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(not BINARY or not DRIVER, reason="no Chromium with chromedriver is installed")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")

# Text whose colour stands out from what is behind it by less than 4.5 : 1; the halo of the plane's labels is left out.
FAINT = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const light = (colour) => { const [r, g, b] = parts(colour).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const back = (node) => getComputedStyle(node).backgroundColor;
const behind = (node) => parts(back(node))[3] === 0 ? behind(node.parentElement) : back(node);
const front = (node) => getComputedStyle(node)[node.namespaceURI.endsWith("svg") ? "fill" : "color"];
const speaks = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
return [...document.querySelectorAll("body *")]
  .filter((node) => speaks(node) && node.checkVisibility() && !node.closest(".plane, script"))
  .map((node) => [ratio(light(front(node)), light(behind(node))), node.textContent.slice(0, 40)])
  .filter(([found]) => found < 4.5);
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Any:
    """The shared browser, as new: a wide window, no emulation, empty logs."""
    return start(chromium, 1000)


def start(chromium: Any, width: int) -> Any:
    """No page, a window of this width, no emulation, empty logs."""
    chromium.get("about:blank")
    resize(chromium, width)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    return chromium


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def show(browser: Any, folder: Path, *found: Document) -> None:
    """Open the report of these results, from a file."""
    browser.get(write_report(found, folder / "report.html", force=True).as_uri())


def show_text(browser: Any, folder: Path, text: str) -> None:
    file = folder / "page.html"
    file.write_text(text, "utf-8")
    browser.get(file.as_uri())


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Any) -> list[str]:
    """The addresses the page asked for, itself and data inside it left out."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("data:", "about:")) and not url.endswith(".html")]


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))
