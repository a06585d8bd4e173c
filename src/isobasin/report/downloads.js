
"use strict";
// Downloads of each figure as SVG, PNG and CSV, made in the page. A table is drawn as it is shown.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PAINT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap",
    "stroke-opacity", "opacity", "paint-order", "text-anchor", "font-family", "font-size", "font-weight"];
  const ZOOM = 2;

  function svg(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  const visible = (colour) => colour !== "transparent" && !/, 0\)$/.test(colour);

  // A picture inside the region, with the style that the page gives it.
  function copied(picture, box) {
    const copy = picture.cloneNode(true);
    const pairs = [[picture, copy]], inner = [...copy.querySelectorAll("*")];
    [...picture.querySelectorAll("*")].forEach((node, i) => pairs.push([node, inner[i]]));
    for (const [node, twin] of pairs) {
      const style = getComputedStyle(node);
      for (const name of PAINT) twin.setAttribute(name, style.getPropertyValue(name));
      for (const name of ["class", "data-term", "tabindex"]) twin.removeAttribute(name);
    }
    for (const [node, twin] of pairs) if (node.dataset.passing) twin.remove();
    for (const [name, value] of Object.entries(box)) copy.setAttribute(name, value);
    return copy;
  }

  // The lines of a text, each at its place.
  function lines(node) {
    const range = document.createRange(), found = [];
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const box = range.getBoundingClientRect(), last = found[found.length - 1];
      if (!box.width) continue;
      if (last && Math.abs(last.box.top - box.top) < 2) last.text += ` ${word[0]}`;
      else found.push({ text: word[0], box });
    }
    return found;
  }

  function paint(node, root, origin) {
    if (node.nodeType === Node.TEXT_NODE) return letters(node, root, origin);
    if (node.nodeType !== Node.ELEMENT_NODE || !node.checkVisibility()) return;
    const style = getComputedStyle(node), rect = node.getBoundingClientRect();
    const box = { x: rect.left - origin.left, y: rect.top - origin.top, width: rect.width, height: rect.height };
    if (node.namespaceURI === SVG) { root.append(copied(node, box)); return; }
    if (visible(style.backgroundColor))
      root.append(svg("rect", { ...box, rx: parseFloat(style.borderTopLeftRadius) || 0, fill: style.backgroundColor }));
    if (parseFloat(style.borderBottomWidth) && style.borderBottomStyle === "solid")
      root.append(svg("rect", { ...box, y: box.y + box.height - 1, height: 1, fill: style.borderBottomColor }));
    for (const child of node.childNodes) paint(child, root, origin);
  }

  function letters(node, root, origin) {
    const style = getComputedStyle(node.parentElement);
    for (const { text, box } of lines(node))
      root.append(svg("text", {
        x: box.left - origin.left, y: box.top - origin.top + box.height / 2, "dominant-baseline": "central", fill: style.color,
        "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight,
      }, text));
  }

  // The names and colours of the curves that are shown, which on the page are those of the buttons.
  function key(figure, root) {
    let x = 8;
    for (const button of figure.querySelectorAll('[data-path][aria-pressed="true"]')) {
      const colour = getComputedStyle(button.querySelector(".swatch")).backgroundColor, style = getComputedStyle(button);
      const text = { x: x + 24, y: 16, fill: style.color, "font-family": style.fontFamily, "font-size": 13 };
      root.append(svg("rect", { x, y: 10, width: 18, height: 4, fill: colour }), svg("text", text, button.textContent));
      x += 44 + 8 * button.textContent.length;
    }
    return x > 8 ? 28 : 0;
  }

  function drawn(figure) {
    const region = figure.querySelector(".drawing"), rect = region.getBoundingClientRect(), edge = 8;
    const root = svg("svg", { xmlns: SVG }), caption = figure.querySelector("figcaption, caption");
    root.append(svg("title", {}, caption ? caption.textContent : figure.dataset.name));
    const ground = root.appendChild(svg("rect", { fill: getComputedStyle(document.body).backgroundColor }));
    const top = key(figure, root) + edge, width = Math.ceil(rect.width + 2 * edge), height = Math.ceil(rect.height + top + edge);
    paint(region, root, { left: rect.left - edge, top: rect.top - top });
    for (const node of [root, ground]) { node.setAttribute("width", width); node.setAttribute("height", height); }
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    return { text: new XMLSerializer().serializeToString(root), width, height };
  }

  function csv(figure) {
    const quoted = (value) => {
      if (typeof value === "number" || value === null) return value === null ? "" : String(value);
      const safe = /^[=+@-]/.test(value) ? `'${value}` : value;  // a spreadsheet would take it for a formula
      return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    return JSON.parse(figure.dataset.rows).map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  }

  function raster(picture) {
    return new Promise((done, failed) => {
      const image = new Image(), canvas = document.createElement("canvas");
      canvas.width = ZOOM * picture.width;
      canvas.height = ZOOM * picture.height;
      image.onload = () => {
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("no picture"))), "image/png");
      };
      image.onerror = () => failed(new Error("no picture"));
      image.setAttribute("src", `data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture.text)}`);
    });
  }

  const makers = {
    svg: async (figure) => new Blob([drawn(figure).text], { type: "image/svg+xml" }),
    png: (figure) => raster(drawn(figure)),
    csv: async (figure) => new Blob([csv(figure)], { type: "text/csv" }),
  };

  async function save(button) {
    const figure = button.closest("[data-rows]"), kind = button.dataset.save, link = document.createElement("a");
    const select = figure.querySelector("[data-metric]"), name = [figure.dataset.name, ...(select && kind !== "csv" ? [select.value] : [])];
    link.href = URL.createObjectURL(await makers[kind](figure));
    link.download = `${name.join("-").replace(/[^\p{L}\p{N}._-]+/gu, "-")}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  for (const button of document.querySelectorAll("[data-save]")) button.addEventListener("click", () => save(button));
})();
