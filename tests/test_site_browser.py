"""The documentation site in Chromium, opened as files."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pages_in_browser import NEEDED, browser, chromium, resize
from test_site import build

wait = pytest.importorskip("selenium.webdriver.support.wait", reason="selenium is not installed")
__all__ = ["browser", "chromium"]
pytestmark = NEEDED


def test_a_page_that_is_opened_as_a_file_can_be_searched_and_follows_the_system(browser: Any, tmp_path: Path) -> None:
    """Without the script that stands in for a worker, the search finds nothing."""
    assert build(tmp_path, "# Title\n\nText about barriers.\n").returncode == 0
    site = tmp_path / "out/site"

    resize(browser, 1280)

    def found() -> str:
        """What the search says, and nothing where it can not be opened."""
        browser.get((site / "index.html").as_uri())
        browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
        box, shown = (browser.find_element("css selector", f".md-search{x}") for x in ("__input", "-result__meta"))
        with suppress(wait.TimeoutException):
            wait.WebDriverWait(browser, 5, 0.05).until(lambda _: box.is_displayed())
            box.send_keys("barriers")
            wait.WebDriverWait(browser, 5, 0.05).until(lambda _: "1 matching document" in shown.text)
        return str(shown.text)

    assert found() == "1 matching document"
    for scheme, shown in (("light", "default"), ("dark", "slate"), ("light", "default")):  # as the system changes it
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        browser.get((site / "index.html").as_uri())
        assert browser.find_element("css selector", "body").get_attribute("data-md-color-scheme") == shown
    (site / "iframe-worker.js").write_text("")
    assert "matching" not in found()
