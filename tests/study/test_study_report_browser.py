"""The study's page in a real browser: nothing is asked for, nothing is cut off, and it can be read by night."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_documents import Written, full_study

from isobasin.report.study_page import render, write_study_report
from isobasin.study.results import read_study

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not BINARY or not DRIVER, reason="no Chromium with chromedriver is installed")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")

# Text whose colour stands out from what is behind it by less than 4.5 : 1.
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
  .filter((node) => speaks(node) && node.checkVisibility() && !node.closest("script"))
  .map((node) => [ratio(light(front(node)), light(behind(node))), node.textContent.slice(0, 40)])
  .filter(([found]) => found < 4.5);
"""
# Text of a chart that sticks out of its picture.
CUT_OFF = """
return [...document.querySelectorAll("svg.panel text")].filter((node) => {
  const box = node.getBoundingClientRect(), frame = node.ownerSVGElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
}).map((node) => node.textContent);
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isobasin.report.study_page.write_figures", lambda *_: [])  # takes long
        return write_study_report(full_study(tmp_path_factory.mktemp("study")))


@pytest.fixture
def browser(chromium: Any, page: Path) -> Any:
    """The shared browser with the page in a wide window, its logs empty before."""
    resize(chromium, 1100)
    chromium.get("about:blank")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    chromium.get(page.as_uri())
    return chromium


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("data:", "about:")) and not url.endswith(".html")]


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))


def test_it_shows_all_without_a_complaint_or_a_request(browser: Any) -> None:
    assert count(browser, "#curves details.curves") == 7
    assert count(browser, "#curves svg.panel") == 7 * 6, "three pairs, two metrics"
    assert count(browser, "#curves p.status[id]") == 2, "what is not done has a place too"
    assert count(browser, "#heads svg.panel") == 6
    assert count(browser, "#heads svg .s-thin") == 6 * 23
    assert count(browser, "td.status.failed") == 1
    assert count(browser, "td.status.not-filled") == 1
    links = [
        a.get_attribute("href").partition("#")[2] for a in browser.find_elements("css selector", "main a[href*='#']")
    ]
    missing = "return arguments[0].filter((id) => id && !document.getElementById(id))"
    assert browser.execute_script(missing, links) == []
    assert browser.execute_script(missing, ["nowhere"]) == ["nowhere"], "the check finds nothing"
    assert complaints(browser) == []
    assert requests(browser) == []


def test_no_number_of_a_chart_is_cut_off(browser: Any) -> None:
    assert browser.execute_script(CUT_OFF) == []
    browser.execute_script("document.querySelector('svg.panel text').setAttribute('x', '-20')")
    assert len(browser.execute_script(CUT_OFF)) == 1, "the check finds nothing"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser: Any, theme: str) -> None:
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.execute_script(FAINT) == []
    browser.execute_script("document.querySelector('h1').style.color = '#777'")
    assert len(browser.execute_script(FAINT)) == 1, "the check finds nothing"


def test_a_phone_needs_no_sideways_scrolling(browser: Any) -> None:
    resize(browser, 360)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    width = "return document.documentElement.scrollWidth"
    assert browser.execute_script(width) <= 360
    assert browser.find_element("css selector", "svg.panel").size["width"] > 280
    browser.execute_script("document.querySelector('svg.panel').style.width = '500px'")
    assert browser.execute_script(width) > 360, "the check finds nothing"


def test_rows_can_be_taken_along(browser: Any, page: Path) -> None:
    browser.execute_script("document.querySelector('#runs details').open = true")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    shown = browser.execute_script("return document.querySelector('.json').textContent")
    assert json.loads(shown) == json.loads((page.parent / "summary.json").read_text("utf-8"))["cells"]


def test_a_hostile_name_runs_nothing(chromium: Any, tmp_path: Path) -> None:
    name = "</script><img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
    made = Written(tmp_path / "study")
    made.cell(dataset=name, positions=name, shares={name: 0.1, "weights": 0.2}, ablations=("heads", "control"))
    made.cell(model=name, scope=name, status="failed", why=name)
    place = tmp_path / "page.html"
    text = render(read_study(made.close(name)))
    place.write_text(text, "utf-8")
    chromium.get(place.as_uri())
    assert chromium.execute_script("return window.pwned") is None
    assert count(chromium, "img") == 0
    place.write_text(text.replace("Content-Security-Policy", "x-none").replace("<main>", f"<main>{name[9:]}"), "utf-8")
    chromium.get(place.as_uri())
    assert chromium.execute_script("return window.pwned") == 1, "the check finds nothing"
