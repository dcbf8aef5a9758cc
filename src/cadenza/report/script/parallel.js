// The runs as lines across parallel axes, one for each argument and one for a metric, read from the table of runs.

const TALL = 316, HEAD = 46, FOOT = 50, APART = 118, MOST_AXES = 12;

function parallel() {
  const host = document.getElementById("parallel"), table = document.getElementById("run-table");
  if (!host || !table) return;
  const columns = columnsOf(table), metrics = columns.filter((one) => one.kind === "metric");
  const chosen = columns.filter((one) => one.kind === "argument").slice(0, MOST_AXES - 1);
  if (!chosen.length || !metrics.length) return;
  const choice = html("select", ""), label = html("label", "tool", "colour by "), left = html("span", "count");
  const clear = html("button", "plain", "clear the filter"), frame = html("div", "wide"), tools = html("div", "tools");
  metrics.forEach((one, i) => choice.append(new Option(one.name, i)));
  label.append(choice);
  clear.type = "button";
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", "arguments and a metric on parallel axes; the table above has the same values");
  tools.append(label, left, clear);
  host.append(html("h3", "", "Arguments and results"), tools, frame, html("p", "note", HOW));
  const state = { host, table, frame, left, clear, axes: [...chosen, metrics[0]], focus: null, width: 0 };
  choice.addEventListener("change", () => {
    state.axes = [...chosen, metrics[choice.value]];
    drawThreads(state);
    filter(state);
  });
  clear.addEventListener("click", () => unbrush(state, state.axes.concat(metrics)));
  new ResizeObserver(() => host.clientWidth !== state.width && drawThreads(state)).observe(host);
  filter(state, false);
}

const HOW = "Drag along an axis to keep the runs in that range, double-click to keep all. With the keyboard: Tab to an end of an "
  + "axis, arrow keys move it, Escape keeps all. The charts and the table show the same runs.";

function columnsOf(table) {
  const rows = [...table.tBodies[0].rows];
  return [...table.tHead.rows[0].cells].slice(1).map((head, i) => {
    const values = [];
    for (const row of rows) {
      const cell = row.cells[i + 1], given = cell.dataset.value;
      values[row.dataset.run] = given !== undefined ? Number(given) : cell.className === "none" ? null : cell.textContent;
    }
    return axisOf({ name: head.textContent, kind: head.dataset.kind, values });
  });
}

// An axis maps each value to 0..1; values that are missing or not finite are below it.
function axisOf(axis) {
  axis.values = axis.values.map((value) => (typeof value === "number" && !Number.isFinite(value) ? null : value));
  const some = axis.values.filter((value) => value !== null);
  axis.numeric = some.length > 0 && some.every((value) => typeof value === "number");
  const low = Math.min(...(axis.numeric ? some : [0])), high = Math.max(...(axis.numeric ? some : [0]));
  axis.log = axis.numeric && low > 0 && high / low >= 20;
  axis.mayLog = axis.numeric && low > 0 && high > low;
  axis.entries = [...new Set(some)].sort((a, b) => (axis.numeric ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })));
  axis.at = (value) => {
    if (value === null) return -0.12;
    if (!axis.numeric) return axis.entries.length < 2 ? 0.5 : axis.entries.indexOf(value) / (axis.entries.length - 1);
    if (high === low) return 0.5;
    const turn = axis.log ? Math.log : (one) => one;
    return (turn(value) / 2 - turn(low) / 2) / (turn(high) / 2 - turn(low) / 2);
  };
  axis.marks = () => {
    if (!axis.numeric) return spaced(axis.entries.map((value) => [value, String(value)]), 14);
    if (axis.entries.length <= 6) return axis.entries.map((value) => [value, short(value)]);
    const values = axis.log ? logTicks(Math.log10(low) - 1e-9, Math.log10(high) + 1e-9) : ticks(low, high, 4);
    const [texts] = axis.log ? [values.map((value) => short(value))] : labels(values);
    return values.map((value, i) => [value, texts[i]]).filter(([value]) => value >= low && value <= high);
  };
  axis.brush = null;
  return axis;
}

function spaced(pairs, most) {
  const apart = Math.ceil(pairs.length / most);
  return pairs.filter((_, i) => i % apart === 0);
}

function cut(text, characters) {
  return text.length > characters ? `${text.slice(0, Math.max(1, characters - 1))}…` : text;
}

function passes(axis, run) {
  const at = axis.at(axis.values[run]);
  return !axis.brush || (at >= axis.brush[0] - 1e-9 && at <= axis.brush[1] + 1e-9);
}

