
"use strict";
// Draws the curves and runs the few controls. Text enters the page as textContent only.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NAMES = { loss: "loss", accuracy: "accuracy", perplexity: "perplexity", bits_per_byte: "bits per byte" };
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

  // The numbers of an axis, with three digits or as many more as tell neighbours apart.
  function numbers(ticks) {
    const step = Math.min(...ticks.slice(1).map((tick, i) => Math.abs(tick - ticks[i])));
    if (!(step > 0 && step < Infinity)) return ticks.map((tick) => plain(tick, 3));
    const found = ticks.map((tick) => (Math.abs(tick) < 1e-6 * step ? 0 : tick));
    let digits = 3;
    while (digits < 12 && found.some((tick) => Math.abs(Number(tick.toPrecision(digits)) - tick) > 0.1 * step)) digits++;
    return found.map((tick) => plain(tick, digits));
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
    const room = high > low ? Math.max(0.11 * (high - low), 1e-4 * Math.abs(high)) : Math.abs(high) * 0.05 || 1;
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
      const width = Math.max(canvas.clientWidth, 240), tall = Math.min(Math.max(width * 0.56, 270), 460);
      const box = { left: 52, right: width - 12, top: 34, bottom: tall - 64 };  // further right where numbers are long
      const root = svg("svg", { viewBox: `0 0 ${width} ${tall}`, width, height: tall });
      const values = visible().flatMap((path) => data.lines[path][metric]).filter((v) => v !== null);
      const scale = axis(values.length ? values : [0, 1], metric, box.top, box.bottom);
      const factor = metric === "accuracy" ? 100 : 1, names = numbers(scale.ticks.map((tick) => factor * tick));
      scale.names = metric === "accuracy" ? names.map((name) => `${name} %`) : names;
      box.left = Math.max(52, 12 + 8 * Math.max(...scale.names.map((name) => name.length)));
      const x = (lam) => box.left + 8 + lam * (box.right - box.left - 16);
      place = { root, box, x, y: scale.y, width };
      canvas.replaceChildren(root);  // before text is measured
      frame(root, box, scale, x, values.length > 0);
      for (const path of visible()) line(root, path, scale.y, x, box);
      label(brackets(root, scale.y, x));
      point();
    }

    function frame(root, box, scale, x, any) {
      root.append(svg("text", { class: "axis-title", x: 0, y: 14 }, data.titles[metric]));
      for (const [i, tick] of scale.ticks.entries()) {
        const y = scale.y(tick), text = scale.names[i];
        root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
        if (any) root.append(svg("text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, text));
      }
      for (const lam of [0, 0.25, 0.5, 0.75, 1])
        root.append(svg("text", { x: x(lam), y: box.bottom + 19, "text-anchor": "middle" }, String(lam)));
      const { a, b } = data, mix = `λ, the share of ${b.letter} in (1 − λ)·${a.letter} + λ·${b.letter}`;
      const title = { class: "axis-title", x: x(0.5), y: box.bottom + 58, "text-anchor": "middle", "data-term": "term-lambda" };
      root.append(svg("text", title, place.width < 360 ? `λ, the share of ${b.letter}` : mix));
      end(root, a, { x: x(0) - 4, y: box.bottom + 38, "text-anchor": "start" });
      end(root, b, { x: x(1) + 4, y: box.bottom + 38, "text-anchor": "end" });
    }

    // The name of a model under its end of the axis, at most half as wide as the axis.
    function end(root, model, at) {
      const whole = model.name === model.letter ? model.letter : `${model.letter}  ${model.name}`;
      const node = root.appendChild(svg("text", { class: "end", ...at }, whole)), room = (place.box.right - place.box.left) / 2 - 10;
      for (let n = whole.length; n > 4 && node.getComputedTextLength() > room; n--)
        node.textContent = `${whole.slice(0, Math.ceil(n / 2))}…${whole.slice(whole.length - Math.floor(n / 2) + 1)}`;
      if (node.textContent !== whole) node.append(svg("title", {}, whole));
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
      group.append(svg("path", { class: `curve-line ${data.kinds[path]}`, d }));
      root.append(group);
    }

    function hole(group, x, y) {
      const mark = svg("path", { class: "hole", d: `M${x - 4},${y - 10}l8,8m0,-8l-8,8` });
      mark.append(svg("title", {}, "not finite here"));
      group.append(mark);
    }

    // The barriers of the visible paths, from the straight line to the curve; brackets at one λ stand side by side.
    function brackets(root, y, x) {
      const found = [];
      for (const path of visible()) {
        const [rise, lam] = data.barriers[path][metric] || [null, null], values = data.lines[path][metric];
        if (!rise || lam === null || values[0] === null || values[last] === null) continue;
        const foot = (1 - lam) * values[0] + lam * values[last], from = y(foot), to = y(foot + WORSE[metric] * rise);
        const aside = lam < 0.8 ? 10 : -10;
        let at = x(lam);
        while (found.some((other) => Math.abs(other.at - at) < 9)) at += aside;
        const kind = data.kinds[path], group = svg("g", { "data-line": path });
        group.append(svg("path", { class: `bracket ${kind}`, d: `M${at - 4},${from}h8M${at},${from}V${to}M${at - 4},${to}h8` }));
        const words = `${path}${place.width < 480 ? "" : " barrier"} ${height(metric, rise)}`;
        const text = group.appendChild(svg("text", { class: `barrier ${kind}` }, words));
        root.append(group);
        found.push({ at, top: Math.min(from, to), bottom: Math.max(from, to), text, group, kind });
      }
      return found;
    }

    // Each label goes to the place near its bracket where it covers no other label and as little as possible of the curves.
    function label(marks) {
      const ink = dots(), taken = [];
      for (const mark of marks) {
        const size = mark.text.getBBox();
        let best = null;
        for (const spot of spots(mark, size)) {
          const clash = taken.some((other) => cross(spot, other, 3)) ? 1e4 : 0;
          const cost = clash + 25 * Math.min(ink.filter((dot) => inside(dot, spot, 3)).length, 40) + spot.far;
          if (!best || cost < best.cost) best = { ...spot, cost };
        }
        mark.text.setAttribute("x", best.x);
        mark.text.setAttribute("y", best.y + size.height * 0.78);
        taken.push(best);
        if (best.far > 45) leader(mark, best);
      }
    }

    const cross = (a, b, gap) => a.x < b.x + b.width + gap && b.x < a.x + a.width + gap && a.y < b.y + b.height + gap && b.y < a.y + a.height + gap;
    const inside = ([x, y], box, gap) => x > box.x - gap && x < box.x + box.width + gap && y > box.y - gap && y < box.y + box.height + gap;

    // Places for a label inside the axes, with their distance from the bracket.
    function* spots(mark, { width, height }) {
      const { box } = place;
      for (const dx of [8, 30, 60, 100, 150]) for (const x of [mark.at + dx, mark.at - dx - width]) {
        if (x < box.left || x + width > box.right) continue;
        for (let y = box.top; y + height <= box.bottom; y += 6) {
          const middle = y + height / 2, off = Math.max(mark.top - middle, middle - mark.bottom, 0);
          yield { x, y, width, height, far: dx - 8 + off + 0.05 * Math.abs(middle - mark.top) };
        }
      }
      yield { x: box.left, y: box.top, width, height, far: 1e3 };
    }

    // Points of everything that is drawn, a few pixels apart.
    function dots() {
      const shapes = [...place.root.querySelectorAll(".curve-line, .chord, .bracket")];
      return shapes.flatMap((shape) => {
        const long = shape.getTotalLength(), n = Math.min(Math.ceil(long / 4), 600);
        return Array.from({ length: n + 1 }, (_, i) => shape.getPointAtLength((i / n) * long)).map(({ x, y }) => [x, y]);
      });
    }

    function leader(mark, spot) {
      const x = spot.x > mark.at ? spot.x - 3 : spot.x + spot.width + 3, y = spot.y + spot.height / 2;
      const end = Math.min(Math.max(y, mark.top), mark.bottom);
      mark.group.append(svg("path", { class: `leader ${mark.kind}`, d: `M${mark.at},${end}L${x},${y}` }));
    }

    function point() {
      const { root, box, x, y } = place;
      root.querySelectorAll("[data-passing]").forEach((node) => node.remove());
      const lam = data.lambdas[at];
      root.prepend(svg("line", { class: "cursor", "data-passing": 1, x1: x(lam), x2: x(lam), y1: box.top, y2: box.bottom }));
      for (const path of visible()) {
        const value = data.lines[path][metric][at];
        if (value !== null) root.append(svg("circle", { class: data.kinds[path], "data-passing": 1, cx: x(lam), cy: y(value), r: 5.5 }));
      }
      say(lam);
    }

    function say(lam) {
      const words = [span("b", "", `λ = ${plain(lam, 3)}`)];
      for (const path of paths.filter((p) => !hidden.has(p))) {
        const line = data.lines[path];
        const order = ["loss", "accuracy", ...(["loss", "accuracy"].includes(metric) ? [] : [metric])];
        const told = order.filter((m) => line[m]).map((m) => `${NAMES[m]} ${shown(m, line[m][at])}`);
        words.push(span("span", data.kinds[path], `${path}: ${told.join(", ")}`));
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
    const details = section.querySelector("details:not(.fold)"), link = section.querySelector(".download");
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

  // The definition of a term beside the word, for a pointer, for keys and for touch; Escape closes it.
  function terms() {
    const tip = document.createElement("div"), of = (node) => (node.closest ? node.closest(".term, [data-term]") : null);
    const id = (word) => word.dataset.term || word.getAttribute("href").slice(1);
    let open = null;
    Object.assign(tip, { id: "tip", role: "tooltip", hidden: true });
    document.body.append(tip);
    function show(word) {
      const meaning = document.getElementById(id(word));
      if (!meaning) return;
      open = word;
      tip.textContent = meaning.textContent;
      tip.hidden = false;
      const at = word.getBoundingClientRect(), room = document.documentElement.clientWidth - tip.offsetWidth - 8;
      const above = at.top - tip.offsetHeight - 8;
      tip.style.left = `${Math.max(8, Math.min(at.left, room))}px`;
      tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
    }
    function hide() { open = null; tip.hidden = true; }
    for (const word of document.querySelectorAll(".term, [data-term]")) word.setAttribute("aria-describedby", id(word));
    document.addEventListener("pointerover", (event) => {
      if (event.pointerType === "touch") return;
      const word = of(event.target);
      if (word) show(word); else if (open && !tip.contains(event.target)) hide();
    });
    document.addEventListener("focusin", (event) => { const word = of(event.target); if (word && word.matches(":focus-visible")) show(word); else hide(); });
    document.addEventListener("click", (event) => {
      const word = of(event.target);
      if (!word) { hide(); return; }
      if (word.matches(".term")) event.preventDefault();
      show(word);
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
    document.addEventListener("scroll", hide, { passive: true });
  }

  // A link into a folded section opens it, and all of it is printed.
  function folds() {
    const unfold = () => {
      const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (!target) return;
      for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
      target.scrollIntoView();
    };
    const all = [...document.querySelectorAll("details.fold")], button = document.getElementById("unfold");
    const tell = () => { button.textContent = all.every((fold) => fold.open) ? "Close all sections" : "Open all sections"; };
    addEventListener("hashchange", unfold);
    addEventListener("beforeprint", () => { for (const fold of all) fold.open = true; });
    unfold();
    if (!button) return;
    button.addEventListener("click", () => {
      const open = !all.every((fold) => fold.open);
      for (const fold of all) fold.open = open;
      tell();
    });
    for (const fold of all) fold.addEventListener("toggle", tell);
    tell();
  }

  // A narrow window shows each row of such a table as a block, in which the heads stand before the numbers.
  function labelled(table) {
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, i) => { if (i && cell.colSpan === 1) cell.dataset.label = heads[i]; });
    table.classList.add("labelled");
  }

  theme(document.getElementById("theme"));
  document.querySelectorAll("table.study").forEach(labelled);
  folds();
  document.querySelectorAll("[data-chart]").forEach(chart);
  document.querySelectorAll("[data-result]").forEach(provenance);
  terms();
})();
