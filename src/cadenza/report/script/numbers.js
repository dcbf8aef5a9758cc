// Elements, numbers as text, and searches in sorted steps.

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

// Announce a text to screen readers.
function say(text) {
  document.getElementById("said").textContent = text;
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

// A number for an axis, as in formats.py.
function short(value, digits = 4) {
  const size = Math.abs(value);
  for (const [least, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= least && size < 1e12) return round(value / least, digits) + letter;
  }
  if (size && (size < 1e-3 || size >= 1e12)) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  return round(value, digits);
}

function whole(step) {
  return Math.round(step).toLocaleString("en");
}
