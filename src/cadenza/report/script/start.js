// Put it all together.

recall();
themes();
document.documentElement.classList.remove("no-script");
if (charts.length) {
  for (const chart of charts) {
    chart.ranges = html("p", "count");
    chart.plot.after(chart.ranges);
    listen(chart);
    tabled(chart);
  }
  document.querySelector(".controls").append(html("p", "unseen", "Arrow keys, Home and End read values. Plus and minus zoom. Escape shows the whole range."));
  document.querySelector(".controls .unseen").id = "keys";
  folding();
  searching();
  control();
  legend();
  const watch = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(charts[target.parentNode.dataset.chart])));
  charts.forEach((chart) => watch.observe(chart.plot));
}
parallel();
sliders();
document.querySelectorAll("table.sortable").forEach(sortable);
addEventListener("beforeprint", () => document.querySelectorAll("details:not(.values)").forEach((one) => (one.open = true)));
