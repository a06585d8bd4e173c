
"use strict";
// Draws the curves and runs the few controls. Text enters the page as textContent only.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const TITLES = { loss: "Loss", accuracy: "Accuracy", perplexity: "Perplexity", bits_per_byte: "Bits per byte" };
  const WORSE = { loss: 1, accuracy: -1 };
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const results = JSON.parse(document.getElementById("results").textContent);

  function svg(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function plain(value, digits) {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value), many = digits || 4;
    const text = size !== 0 && (size < 1e-4 || size >= 10 ** many) ? value.toExponential(many - 1) : value.toPrecision(many);
    return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "").replace("e+", "e").replace("-", "−");
  }

  function shown(metric, value) {
    return metric === "accuracy" && value !== null ? `${plain(100 * value, 3)} %` : plain(value);
  }

  function height(metric, value) {
    return metric === "accuracy" ? `${plain(100 * value, 3)} pt` : plain(value);
  }

  function steps(low, high, most) {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= raw) || raw;
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high + 1e-9 * step; k++) found.push(k * step);
    return found;
  }

  function decades(low, high) {
    const found = [];
    for (let k = Math.ceil(Math.log10(low)); k <= Math.log10(high); k++) found.push(10 ** k);
    return found.length > 1 ? found : [low, high];
  }

  // The vertical axis: what is shown decides its range, so that hiding the naive path magnifies the aligned one.
  function axis(values, metric, top, bottom) {
    let low = Math.min(...values), high = Math.max(...values);
    const logarithmic = metric === "perplexity" && low > 0 && high > 50 * low;
    if (logarithmic) {
      const from = Math.log(low), width = Math.log(high) - from;
      return { y: (v) => bottom - ((Math.log(v) - from) / width) * (bottom - top), ticks: decades(low, high) };
    }
    const room = 0.11 * (high - low) || Math.abs(high) * 0.05 || 1;
    low -= room; high += room;
    return { y: (v) => bottom - ((v - low) / (high - low)) * (bottom - top), ticks: steps(low, high, 6) };
  }

  function chart(figure) {
    const data = charts[Number(figure.dataset.chart)];
    const canvas = figure.querySelector(".canvas"), readout = figure.querySelector(".readout");
    const select = figure.querySelector("[data-metric]");
    const paths = Object.keys(data.lines), hidden = new Set(), last = data.lambdas.length - 1;
    let metric = select.value, at = start(), place = null;

    function start() {
      const [rise, lam] = data.barriers.naive.loss || [0, null];
      const near = data.lambdas.map((x) => Math.abs(x - (rise ? lam : 0.5)));
      return near.indexOf(Math.min(...near));
    }

    function visible() {
      return paths.filter((path) => !hidden.has(path) && data.lines[path][metric]);
    }

    function draw() {
      const width = Math.max(canvas.clientWidth, 240), tall = Math.min(Math.max(width * 0.56, 250), 430);
      const box = { left: 52, right: width - 12, top: 14, bottom: tall - 46 };
      const root = svg("svg", { viewBox: `0 0 ${width} ${tall}`, width, height: tall });
      const values = visible().flatMap((path) => data.lines[path][metric]).filter((v) => v !== null);
      const scale = axis(values.length ? values : [0, 1], metric, box.top, box.bottom);
      const x = (lam) => box.left + 8 + lam * (box.right - box.left - 16);
      place = { root, box, x, y: scale.y, width };
      frame(root, box, scale, x, values.length > 0);
      for (const path of visible()) line(root, path, scale.y, x, box);
      for (const path of visible()) bracket(root, path, scale.y, x);
      canvas.replaceChildren(root);
      point();
    }

    function frame(root, box, scale, x, any) {
      for (const tick of scale.ticks) {
        const y = scale.y(tick);
        root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
        const text = metric === "accuracy" ? `${plain(100 * tick, 3)} %` : plain(tick, 3);
        if (any) root.append(svg("text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, text));
      }
      for (const lam of [0, 0.25, 0.5, 0.75, 1])
        root.append(svg("text", { x: x(lam), y: box.bottom + 19, "text-anchor": "middle" }, String(lam)));
      root.append(svg("text", { x: x(0.5), y: box.bottom + 39, "text-anchor": "middle" }, "λ"));
      const ends = [[data.a, x(0) - 4, "start"], [data.b, x(1) + 4, "end"]];
      for (const [end, at, anchor] of ends) {
        const name = end.name === end.letter ? end.letter : `${end.letter}  ${end.name}`;
        root.append(svg("text", { class: "end", x: at, y: box.bottom + 39, "text-anchor": anchor }, name));
      }
    }

    function line(root, path, y, x, box) {
      const values = data.lines[path][metric], group = svg("g", { "data-line": path });
      const first = values[0], final = values[last];
      if (first !== null && final !== null && metric !== "perplexity")
        group.append(svg("path", { class: "chord", d: `M${x(0)},${y(first)}L${x(1)},${y(final)}` }));
      let d = "", pen = "M";
      values.forEach((value, i) => {
        if (value === null) { hole(group, x(data.lambdas[i]), box.bottom); pen = "M"; return; }
        d += `${pen}${x(data.lambdas[i]).toFixed(2)},${y(value).toFixed(2)}`;
        pen = "L";
      });
      group.append(svg("path", { class: `curve-line ${path}`, d }));
      root.append(group);
    }

    function hole(group, x, y) {
      const mark = svg("path", { class: "hole", d: `M${x - 4},${y - 10}l8,8m0,-8l-8,8` });
      mark.append(svg("title", {}, "not finite here"));
      group.append(mark);
    }

    function bracket(root, path, y, x) {
      const [rise, lam] = data.barriers[path][metric] || [null, null], values = data.lines[path][metric];
      if (!rise || lam === null || values[0] === null || values[last] === null) return;
      const foot = (1 - lam) * values[0] + lam * values[last], peak = foot + WORSE[metric] * rise;
      const at = x(lam), from = y(foot), to = y(peak), naive = path === "naive";
      const group = svg("g", { "data-line": path });
      group.append(svg("path", { class: `bracket ${path}`, d: `M${at - 4},${from}h8M${at},${from}V${to}M${at - 4},${to}h8` }));
      const label = { class: path, ...beside(naive, lam, at, from, to) };
      group.append(svg("text", label, place.width < 480 ? height(metric, rise) : `barrier ${height(metric, rise)}`));
      root.append(group);
    }

    // Off the curves: inside the naive hill where the aligned one is low, else above it.
    function beside(naive, lam, at, from, to) {
      const rise = (path) => (visible().includes(path) && data.barriers[path][metric] || [0])[0] || 0;
      const high = rise("aligned") > 0.4 * rise("naive"), outside = to + (to < from ? -9 : 19);
      const inside = from + 0.22 * (to - from) + 4;
      if (naive && high) return { x: at + 10, y: outside, "text-anchor": "start" };
      if (naive) return lam < 0.65 ? { x: at + 8, y: inside, "text-anchor": "start" } : { x: at - 8, y: inside, "text-anchor": "end" };
      return { x: at - 8, y: high ? inside : outside, "text-anchor": "end" };
    }

    function point() {
      const { root, box, x, y } = place;
      root.querySelectorAll(".cursor, circle").forEach((node) => node.remove());
      const lam = data.lambdas[at];
      root.prepend(svg("line", { class: "cursor", x1: x(lam), x2: x(lam), y1: box.top, y2: box.bottom }));
      for (const path of visible()) {
        const value = data.lines[path][metric][at];
        if (value !== null) root.append(svg("circle", { class: path, cx: x(lam), cy: y(value), r: 5.5 }));
      }
      say(lam);
    }

    function say(lam) {
      const words = [span("b", "", `λ = ${plain(lam, 3)}`)];
      for (const path of paths.filter((p) => !hidden.has(p))) {
        const line = data.lines[path];
        const order = ["loss", "accuracy", ...(["loss", "accuracy"].includes(metric) ? [] : [metric])];
        const told = order.filter((m) => line[m]).map((m) => `${TITLES[m].toLowerCase()} ${shown(m, line[m][at])}`);
        words.push(span("span", path, `${path}: ${told.join(", ")}`));
      }
      readout.replaceChildren(...words);
      canvas.setAttribute("aria-valuenow", String(at));
      canvas.setAttribute("aria-valuetext", words.map((word) => word.textContent).join("; "));
    }

    function span(tag, kind, text) {
      const node = document.createElement(tag);
      node.className = kind;
      node.textContent = text;
      return node;
    }

    function move(index) {
      at = Math.min(Math.max(index, 0), last);
      point();
    }

    function follow(event) {
      const frame = place.root.getBoundingClientRect(), unit = place.width / frame.width;
      const here = (event.clientX - frame.left) * unit;
      const far = data.lambdas.map((lam) => Math.abs(place.x(lam) - here));
      move(far.indexOf(Math.min(...far)));
    }

    const keys = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 5, PageDown: -5, Home: -Infinity, End: Infinity };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      move(at + keys[event.key]);
    });
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    for (const button of figure.querySelectorAll("[data-path]"))
      button.addEventListener("click", () => {
        const path = button.dataset.path, on = hidden.has(path);
        if (on) hidden.delete(path); else hidden.add(path);
        button.setAttribute("aria-pressed", String(on));
        draw();
      });
    select.addEventListener("change", () => { metric = select.value; draw(); });
    const attributes = { role: "slider", tabindex: "0", "aria-label": "Point on the path, by its number", "aria-valuemin": "0", "aria-valuemax": String(last) };
    for (const [key, value] of Object.entries(attributes)) canvas.setAttribute(key, value);
    let seen = 0;
    new ResizeObserver(() => {
      if (canvas.clientWidth === seen) return;
      seen = canvas.clientWidth;
      draw();
    }).observe(canvas);
    draw();
  }

  function theme(button) {
    const dark = () => {
      const chosen = document.documentElement.dataset.theme;
      return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    };
    const tell = () => {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Change to ${dark() ? "light" : "dark"} colours`);
    };
    button.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; tell(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
    tell();
  }

  function provenance(section) {
    const text = () => JSON.stringify(results[Number(section.dataset.result)], null, 1);
    const details = section.querySelector("details"), link = section.querySelector(".download");
    details.addEventListener("toggle", () => {
      if (!details.open || link.href.startsWith("blob:")) return;
      section.querySelector(".json").textContent = text();
      link.href = URL.createObjectURL(new Blob([text()], { type: "application/json" }));
    });
    const copy = section.querySelector(".copy");
    if (copy) copy.addEventListener("click", () => copied(section.querySelector("code"), copy));
  }

  // Where there is no clipboard the text is selected, ready to be copied by hand.
  async function copied(code, button) {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  }

  theme(document.getElementById("theme"));
  document.querySelectorAll("[data-chart]").forEach(chart);
  document.querySelectorAll("[data-result]").forEach(provenance);
})();
