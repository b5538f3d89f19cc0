// Curves. One cursor for all of them: the legends show the values at its step, or the last ones.
const COLORS = 8, DASHES = ["", "6 3", "2 2", "8 3 2 3"], HEIGHT = 190;
const MARGIN = { left: 54, right: 10, top: 8, bottom: 20 };
const cursor = { step: null, charts: new Set() };
let smoothing = 0;

function seriesOf(name, index) {
  const recorded = run.metrics.series[name];
  const place = recorded.place === undefined ? index : recorded.place; // of its run, in a comparison
  return {
    name, steps: recorded.steps || run.metrics.steps, values: recorded.values, shown: true,
    // Figures of one lag are absent, not unchanged, in a step without tokens of that lag: no line leads over the gap.
    sparse: 3 * recorded.values.length < (run.metrics.thinned === null ? run.metrics.recorded : run.metrics.thinned),
    gaps: /\/lag_/.test(name) && recorded.steps !== undefined && run.metrics.thinned === null,
    color: `var(--s${place % COLORS})`, dash: DASHES[place % DASHES.length],
  };
}
const firstStep = () => Math.min(...Object.values(run.metrics.series).map((each) => (each.steps || run.metrics.steps)[0]));
const lastStep = () => Math.max(...Object.values(run.metrics.series).map((each) => (each.steps || run.metrics.steps).at(-1)));

// Exponential mean, corrected for its start; a value that is not finite leaves it as it is.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}
function setCursor(step) {
  cursor.step = step;
  cursor.charts.forEach((chart) => chart.point());
}

