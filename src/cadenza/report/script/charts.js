// The curves come drawn; this draws them anew: as wide as they are shown, zoomed, smoothed, on other scales.

const HEIGHT = 210, RIGHT = 14, TOP = 12, BOTTOM = 26; // chart.py has the same

function turned(value) {
  return view.log ? Math.log10(value) : value;
}

function draws(value) {
  return value !== null && (!view.log || value > 0);
}

// The lowest and the highest value of a series between two steps, as the axis counts them; null without any.
function rangeOf({ x, y }, from, to) {
  let low = Infinity, high = -Infinity;
  for (let i = indexFrom(x, from); i < x.length && x[i] <= to; i++) {
    if (!draws(y[i])) continue;
    low = Math.min(low, turned(y[i]));
    high = Math.max(high, turned(y[i]));
  }
  return low > high ? null : [low, high];
}

function joinedRange(ranges) {
  const some = ranges.filter(Boolean);
  return some.length ? [Math.min(...some.map(([low]) => low)), Math.max(...some.map(([, high]) => high))] : null;
}

// Each axis maps values to 0..1 for the lines that it has.
function axesOf(chart, from, to) {
  const lines = shown(chart), crowd = lines.length > CROWD;
  const measured = (line) => (view.smooth || (crowd && view.mean) ? line.soft : line.raw);
  const ends = (range) => padded(...(range ?? [0, 1]), view.log ? 0.3 : undefined);
  if (view.scale === "shared" || lines.length < 2) {
    const range = joinedRange(lines.map((line) => rangeOf(measured(line), from, to)));
    return { of: () => 0, all: [{ ends: ends(range), empty: !range, turned, log: view.log }] };
  }
  const ranges = lines.map((line) => rangeOf(measured(line), ...(view.scale === "own" ? [from, to] : span)));
  const order = new Map(lines.map((line, i) => [line, i]));
  if (view.scale === "own") {
    const all = ranges.map((range, i) => ({ ends: ends(range), empty: !range, turned, log: view.log, run: lines[i].run, range }));
    return { of: (line) => order.get(line), all };
  }
  const unit = (range) => (value) => (range && range[1] > range[0] ? (turned(value) - range[0]) / (range[1] - range[0]) : 0.5);
  const all = ranges.map((range) => ({ ends: padded(0, 1), empty: !range, turned: unit(range), log: false }));
  return { of: (line) => order.get(line), all };
}

function scaleOf(chart) {
  let from = view.from ?? span[0], to = view.to ?? span[1];
  if (from === to) [from, to] = [from - 0.5, to + 0.5];
  const axes = axesOf(chart, from, to), empty = axes.all.every((axis) => axis.empty);
  for (const axis of axes.all.slice(0, 2)) {
    axis.values = axis.empty ? [] : axis.log ? logTicks(...axis.ends) : ticks(...axis.ends, 4);
    [axis.texts, axis.base] = labels(axis.values);
    if (axis.log && axis.ends[1] - axis.ends[0] > 1) [axis.texts, axis.base] = [axis.values.map((value) => short(value)), ""];
  }
  const width = Math.max(chart.plot.clientWidth, 160), two = view.scale === "own" && axes.all.length > 1;
  const left = roomFor(axes.all[0].texts), right = two ? roomFor(axes.all[1].texts) : RIGHT, wide = width - left - right;
  const across = (step) => left + ((step - from) * wide) / (to - from);
  const step = (pixel) => from + ((pixel - left) * (to - from)) / wide;
  const at = ({ ends: [low, high] }, value) => HEIGHT - BOTTOM - ((value / 2 - low / 2) / (high / 2 - low / 2)) * (HEIGHT - BOTTOM - TOP);
  const up = (line) => {
    const axis = axes.all[axes.of(line)];
    return (value) => at(axis, axis.turned(value));
  };
  return { from, to, width, left, right, across, step, up, at, axes: axes.all, two, empty };
}

// The points inside the range shown, and one on either side, which the curve comes from and goes to.
function within({ x }, { from, to }) {
  return [Math.max(0, indexFrom(x, from) - 1), Math.min(x.length, indexFrom(x, to + 1) + 1)];
}

