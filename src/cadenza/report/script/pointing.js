// Reading values in a chart: with the mouse, a finger or the keyboard.

const MOST_IN_TIP = 12;

// Show the values at the step nearest to `step`, as text at `chart`, as a line in all the others; null takes it away.
function point(chart, step = 0, height = null) {
  for (const one of charts) {
    one.svg.querySelector(".hover")?.remove();
    one.tip?.remove();
    one.tip = null;
  }
  if (chart === null || !chart.scale) return null;
  const { from, to } = chart.scale;
  const near = shown(chart).map((line) => line.raw.x[nearest(line.raw.x, step)]).filter((at) => at >= from && at <= to);
  if (!near.length) return null;
  const at = near.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  chart.at = at;
  const picked = pickedLines(chart, at, height);
  for (const one of charts) if (one.plot.clientWidth) mark(one, at, one === chart ? picked : []);
  return tell(chart, at, picked);
}

// The lines that the text names: all of a few, of many those nearest to the pointer.
function pickedLines(chart, at, height) {
  const lines = shown(chart);
  if (lines.length <= MOST_IN_TIP) return lines;
  const distance = (line) => {
    const value = line.soft.y[nearest(line.soft.x, at)];
    return draws(value) ? Math.abs(chart.scale.up(line)(value) - (height ?? 0)) : Infinity;
  };
  return lines.map((line) => [distance(line), line]).sort(([a], [b]) => a - b).slice(0, MOST_IN_TIP).map(([, line]) => line);
}

