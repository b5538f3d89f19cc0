// Several runs on one page. `run.labels` and all lists beside it are in the order of the runs.
function outcomes() {
  const validation = (state) => Object.keys(state.validation_last).map((domain) => h("div", {}, `${domain}: ${percent(state.validation_first[domain])} → ${percent(state.validation_last[domain])}`));
  const rows = run.states.map((state, place) => h("tr", {},
    h("td", { class: "words" }, swatch(place), run.labels[place]), h("td", { class: "words" }, state.status), h("td", {}, `${number(state.steps)}${state.max_steps ? ` of ${number(state.max_steps)}` : ""}`),
    h("td", {}, seconds(state.seconds)), h("td", {}, run.rewards[place] === null ? "–" : number(run.rewards[place])), h("td", { class: "words" }, validation(state)), h("td", { class: "words quiet" }, run.folders[place])));
  return table(["run", "status", "steps", "duration", "last reward", "validation, first → last", "folder"], rows);
}
const swatch = (place) => s("svg", { "aria-hidden": "true", viewBox: "0 0 22 8", width: 22, height: 8 }, s("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: `var(--s${place % COLORS})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[place % DASHES.length] }));
function differencesView() {
  if (run.absent.some((reasons) => reasons["config.yaml"])) return absent("Not every run has a configuration that can be read.");
  if (!run.differences.length) return absent("The settings of these runs are the same.");
  return table(["key", ...run.labels], run.differences.map((row) => h("tr", {}, h("td", { class: "words" }, h("code", {}, row.key)), row.values.map((value) => h("td", { class: "words" }, value)))));
}
function comparison() {
  const drawn = Object.keys(run.metrics.series).length > 0;
  const shown = run.sections.filter((part) => !part.folded), others = run.sections.filter((part) => part.folded);
  const main = h("main", {},
    h("h1", {}, run.labels.join(" · ")),
    section("Outcomes", "Outcomes", outcomes()),
    section("What differs in their settings", "Settings", differencesView()),
    drawn ? curveControls() : absent("No step has been recorded."),
    shown.map((part) => section(part.title, part.title.split(" ")[0], panelsOf(part))),
    others.map((part) => folded(part.title, `${part.panels.length} more ${part.panels.length === 1 ? "curve" : "curves"}`, () => panelsOf(part))),
    h("p", { class: "quiet" }, `This page was made ${new Date(run.made * 1e3).toLocaleString()}.`));
  document.getElementById("report").append(h("div", { class: "bar" }, h("strong", {}, "Comparison"), h("nav", { "aria-label": "parts of this page" }, links), themeButton()), main);
}
