// Axes: their ends, round numbers on them, and labels that differ and fit. axes.py has the same.

const CHARACTER = 7, DIGITS = 7;

function padded(low, high, room = Math.abs(high) * 0.1 || 1) {
  const spread = high / 2 - low / 2;
  if (spread > 5e-10 * Math.max(Math.abs(low), Math.abs(high))) room = spread * 0.1; // less is rounding
  return [Math.max(low - room, -Number.MAX_VALUE), Math.min(high + room, Number.MAX_VALUE)];
}

function ticks(low, high, count) {
  const rough = ((high / 2 - low / 2) / count) * 2;
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough * 0.7);
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  const found = [], digits = Math.min(100, Math.max(0, 1 - Math.floor(Math.log10(step))));
  for (let i = Math.ceil(low / step), last = Math.floor(high / step); i <= last && found.length < 30; i++) {
    found.push(digits < 100 ? Number((i * step).toFixed(digits)) : i * step);
  }
  return found;
}

// Round numbers for an axis of powers: 1, 10, 100; with 2 and 5 between where the range is short.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const size of high - low > 3 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(size);
      if (at >= low && at <= high) found.push(size * 10 ** power);
    }
  }
  const apart = Math.ceil(found.length / 6);
  return found.length < 2 ? ticks(10 ** low, 10 ** high, 4) : found.filter((_, i) => i % apart === 0);
}

// A label for each tick, all different, and the number that they are added to, if one is needed.
function labels(values) {
  let apart = Infinity;
  for (let i = 1; i < values.length; i++) apart = Math.min(apart, Math.abs(values[i] - values[i - 1]));
  if (!(apart > 0) || apart === Infinity) return [values.map((value) => short(value)), ""];
  const largest = Math.max(...values.map(Math.abs));
  const digits = Math.floor(Math.log10(largest / apart) + 1e-9) + 2;
  if (digits > DIGITS) return [values.map((value) => `+${short(value - values[0])}`), round(values[0], 15)];
  return [values.map((value) => short(value, Math.max(4, digits))), ""];
}

function roomFor(texts) {
  return Math.max(44, CHARACTER * Math.max(0, ...texts.map((text) => text.length)) + 12);
}

// Labels of a step axis, each with its position; none runs past `width`, and none touches another.
function stepLabels(from, to, across, left, width) {
  const steps = ticks(from, to, Math.max(2, Math.min(6, width / 90))).filter(Number.isInteger);
  const [short, base] = labels(steps), texts = base ? steps.map(whole) : short, found = [];
  let taken = left - 7;
  steps.forEach((step, i) => {
    const half = (CHARACTER * texts[i].length) / 2, middle = Math.min(across(step), width - half);
    if (middle - half <= taken + 4) return;
    found.push({ step, text: texts[i], middle });
    taken = middle + half;
  });
  return found;
}
