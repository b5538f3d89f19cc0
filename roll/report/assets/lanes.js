// Swim lanes on a canvas: exact spans where they are known, shares of short stretches of time before them.
const ROW = 26, AXIS = 26;
const STATE_COLORS = {
  busy: "running", running: "running", "waiting for input": "input", "waiting for devices": "devices",
  "waiting for output": "output", failed: "failed", idle: "rest", done: "rest",
};
const stateColor = (state) => STATE_COLORS[state] || "s3";

function timelineView(timeline) {
  const rows = [];
  for (const [kind, title] of [["roles", "roles"], ["stages", "stages"]]) {
    const lanes = timeline.lanes.filter((lane) => lane.kind === kind);
    if (lanes.length) rows.push({ title }, ...lanes.map((lane) => ({ lane })));
  }
  const whole = [0, Math.max(timeline.end, 1)], view = { from: timeline.window[0], until: Math.max(timeline.window[1], timeline.window[0] + 1) };
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": laneSummary(timeline) });
  const readout = h("div", { class: "readout", "aria-live": "polite" });
  const shares = rows.map(({ lane }) => (lane ? h("span", {}) : null));
  const names = h("div", { class: "names" }, rows.map(({ lane, title }, index) =>
    lane ? h("div", { title: lane.name }, h("span", {}, lane.label), shares[index]) : h("div", { class: "group" }, title)));
  const hint = "Drag to move, Ctrl + wheel or + and − to zoom, arrow keys to move, 0 for all.";

  function draw(width) {
    const ratio = window.devicePixelRatio || 1, height = AXIS + rows.length * ROW;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.setProperty("height", `${height}px`);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = color("paper"); pen.fillRect(0, 0, width, height);
    const x = (time) => ((time - view.from) / (view.until - view.from)) * width;
    drawTimeAxis(pen, view, x, width, height, timeline);
    rows.forEach(({ lane }, index) => { if (lane) drawLane(pen, lane, timeline, x, view, AXIS + index * ROW, width); });
    rows.forEach(({ lane }, index) => { if (lane) shares[index].textContent = shareInView(lane, timeline, view); });
  }
  const redraw = () => draw(widthOf(canvas));
  function show(from, until) {
    const length = clamp(until - from, 0.05, whole[1] - whole[0]);
    view.from = clamp(from, whole[0], whole[1] - length);
    view.until = view.from + length;
    redraw();
  }
  const zoom = (factor, share = 0.5) => {
    const middle = view.from + share * (view.until - view.from), length = (view.until - view.from) * factor;
    show(middle - share * length, middle + (1 - share) * length);
  };
  const move = (share) => { const by = share * (view.until - view.from); show(view.from + by, view.until + by); };
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(...whole), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); } });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / widthOf(canvas));
  }, { passive: false });
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, from: view.from, until: view.until }; canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragging"); });
  canvas.addEventListener("pointerup", () => { grip = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, event.offsetX / widthOf(canvas)));
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const by = ((grip.x - event.clientX) / widthOf(canvas)) * (grip.until - grip.from);
      show(grip.from + by, grip.until + by);
    }
    const row = rows[Math.floor((event.offsetY - AXIS) / ROW)];
    const time = view.from + (event.offsetX / widthOf(canvas)) * (view.until - view.from);
    readout.textContent = row && row.lane ? describe(row.lane, timeline, time) : hint;
  });
  readout.textContent = hint;
  drawWhenSized(canvas, draw);
  const last = timeline.step_ends.slice(-11);
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  return [
    h("div", { class: "controls" },
      button("training", () => show(...timeline.window)), button("all, with start", () => show(...whole)),
      last.length > 2 ? button("last 10 steps", () => show(last[0], timeline.end)) : "",
      h("button", { type: "button", onclick: () => zoom(0.5), "aria-label": "zoom in" }, "+"), h("button", { type: "button", onclick: () => zoom(2), "aria-label": "zoom out" }, "−")),
    h("div", { class: "keys" }, timeline.states.map((state) => h("span", { class: "key" }, h("i", { style: { background: `var(--${stateColor(state)})` } }), state))),
    h("div", { class: "lanes" }, names, h("div", {}, canvas)), readout,
    h("p", { class: "quiet" }, "Beside each lane: the share of the time in view in which it worked. A stage that waits for input waits for the stage before it (rollout: for groups that are generated and judged)."),
    timeline.bins ? h("p", { class: "quiet" }, `${number(timeline.spans_recorded)} spans were recorded. Those after ${seconds(timeline.detail_from / 1e3)} are drawn one by one; before, each lane shows how much of each stretch of time it spent in each state.`) : "",
    run.resumed_at.length ? h("p", { class: "quiet" }, `The run went on after step ${run.resumed_at.join(", ")}; this is the timeline since then. Earlier ones are in timeline-before*.json.`) : "",
    laneTable(timeline),
  ];
}
const laneSummary = (timeline) => `Timeline. ${timeline.lanes.map((lane) => `${lane.label} works ${percent(lane.busy, 0)} of the training time`).join("; ")}.`;

