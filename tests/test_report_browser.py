"""The report in a real browser: it draws, its controls work, it makes no request, and runs no script of its input."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobasin.report import layout, page
from pages_in_browser import (
    FAINT,
    NEEDED,
    ActionChains,
    Keys,
    browser,
    chromium,
    complaints,
    count,
    find,
    requests,
    resize,
    show,
    show_text,
)  # fmt: skip
from path_documents import Document, document, minimal, with_hole

__all__ = ["browser", "chromium"]
pytestmark = NEEDED

HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
)


def readout(browser: Any) -> str:
    return find(browser, ".readout").text


def scroll_width(browser: Any) -> int:
    return browser.execute_script("return document.documentElement.scrollWidth")


def test_it_draws_without_a_complaint_or_a_request(browser: Any, tmp_path: Path) -> None:
    show(
        browser, tmp_path, document(3), with_hole(document(kind="lm")), minimal(), document(aligned=None, n_points=101)
    )
    assert count(browser, "figure.curve svg") == 6
    assert count(browser, "svg .curve-line.naive") == 6
    assert count(browser, "svg .curve-line.aligned") == 4
    assert count(browser, "svg .hole") == 1
    assert count(browser, "svg.plane") == 2
    assert all(path.get_attribute("d") for path in browser.find_elements("css selector", ".curve-line"))
    assert "NaN" not in browser.page_source
    assert complaints(browser) == []
    assert requests(browser) == []


def test_the_switch_hides_and_shows_a_curve(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    button, before = find(browser, "button[data-path=naive]"), find(browser, ".curve-line.aligned").get_attribute("d")
    assert button.get_attribute("aria-pressed") == "true"
    assert count(browser, ".curve-line.naive") == 1
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert count(browser, "[data-line=naive]") == 0
    assert count(browser, ".curve-line.aligned") == 1
    assert find(browser, ".curve-line.aligned").get_attribute("d") != before, "what is left is magnified"
    assert "naive" not in readout(browser)
    find(browser, "button[data-path=aligned]").click()
    assert count(browser, ".curve-line") == 0
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert count(browser, ".curve-line.naive") == 1
    assert complaints(browser) == []


def test_pointing_shows_the_numbers(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    canvas = find(browser, ".canvas")
    assert readout(browser).startswith("λ = 0.5"), "the barrier's point at first"
    width = canvas.size["width"]
    ActionChains(browser).move_to_element_with_offset(canvas, -width // 2 + 61, 0).perform()
    assert "λ = 0\n" in readout(browser)
    assert "naive: loss 0.21, accuracy 94.1 %" in readout(browser)
    ActionChains(browser).move_to_element_with_offset(canvas, width // 2 - 21, 0).perform()
    assert "λ = 1\n" in readout(browser)
    assert "aligned: loss 0.19, accuracy 94.7 %" in readout(browser)


def test_without_a_barrier_the_middle_is_shown_at_first(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document(naive=-0.5, aligned=-0.4))
    assert readout(browser).startswith("λ = 0.5")
    assert count(browser, ".bracket") == 0
    cells = [cell.text for cell in browser.find_elements("css selector", ".numbers tr.naive:nth-child(2) td")]
    assert cells[-2:] == ["0.000", "–"], "no barrier is nowhere"


def test_touch_and_keys_show_the_numbers(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    canvas = find(browser, ".canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", canvas)
    touch = {"x": box["left"] + 60, "y": box["top"] + 100}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [touch]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert "λ = 0\n" in readout(browser)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "λ = 0.0417" in readout(browser)
    assert canvas.get_attribute("aria-valuenow") == "1"
    canvas.send_keys(Keys.END)
    assert "λ = 1\n" in readout(browser)
    assert "λ = 1; naive: loss 0.19" in canvas.get_attribute("aria-valuetext")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "λ = 1\n" in readout(browser), "there is nothing beyond"


def test_the_metric_can_be_chosen(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document(kind="lm", naive=5.5))
    assert count(browser, ".bracket") == 2
    drawn = {find(browser, ".canvas").get_attribute("innerHTML")}
    for metric in ("accuracy", "perplexity", "bits_per_byte"):
        find(browser, f"option[value={metric}]").click()
        drawn.add(find(browser, ".canvas").get_attribute("innerHTML"))
    assert len(drawn) == 4
    assert count(browser, ".bracket") == 0, "bits per byte have no barrier"
    assert "bits per byte" in readout(browser)
    assert complaints(browser) == []


def background(browser: Any) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_light_and_dark_can_be_switched_and_follow_the_system(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    light, button = background(browser), find(browser, "#theme")
    assert button.text == "Dark"
    button.click()
    dark = background(browser)
    assert dark != light
    assert button.text == "Light"
    button.click()
    assert background(browser) == light
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.refresh()
    assert background(browser) == dark
    find(browser, "#theme").click()
    assert background(browser) == light


def test_print_is_light_and_without_controls(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    light = background(browser)
    find(browser, "#theme").click()
    assert find(browser, ".controls").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert background(browser) == light
    assert not find(browser, ".controls").is_displayed()
    assert find(browser, "figure.curve svg").is_displayed()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser: Any, tmp_path: Path, theme: str) -> None:
    show(browser, tmp_path, document(), with_hole(document(aligned=0.9)), document(aligned=0.9))
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.execute_script(FAINT) == []
    browser.execute_script("document.querySelector('h1').style.color = '#777'")
    assert len(browser.execute_script(FAINT)) == 1, "the check finds nothing"


def test_a_phone_needs_no_sideways_scrolling(browser: Any, tmp_path: Path) -> None:
    resize(browser, 360)
    wide = with_hole(document())
    changes = wide["alignment"]["A-B"]["per_layer"]
    changes += [{**changes[0], "space": f"{i} {'space' * 4}"} for i in range(9)]
    show(browser, tmp_path, document(3, kind="lm", names=("n" * 300, "seed1", "a b " * 80)), wide)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert scroll_width(browser) <= 360
    assert find(browser, "figure.curve svg").size["width"] > 280
    browser.execute_script("document.querySelector('main').append(document.createElement('hr'))")
    browser.execute_script("document.querySelector('main > hr').style.width = '500px'")
    assert scroll_width(browser) > 360, "the check finds nothing"


def test_the_result_and_the_command_can_be_taken_along(browser: Any, tmp_path: Path) -> None:
    found = document()
    show(browser, tmp_path, found)
    find(browser, "summary").click()
    assert json.loads(find(browser, ".json").get_attribute("textContent")) == found
    assert find(browser, ".download").get_attribute("href").startswith("blob:")
    find(browser, ".copy").click()
    assert browser.execute_script("return getSelection().toString()") == found["provenance"]["command"]
    assert requests(browser) == []


def hostile(name: str) -> Document:
    found = document(names=(name, name, name))
    found["models"]["A"] |= {"family": name, name: name}
    found["alignment"]["A-B"] |= {"scope": name, "matcher": name}
    found["alignment"]["A-B"]["per_layer"][0]["space"] = name
    found["explain"]["A-B"]["naive"]["components"][0]["name"] = name
    found["plane"]["A-B"]["points"][name] = [0.2, 0.3]
    found["task"]["name"] = found["provenance"]["command"] = name
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_runs_nothing(browser: Any, tmp_path: Path, name: str) -> None:
    show(browser, tmp_path, hostile(name))
    assert browser.execute_script("return window.pwned") is None
    assert count(browser, "img") == 0
    assert count(browser, "script") == 3
    assert find(browser, ".command code").text == name
    assert complaints(browser) == []
    assert requests(browser) == []


def test_the_same_name_runs_where_it_is_not_escaped(browser: Any, tmp_path: Path) -> None:
    text = page.render([page.read_result(document())])
    unguarded = text.replace("Content-Security-Policy", "x-nothing")
    show_text(browser, tmp_path, unguarded.replace("<main>", f"<main>{HOSTILE[0]}"))
    assert browser.execute_script("return window.pwned") == 1
    show_text(browser, tmp_path, text.replace("<main>", f"<main>{HOSTILE[0]}"))
    assert browser.execute_script("return window.pwned") is None, "the policy stops what escaping would not"
    assert complaints(browser) != []


def test_a_broken_script_is_noticed(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = layout.asset
    monkeypatch.setattr(layout, "asset", lambda name: whole(name).replace("theme(document", "missing(document"))
    show(browser, tmp_path, document())
    assert any("missing is not defined" in message for message in complaints(browser))
    assert count(browser, "figure.curve svg") == 0
    assert find(browser, "table.numbers").is_displayed(), "the numbers do not need the script"


def test_a_request_is_noticed(browser: Any, tmp_path: Path) -> None:
    show_text(browser, tmp_path, "<!doctype html><link rel=stylesheet href=other.css>")
    assert [url.rpartition("/")[2] for url in requests(browser)] == ["other.css"]
