"""The report in a real browser: it draws, its controls work, it asks for nothing and runs nothing of a stranger's."""

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobasin.report import layout, page, write_report
from path_documents import Document, document, minimal, with_hole

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver import ActionChains, Keys  # noqa: E402

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not BINARY or not DRIVER, reason="no Chromium with chromedriver is installed")

HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
)
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


# Pairs of texts of one chart that cover each other.
OVERPRINTED = """
const found = [];
for (const chart of document.querySelectorAll(".canvas svg")) {
  const boxes = [...chart.querySelectorAll("text")].map((node) => [node.getBoundingClientRect(), node.textContent]);
  boxes.forEach(([a, first], i) => boxes.slice(i + 1).forEach(([b, second]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3) found.push([first, second]);
  }));
}
return found;
"""
# Points of curves and brackets under the labels of barriers, and labels outside their picture.
UNDER_LABELS = """
const found = [];
for (const chart of document.querySelectorAll(".canvas svg")) {
  const frame = chart.getBoundingClientRect(), matrix = chart.getScreenCTM();
  const points = [...chart.querySelectorAll(".curve-line, .bracket")].flatMap((shape) =>
    Array.from({ length: 300 }, (_, i) => shape.getPointAtLength(i / 299 * shape.getTotalLength()).matrixTransform(matrix)));
  for (const node of chart.querySelectorAll("text.barrier")) {
    const box = node.getBoundingClientRect();
    if (box.left < frame.left || box.right > frame.right) found.push(["outside", node.textContent]);
    if (points.some(({ x, y }) => x > box.left && x < box.right && y > box.top + 2 && y < box.bottom - 2)) found.push(["curve", node.textContent]);
  }
}
return found;
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
    chromium.get("about:blank")
    resize(chromium, 1000)
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


LONG = "organisation/model-7b-instruct-fine-tuned-on-everything"


def several_ways(*heights: float) -> list[Document]:
    """One pair that was aligned by several matchers."""
    found = [document(naive=1.2, aligned=height) for height in heights]
    for each, matcher in zip(found, ("weights", "learned", "activations")):
        each["alignment"]["A-B"]["matcher"] = matcher
    return found


@pytest.mark.parametrize("width", [390, 1000])
def test_no_label_covers_another(browser: Any, tmp_path: Path, width: int) -> None:
    resize(browser, width)
    names = (f"{LONG}-a", f"{LONG}-b", f"{LONG}-c")
    cases = [document(naive=n, aligned=a, names=names) for n, a in ((1.2, 0.6), (1.2, 1.2), (1.2, 1e-3), (1e-3, 2e-4))]
    show(browser, tmp_path, *cases, *several_ways(0.5, 0.1))
    assert browser.execute_script(OVERPRINTED) == []
    assert browser.execute_script(UNDER_LABELS) == []
    show(browser, tmp_path, *several_ways(1.19, 1.18, 1.17))
    assert browser.execute_script(OVERPRINTED) == [], "four curves that are almost one"
    assert count(browser, "figure[data-name=A-B-all] text.barrier") == 4
    onto_the_curve = "const p = document.querySelector('.curve-line').getPointAtLength(90);" + (
        "document.querySelectorAll('text.barrier').forEach((n) => { n.setAttribute('x', p.x - 5); n.setAttribute('y', p.y + 5); })"
    )
    browser.execute_script(onto_the_curve)
    assert browser.execute_script(OVERPRINTED) != [], "the check finds nothing"
    assert browser.execute_script(UNDER_LABELS) != [], "the check finds nothing"


def test_axes_say_what_they_are(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document(kind="lm"))
    titles = [node.text for node in browser.find_elements("css selector", ".canvas .axis-title")]
    assert titles == ["Loss (nats)", "λ, the share of B in (1 − λ)·A + λ·B"]
    find(browser, "option[value=bits_per_byte]").click()
    assert find(browser, ".canvas .axis-title").text == "Bits per byte (bits)"
    assert find(browser, ".surface .axes").text.startswith("horizontal: along A to B")


def test_several_alignments_of_one_pair_have_one_picture(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, *several_ways(0.5, 0.1))
    together = find(browser, "figure[data-name=A-B-all]")
    assert [button.text for button in together.find_elements("css selector", "[data-path]")] == [
        "naive", "weights", "learned",
    ]  # fmt: skip
    assert len(together.find_elements("css selector", ".curve-line")) == 3
    colours = browser.execute_script(
        "return [...arguments[0].querySelectorAll('.curve-line')].map((line) => getComputedStyle(line).stroke)", together
    )
    assert len(set(colours)) == 3
    show(browser, tmp_path, document(), document(naive=0.9))
    assert count(browser, "figure[data-name=A-B-all]") == 0, "another naive path is another pair"


def tip(browser: Any) -> str:
    return find(browser, "#tip").text


def test_terms_are_explained_by_pointer_key_and_touch(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, document())
    word = find(browser, ".sentence .term[href='#term-naive']")
    assert not find(browser, "#tip").is_displayed()
    ActionChains(browser).move_to_element(word).perform()
    assert tip(browser).startswith("Without alignment")
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not find(browser, "#tip").is_displayed()
    ActionChains(browser).move_to_element(find(browser, "h1")).perform()
    for _ in range(9):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if tip(browser).startswith("The unit of the loss"):
            break
    assert tip(browser).startswith("The unit of the loss"), "nats can be reached by the key Tab"
    assert browser.switch_to.active_element.get_attribute("aria-describedby") == "term-nats"
    lam = find(browser, "figcaption .term[href='#term-lambda']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", lam)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", lam)
    touch = {"x": box["left"] + box["width"] / 2, "y": box["top"] + box["height"] / 2}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [touch]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    browser.execute_async_script("setTimeout(arguments[0], 400)")
    assert tip(browser).startswith("A point of the straight line")
    terms = {node.get_attribute("id") for node in browser.find_elements("css selector", ".terms dd")}
    assert terms >= {"term-lambda", "term-naive", "term-nats", "term-barrier"}, "readers without scripts have a list"
    axis = find(browser, ".canvas [data-term=term-lambda]")
    ActionChains(browser).move_to_element(axis).perform()
    assert tip(browser).startswith("A point of the straight line")
    assert complaints(browser) == []


# The downloads of a figure: what the page would save, as text or as the size and the head of a PNG.
SAVED = """
const [figure, kind, done] = arguments, make = URL.createObjectURL, click = HTMLAnchorElement.prototype.click;
let blob = null;
URL.createObjectURL = (made) => { blob = made; return make(made); };
HTMLAnchorElement.prototype.click = async function () {
  URL.createObjectURL = make;
  HTMLAnchorElement.prototype.click = click;
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (kind !== "png") { done([this.download, await blob.text()]); return; }
  const image = await createImageBitmap(blob), canvas = new OffscreenCanvas(image.width, image.height), at = canvas.getContext("2d");
  at.drawImage(image, 0, 0);
  const data = at.getImageData(0, 0, image.width, image.height).data, colours = new Set();
  for (let i = 0; i < data.length; i += 4) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  done([this.download, String.fromCharCode(...bytes.slice(1, 4)), image.width, colours.size]);
};
figure.querySelector(`[data-save=${kind}]`).click();
"""


def saved(browser: Any, figure: str, kind: str) -> list[Any]:
    return browser.execute_async_script(SAVED, find(browser, f"figure[data-name={figure}]"), kind)


def test_each_figure_can_be_saved(browser: Any, tmp_path: Path) -> None:
    result = document()
    show(browser, tmp_path, result)
    names = [node.get_attribute("data-name") for node in browser.find_elements("css selector", "figure")]
    assert names == ["A-B-curve", "A-B-layers", "A-B-components", "A-B-plane", "A-B-exactness"]
    for name in names:
        file, picture = saved(browser, name, "svg")
        assert file == f"{name}{'-loss' if 'curve' in name else ''}.svg"
        assert picture.startswith("<svg"), name
        assert " class=" not in picture, "the style goes along"
        assert "<text" in picture, name
        png = saved(browser, name, "png")
        assert png[0].endswith(".png")
        assert png[1] == "PNG"
        assert png[2] > 500
        assert png[3] > 20, "not an empty picture"
    assert saved(browser, "A-B-curve", "svg")[1].count("aligned barrier 0.031") == 1
    rows = list(csv.DictReader(io.StringIO(saved(browser, "A-B-curve", "csv")[1])))
    assert [float(row["lambda"]) for row in rows] == result["lambdas"]
    assert [float(row["aligned loss"]) for row in rows] == result["curves"]["A-B"]["aligned"]["loss"]
    plane = list(csv.reader(io.StringIO(saved(browser, "A-B-plane", "csv")[1])))
    assert [[float(value) for value in row[1:]] for row in plane[1:]] == result["plane"]["A-B"]["loss"]
    layers = list(csv.DictReader(io.StringIO(saved(browser, "A-B-layers", "csv")[1])))
    assert (layers[0]["layer"], float(layers[0]["distance before"])) == ("layer 0", 1.31)
    assert complaints(browser) == []
    assert requests(browser) == []


def test_no_formula_of_a_stranger_is_saved(browser: Any, tmp_path: Path) -> None:
    found = document()
    found["explain"]["A-B"]["naive"]["components"][0]["name"] = '=HYPERLINK("x"),1'
    show(browser, tmp_path, found)
    assert list(csv.reader(io.StringIO(saved(browser, "A-B-components", "csv")[1])))[1][0] == "'=HYPERLINK(\"x\"),1"


# The step of a heat map's cell, the contrast of its text, and of its background to the page.
HEAT = FAINT.partition("return [")[0] + """
return [...document.querySelectorAll(".heat td[class^=g]")].map((cell) => {
  const page = back(document.body), own = back(cell), words = [...cell.querySelectorAll("b, small")].map((node) => getComputedStyle(node).color);
  return [Number(cell.className[1]), Math.min(...words.map((word) => ratio(light(word), light(own)))), ratio(light(own), light(page))];
});
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_heat_cells_fit_the_theme(browser: Any, tmp_path: Path, theme: str) -> None:
    found = document()
    for i, change in enumerate(found["alignment"]["A-B"]["per_layer"][:6]):
        change["distance_after"] = change["distance_before"] * (1 - (i + 0.5) / 6)
    show(browser, tmp_path, found)
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    cells = browser.execute_script(HEAT)
    assert {step for step, _, _ in cells} == set(range(6))
    assert min(contrast for _, contrast, _ in cells) > 4.5
    by_step = [min(found for step, _, found in cells if step == wanted) for wanted in range(6)]
    assert by_step == sorted(by_step), "the stronger, the farther from the page"
    assert by_step[0] < 1.3, "no gain is no light"
