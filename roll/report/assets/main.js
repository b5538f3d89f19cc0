// The page from top to bottom.
function statusBadge() {
  const status = run.state.status, kinds = ["success", "failed", "running", "interrupted", "unknown"];
  return h("span", { class: `badge ${kinds.includes(status) ? status : status === "simulated" ? "unknown" : "lost"}` }, status);
}
function themeButton() {
  const order = ["auto", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("roll-report-theme") || "auto"; } catch { return "auto"; } };
  const apply = (theme) => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme"); else document.documentElement.setAttribute("data-theme", theme);
    button.textContent = `theme: ${theme}`;
    redrawAll();
  };
  let current = stored();
  const button = h("button", {
    type: "button", onclick: () => {
      current = order[(order.indexOf(current) + 1) % order.length];
      try { localStorage.setItem("roll-report-theme", current); } catch { /* a page without storage forgets the choice */ }
      apply(current);
    },
  });
  apply(current);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  return button;
}
function tiles() {
  const { state } = run, tile = (name, value, more) => h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value), more ? h("div", { class: "more" }, more) : "");
  const perStep = run.metrics.series["time/step"];
  const idle = Object.entries(run.idle).sort((a, b) => b[1] - a[1])[0];
  const domains = Object.keys(state.validation_last);
  return h("div", { class: "tiles" },
    tile("status", state.status, state.pipeline || ""),
    tile("training steps", `${number(state.steps)}${state.max_steps ? ` of ${number(state.max_steps)}` : ""}`, run.resumed_at.length ? `resumed after step ${run.resumed_at.join(", ")}` : ""),
    tile("duration", seconds(state.seconds), state.first_step_seconds ? `first step done after ${seconds(state.first_step_seconds)}` : ""),
    domains.slice(0, 6).map((domain) => tile(`validation, ${domain}`, `${percent(state.validation_first[domain])} → ${percent(state.validation_last[domain])}`, "accuracy, first → last")),
    lastTile(tile, "reward/mean", "reward", "mean score at the last step"),
    state.lag_max === null ? "" : tile("largest lag", number(state.lag_max), "policy versions"),
    idle ? tile("largest idle share", percent(idle[1], 0), idle[0]) : "",
    perStep ? tile("last step took", seconds(perStep.values.at(-1)), "wall clock") : "");
}
function lastTile(tile, name, title, more) {
  const series = run.metrics.series[name];
  return series ? tile(title, number(series.values.at(-1)), more) : "";
}
function findingsView() {
  if (!run.findings.length) return absent(run.absent["metrics.jsonl"] ? `Not known: ${run.absent["metrics.jsonl"]}.` : "Nothing that stands out.");
  return h("ol", { class: "findings" }, run.findings.map((finding, index) => h("li", { class: index ? "" : "first" },
    h("p", {}, prose(finding.text)), finding.remedy ? h("p", {}, prose(finding.remedy)) : "", finding.evidence ? h("p", { class: "quiet" }, `Seen in ${finding.evidence}.`) : "")));
}
const meter = (share, waste) => h("td", { class: "wide" }, h("span", { class: "meter" }, h("i", { class: waste ? "waste" : "", style: { width: `${(100 * clamp(share, 0, 1)).toFixed(2)}%` } })));
const table = (head, rows, caption) => h("div", { class: "scroll" }, h("table", {}, caption ? h("caption", { class: "quiet" }, caption) : "",
  h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: name.startsWith("share") ? "words" : "" }, name)))), h("tbody", {}, rows)));

