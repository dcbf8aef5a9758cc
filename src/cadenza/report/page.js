"use strict";
// The curves come drawn; this draws them anew: as wide as they are shown, zoomed, smoothed, on a log scale.
const { runs = [], charts: known = [], span = [0, 1] } = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 210, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 26, DOTS = 40; // chart.py has the same
const view = { from: null, to: null, log: false, smooth: 0, hidden: new Set() };

const charts = known.map((one, number) => {
  const plot = document.querySelector(`figure[data-chart="${number}"] .plot`);
  const lines = one.lines.map(({ run, x, y, means }) => {
    const raw = { x: summed(x), y };
    return { run, raw, means: means ? { x: summed(means.x), y: means.y } : raw, soft: raw };
  });
  return { number, plot, lines, svg: plot.querySelector("svg"), scale: null };
});

function summed(differences) {
  let step = 0;
  return differences.map((ahead) => (step += ahead));
}

// -- small helpers ------------------------------------------------------------------------------------------------

function make(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

function html(name, className, text = null) {
  const node = document.createElement(name);
  node.className = className;
  if (text !== null) node.textContent = text;
  return node;
}

// The first index with a step not below `step`.
function indexFrom(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(steps, step) {
  const after = indexFrom(steps, step);
  if (after === 0) return 0;
  if (after === steps.length) return after - 1;
  return step - steps[after - 1] <= steps[after] - step ? after - 1 : after;
}

function round(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function short(value) {
  const size = Math.abs(value);
  for (const [least, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= least && size < 1e12) return round(value / least, 4) + letter;
  }
  if (size && (size < 1e-3 || size >= 1e12)) {
    const [mantissa, exponent] = value.toExponential(3).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  return round(value, 4);
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough * 0.7);
  const found = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i++) found.push(i * step);
  return found;
}

// Round numbers for an axis of powers: 1, 10, 100; with 2 and 5 between where the range is short.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const size of high - low > 3 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(size);
      if (at >= low && at <= high) found.push(size * 10 ** power);
    }
  }
  const apart = Math.ceil(found.length / 6);
  return found.length < 2 ? ticks(10 ** low, 10 ** high, 4) : found.filter((_, i) => i % apart === 0);
}

// A moving average that forgets, corrected for its beginning; a gap stays one. A thinned curve brings its means along.
function smoothed(line, weight) {
  if (!weight) return line.raw;
  let sum = 0, share = 0;
  const y = line.means.y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
  return { x: line.means.x, y };
}

// -- drawing ------------------------------------------------------------------------------------------------------

function shown(chart) {
  return chart.lines.filter((line) => !view.hidden.has(line.run));
}

function draws(value) {
  return value !== null && (!view.log || value > 0);
}

function scaleOf(chart) {
  const lines = shown(chart);
  const from = view.from ?? span[0], to = view.to ?? span[1];
  const turned = view.log ? Math.log10 : (value) => value;
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    const { x, y } = line.soft;
    for (let i = indexFrom(x, from); i < x.length && x[i] <= to; i++) {
      if (!draws(y[i])) continue;
      low = Math.min(low, turned(y[i]));
      high = Math.max(high, turned(y[i]));
    }
  }
  const empty = low > high;
  if (empty) [low, high] = [0, 1];
  const spread = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)) ? high - low : 0; // less is rounding
  const room = spread * 0.05 || (view.log ? 0.3 : Math.abs(high) * 0.1 || 1);
  [low, high] = [low - room, high + room];
  const width = Math.max(chart.plot.clientWidth, 160);
  const across = (step) => LEFT + ((step - from) * (width - LEFT - RIGHT)) / (to - from || 1);
  const up = (value) => HEIGHT - BOTTOM - ((turned(value) - low) * (HEIGHT - BOTTOM - TOP)) / (high - low);
  const step = (pixel) => from + ((pixel - LEFT) * (to - from)) / (width - LEFT - RIGHT);
  return { from, to, low, high, width, across, up, step, empty };
}

// The points inside the range shown, and one on either side, which the curve comes from and goes to.
function within({ x }, { from, to }) {
  return [Math.max(0, indexFrom(x, from) - 1), Math.min(x.length, indexFrom(x, to + 1) + 1)];
}

function pathOf({ x, y }, [first, last], { across, up }) {
  let path = "", pen = false;
  for (let i = first; i < last; i++) {
    if (!draws(y[i])) {
      pen = false;
      continue;
    }
    const lone = !pen && !(i + 1 < last && draws(y[i + 1]));
    path += `${pen ? "L" : "M"}${across(x[i]).toFixed(1)},${up(y[i]).toFixed(1)}${lone ? "h0" : ""}`;
    pen = true;
  }
  return path;
}

