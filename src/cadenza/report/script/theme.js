// Light or dark: as the system asks, or as the reader chose; the choice holds for all reports.

function themes() {
  const choice = document.getElementById("theme"), key = "cadenza report colours";
  const take = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  const kept = read(key);
  if (kept === "light" || kept === "dark") take((choice.value = kept));
  choice.addEventListener("change", () => {
    take(choice.value);
    write(key, choice.value);
  });
}
