// Tables that are sorted by a click on a head, and the values of a chart as a table.

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const way = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    const number = (row) => Number(row.cells[column].dataset.value ?? NaN);
    const text = (row) => row.cells[column].textContent;
    const order = (a, b) => (Number.isNaN(number(a)) - Number.isNaN(number(b))) || way * (number(a) - number(b)) || byText(a, b);
    const byText = (a, b) => (Number.isNaN(number(a)) ? way * text(a).localeCompare(text(b), "en", { numeric: true }) : 0);
    body.append(...[...body.rows].sort(order));
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    say(`sorted by ${head.textContent}, ${way > 0 ? "ascending" : "descending"}`);
  }));
}

const ROWS = 50, COLUMNS = 6;

// Two tables: the ends and extremes of each run shown, and its values at up to 50 steps.
function tabled(chart) {
  const details = chart.figure.querySelector(".values");
  details.querySelector("summary").setAttribute("aria-label", `values of ${chart.name}`);
  details.addEventListener("toggle", () => {
    details.querySelectorAll(".wide").forEach((one) => one.remove());
    if (details.open) details.append(...tablesOf(chart));
  });
}

function tablesOf(chart) {
  const lines = shown(chart);
  const extremes = lines.map((line) => {
    const found = line.raw.y.map((value, i) => [value, line.raw.x[i]]).filter(([value]) => value !== null);
    const text = (pair) => (pair ? `${round(pair[0], 6)} at ${whole(pair[1])}` : "-");
    const pick = (better) => found.reduce((best, one) => (best && !better(one[0], best[0]) ? best : one), null);
    return [runs[line.run].name, text(found[0]), text(found.at(-1)), text(pick((a, b) => a < b)), text(pick((a, b) => a > b))];
  });
  const few = lines.slice(0, COLUMNS), steps = [...new Set(few.flatMap((line) => line.raw.x))].sort((a, b) => a - b);
  const apart = Math.max(1, steps.length / ROWS);
  const picked = Array.from({ length: Math.min(ROWS, steps.length) }, (_, i) => steps[Math.floor(i * apart)]);
  if (steps.length) picked[picked.length - 1] = steps.at(-1);
  const rows = picked.map((step) => [whole(step), ...few.map(({ raw }) => {
    const i = nearest(raw.x, step);
    return raw.x[i] !== step ? "-" : raw.y[i] === null ? "not finite" : round(raw.y[i], 6);
  })]);
  const names = few.map((line) => runs[line.run].name);
  return [
    tableOf(`${chart.name}: ends and extremes`, ["run", "first", "last", "lowest", "highest"], extremes),
    tableOf(`${chart.name}: ${rows.length} of ${steps.length} steps`, ["step", ...names], rows),
  ];
}

function tableOf(caption, head, rows) {
  const region = html("div", "wide"), table = html("table", ""), top = html("thead", ""), body = html("tbody", "");
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", caption);
  const row = (cells, kind, scope) => {
    const node = html("tr", "");
    cells.forEach((text, i) => {
      const name = kind === "th" || i === 0 ? "th" : "td", cell = html(name, i ? "figure" : "", text);
      if (name === "th") cell.scope = scope ?? "row";
      node.append(cell);
    });
    return node;
  };
  top.append(row(head, "th", "col"));
  body.append(...rows.map((cells) => row(cells, "td")));
  table.append(html("caption", "", caption), top, body);
  region.append(table);
  return region;
}
