// The data of the page, what of it is shown, and what the browser keeps of that between two visits.

const { runs = [], acts = [], charts: known = [], span = [0, 1] } = JSON.parse(document.getElementById("data").textContent);
const CROWD = 20, DOTS = 40; // chart.py has the same
const view = {
  from: null, to: null, log: false, mean: true, smooth: 0, scale: "shared", search: "",
  hidden: new Set(), // runs that the legend takes out
  filtered: new Set(), // runs that the parallel axes take out
  folded: new Map(), // groups by name: whether the reader folded or unfolded them
};

const charts = known.map((one, number) => {
  const figure = document.querySelector(`figure[data-chart="${number}"]`), plot = figure.querySelector(".plot");
  return { number, name: one.name, figure, plot, lines: linesOf(one), svg: plot.querySelector("svg"), scale: null };
});

function linesOf(one) {
  return one.lines.map(({ run, x, y, mean }) => {
    const raw = { x: summed(x), y };
    return { run, raw, mean: mean ? { x: summed(mean.x), y: mean.y } : null, soft: raw };
  });
}

function summed(differences) {
  let step = 0;
  return differences.map((ahead) => (step += ahead));
}

function shown(chart) {
  return chart.lines.filter((line) => !view.hidden.has(line.run) && !view.filtered.has(line.run));
}

// A moving average that forgets, corrected for its beginning; a gap stays one.
function smoothed({ x, y }, weight) {
  let sum = 0, whole = 0;
  const soft = y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return sum / whole;
  });
  return { x, y: soft };
}

// Choose the strong line of each curve: the smoothed one, the mean of a noisy one, or the values.
function refine() {
  for (const line of charts.flatMap((chart) => chart.lines)) {
    if (view.smooth) line.soft = smoothed(line.mean ?? line.raw, view.smooth);
    else line.soft = view.mean && line.mean ? line.mean : line.raw;
  }
}

const KEPT = `cadenza report ${location.pathname} ${document.title}`;

function keep() {
  const { log, mean, smooth, scale, search } = view;
  const hidden = [...view.hidden].map((run) => runs[run].name);
  write(KEPT, JSON.stringify({ log, mean, smooth, scale, search, hidden, folded: [...view.folded] }));
}

function recall() {
  try {
    const { hidden, folded, ...simple } = JSON.parse(read(KEPT) ?? "{}");
    for (const key of ["log", "mean", "smooth", "scale", "search"]) {
      if (typeof simple[key] === typeof view[key]) view[key] = simple[key];
    }
    for (const [number, run] of runs.entries()) if (hidden?.includes(run.name)) view.hidden.add(number);
    view.folded = new Map(folded);
  } catch {
    write(KEPT, "{}"); // another version kept something else
  }
}

// A browser may refuse to keep anything, for example in a frame.
function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function write(key, text) {
  try {
    localStorage.setItem(key, text);
  } catch {
    // then the page opens anew each time
  }
}
