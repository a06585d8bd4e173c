"""The study's page in a real browser: nothing is asked for, nothing is cut off, and it can be read by night."""

import json
from pathlib import Path
from typing import Any

import pytest
from study_documents import Written, full_study

from isobasin.report.study_page import render, write_study_report
from isobasin.study.results import read_study
from pages_in_browser import FAINT, NEEDED, chromium, complaints, count, requests, resize, start

__all__ = ["chromium"]
pytestmark = NEEDED

# Text of a chart that sticks out of its picture.
CUT_OFF = """
return [...document.querySelectorAll("svg.panel text")].filter((node) => {
  const box = node.getBoundingClientRect(), frame = node.ownerSVGElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
}).map((node) => node.textContent);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isobasin.report.study_page.write_figures", lambda *_: [])  # takes long
        return write_study_report(full_study(tmp_path_factory.mktemp("study")))


@pytest.fixture
def browser(chromium: Any, page: Path) -> Any:
    """The shared browser with the page in a wide window, its logs empty before."""
    start(chromium, 1100)
    chromium.get(page.as_uri())
    return chromium


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


def unfold(browser: Any) -> None:
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")


def test_an_overview_comes_first_and_the_rest_is_folded(browser: Any) -> None:
    first = browser.execute_script("return document.querySelector('main > :nth-child(3)').className")
    assert first == "whole", "after the title and the verdict"
    done = {"First attention layer": 4, "Entire model": 3}
    rows = [row.text.splitlines() for row in browser.find_elements("css selector", ".overview tr")]
    heads = [row[0] for row in rows if row[0] in done]
    assert heads == list(done), "scopes without a cell that is done have no strip"
    assert count(browser, ".overview circle.s-naive") == 7
    assert count(browser, ".overview circle.s-learned.filled") == 6, "all but the Llama"
    assert count(browser, ".overview circle.s-learned.hollow") == 1
    assert [row[-1] for row in rows if row[0] == "learned"] == ["4 of 4", "2 of 3"]
    assert count(browser, "details.fold") == count(browser, "main > section:not(.terms)") > 8
    assert count(browser, "details[open]") == 0
    for width, most in ((1280, 2600), (390, 3700)):
        resize(browser, width)
        tall = browser.execute_script("return document.documentElement.scrollHeight")
        assert tall < most
        unfold(browser)
        assert browser.execute_script("return document.documentElement.scrollHeight") > 2 * most, "nothing is folded"
        browser.refresh()


def test_sections_open_by_button_and_by_link(browser: Any) -> None:
    button = browser.find_element("css selector", "#unfold")
    button.click()
    assert count(browser, "details.fold[open]") == count(browser, "details.fold")
    assert button.text == "Close all sections"
    button.click()
    assert count(browser, "details.fold[open]") == 0
    browser.find_element("css selector", "details.fold summary").click()
    link = browser.find_element("css selector", "#scope-first-attention td ~ td, #scope-first-attention tbody a")
    assert count(browser, "details.curves[open]") == 0
    link.click()
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert count(browser, "#curves details.fold[open] details.curves[open]") == 1, "the cell and what is around it"


def test_no_table_needs_sideways_scrolling(browser: Any) -> None:
    wide = "return [...document.querySelectorAll('.scroll')].filter((n) => n.scrollWidth > n.clientWidth + 1).length"
    for width in (1280, 700, 390, 360):
        resize(browser, width)
        unfold(browser)
        assert browser.execute_script(wide) == 0, width
    shown = "return getComputedStyle(document.querySelector('table.cells td:nth-child(6)'), '::before').content"
    assert browser.execute_script(shown) == '"weights"', "the head of the column stands before the number"
    browser.execute_script("document.querySelector('table.cells').classList.remove('labelled')")
    assert browser.execute_script(wide) == 1, "the check finds nothing"


def test_figures_can_be_saved(browser: Any) -> None:
    unfold(browser)
    kept = (
        "const [figure, done] = arguments, make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { URL.createObjectURL = make; blob.text().then(done); return make(blob); };"
        "figure.querySelector('[data-save=%s]').click();"
    )
    overview = browser.find_element("css selector", "figure.whole")
    table = browser.execute_async_script(kept % "csv", overview).splitlines()
    assert table[0] == "scope,cell,size,path,mean barrier,share,pairs connected,pairs"
    assert len(table) == 1 + 7 * 3, "seven cells, three paths"
    picture = browser.execute_async_script(kept % "svg", overview)
    assert picture.count("<circle") == 21
    curves = browser.find_element("css selector", "#curves figure")
    table = browser.execute_async_script(kept % "csv", curves).splitlines()
    assert table[0] == "seeds,lambda,naive,weights,learned"
    assert len(table) == 1 + 3 * 25
    picture = browser.execute_async_script(kept % "svg", curves)
    assert "learned" in picture, "the key goes along"
    assert count(browser, "figure:not([data-rows])") == 0


def test_no_number_of_a_chart_is_cut_off(browser: Any) -> None:
    unfold(browser)
    assert browser.execute_script(CUT_OFF) == []
    browser.execute_script("document.querySelector('svg.panel text').setAttribute('x', '-20')")
    assert len(browser.execute_script(CUT_OFF)) == 1, "the check finds nothing"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser: Any, theme: str) -> None:
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    unfold(browser)
    assert browser.execute_script(FAINT) == []
    browser.execute_script("document.querySelector('h1').style.color = '#777'")
    assert len(browser.execute_script(FAINT)) == 1, "the check finds nothing"


def test_a_phone_needs_no_sideways_scrolling(browser: Any) -> None:
    resize(browser, 360)
    unfold(browser)
    width = "return document.documentElement.scrollWidth"
    assert browser.execute_script(width) <= 360
    assert browser.find_element("css selector", "svg.panel").size["width"] > 280
    browser.execute_script("document.querySelector('svg.panel').style.width = '500px'")
    assert browser.execute_script(width) > 360, "the check finds nothing"


def test_rows_can_be_taken_along(browser: Any, page: Path) -> None:
    unfold(browser)
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
