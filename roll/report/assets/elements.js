// Small helpers. Text always becomes a text node: nothing that a model wrote is ever parsed as markup.
const run = JSON.parse(document.getElementById("run-data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Numbers: four digits that count; the whole value is in the title of what shows it.
function number(value) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replaceAll("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}
function percent(share, digits = 1) {
  return share === null || share === undefined ? "?" : `${(100 * share).toFixed(digits)}\u00a0%`;
}
function withUnit(value, unit) {
  if (value === null || value === undefined) return "not finite";
  return unit === "share" ? percent(value) : `${number(value)}${unit ? ` ${unit}` : ""}`;
}
function seconds(value) {
  if (value === null || value === undefined) return "?";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
}
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Index of the last entry that is at most `value` in a sorted list; -1: none is.
function lastAtMost(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}
function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * magnitude).find((each) => each >= raw * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(index * step);
  return ticks;
}
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// `code` between backticks.
const prose = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
const absent = (...reasons) => h("p", { class: "absent" }, reasons.filter(Boolean).join(" "));

// What must be drawn anew when colours or widths change.
const redraws = new Set();
const widthOf = (element) => Math.floor(element.getBoundingClientRect().width);
function drawWhenSized(element, draw) {
  let width = 0;
  const update = () => { if (widthOf(element)) draw(widthOf(element)); };
  new ResizeObserver(() => {
    if (widthOf(element) === width) return;
    width = widthOf(element);
    requestAnimationFrame(update); // drawing changes heights, which an observer must not do while it observes
  }).observe(element);
  redraws.add(update);
}
const redrawAll = () => redraws.forEach((redraw) => redraw());