function drawTimeAxis(pen, view, x, width, height, timeline) {
  const span = (view.until - view.from) / 1e3;
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.lineWidth = 1;
  for (const tick of niceTicks(view.from / 1e3, view.until / 1e3, Math.max(2, Math.floor(width / 110)))) {
    const at = x(tick * 1e3);
    pen.strokeStyle = color("grid"); pen.beginPath(); pen.moveTo(at, AXIS - 6); pen.lineTo(at, height); pen.stroke();
    pen.fillStyle = color("quiet"); pen.textAlign = at < 20 ? "left" : at > width - 25 ? "right" : "center";
    pen.fillText(span < 0.05 ? `${(tick * 1e3).toFixed(2)} ms` : tick < 120 ? `${Number(tick.toPrecision(7))} s` : seconds(tick).replace(/ (min|h)$/, ""), at, 10);
  }
  const ends = timeline.step_ends, first = lastAtMost(ends, view.from) + 1, count = lastAtMost(ends, view.until) + 1 - first;
  if (count > width / 6) return;
  pen.strokeStyle = color("quiet");
  let free = 0; // where the next label may begin
  for (let index = first; index < first + count; index += 1) {
    const at = x(ends[index]);
    pen.globalAlpha = 0.55; pen.setLineDash([1, 3]); pen.beginPath(); pen.moveTo(at, AXIS - 7); pen.lineTo(at, height); pen.stroke();
    pen.globalAlpha = 1; pen.setLineDash([]);
    if (at - 40 < free || at + 40 > width) continue;
    pen.fillStyle = color("quiet"); pen.textAlign = "center"; pen.fillText(`step ${timeline.step_first + index} ends`, at, 21);
    free = at + 40;
  }
}
function drawLane(pen, lane, timeline, x, view, top, width) {
  pen.fillStyle = color("sheet"); pen.fillRect(0, top + 3, width, ROW - 6);
  const tall = ROW - 6, paint = new Map(timeline.states.map((state, index) => [index, color(stateColor(state))]));
  if (timeline.bins && view.from < timeline.detail_from) {
    const length = timeline.detail_from / timeline.bins;
    for (let bin = Math.floor(view.from / length); bin < timeline.bins && bin * length < view.until; bin += 1) {
      let floor = top + 3 + tall;
      for (const [state, parts] of Object.entries(lane.bins)) {
        const part = (parts[bin] / 1000) * tall;
        pen.fillStyle = paint.get(Number(state)); pen.fillRect(x(bin * length), floor - part, x((bin + 1) * length) - x(bin * length), part);
        floor -= part;
      }
    }
  }
  for (let index = Math.max(0, lastAtMost(lane.start, view.from)); index < lane.start.length && lane.start[index] < view.until; index += 1) {
    const from = Math.max(lane.start[index], timeline.detail_from);
    const left = Math.max(-2, x(from)), right = Math.min(width + 2, x(lane.start[index] + lane.length[index]));
    if (right > left) { pen.fillStyle = paint.get(lane.state[index]); pen.fillRect(left, top + 3, right - left, tall); }
  }
}
const works = (state) => state === "busy" || state === "running";
function shareInView(lane, timeline, view) {
  let worked = 0;
  for (let index = Math.max(0, lastAtMost(lane.start, view.from)); index < lane.start.length && lane.start[index] < view.until; index += 1) {
    const from = Math.max(lane.start[index], view.from, timeline.detail_from), until = Math.min(lane.start[index] + lane.length[index], view.until);
    if (works(timeline.states[lane.state[index]]) && until > from) worked += until - from;
  }
  const length = timeline.bins ? timeline.detail_from / timeline.bins : 0;
  for (let bin = 0; bin < timeline.bins; bin += 1) {
    const inside = Math.min((bin + 1) * length, view.until) - Math.max(bin * length, view.from);
    if (inside > 0) for (const [state, parts] of Object.entries(lane.bins)) if (works(timeline.states[state])) worked += (inside * parts[bin]) / 1000;
  }
  return percent(worked / (view.until - view.from), 0);
}
function describe(lane, timeline, time) {
  if (time < timeline.detail_from) {
    const bin = Math.floor(time / (timeline.detail_from / timeline.bins));
    return `${lane.label} around ${seconds(time / 1e3)}: ${Object.entries(lane.bins).map(([state, parts]) => [timeline.states[state], parts[bin]]).filter(([, part]) => part).map(([state, part]) => `${state} ${percent(part / 1000, 0)}`).join(", ") || "nothing recorded"}`;
  }
  const at = lastAtMost(lane.start, time);
  if (at < 0 || time > lane.start[at] + lane.length[at]) return `${lane.label}: ${lane.kind === "roles" ? "idle" : "nothing recorded"} at ${seconds(time / 1e3)}`;
  const [from, until] = [lane.start[at], lane.start[at] + lane.length[at]].map((each) => `${(each / 1e3).toFixed(4)} s`);
  return `${lane.label}: ${timeline.states[lane.state[at]]} for ${seconds(lane.length[at] / 1e3)}, from ${from} to ${until}`;
}
function laneTable(timeline) {
  const states = timeline.states.filter((state) => !works(state) && !["idle", "done"].includes(state) && timeline.lanes.some((lane) => lane.shares[state]));
  const rows = timeline.lanes.map((lane) => h("tr", {}, h("td", {}, lane.label), h("td", {}, percent(lane.busy)), h("td", {}, percent(1 - lane.busy)), states.map((state) => h("td", {}, lane.shares[state] ? percent(lane.shares[state]) : "–"))));
  return h("div", { class: "scroll" }, h("table", {},
    h("caption", { class: "quiet" }, `Shares of the training time (${seconds((timeline.window[1] - timeline.window[0]) / 1e3)})`),
    h("thead", {}, h("tr", {}, ["lane", "works", "idle or waiting", ...states].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));
}
