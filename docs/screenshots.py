"""The pictures of these pages, from the folder of the demo and a result of `path`:

    isobasin demo
    isobasin path isobasin-demo/A isobasin-demo/B --data digits --align --explain --plane 15 -o explain.json
    python docs/screenshots.py isobasin-demo explain.json docs/img

Needs selenium, Chromium and its driver for the report.
"""

import base64
import shutil
import sys
from pathlib import Path

from selenium import webdriver

from isobasin.report.figures import plot_explain, plot_path, plot_plane

WIDTH, HEIGHT = 960, 1080  # the beginning of the page


def main(demo: Path, explained: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plot_path(demo / "learned.json", folder / "path.png")
    plot_explain(explained, folder / "explain.png")
    plot_plane(explained, folder / "plane.png")
    (folder / "report.png").write_bytes(screenshot(demo / "report.html"))


def screenshot(page: Path) -> bytes:
    """The beginning of the page, in light colours."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    finally:
        browser.quit()
    return base64.b64decode(taken["data"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