// Show the runs that pass all axes, here, in the charts and in the table.
function filter(state, loud = true) {
  view.filtered = new Set([...runs.keys()].filter((run) => !state.axes.every((axis) => passes(axis, run))));
  const kept = runs.length - view.filtered.size;
  for (const row of state.table.tBodies[0].rows) row.hidden = view.filtered.has(Number(row.dataset.run));
  for (const path of state.frame.querySelectorAll(".threads path")) path.classList.toggle("out", view.filtered.has(Number(path.dataset.of)));
  state.left.textContent = kept < runs.length ? `${kept} of ${runs.length} runs` : `${runs.length} runs`;
  state.clear.hidden = kept === runs.length && state.axes.every((axis) => !axis.brush);
  if (loud) say(state.left.textContent);
  if (loud && charts.length) drawAll();
}

function unbrush(state, axes) {
  for (const axis of axes) axis.brush = null;
  drawThreads(state);
  filter(state);
}

function drawThreads(state) {
  state.width = state.host.clientWidth;
  const { axes, frame } = state, width = Math.max(frame.clientWidth, axes.length * APART), apart = width / axes.length;
  const svg = make("svg", { viewBox: `0 0 ${width} ${TALL}`, width, height: TALL, class: "threads-plot" });
  const x = (i) => apart * (i + 0.5), y = (at) => TALL - FOOT - at * (TALL - HEAD - FOOT);
  const threads = make("g", { class: "threads", "aria-hidden": "true" }), last = axes.at(-1);
  const order = [...runs.keys()].sort((a, b) => last.at(last.values[b]) - last.at(last.values[a]));
  for (const run of order) {
    const d = axes.map((axis, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(axis.at(axis.values[run])).toFixed(1)}`).join("");
    const path = make("path", { d, "data-of": run, class: view.filtered.has(run) ? "out" : "" });
    const at = last.at(last.values[run]);
    if (at >= 0) path.style.stroke = `color-mix(in oklab, var(--high) ${(at * 100).toFixed(1)}%, var(--low))`;
    threads.append(path);
  }
  svg.append(threads, ...heat(x(axes.length - 1), y(1), y(0)));
  axes.forEach((axis, i) => svg.append(drawAxis(state, axis, { x: x(i), y, apart, number: i })));
  svg.addEventListener("pointermove", (event) => hoverThread(state, event, { x, y, apart }));
  svg.addEventListener("pointerleave", () => hoverThread(state, null));
  frame.replaceChildren(svg);
  if (state.focus) frame.querySelector(state.focus)?.focus();
}

// The colours of the metric, beside its axis.
function heat(x, top, bottom) {
  const colours = make("linearGradient", { id: "heat", x1: 0, x2: 0, y1: 0, y2: 1 });
  for (const [offset, name] of [[0, "high"], [1, "low"]]) {
    const stop = make("stop", { offset });
    stop.style.stopColor = `var(--${name})`;
    colours.append(stop);
  }
  return [colours, make("rect", { x: x - 5, width: 5, y: top, height: bottom - top, fill: "url(#heat)" })];
}

function drawAxis(state, axis, { x, y, apart, number }) {
  const group = make("g", { class: "axis-of-runs" }), raised = number % 2 ? 14 : 30;
  const name = make("text", { x, y: raised, class: "name" }, cut(axis.name, Math.floor((apart * 1.9) / CHARACTER)));
  name.append(make("title", {}, axis.name));
  group.append(name, make("path", { d: `M${x},${y(0)}V${y(1)}` }));
  for (const [value, text] of axis.marks()) {
    group.append(make("text", { x: x + 12, y: y(axis.at(value)), class: "value" }, cut(text, Math.floor((apart - 36) / CHARACTER))));
  }
  if (axis.values.includes(null)) group.append(make("text", { x: x + 12, y: y(-0.12), class: "value" }, "none"));
  const brush = make("rect", { x: x - 9, width: 18, class: "brush" });
  const area = make("rect", { x: x - 18, width: 36, y: y(1) - 6, height: y(0) - y(1) + 12, class: "area" });
  const ends = ["from", "to"].map((end) => handle(state, axis, end, number));
  const refresh = () => {
    const [low, high] = axis.brush ?? [0, 1];
    brush.setAttribute("y", y(high) - 3);
    brush.setAttribute("height", y(low) - y(high) + 6);
    brush.classList.toggle("on", axis.brush !== null);
    ends.forEach((node, i) => {
      const at = i ? high : low, index = i ? lastBelow(axis, at) : firstFrom(axis, at);
      node.setAttribute("transform", `translate(${x},${y(at)})`);
      node.setAttribute("aria-valuenow", index);
      node.setAttribute("aria-valuetext", String(axis.entries[index] ?? "none"));
    });
  };
  axis.refresh = refresh;
  refresh();
  brushable(state, axis, area, y);
  group.append(brush, area, ...ends);
  if (axis.mayLog) group.append(switchOf(state, axis, x));
  return group;
}

// The end of a range: a slider over the values of the axis.
function handle(state, axis, end, number) {
  const up = end === "to";
  const node = make("path", {
    d: up ? "M-7,0L7,0L0,-8z" : "M-7,0L7,0L0,8z", class: "handle", tabindex: 0, role: "slider", "aria-orientation": "vertical",
    "aria-label": `${axis.name}, ${end}`, "aria-valuemin": 0, "aria-valuemax": Math.max(0, axis.entries.length - 1), "data-axis": number, "data-end": end,
  });
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return unbrushOne(state, axis);
    const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !axis.entries.length) return;
    event.preventDefault();
    const [low, high] = axis.brush ?? [0, 1], most = axis.entries.length - 1, from = firstFrom(axis, low), to = lastBelow(axis, high);
    const index = Math.max(up ? from : 0, Math.min(up ? most : to, (up ? to : from) + by));
    const at = axis.at(axis.entries[index]);
    axis.brush = up ? [low, at] : [at, high];
    if (axis.brush[0] <= axis.at(axis.entries[0]) && axis.brush[1] >= axis.at(axis.entries[most])) axis.brush = null;
    axis.refresh();
    filter(state);
  });
  return node;
}

function unbrushOne(state, axis) {
  axis.brush = null;
  axis.refresh();
  filter(state);
}

function firstFrom(axis, at) {
  const index = axis.entries.findIndex((value) => axis.at(value) >= at - 1e-9);
  return index < 0 ? Math.max(0, axis.entries.length - 1) : index;
}

function lastBelow(axis, at) {
  return Math.max(0, axis.entries.findLastIndex((value) => axis.at(value) <= at + 1e-9));
}

function brushable(state, axis, area, y) {
  const at = (event) => {
    const box = area.ownerSVGElement.getBoundingClientRect(), pixel = ((event.clientY - box.top) * TALL) / box.height;
    return Math.max(0, Math.min(1, (y(0) - pixel) / (y(0) - y(1))));
  };
  const near = 8 / (y(0) - y(1));
  let fixed = null, first = 0;
  area.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    first = at(event);
    const [low, high] = axis.brush ?? [NaN, NaN];
    fixed = Math.abs(first - low) < near ? high : Math.abs(first - high) < near ? low : first;
    area.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  area.addEventListener("pointermove", (event) => {
    if (fixed === null || Math.abs(at(event) - first) < near / 2) return;
    axis.brush = [Math.min(fixed, at(event)), Math.max(fixed, at(event))];
    axis.refresh();
    filter(state, false);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    area.addEventListener(end, () => {
      if (fixed !== null) filter(state);
      fixed = null;
    });
  }
  area.addEventListener("dblclick", () => unbrushOne(state, axis));
}

function switchOf(state, axis, x) {
  const node = make("text", { x, y: TALL - 6, class: "switch", tabindex: 0, role: "button", "aria-pressed": axis.log, "aria-label": `${axis.name}, log axis` }, axis.log ? "log" : "linear");
  const turn = () => {
    axis.log = !axis.log;
    axis.brush = null;
    state.focus = `[aria-label="${CSS.escape(`${axis.name}, log axis`)}"]`;
    drawThreads(state);
    filter(state);
    state.focus = null;
  };
  node.addEventListener("click", turn);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    turn();
  });
  return node;
}

// Name the run nearest to the pointer, and let it stand out everywhere.
function hoverThread(state, event, where = null) {
  state.frame.querySelector(".tip")?.remove();
  if (!event) return highlight(null);
  const box = event.currentTarget.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const { axes } = state, i = Math.max(0, Math.min(axes.length - 2, Math.floor(px / where.apart - 0.5)));
  const part = (px - where.x(i)) / where.apart;
  const height = (run, one) => where.y(axes[one].at(axes[one].values[run]));
  const distance = (run) => Math.abs(height(run, i) + (height(run, i + 1) - height(run, i)) * part - py);
  const run = [...runs.keys()].filter((one) => !view.filtered.has(one)).reduce((best, one) => (best === null || distance(one) < distance(best) ? one : best), null);
  if (run === null || part < -0.2 || part > 1.2 || distance(run) > 14) return highlight(null);
  highlight(run);
  const tip = html("div", "tip"), table = html("table", "");
  for (const axis of axes) {
    const row = html("tr", ""), value = axis.values[run];
    row.append(html("td", "", axis.name), html("td", "", value === null ? "-" : typeof value === "number" ? round(value, 6) : value));
    table.append(row);
  }
  tip.append(html("div", "at", runs[run].name), table);
  state.frame.append(tip);
  tip.style.left = `${Math.max(0, Math.min(box.width - tip.offsetWidth, px < box.width / 2 ? px + 16 : px - tip.offsetWidth - 16))}px`;
  tip.style.top = `${Math.max(HEAD, Math.min(py, TALL - tip.offsetHeight))}px`;
}