function chart(panel) {
  const all = panel.metrics.map(seriesOf);
  const state = { log: panel.scale === "log", frame: null };
  const step = h("span", { class: "quiet" });
  const svg = s("svg", { tabindex: "0", role: "img" });
  const rows = all.map((series) => legendRow(series, panel, () => draw(widthOf(svg))));
  const canLog = all.some((series) => series.values.some((value) => value > 0));
  const logButton = h("button", {
    type: "button", "aria-pressed": String(state.log), title: "logarithmic scale",
    onclick: () => { state.log = !state.log; logButton.setAttribute("aria-pressed", String(state.log)); draw(widthOf(svg)); },
  }, "log");
  const note = h("p", { class: "help" });

  function draw(width) {
    if (!width) return;
    state.frame = frameOf(all.filter((series) => series.shown), state.log, width);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(...drawAxes(state.frame, panel.unit), ...all.filter((each) => each.shown).flatMap((each) => drawSeries(each, state.frame)), s("g", { class: "marks" }));
    const hidden = state.log ? all.filter((each) => each.shown).reduce((sum, each) => sum + each.values.filter((value) => value !== null && value <= 0).length, 0) : 0;
    const broken = all.reduce((sum, each) => sum + each.values.filter((value) => value === null).length, 0);
    note.textContent = [panel.help, hidden ? `${hidden} values of 0 or less have no place on a logarithmic scale.` : "", broken ? `${broken} values were not finite (gaps).` : ""].filter(Boolean).join(" ");
    point();
  }
  function point() {
    const ats = all.map((series) => (cursor.step === null ? series.steps.length - 1 : lastAtMost(series.steps, cursor.step)));
    rows.forEach((row, index) => row.say(ats[index])); // the legend needs no width: it is there before the first frame
    const marks = svg.querySelector(".marks");
    if (!marks || !state.frame) return;
    const { x, y } = state.frame;
    step.textContent = cursor.step === null ? "" : `step ${cursor.step}`;
    marks.replaceChildren();
    if (cursor.step === null) return;
    marks.append(s("line", { class: "cursor", x1: x(cursor.step), x2: x(cursor.step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    all.forEach((series, index) => {
      const at = ats[index], value = series.values[at];
      if (series.shown && at >= 0 && value !== null && (!state.log || value > 0)) {
        marks.append(s("circle", { cx: x(series.steps[at]), cy: y(value), r: 3.5, fill: series.color, stroke: "var(--sheet)" }));
      }
    });
  }
  const follow = (event) => {
    if (!state.frame) return;
    const box = svg.getBoundingClientRect();
    setCursor(nearestStep(all, state.frame.step(event.clientX - box.left)));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", () => setCursor(null));
  svg.addEventListener("blur", () => setCursor(null));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    setCursor(movedStep(all, moves[event.key]));
  });
  svg.setAttribute("aria-label", `${panel.title}: ${all.map((series) => `${series.name}, last ${withUnit(series.values.at(-1), panel.unit)}`).join("; ")}. Arrow keys move through the steps.`);
  cursor.charts.add({ point });
  point();
  drawWhenSized(svg, draw);
  return h("figure", { class: "panel" },
    h("div", { class: "top" }, h("h3", {}, panel.title), h("span", {}, step, " ", canLog ? logButton : "")),
    h("ul", { class: "legend" }, rows.map((row) => row.element)), note, svg);
}

function legendRow(series, panel, changed) {
  const value = h("b", {});
  const button = h("button", {
    type: "button", "aria-pressed": "true", title: "show or hide",
    onclick: () => { series.shown = !series.shown; button.setAttribute("aria-pressed", String(series.shown)); changed(); },
  }, s("svg", { "aria-hidden": "true", viewBox: "0 0 22 8" }, s("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: series.color, "stroke-width": 2.5, "stroke-dasharray": series.dash })), series.name, value);
  return {
    element: h("li", {}, button),
    say: (at) => {
      if (at < 0) { value.textContent = "–"; return; }
      const meant = cursor.step === null ? lastStep() : cursor.step;
      const elsewhere = series.steps[at] !== meant ? ` (step ${series.steps[at]})` : "";
      value.textContent = withUnit(series.values[at], panel.unit) + elsewhere;
      value.title = `step ${series.steps[at]}: ${series.values[at]}`;
    },
  };
}

function frameOf(shown, log, width) {
  const values = shown.flatMap((series) => series.values).filter((value) => value !== null && (!log || value > 0));
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log) { low = Math.log10(low); high = Math.log10(high); }
  // A curve that hardly moves is not blown up to look as if it did.
  const least = log ? 0.3 : Math.max(Math.abs(low), Math.abs(high)) * (high === low ? 0.5 : 0.01);
  if (high === 0 && low === 0 && !log) high = 1;
  else if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
  if (!log && low > 0 && low < high * 0.4) low = 0;
  const pad = (high - low) * 0.04;
  if (low !== 0) low -= pad;
  high += pad;
  const [from, until] = [firstStep(), Math.max(lastStep(), firstStep() + 1)];
  const inner = width - MARGIN.left - MARGIN.right, tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  return {
    width, low, high, log, from, until,
    x: (step) => MARGIN.left + ((step - from) / (until - from)) * inner,
    y: (value) => MARGIN.top + (1 - ((log ? Math.log10(value) : value) - low) / (high - low)) * tall,
    step: (x) => from + ((x - MARGIN.left) / inner) * (until - from),
  };
}
function drawAxes(frame, unit) {
  const { width, low, high, log, from, until, x, y } = frame;
  const rows = log ? niceTicks(low, high, 4).map((power) => 10 ** power) : niceTicks(low, high, 4);
  const columns = niceTicks(from, until, width > 500 ? 8 : 5).filter(Number.isInteger);
  return [
    ...rows.flatMap((value) => [
      s("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      s("text", { class: "axis", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, unit === "share" ? `${number(Number((100 * value).toPrecision(6)))} %` : number(Number(value.toPrecision(log ? 2 : 6)))),
    ]),
    ...columns.map((step) => s("text", { class: "axis", x: x(step), y: HEIGHT - 5, "text-anchor": step === until && columns.length > 1 ? "end" : "middle" }, number(step))),
  ];
}
function drawSeries(series, frame) {
  const few = series.values.length <= 40 || series.gaps;
  const line = (values, opacity) => s("path", { d: pathOf(series, values, frame), fill: "none", stroke: series.color, "stroke-width": 1.7, "stroke-dasharray": series.dash, opacity, "stroke-linejoin": "round" });
  const dots = !few ? [] : series.values.flatMap((value, index) => (value === null || (frame.log && value <= 0) ? [] : [s("circle", { cx: frame.x(series.steps[index]), cy: frame.y(value), r: 2.2, fill: series.color, opacity: smoothing && !series.sparse ? 0.4 : 1 })]));
  return smoothing && !series.sparse ? [line(series.values, 0.25), line(smoothed(series.values), 1), ...dots] : [line(series.values, 1), ...dots];
}
function pathOf({ steps, gaps }, values, { x, y, log }) {
  let path = "", pen = false;
  values.forEach((value, index) => {
    const drawn = value !== null && (!log || value > 0);
    if (gaps && steps[index] !== steps[index - 1] + 1) pen = false;
    if (drawn) path += `${pen ? "L" : "M"}${x(steps[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = drawn;
  });
  return path;
}
function nearestStep(all, wanted) {
  const candidates = all.flatMap((series) => { const at = lastAtMost(series.steps, wanted); return [series.steps[at], series.steps[at + 1]]; }).filter((step) => step !== undefined);
  return candidates.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), candidates[0]);
}
function movedStep(all, move) {
  const steps = [...new Set(all.flatMap((series) => series.steps))].sort((a, b) => a - b);
  const at = cursor.step === null ? steps.length - 1 : lastAtMost(steps, cursor.step);
  return steps[clamp(at + move, 0, steps.length - 1)];
}

function curveControls() {
  const shown = h("output", {}, "none");
  const slider = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing of curves",
    oninput: () => { smoothing = Number(slider.value); shown.textContent = smoothing ? smoothing.toFixed(2) : "none"; redrawAll(); },
  });
  const thinned = run.metrics.thinned === null ? "" :
    `${number(run.metrics.recorded)} steps were recorded. Of each curve at most ${run.metrics.thinned} points are drawn: of each stretch of steps the first, the smallest and the largest value. Every point is a recorded value.`;
  return [
    h("div", { class: "controls" }, h("label", {}, "smoothing", slider, shown), h("span", { class: "quiet" }, "Point at a curve, or move through it with the arrow keys, to read its values; names switch curves on and off.")),
    thinned ? h("p", { class: "quiet" }, thinned) : "",
  ];
}
