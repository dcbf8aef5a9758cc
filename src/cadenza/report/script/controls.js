// The controls above the charts: scales, smoothing, which runs and which charts are shown.

function control() {
  const log = document.getElementById("log"), mean = document.getElementById("mean"), smooth = document.getElementById("smooth");
  const scale = document.getElementById("scale");
  log.checked = view.log;
  mean.checked = view.mean;
  smooth.value = view.smooth;
  if (scale) scale.value = view.scale;
  const changed = () => {
    view.log = log.checked;
    view.mean = mean.checked;
    view.smooth = Number(smooth.value);
    view.scale = scale?.value || "shared";
    document.getElementById("smooth-value").textContent = smooth.value;
    smooth.setAttribute("aria-valuetext", view.smooth ? smooth.value : "off");
    refine();
    drawAll();
    keep();
  };
  for (const [node, event] of [[log, "change"], [mean, "change"], [smooth, "input"], [scale, "change"]]) node?.addEventListener(event, changed);
  document.getElementById("reset").addEventListener("click", () => zoom(null, null));
  if (!known.some((one) => one.lines.some((line) => line.mean))) mean.parentNode.hidden = true;
  changed();
}

function legend() {
  const buttons = [...document.querySelectorAll(".legend button[data-run]")];
  const show = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(!view.hidden.has(Number(button.dataset.run))));
    drawAll();
    keep();
  };
  for (const button of buttons) {
    const run = Number(button.dataset.run);
    button.dataset.of = run;
    button.addEventListener("click", () => {
      if (!view.hidden.delete(run)) view.hidden.add(run);
      show();
    });
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => highlight(run));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => highlight(null));
  }
  document.getElementById("runs-all")?.addEventListener("click", () => {
    view.hidden.clear();
    show();
  });
  document.getElementById("runs-none")?.addEventListener("click", () => {
    for (const run of runs.keys()) view.hidden.add(run);
    show();
  });
  if (view.hidden.size) show();
}

// Show the charts with all the parts of the text in their names, and unfold their groups meanwhile.
function searching() {
  const field = document.getElementById("search");
  if (!field) return;
  const nothing = html("p", "note", "No chart has such a name.");
  field.closest(".controls").after(nothing);
  const search = () => {
    view.search = field.value;
    const parts = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const chart of charts) {
      const here = parts.every((part) => chart.name.toLowerCase().includes(part));
      chart.figure.hidden = !here;
      found += here;
    }
    for (const group of groups()) {
      group.hidden = !group.querySelector("figure:not([hidden])");
      group.open = parts.length ? true : (view.folded.get(nameOf(group)) ?? group.dataset.open === "true");
    }
    nothing.hidden = found > 0;
    keep();
    return `${found} of ${charts.length} charts`;
  };
  field.value = view.search;
  field.addEventListener("input", () => say(search()));
  search();
}

function groups() {
  return [...document.querySelectorAll("details.group")];
}

function nameOf(group) {
  return group.querySelector("h3").textContent;
}

function folding() {
  const fold = (group, open) => {
    group.open = open;
    view.folded.set(nameOf(group), open);
    keep();
  };
  for (const group of groups()) {
    group.dataset.open = group.open;
    group.open = view.folded.get(nameOf(group)) ?? group.open;
    group.querySelector("summary").addEventListener("click", (event) => {
      event.preventDefault();
      fold(group, !group.open);
    });
  }
  for (const [id, open] of [["fold", false], ["unfold", true]]) {
    document.getElementById(id)?.addEventListener("click", () => groups().forEach((group) => fold(group, open)));
  }
}