function mark(chart, at, lines) {
  const scale = chart.scale;
  if (!scale || at < scale.from || at > scale.to) return;
  const group = make("g", { class: "hover" }), pixel = scale.across(at).toFixed(1);
  group.append(make("line", { x1: pixel, x2: pixel, y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" }));
  for (const line of lines) {
    const { x, y } = line.soft, i = nearest(x, at);
    if (!draws(y[i]) || x[i] < scale.from || x[i] > scale.to) continue;
    const spot = { cx: scale.across(x[i]).toFixed(1), cy: scale.up(line)(y[i]).toFixed(1) };
    group.append(make("circle", { ...spot, r: 4, class: `point ${runs[line.run].look}` }));
  }
  chart.svg.append(group);
}

// The value of a line at a step: its text, and further texts beside it.
function valueAt(line, at) {
  const { x, y } = line.raw, i = nearest(x, at), beside = [];
  if (line.soft !== line.raw) {
    const soft = line.soft.y[nearest(line.soft.x, at)];
    if (soft !== null && soft !== undefined) beside.push(`${view.smooth ? "smoothed" : "mean"} ${round(soft, 4)}`);
  }
  if (x[i] !== at) beside.push(`at ${whole(x[i])}`);
  return { text: y[i] === null ? "not finite" : round(y[i], 6), beside };
}

// Show the text, and return it as a sentence.
function tell(chart, at, lines) {
  const tip = html("div", "tip"), table = html("table", ""), said = [];
  tip.setAttribute("aria-hidden", "true"); // screen readers get the sentence
  tip.append(html("div", "at", `step ${whole(at)}`), table);
  for (const line of lines) {
    const { text, beside } = valueAt(line, at);
    const row = html("tr", ""), name = html("td", ""), value = html("td", "");
    if (runs.length > 1) name.append(swatchOf(line.run), runs[line.run].name);
    value.append(html("b", "", text), ...beside.map((one) => html("span", "elsewhere", one)));
    row.append(...(runs.length > 1 ? [name, value] : [value]));
    table.append(row);
    said.push([runs.length > 1 ? runs[line.run].name : "", text, ...beside].filter(Boolean).join(" "));
  }
  const close = ({ run, step }) => lines.some((line) => line.run === run) && Math.abs(chart.scale.across(step) - chart.scale.across(at)) < 4;
  for (const { text } of acts.filter(close).slice(-3)) {
    tip.append(html("div", "at", text));
    said.push(text);
  }
  const others = shown(chart).length - lines.length;
  if (others) tip.append(html("div", "at", `and ${others} more`));
  chart.plot.append(tip);
  chart.tip = tip;
  const x = chart.scale.across(at), room = chart.plot.clientWidth, width = tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(room - width, x < room / 2 ? x + 14 : x - width - 14))}px`;
  return `${chart.name}, step ${whole(at)}: ${said.join(", ")}${others ? `, and ${others} more` : ""}`;
}

function swatchOf(run) {
  const sample = make("svg", { viewBox: "0 0 22 12", class: "swatch", "aria-hidden": "true" });
  sample.append(make("path", { d: "M1,6H21", class: `line ${runs[run].look}` }));
  sample.append(make("path", { d: markOf(run, 11, 6), class: `marks ${runs[run].look}` }));
  return sample;
}

// Let one run stand out wherever it is drawn or named; null ends that.
function highlight(run) {
  for (const node of document.querySelectorAll(".lit")) node.classList.remove("lit");
  document.body.classList.toggle("spotlight", run !== null);
  for (const node of run === null ? [] : document.querySelectorAll(`[data-of="${run}"], tr[data-run="${run}"]`)) node.classList.add("lit");
}

function listen(chart) {
  const glass = html("div", "glass"), selection = html("div", "selection");
  let start = null;
  const pixel = (event) => event.clientX - glass.getBoundingClientRect().left;
  const height = (event) => event.clientY - glass.getBoundingClientRect().top;
  const inside = (x) => Math.max(chart.scale.left, Math.min(chart.scale.width - chart.scale.right, x));
  const look = (event) => {
    point(chart, chart.scale.step(pixel(event)), height(event));
    if (shown(chart).length > MOST_IN_TIP) highlight(pickedLines(chart, chart.at, height(event))[0].run);
  };

  glass.addEventListener("pointerdown", (event) => {
    if (!chart.scale) return;
    if (event.pointerType === "touch" || event.button) return look(event);
    start = inside(pixel(event));
    glass.setPointerCapture(event.pointerId);
    event.preventDefault(); // else a drag selects text
  });
  glass.addEventListener("pointermove", (event) => {
    if (!chart.scale) return;
    look(event);
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
  glass.addEventListener("pointerleave", (event) => {
    if (start === null && event.pointerType !== "touch") leave(); // what a finger showed stays when it is lifted
  });
  glass.addEventListener("dblclick", () => zoom(null, null));
  chart.plot.append(glass);

  for (const [key, value] of Object.entries({
    tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": chart.name, "aria-describedby": `desc-${chart.number} keys`,
  })) chart.plot.setAttribute(key, value);
  chart.plot.addEventListener("keydown", (event) => walk(chart, event));
  chart.plot.addEventListener("blur", () => point(null));
}

function leave() {
  point(null);
  highlight(null);
}

// A tap beside the charts ends what a finger showed.
addEventListener("pointerdown", (event) => {
  if (event.pointerType === "touch" && !event.target.closest(".plot")) leave();
});

const WALKS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

function walk(chart, event) {
  const line = shown(chart)[0];
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") return chart.tip ? void point(null) : zoom(null, null);
  if (!line || !chart.scale) return;
  if ("+-=".includes(event.key)) {
    event.preventDefault();
    return zoomAround(chart, event.key === "-" ? 2 : 0.5);
  }
  if (!(event.key in WALKS)) return;
  event.preventDefault();
  const { from, to } = chart.scale, steps = line.raw.x.filter((step) => step >= from && step <= to);
  if (!steps.length) return;
  const by = WALKS[event.key] * (event.shiftKey && Math.abs(WALKS[event.key]) === 1 ? 10 : 1);
  const i = chart.at === undefined ? (by === Infinity ? steps.length : 0) : nearest(steps, chart.at) + by;
  say(point(chart, steps[Math.max(0, Math.min(steps.length - 1, i))]) ?? "");
}

function zoomAround(chart, factor) {
  const { from, to } = chart.scale, middle = chart.at ?? (from + to) / 2;
  const a = Math.max(span[0], middle - (middle - from) * factor), b = Math.min(span[1], middle + (to - middle) * factor);
  if (a <= span[0] && b >= span[1]) return zoom(null, null);
  if (b - a >= 1) zoom(a, b);
}