function pathOf({ x, y }, [first, last], across, up) {
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

// A run's mark: a disc, a square, a triangle or a diamond.
function markOf(run, x, y) {
  const at = (dx, dy) => `M${(x + dx).toFixed(1)},${(y + dy).toFixed(1)}`;
  return [
    `${at(-3, 0)}a3,3 0 1 0 6,0a3,3 0 1 0 -6,0z`,
    `${at(-2.8, -2.8)}h5.6v5.6h-5.6z`,
    `${at(0, -3.8)}l3.7,6.4h-7.4z`,
    `${at(0, -4)}l3.6,4l-3.6,4l-3.6,-4z`,
  ][run % 4];
}

// Short series have a mark at each point, others three, so that they differ without their colours.
function marksOf(line, [first, last], scale, several) {
  const { x, y } = line.soft, up = scale.up(line), few = last - first <= DOTS && line.soft === line.raw;
  if (!few && !several) return "";
  const points = [];
  for (let i = first; i < last; i++) if (draws(y[i]) && x[i] >= scale.from && x[i] <= scale.to) points.push(i);
  const spots = few ? points : [1, 2, 3].map((part) => points[Math.floor((points.length * part) / 3) - 1]);
  return spots.filter((i) => i !== undefined).map((i) => markOf(line.run, scale.across(x[i]), up(y[i]))).join("");
}

function gridOf(chart) {
  const { from, to, width, left, right, across, at, axes, two, empty } = chart.scale;
  const nodes = [], bottom = HEIGHT - BOTTOM, end = width - right;
  axes.slice(0, two ? 2 : 1).forEach((axis, second) => {
    const look = two ? ` of-run ${runs[axis.run].look}` : "";
    axis.values.forEach((value, i) => {
      const y = at(axis, axis.log ? Math.log10(value) : value).toFixed(1);
      if (y > bottom - 8 || y < TOP - 6) return; // it would touch the axis below
      if (!second) nodes.push(make("path", { d: `M${left},${y}H${end}` }));
      nodes.push(make("text", { x: second ? end + 7 : left - 7, y, class: (second ? "y right" : "y") + look }, axis.texts[i]));
    });
    if (axis.base) nodes.push(make("text", { x: second ? end : left, y: TOP - 2, class: second ? "base right" : "base" }, `from ${axis.base}`));
  });
  for (const { step, text, middle } of stepLabels(from, to, across, left, width)) {
    nodes.push(make("path", { d: `M${across(step).toFixed(1)},${bottom}v4`, class: "axis" }));
    nodes.push(make("text", { x: middle.toFixed(1), y: bottom + 17, class: "x" }, text));
  }
  if (empty) {
    const said = view.log ? "nothing above 0 to show" : "nothing finite to show";
    nodes.push(make("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, said));
  }
  nodes.push(make("text", { x: left - 7, y: bottom + 17, class: "unit" }, "step"));
  nodes.push(make("path", { d: `M${left},${bottom}H${end}`, class: "axis" }));
  return nodes;
}

function curvesOf(chart) {
  const nodes = [], scale = chart.scale, lines = shown(chart), crowd = lines.length > CROWD;
  const clip = make("clipPath", { id: `clip-${chart.number}` });
  const { width, left, right } = scale;
  clip.append(make("rect", { x: left - 4, y: 0, width: Math.max(0, width - left - right + 8), height: HEIGHT - BOTTOM + 4 }));
  nodes.push(clip);
  for (const line of lines) {
    const look = runs[line.run].look, up = scale.up(line), own = { "data-of": line.run };
    const range = within(line.soft, scale), faint = line.soft !== line.raw && !crowd;
    if (faint) nodes.push(make("path", { ...own, d: pathOf(line.raw, within(line.raw, scale), scale.across, up), class: `line raw ${look}` }));
    nodes.push(make("path", { ...own, d: pathOf(line.soft, range, scale.across, up), class: `line ${look}` }));
    const marks = crowd ? "" : marksOf(line, range, scale, lines.length > 1);
    if (marks) nodes.push(make("path", { ...own, d: marks, class: `marks ${look}` }));
  }
  return nodes;
}

// The acts of the runs shown: a line from the top to the axis, with a flag.
function actsOf(chart) {
  const { from, to, across } = chart.scale, here = new Set(shown(chart).map((line) => line.run));
  return acts.filter(({ run, step }) => here.has(run) && step >= from && step <= to).map(({ run, step }) =>
    make("path", { d: `M${across(step).toFixed(1)},${HEIGHT - BOTTOM}V${TOP}l7,3.5l-7,3.5`, class: `act ${runs[run].look}`, "data-of": run }));
}

// The run of each axis, and the ranges of those without an axis.
function rangesOf(chart) {
  if (!chart.scale?.two) return "";
  const number = (value) => round(view.log ? 10 ** value : value, 4);
  const [first, second, ...others] = chart.scale.axes;
  const told = others.slice(0, 6).map(({ run, range }) => `${runs[run].name} ${range ? `${number(range[0])} to ${number(range[1])}` : "-"}`);
  if (others.length > 6) told.push(`and ${others.length - 6} more`);
  return [`left axis ${runs[first.run].name}`, `right axis ${runs[second.run].name}`, ...told].join(", ");
}

function draw(chart) {
  if (!chart.plot.clientWidth) return; // folded or not found; it is drawn when it has a width again
  chart.scale = shown(chart).length ? scaleOf(chart) : null;
  const [grid, marks, curves] = [".grid", ".acts", ".curves"].map((part) => chart.svg.querySelector(part));
  chart.ranges.textContent = rangesOf(chart);
  if (!chart.scale) {
    grid.replaceChildren();
    marks.replaceChildren();
    curves.replaceChildren();
    return;
  }
  chart.svg.setAttribute("viewBox", `0 0 ${chart.scale.width} ${HEIGHT}`);
  grid.replaceChildren(...gridOf(chart));
  marks.replaceChildren(...actsOf(chart));
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
  say(from === null ? "whole range" : `steps ${whole(from)} to ${whole(to)}`);
}
