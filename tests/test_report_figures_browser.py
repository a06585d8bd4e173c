"""The figures of a report in a real browser: labels that keep apart, terms, downloads, the colours of the heat map."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

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
)  # fmt: skip
from path_documents import Document, document

__all__ = ["browser", "chromium"]
pytestmark = NEEDED

# Pairs of texts of one chart that cover each other.
OVERPRINTED = """
const found = [];
for (const chart of document.querySelectorAll(".canvas svg")) {
  const boxes = [...chart.querySelectorAll("text")].map((node) => [node.getBoundingClientRect(), node.textContent]);
  boxes.forEach(([a, first], i) => boxes.slice(i + 1).forEach(([b, second]) => {
    const across = a.left < b.right - 1 && b.left < a.right - 1, down = a.top < b.bottom - 3 && b.top < a.bottom - 3;
    if (across && down) found.push([first, second]);
  }));
}
return found;
"""
# Points of curves and brackets under the labels of barriers, and labels outside their picture.
UNDER_LABELS = """
const found = [];
for (const chart of document.querySelectorAll(".canvas svg")) {
  const frame = chart.getBoundingClientRect(), matrix = chart.getScreenCTM();
  const along = (shape, share) => shape.getPointAtLength(share * shape.getTotalLength()).matrixTransform(matrix);
  const points = [...chart.querySelectorAll(".curve-line, .bracket")].flatMap((shape) =>
    Array.from({ length: 300 }, (_, i) => along(shape, i / 299)));
  for (const node of chart.querySelectorAll("text.barrier")) {
    const box = node.getBoundingClientRect();
    if (box.left < frame.left || box.right > frame.right) found.push(["outside", node.textContent]);
    const inside = ({ x, y }) => x > box.left && x < box.right && y > box.top + 2 && y < box.bottom - 2;
    if (points.some(inside)) found.push(["curve", node.textContent]);
  }
}
return found;
"""


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
    onto_the_curve = (
        "const p = document.querySelector('.curve-line').getPointAtLength(90);"
        "for (const node of document.querySelectorAll('text.barrier'))"
        "  { node.setAttribute('x', p.x - 5); node.setAttribute('y', p.y + 5); }"
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


@pytest.mark.parametrize("width", [0.3, 1e-3, 1e-5])
def test_numbers_of_narrow_ranges_differ_and_fit(browser: Any, tmp_path: Path, width: float) -> None:
    result = document(naive=1.0, aligned=0.5)
    for pair in result["curves"].values():
        for path in pair.values():
            path["loss"] = [2.7 + width * value for value in path["loss"]]
    show(browser, tmp_path, result)
    numbers = ".canvas text[text-anchor=end]:not([class])"
    found = [node.text for node in browser.find_elements("css selector", numbers)]
    assert 3 <= len(found) == len(set(found)), found
    outside = "return [...document.querySelectorAll(arguments[0])].filter((node) => node.getBBox().x < -1).length"
    assert browser.execute_script(outside, numbers) == 0


def test_several_alignments_of_one_pair_have_one_picture(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, *several_ways(0.5, 0.1))
    together = find(browser, "figure[data-name=A-B-all]")
    assert [button.text for button in together.find_elements("css selector", "[data-path]")] == [
        "naive", "weights", "learned",
    ]  # fmt: skip
    assert len(together.find_elements("css selector", ".curve-line")) == 3
    colours = browser.execute_script(
        "return [...arguments[0].querySelectorAll('.curve-line')].map((line) => getComputedStyle(line).stroke)",
        together,
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
  const image = await createImageBitmap(blob), canvas = new OffscreenCanvas(image.width, image.height);
  const at = canvas.getContext("2d");
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
    assert [float(row["lambda"]) for row in rows] == pytest.approx(result["lambdas"], rel=1e-6)
    assert [float(row["aligned loss"]) for row in rows] == pytest.approx(result["curves"]["A-B"]["aligned"]["loss"])
    plane = list(csv.reader(io.StringIO(saved(browser, "A-B-plane", "csv")[1])))
    losses = [float(value) for row in plane[1:] for value in row[1:]]
    assert losses == pytest.approx([value for row in result["plane"]["A-B"]["loss"] for value in row])
    layers = list(csv.DictReader(io.StringIO(saved(browser, "A-B-layers", "csv")[1])))
    assert (layers[0]["layer"], float(layers[0]["distance before"])) == ("layer 0", 1.31)
    assert complaints(browser) == []
    assert requests(browser) == []


def test_no_formula_of_the_input_is_saved(browser: Any, tmp_path: Path) -> None:
    found = document()
    found["explain"]["A-B"]["naive"]["components"][0]["name"] = '=HYPERLINK("x"),1'
    show(browser, tmp_path, found)
    assert list(csv.reader(io.StringIO(saved(browser, "A-B-components", "csv")[1])))[1][0] == '\'=HYPERLINK("x"),1'


# The step of a heat map's cell, the contrast of its text, and of its background to the page.
HEAT = (
    FAINT.partition("return [")[0]
    + """
const page = light(back(document.body));
return [...document.querySelectorAll(".heat td[class^=g]")].map((cell) => {
  const own = light(back(cell)), words = [...cell.querySelectorAll("b, small")];
  const contrasts = words.map((word) => ratio(light(getComputedStyle(word).color), own));
  return [Number(cell.className[1]), Math.min(...contrasts), ratio(own, page)];
});
"""
)


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