function dotsOf({ x, y }, [first, last], { across, up }) {
  let path = "";
  for (let i = first; i < last; i++) {
    if (draws(y[i])) path += `M${across(x[i]).toFixed(1)},${up(y[i]).toFixed(1)}h0`;
  }
  return path;
}

function gridOf(chart) {
  const { from, to, low, high, width, across, up, empty } = chart.scale;
  const nodes = [], bottom = HEIGHT - BOTTOM;
  for (const value of empty ? [] : view.log ? logTicks(low, high) : ticks(low, high, 4)) {
    const y = up(value).toFixed(1);
    if (y > bottom - 8) continue; // it would touch the axis below
    nodes.push(make("path", { d: `M${LEFT},${y}H${width - RIGHT}` }), make("text", { x: LEFT - 7, y, class: "y" }, short(value)));
  }
  for (const step of ticks(from, to, Math.max(2, Math.min(6, width / 90)))) {
    if (Number.isInteger(step) && across(step) > LEFT + 16) nodes.push(make("text", { x: across(step).toFixed(1), y: bottom + 17, class: "x" }, short(step)));
  }
  if (empty) {
    const said = view.log ? "nothing above 0 to show" : "nothing finite to show";
    nodes.push(make("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, said));
  }
  nodes.push(make("text", { x: LEFT - 7, y: bottom + 17, class: "unit" }, "step"));
  nodes.push(make("path", { d: `M${LEFT},${bottom}H${width - RIGHT}`, class: "axis" }));
  return nodes;
}

function curvesOf(chart) {
  const nodes = [], scale = chart.scale;
  const clip = make("clipPath", { id: `clip-${chart.number}` });
  clip.append(make("rect", { x: LEFT - 3, y: 0, width: scale.width - LEFT - RIGHT + 6, height: HEIGHT - BOTTOM + 3 }));
  nodes.push(clip);
  for (const line of shown(chart)) {
    const look = runs[line.run].look;
    const range = within(line.soft, scale);
    if (view.smooth) nodes.push(make("path", { d: pathOf(line.raw, within(line.raw, scale), scale), class: `line raw ${look}` }));
    nodes.push(make("path", { d: pathOf(line.soft, range, scale), class: `line ${look}` }));
    if (range[1] - range[0] <= DOTS) nodes.push(make("path", { d: dotsOf(line.soft, range, scale), class: `dots ${look}` }));
  }
  return nodes;
}

function draw(chart) {
  chart.scale = shown(chart).length ? scaleOf(chart) : null;
  const grid = chart.svg.querySelector(".grid"), curves = chart.svg.querySelector(".curves");
  if (!chart.scale) {
    grid.replaceChildren();
    curves.replaceChildren();
    return;
  }
  chart.svg.setAttribute("viewBox", `0 0 ${chart.scale.width} ${HEIGHT}`);
  grid.replaceChildren(...gridOf(chart));
  curves.setAttribute("clip-path", `url(#clip-${chart.number})`);
  curves.replaceChildren(...curvesOf(chart));
}

function drawAll() {
  point(null);
  document.getElementById("reset").hidden = view.from === null;
  charts.forEach(draw);
}

function zoom(from, to) {
  view.from = from;
  view.to = to;
  drawAll();
}

// -- the crosshair ------------------------------------------------------------------------------------------------

// Show the values at the step nearest to `step`, as text at `chart`, as a line in all the others; null takes it away.
function point(chart, step = 0) {
  for (const one of charts) {
    one.svg.querySelector(".hover")?.remove();
    one.tip?.remove();
  }
  if (chart === null || !chart.scale) return;
  const { from, to } = chart.scale;
  const near = shown(chart).map((line) => line.raw.x[nearest(line.raw.x, step)]).filter((at) => at >= from && at <= to);
  if (!near.length) return;
  const at = near.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  chart.at = at;
  for (const one of charts) mark(one, at, one === chart);
  tell(chart, at);
}

function mark(chart, at, here) {
  const scale = chart.scale;
  if (!scale || at < scale.from || at > scale.to) return;
  const group = make("g", { class: "hover" }), pixel = scale.across(at).toFixed(1);
  group.append(make("line", { x1: pixel, x2: pixel, y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" }));
  for (const line of here ? shown(chart) : []) {
    const { x, y } = line.soft, i = nearest(x, at);
    if (!draws(y[i]) || x[i] < scale.from || x[i] > scale.to) continue;
    const where = { cx: scale.across(x[i]).toFixed(1), cy: scale.up(y[i]).toFixed(1) };
    group.append(make("circle", { ...where, r: 4, class: `point ${runs[line.run].look}` }));
  }
  chart.svg.append(group);
}

function tell(chart, at) {
  const tip = html("div", "tip"), table = html("table", "");
  tip.setAttribute("role", "status");
  tip.append(html("div", "at", `step ${at.toLocaleString("en")}`), table);
  for (const line of shown(chart)) {
    const { x, y } = line.raw, i = nearest(x, at), soft = line.soft.y[nearest(line.soft.x, at)];
    const row = html("tr", ""), name = html("td", ""), value = html("td", "");
    if (runs.length > 1) name.append(html("span", `swatch ${runs[line.run].look}`), runs[line.run].name);
    value.append(html("b", "", y[i] === null ? "not finite" : round(y[i], 6)));
    if (view.smooth && soft !== null) value.append(html("span", "elsewhere", `smoothed ${round(soft, 4)}`));
    if (x[i] !== at) value.append(html("span", "elsewhere", `at ${x[i].toLocaleString("en")}`));
    row.append(...(runs.length > 1 ? [name, value] : [value]));
    table.append(row);
  }
  chart.plot.append(tip);
  chart.tip = tip;
  const x = chart.scale.across(at), room = chart.plot.clientWidth, width = tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(room - width, x < room / 2 ? x + 14 : x - width - 14))}px`;
}

// -- mouse, finger, keyboard --------------------------------------------------------------------------------------

function listen(chart) {
  const glass = html("div", "glass"), selection = html("div", "selection");
  let start = null;
  const pixel = (event) => event.clientX - glass.getBoundingClientRect().left;
  const inside = (x) => Math.max(LEFT, Math.min(chart.scale.width - RIGHT, x));

  glass.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button || !chart.scale) return point(chart, chart.scale?.step(pixel(event)));
    start = inside(pixel(event));
    glass.setPointerCapture(event.pointerId);
    event.preventDefault(); // else a drag selects text
  });
  glass.addEventListener("pointermove", (event) => {
    if (!chart.scale) return;
    point(chart, chart.scale.step(pixel(event)));
    if (start === null) return;
    const end = inside(pixel(event));
    const box = { left: Math.min(start, end), width: Math.abs(end - start), top: TOP, height: HEIGHT - BOTTOM - TOP };
    for (const [key, value] of Object.entries(box)) selection.style[key] = `${value}px`;
    chart.plot.append(selection);
  });
  glass.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [a, b] = [start, inside(pixel(event))].sort((one, other) => one - other).map(chart.scale.step);
    const wide = Math.abs(inside(pixel(event)) - start) > 5;
    start = null;
    selection.remove();
    if (wide) zoom(a, b);
  });
  glass.addEventListener("pointercancel", () => {
    start = null;
    selection.remove();
  });
  glass.addEventListener("pointerleave", () => start === null && point(null));
  glass.addEventListener("dblclick", () => zoom(null, null));
  chart.plot.append(glass);

  chart.plot.tabIndex = 0;
  chart.plot.setAttribute("role", "group");
  chart.plot.setAttribute("aria-label", `${known[chart.number].name}: arrow keys read values, Escape shows the whole range`);
  chart.plot.addEventListener("keydown", (event) => walk(chart, event));
  chart.plot.addEventListener("blur", () => point(null));
}

function walk(chart, event) {
  const line = shown(chart)[0], by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") zoom(null, null);
  if (!line || !by) return;
  event.preventDefault();
  const steps = line.raw.x, i = chart.at === undefined ? 0 : nearest(steps, chart.at) + by;
  point(chart, steps[Math.max(0, Math.min(steps.length - 1, i))]);
}

function control() {
  document.getElementById("log").addEventListener("change", (event) => {
    view.log = event.target.checked;
    drawAll();
  });
  document.getElementById("smooth").addEventListener("input", (event) => {
    view.smooth = Number(event.target.value);
    document.getElementById("smooth-value").textContent = event.target.value;
    for (const line of charts.flatMap((chart) => chart.lines)) line.soft = smoothed(line, view.smooth);
    drawAll();
  });
  document.getElementById("reset").addEventListener("click", () => zoom(null, null));
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run), hidden = view.hidden.delete(run);
      if (!hidden) view.hidden.add(run);
      button.setAttribute("aria-pressed", String(hidden));
      drawAll();
    });
  }
}

// -- tables -------------------------------------------------------------------------------------------------------

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const way = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    const key = (row) => Number(row.cells[column].dataset.value ?? NaN);
    const order = (a, b) => (Number.isNaN(key(a)) - Number.isNaN(key(b))) || way * (key(a) - key(b)) || 0;
    body.append(...[...body.rows].sort(order));
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  }));
}

if (charts.length) {
  charts.forEach(listen);
  control();
  const watch = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(charts[target.parentNode.dataset.chart])));
  charts.forEach((chart) => watch.observe(chart.plot));
}
document.querySelectorAll("table.sortable").forEach(sortable);
document.documentElement.classList.remove("no-script");
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
