"""Pictures of the first part of a report for these pages: light, dark, and as on a phone.

    python docs/screenshots.py report.html docs/img

Needs selenium, Chromium and its driver.
"""

import base64
import shutil
import sys
from pathlib import Path

from selenium import webdriver

HEIGHT = 1500
LOOKS = {"report": (960, "light"), "report-dark": (960, "dark"), "report-phone": (390, "light")}


def main(page: Path, folder: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    folder.mkdir(parents=True, exist_ok=True)
    for name, (width, theme) in LOOKS.items():
        feature = {"name": "prefers-color-scheme", "value": theme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        part = {"x": 0, "y": 0, "width": width, "height": HEIGHT, "scale": 1}
        asked = {"format": "png", "captureBeyondViewport": True, "clip": part}
        taken = browser.execute_cdp_cmd("Page.captureScreenshot", asked)
        (folder / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
    browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs/img"))
