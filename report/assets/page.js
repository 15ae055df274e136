// Draws the report's charts from the JSON beside it, and answers pointer, keys and controls. Needs nothing else.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const AXES = { tokens: "tokens trained on", s: "step", hours: "training time" };
  const axes = Object.keys(AXES).filter((axis) => data.runs.every((run) => run.axes[axis]));
  const KEY = "report " + location.pathname;
  const state = { axis: axes[0], log: false, hidden: [], zoom: null, scroll: 0 };
  try { Object.assign(state, JSON.parse(sessionStorage.getItem(KEY) || "{}")); } catch { /* storage may be forbidden */ }
  if (!axes.includes(state.axis)) state.axis = axes[0];
  let cursor = null; // value of the horizontal axis under the pointer
  const views = new Map(); // chart id -> what its last drawing needs for the crosshair

  function remember() {
    state.scroll = window.scrollY;
    try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* as above */ }
  }

  // ---- numbers

  function short(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit * 0.99999) return String(Number((value / unit).toPrecision(3))) + suffix;
    if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
    return String(Number(value.toPrecision(3)));
  }

  function shown(value, chart) {
    if (chart.format === "percent") return (100 * value).toFixed(1) + " %";
    if (chart.format === "loss") return value.toFixed(3) + (value < 20 ? "  (ppl " + short(Math.exp(value)) + ")" : "");
    return short(value);
  }

  function hoursUnit(span) { return span > 2 ? [1, "h"] : span > 1 / 30 ? [60, "min"] : [3600, "s"]; }

  function xText(value) {
    if (state.axis !== "hours") return short(value);
    const [factor, unit] = hoursUnit(Math.abs(value));
    return Number((value * factor).toPrecision(3)) + " " + unit;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  function logTicks(low, high) {
    const all = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const m of [1, 2, 3, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) all.push(m * 10 ** e);
    if (all.length < 2) return ticks(low, high, 4).filter((t) => t > 0);
    return all.length > 7 ? all.filter((t) => Math.abs(Math.log10(t) % 1) < 1e-9) : all;
  }

  // ---- lines

  // The place of a step on the chosen axis: between the steps that the run's table has, on a straight line.
  function place(run, step) {
    const { s } = run.axes, to = run.axes[state.axis];
    let low = 0, high = s.length - 1;
    if (step <= s[0]) return state.axis === "s" ? step : s[0] ? to[0] * step / s[0] : to[0];
    if (step >= s[high]) return state.axis === "s" ? step : to[high];
    while (high - low > 1) { const middle = (low + high) >> 1; if (s[middle] <= step) low = middle; else high = middle; }
    return to[low] + (to[high] - to[low]) * (step - s[low]) / (s[high] - s[low]);
  }

  function visible(chart) { return chart.lines.filter((line) => !state.hidden.includes(line.run)); }

  function domain(chart, lines) {
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const line of lines) {
      if (line.kind === "raw" && line.y.length > 20) continue; // what leaves the panel is noise, the trend is inside
      for (let n = 0; n < line.y.length; n++) {
        if (state.zoom && (line.x[n] < state.zoom[0] || line.x[n] > state.zoom[1])) continue;
        low = Math.min(low, line.y[n]); high = Math.max(high, line.y[n]);
        if (line.y[n] > 0) least = Math.min(least, line.y[n]);
      }
    }
    if (low > high) return null;
    const log = (chart.log || (state.log && chart.format === "loss")) && least < Infinity && high > 0;
    if (log) { const pad = Math.max((high / least) ** 0.04, 1.01); return { low: least / pad, high: high * pad, log }; }
    if (chart.range) [low, high] = [Math.min(chart.range[0], chart.reference ?? chart.range[0]) - 0.01, chart.range[1]];
    else if (chart.reference !== undefined) { low = Math.min(low, chart.reference); high = Math.max(high, chart.reference); }
    if (chart.zero) low = Math.min(0, low);
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    high += pad;
    if (!chart.zero) low -= pad;
    if (chart.format === "percent") { high = Math.min(high, 1.02); low = Math.max(low, -0.001); }
    return { low, high, log: false };
  }

  // ---- drawing

  function make(name, attributes, parent) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  }

  const colour = (name) => `var(--${name})`;
  const DASHES = ["", "7 4", "1.5 3.5"];

  // All charts share one horizontal range, so that one pointer reads them all.
  function range() {
    if (state.zoom) return state.zoom;
    let low = Infinity, high = -Infinity;
    for (const [number, run] of data.runs.entries()) {
      if (state.hidden.includes(number)) continue;
      const values = run.axes[state.axis];
      low = Math.min(low, values[0]); high = Math.max(high, values[values.length - 1]);
    }
    if (low < high * 0.15) low = 0;
    return low < high ? [low, high] : [low * 0.5, low * 1.5 || 1];
  }

  function draw(chart, plot) {
    plot.replaceChildren();
    const width = plot.clientWidth, height = plot.clientHeight;
    if (!width) return;
    for (const line of chart.lines) if (line.axis !== state.axis) {
      line.x = line.s.map((step) => place(data.runs[line.run], step));
      line.axis = state.axis;
    }
    const lines = visible(chart), y = lines.length ? domain(chart, lines) : null;
    views.delete(chart.id);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, plot);
    if (!y) {
      make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg).textContent = "nothing in this range";
      return;
    }
    const [x0, x1] = range();
    const yTicks = chart.ticks && !state.zoom ? chart.ticks : y.log ? logTicks(y.low, y.high) : ticks(y.low, y.high, height / 52);
    const label = (v) => chart.format === "percent" ? Number((100 * v).toPrecision(4)) + " %" : short(v);
    const left = 10 + 6.9 * Math.max(...yTicks.map((t) => label(t).length), 2), right = 20, top = 8, bottom = 34;
    const sx = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
    const log = Math.log, f = y.log ? (v) => (log(Math.max(v, 1e-30)) - log(y.low)) / (log(y.high) - log(y.low))
      : (v) => (v - y.low) / (y.high - y.low);
    const sy = (v) => height - bottom - f(v) * (height - top - bottom);

    for (const t of yTicks) {
      make("line", { x1: left, x2: width - right, y1: sy(t), y2: sy(t), stroke: "var(--grid)" }, svg);
      make("text", { x: left - 7, y: sy(t) + 4, "text-anchor": "end" }, svg).textContent = label(t);
    }
    const [factor, unit] = state.axis === "hours" ? hoursUnit(x1) : [1, ""];
    const xTicks = ticks(x0 * factor, x1 * factor, Math.min(8, (width - left) / 74));
    for (const t of xTicks) {
      const at = sx(t / factor);
      if (at < left - 1 || at > width - right + 1) continue;
      make("text", { x: at, y: height - bottom + 16, "text-anchor": "middle" }, svg).textContent = short(t);
    }
    make("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, svg).textContent =
      AXES[state.axis] + (unit ? ` (${unit})` : "");
    if (chart.reference !== undefined)
      make("line", { x1: left, x2: width - right, y1: sy(chart.reference), y2: sy(chart.reference), stroke: "var(--muted)", "stroke-dasharray": "2 3" }, svg);

    const clip = `clip-${chart.id}`;
    make("rect", { x: left, y: 0, width: width - left - right + 6, height: height - bottom + 4 }, make("clipPath", { id: clip }, make("defs", {}, svg)));
    const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
    for (const [number, run] of data.runs.entries()) {
      if (state.hidden.includes(number) || !lines.some((line) => line.run === number)) continue;
      for (const step of run.restarts) {
        const at = sx(place(run, step));
        make("line", { x1: at, x2: at, y1: top, y2: height - bottom, stroke: data.runs.length > 1 ? colour(run.colour) : "var(--muted)", "stroke-width": 1.4, "stroke-dasharray": "1.5 3.5", opacity: 0.75 }, inside);
      }
    }
    for (const line of lines) drawLine(line, chart, inside, sx, sy);
    const cross = make("line", { y1: top, y2: height - bottom, stroke: "var(--muted)", visibility: "hidden" }, svg);
    const dots = make("g", {}, svg), brush = make("rect", { y: top, height: height - top - bottom, fill: "var(--accent)", opacity: 0.15, visibility: "hidden" }, svg);
    const inverse = (px) => x0 + (px - left) / (width - left - right) * (x1 - x0);
    views.set(chart.id, { chart, plot, lines, sx, sy, x0, x1, cross, dots, brush, inverse });
  }

  function drawLine(line, chart, parent, sx, sy) {
    const { kind, x, y } = line, hue = line.colour === "ink" ? "var(--ink)" : colour(line.colour);
    const thin = kind === "valid" || kind === "ema";
    let path = "";
    for (let n = 0; n < x.length; n++) {
      const px = sx(x[n]).toFixed(1), py = sy(y[n]).toFixed(1);
      path += n === 0 ? `M${px} ${py}` : kind === "stepped" ? `V${py}H${px}` : `L${px} ${py}`;
    }
    const few = x.length <= 40;
    const wide = chart.reference !== undefined ? 2 : thin ? (few ? 1.2 : 1.6) : kind === "raw" ? 1 : 2.1;
    make("path", { d: path, fill: "none", stroke: hue, "stroke-width": wide, "stroke-linejoin": "round", "stroke-linecap": "round",
      opacity: kind === "raw" ? 0.24 : 1, "stroke-dasharray": kind === "ema" && !line.dash ? "4 3" : DASHES[(line.dash || 0) % DASHES.length] }, parent);
    if (x.length === 1 || (thin && few && !chart.small)) for (let n = 0; n < x.length; n++)
      make("circle", { cx: sx(x[n]), cy: sy(y[n]), r: data.runs.length > 1 ? 2.6 : 3.4, fill: kind === "ema" ? "var(--card)" : hue, stroke: hue, "stroke-width": data.runs.length > 1 ? 1.2 : 1.6 }, parent);
  }

  // ---- pointer and keys

  function nearest(line, value) {
    let low = 0, high = line.x.length - 1;
    if (value > line.x[high] + (line.x[high] - line.x[0]) * 0.02) return -1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] <= value) low = middle; else high = middle; }
    return Math.abs(line.x[low] - value) <= Math.abs(line.x[high] - value) ? low : high;
  }

  function readable(line, lines) {
    return line.kind !== "raw" || !lines.some((other) => other.kind === "smooth" && other.run === line.run && other.label === line.label);
  }

  function point(view) {
    const { lines, sx, sy, x0, x1, cross, dots } = view;
    dots.replaceChildren();
    const on = cursor !== null && cursor >= x0 && cursor <= x1;
    cross.setAttribute("visibility", on ? "visible" : "hidden");
    if (!on) return [];
    cross.setAttribute("x1", sx(cursor)); cross.setAttribute("x2", sx(cursor));
    const rows = [];
    for (const line of lines.filter((each) => readable(each, lines))) {
      const n = nearest(line, cursor);
      if (n < 0) continue;
      const hue = line.colour === "ink" ? "var(--ink)" : colour(line.colour);
      make("circle", { cx: sx(line.x[n]), cy: sy(line.y[n]), r: 4, fill: hue, stroke: "var(--card)", "stroke-width": 1.5 }, dots);
      rows.push({ line, value: line.y[n], hue, step: line.s[n] });
    }
    return rows;
  }

  function hover(active, clientX, clientY) {
    let rows = [];
    for (const view of views.values()) { const found = point(view); if (view === active) rows = found; }
    tip.hidden = !active || !rows.length;
    if (tip.hidden) return;
    const head = document.createElement("b");
    head.textContent = (state.axis === "s" ? "step " : "") + xText(cursor) + (state.axis === "tokens" ? " tokens" : "") +
      (state.axis !== "s" ? `, step ${Math.round(rows[0].step).toLocaleString("en")}` : "");
    tip.replaceChildren(head);
    for (const { line, value, hue } of rows.slice(0, 14)) {
      const row = document.createElement("div"), mark = document.createElement("i"), name = document.createElement("em"), number = document.createElement("span");
      mark.style.borderColor = hue;
      mark.style.background = line.kind === "ema" ? "transparent" : hue;
      name.textContent = [data.runs.length > 1 ? data.runs[line.run].name : "", line.label].filter(Boolean).join(", ");
      number.textContent = shown(value, active.chart);
      row.append(mark, name, number);
      tip.append(row);
    }
    const box = tip.getBoundingClientRect();
    const beside = clientX + 18 + box.width > window.innerWidth - 8 ? clientX - box.width - 18 : clientX + 18;
    tip.style.left = Math.max(8, beside) + "px";
    tip.style.top = Math.min(Math.max(8, clientY - box.height / 2), window.innerHeight - box.height - 8) + "px";
  }

  function listen(plot, chart) {
    let from = null;
    const view = () => views.get(chart.id);
    const at = (event) => view().inverse(event.clientX - plot.getBoundingClientRect().left);
    plot.addEventListener("pointermove", (event) => {
      if (!view()) return;
      cursor = at(event);
      if (from !== null) {
        const { brush, sx } = view(), a = sx(Math.min(from, cursor)), b = sx(Math.max(from, cursor));
        brush.setAttribute("x", a); brush.setAttribute("width", b - a); brush.setAttribute("visibility", "visible");
      }
      hover(view(), event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", () => { if (from === null) { cursor = null; hover(null); } });
    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button || !view()) return;
      from = at(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = at(event), { x0, x1, sx } = view(), begin = from;
      from = null;
      if (Math.abs(sx(to) - sx(begin)) > 8) state.zoom = [Math.max(x0, Math.min(begin, to)), Math.min(x1, Math.max(begin, to))];
      drawAll();
    });
    plot.addEventListener("dblclick", () => { state.zoom = null; drawAll(); });
    plot.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") { cursor = null; state.zoom = null; drawAll(); hover(null); }
      if (!way || !view()) return;
      event.preventDefault();
      const { x0, x1, sx } = view(), box = plot.getBoundingClientRect();
      cursor = Math.min(x1, Math.max(x0, cursor === null ? (way > 0 ? x0 : x1) : cursor + way * (x1 - x0) / 50));
      hover(view(), box.left + sx(cursor), box.top + box.height / 2);
    });
    plot.addEventListener("blur", () => { cursor = null; hover(null); });
  }

  // ---- page

  const charts = new Map(data.charts.map((chart) => [chart.id, chart]));
  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => [charts.get(figure.dataset.chart), figure.querySelector(".plot"), figure]);

  function drawAll() {
    for (const [chart, plot] of figures) draw(chart, plot);
    for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", button.dataset.axis === state.axis);
    document.getElementById("reset").hidden = !state.zoom;
    remember();
  }

  for (const [chart, plot, figure] of figures) {
    if (chart.legend) {
      const legend = document.createElement("div");
      legend.className = "legend";
      for (const line of chart.lines) {
        const item = document.createElement("span"), mark = document.createElement("i");
        mark.style.background = colour(line.colour);
        item.append(mark, line.label);
        legend.append(item);
      }
      figure.append(legend);
    }
    listen(plot, chart);
  }
  for (const button of document.querySelectorAll("[data-axis]"))
    button.addEventListener("click", () => { state.axis = button.dataset.axis; state.zoom = null; cursor = null; drawAll(); });
  for (const box of document.querySelectorAll("[data-run]")) {
    box.checked = !state.hidden.includes(Number(box.dataset.run));
    box.addEventListener("change", () => {
      state.hidden = [...document.querySelectorAll("[data-run]")].filter((b) => !b.checked).map((b) => Number(b.dataset.run));
      drawAll();
    });
  }
  const logBox = document.getElementById("log");
  logBox.checked = state.log;
  logBox.addEventListener("change", () => { state.log = logBox.checked; drawAll(); });
  document.getElementById("reset").addEventListener("click", () => { state.zoom = null; drawAll(); });

  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", drawAll);
  const target = state.scroll;
  drawAll();
  if (data.refresh) {
    history.scrollRestoration = "manual";
    window.scrollTo({ top: target, behavior: "instant" });
  }
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
  window.addEventListener("pagehide", remember);
  window.addEventListener("beforeprint", drawAll);

  // A report that follows a run loads itself anew, but not under the reader's hand.
  if (data.refresh) {
    let touched = 0;
    for (const kind of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"])
      window.addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
    const again = () => {
      if (document.hidden || Date.now() - touched < 2500) { setTimeout(again, 1000); return; }
      remember();
      location.reload();
    };
    setTimeout(again, 1000 * data.refresh);
  }
})();