function lagView() {
  if (!run.lags.length) return absent("No step has recorded which share of its tokens has which lag.", run.absent["metrics.jsonl"]);
  const rows = run.lags.map(({ lag, share }) => h("tr", {}, h("td", {}, `lag ${lag}`), meter(share), h("td", { title: String(share) }, percent(share, 2))));
  return table(["", "share of the trained tokens", ""], rows, "Tokens by lag: mean over the training steps. Lag 0 was sampled by the weights that were about to be trained.");
}
function wasteView() {
  const { ledger, tokens } = run, issued = ledger.issued || 0;
  if (!issued) return absent("No group has been issued, or the ledger was not recorded.", run.absent["summary.json"]);
  const row = (name, count, waste) => h("tr", {}, h("td", {}, name), meter(count / issued, waste), h("td", {}, number(count)), h("td", {}, percent(count / issued, 2)));
  const reasons = Object.keys(ledger).filter((name) => name.startsWith("dropped/"));
  const parts = [
    table(["groups", "share of those issued", "count", ""], [
      row("trained on", ledger.consumed), ...reasons.map((name) => row(`dropped: ${name.slice(8)}`, ledger[name], true)), row("finished, waiting", ledger.buffered), row("in flight", ledger.in_flight),
    ], `${number(issued)} groups were issued; every one is in one of these rows.`),
  ];
  if (tokens.generated) {
    const other = Math.max(0, tokens.generated - tokens.trained), share = (count) => count / tokens.generated;
    const line = (name, count, waste) => h("tr", {}, h("td", {}, name), meter(share(count), waste), h("td", {}, number(Math.round(count))), h("td", {}, percent(share(count), 2)));
    parts.push(table(["tokens", "share of those generated", "count", ""], [line("trained on", tokens.trained), line("not trained on", other, true)],
      "Tokens that the engines generated in the recorded steps. Not trained on: validation, dropped groups, attempts that were repeated, and what is still on its way."));
  }
  return parts;
}
function weightsView() {
  if (!run.weights.length) return absent("No publication has been recorded.", run.absent["metrics.jsonl"]);
  const says = { gather: "copying out of the trainer", send: "handing over", fetch: "taking in, beside decoding", load: "changing over", stall: "longest pause of an engine" };
  return table(["part", "mean", "longest", "last", ""], run.weights.map((row) => h("tr", {}, h("td", {}, row.part), ["mean", "longest", "last"].map((key) => h("td", { title: String(row[key]) }, seconds(row[key]))), h("td", { class: "words quiet" }, says[row.part] || ""))), "Seconds per step.");
}
function configView() {
  if (!run.config) return absent(run.absent["config.yaml"]);
  const lines = run.config.split("\n"), pre = h("pre", { class: "config", tabindex: "0" });
  const show = (wanted) => {
    const kept = new Set(), open = [];
    lines.forEach((line, index) => {
      const depth = line.search(/\S/);
      while (open.length && lines[open.at(-1)].search(/\S/) >= depth) open.pop();
      open.push(index);
      if (line.toLowerCase().includes(wanted)) open.forEach((each) => kept.add(each));
    });
    pre.replaceChildren(...lines.flatMap((line, index) => (wanted && !kept.has(index) ? [] : [wanted && line.toLowerCase().includes(wanted) ? h("mark", {}, line) : line, "\n"])));
  };
  const search = h("input", { type: "search", placeholder: "find a key or a value", "aria-label": "find in the configuration", oninput: () => show(search.value.trim().toLowerCase()) });
  show("");
  const cut = run.config_characters > run.config.length ? h("p", { class: "quiet" }, `Cut: ${number(run.config_characters)} characters are in config.yaml.`) : "";
  return [h("div", { class: "controls" }, search), pre, cut];
}
function filesView() {
  const when = (time) => new Date(time * 1e3).toLocaleString();
  const rows = run.files.map((file) => h("tr", {}, h("td", {}, file.name), h("td", {}, `${number(Math.ceil(file.bytes / 1e3))} kB`), h("td", {}, when(file.modified))));
  const missing = Object.entries(run.absent).map(([name, reason]) => h("li", {}, h("code", {}, name), `: ${reason}`));
  return [h("p", { class: "quiet" }, run.folder), table(["file", "size", "last written"], rows), missing.length ? [h("p", {}, "Left out:"), h("ul", {}, missing)] : "", h("p", { class: "quiet" }, `This page was made ${when(run.made)}.`)];
}
function samplesSection() {
  if (!run.samples.length) return absent(run.absent["samples.jsonl"]);
  const some = run.samples.length < run.samples_recorded ? `${number(run.samples.length)} of ${number(run.samples_recorded)} recorded samples, of steps spread evenly over the run; all are in samples.jsonl.` : "";
  return [some ? h("p", { class: "quiet" }, some) : "", samplesView(run.samples, run.prompt_pictures)];
}

const links = [];
function section(title, short, ...content) {
  const id = short.toLowerCase();
  links.push(h("a", { href: `#${id}` }, short));
  return h("section", { id }, h("h2", {}, title), content);
}
// What is folded is drawn when it is first opened; a printed page has all of it.
function folded(title, count, make) {
  const details = h("details", { class: "fold" }, h("summary", {}, title, " ", h("span", { class: "quiet" }, count)));
  const open = () => { if (details.children.length === 1) details.append(...[make()].flat()); };
  details.addEventListener("toggle", () => details.open && open());
  addEventListener("beforeprint", () => { open(); details.open = true; });
  return details;
}
const panelsOf = (part) => h("div", { class: "panels" }, part.panels.map(chart));
function curves(title) {
  const part = run.sections.find((each) => each.title === title);
  return part ? panelsOf(part) : absent(run.absent["metrics.jsonl"] ? `No curves: ${run.absent["metrics.jsonl"]}.` : "Nothing of this was recorded.");
}

function page() {
  const timeline = run.timeline ? timelineView(run.timeline) : absent(run.absent["timeline.json"]);
  const main = h("main", {},
    h("h1", {}, run.name), h("p", { class: "quiet" }, run.folder),
    run.state.status === "died" ? h("p", {}, "The summary says that the run goes on, but no process works on it: it was killed, or its machine went away. A run with checkpoints goes on with resume_from_checkpoint.") : "",
    run.state.error ? h("div", { class: "error", role: "alert" }, run.state.error) : "", tiles(),
    section("What slows this run down", "Verdict", findingsView()),
    section("Learning", "Learning", Object.keys(run.metrics.series).length ? curveControls() : "", curves("Learning")),
    section("Policy and optimizer", "Policy", curves("Policy and optimizer")),
    section("Freshness", "Freshness", curves("Freshness"), lagView()),
    section("Speed", "Speed", curves("Speed")),
    section("Timeline", "Timeline", timeline),
    section("Weight publication", "Weights", weightsView()),
    section("Waste", "Waste", wasteView()),
    run.pictures ? section("Validation pictures", "Pictures", picturesView(run.pictures)) : "",
    section("Samples", "Samples", samplesSection()),
    section("Configuration", "Configuration", configView()),
    run.sections.filter((part) => part.folded).map((part) => folded(part.title, `${part.panels.length} more ${part.panels.length === 1 ? "curve" : "curves"}`, () => panelsOf(part))),
    run.log ? folded("Log", "last lines of logs/driver.log", () => h("pre", { class: "log", tabindex: "0" }, run.log)) : "",
    section("Files", "Files", filesView()));
  const bar = h("div", { class: "bar" }, h("strong", {}, run.name), statusBadge(), h("nav", { "aria-label": "parts of this page" }, links), themeButton());
  document.getElementById("report").append(bar, main);
}
if (run.labels) comparison(); else page();
