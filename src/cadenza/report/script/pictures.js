// A slider over the steps of media: each run shows its newest one at the chosen step.

function sliders(part = document) {
  for (const slider of part.querySelectorAll(".medium input")) {
    const steps = JSON.parse(slider.dataset.steps), output = slider.parentNode.querySelector("output");
    const show = () => {
      const step = steps[slider.value];
      output.textContent = whole(step);
      slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
      for (const figure of slider.closest(".medium").querySelectorAll("figure")) {
        const items = [...figure.querySelectorAll("[data-step]")];
        const chosen = items.findLast((item) => Number(item.dataset.step) <= step) ?? items[0];
        for (const item of items) item.hidden = item !== chosen;
      }
    };
    slider.addEventListener("input", show);
    show();
  }
}
