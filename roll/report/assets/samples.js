// Samples: what was asked, what was answered, and of each token who wrote it when and what the training made of it.
function expanded(runs, length) {
  const values = [];
  for (const [count, value] of runs || []) for (let index = 0; index < count; index += 1) values.push(value);
  return values.length ? values : new Array(length).fill(null);
}
const lagOf = (sample, version) => (sample.split === "train" ? sample.step - 1 - version : sample.step - version);

function samplesView(samples, pictures) {
  const state = { step: samples.at(-1).step, split: "", domain: "", paint: "version" };
  let steps = [];
  const list = h("div", {}), legend = h("div", { class: "keys" });
  const options = (values, label) => [h("option", { value: "" }, label), ...values.map((value) => h("option", { value }, value))];
  const choose = (name, label, entries) => h("label", {}, label, h("select", { onchange: (event) => { state[name] = event.target.value; show(); } }, entries));
  const stepChoice = h("select", { "aria-label": "step", onchange: () => { state.step = Number(stepChoice.value); show(); } });
  const jump = (by) => { state.step = steps[clamp(steps.indexOf(state.step) + by, 0, steps.length - 1)]; show(); };
  const earlier = h("button", { type: "button", onclick: () => jump(-1), "aria-label": "earlier step" }, "◀");
  const later = h("button", { type: "button", onclick: () => jump(1), "aria-label": "later step" }, "▶");
  const largest = samples.flatMap((each) => [each.advantage, ...(each.tokens ? each.tokens.advantages.map(([, value]) => value) : [])]).reduce((most, value) => Math.max(most, Math.abs(value || 0)), 1e-9);
  const oldest = samples.reduce((most, each) => Math.max(most, each.split === "train" ? lagOf(each, each.versions[0]) : 0), 1);

  function show() {
    const wanted = samples.filter((each) => (!state.split || each.split === state.split) && (!state.domain || each.domain === state.domain));
    steps = [...new Set(wanted.map((each) => each.step))];
    if (!steps.includes(state.step)) state.step = steps[Math.max(0, lastAtMost(steps, state.step))];
    stepChoice.replaceChildren(...steps.map((step) => h("option", { value: step }, `step ${step}`)));
    stepChoice.value = state.step;
    earlier.disabled = !steps.length || state.step === steps[0]; later.disabled = !steps.length || state.step === steps.at(-1);
    const chosen = wanted.filter((each) => each.step === state.step);
    legend.replaceChildren(...paintLegend(state.paint, largest, oldest));
    list.replaceChildren(...(chosen.length ? chosen.map((sample) => sampleCard(sample, pictures, state.paint, largest, oldest)) : [absent("No sample is like that.")]));
  }
  show();
  return [
    h("div", { class: "controls" }, h("span", {}, earlier, " ", stepChoice, " ", later),
      choose("split", "from", [...options(["train", "val"], "training and validation")]),
      choose("domain", "domain", options([...new Set(samples.map((each) => each.domain))], "all")),
      h("label", {}, "colour tokens by", h("select", { onchange: (event) => { state.paint = event.target.value; show(); } }, h("option", { value: "version" }, "policy version"), h("option", { value: "advantage" }, "advantage"), h("option", { value: "none" }, "nothing")))),
    legend, list,
  ];
}

function sampleCard(sample, pictures, paint, largest, oldest) {
  const versions = sample.versions[0] === sample.versions[1] ? `version ${sample.versions[0]}` : `versions ${sample.versions[0]} to ${sample.versions[1]}`;
  const lag = sample.split === "train" ? `, lag up to ${lagOf(sample, sample.versions[0])}` : "";
  const facts = [sample.split === "train" ? "training" : "validation", sample.domain, `group ${sample.group_id}`, `score ${number(sample.score)}`,
    sample.advantage === null ? "" : `mean advantage ${number(sample.advantage)}`, versions + lag, `ended by ${sample.finish_reason}`];
  return h("article", { class: "sample" }, h("header", {}, facts.filter(Boolean).map((fact) => h("span", {}, fact))),
    sample.pictures ? h("div", { class: "text pictures" }, sample.pictures.map((name) => (pictures[name] ? h("img", { src: pictures[name], alt: name, title: `samples/${name}` }) : h("span", {}, `samples/${name} `)))) : "",
    sample.prompt ? h("div", { class: "text", dir: "auto" }, sample.prompt) : "",
    sample.tokens ? tokensView(sample, paint, largest, oldest) : plainResponse(sample, paint, largest, oldest));
}
function tokensView(sample, paint, largest, oldest) {
  const { texts, left_out: leftOut, left_out_after: after } = sample.tokens;
  const versions = expanded(sample.tokens.versions, texts.length), advantages = expanded(sample.tokens.advantages, texts.length), turns = expanded(sample.tokens.turns, texts.length);
  const parts = [];
  let turn = null;
  texts.forEach((text, index) => {
    if (leftOut && index === after) parts.push(h("span", { class: "given" }, ` [… ${leftOut} tokens left out …] `));
    if (index && versions[index] === null && versions[index - 1] !== null) parts.push(h("br", {}));
    if (turns[index] !== null && turns[index] !== turn) parts.push(h("span", { class: "turn" }, `turn ${(turn = turns[index])}`));
    parts.push(tokenView({ sample, text, index, version: versions[index], advantage: advantages[index], turn: turns[index] }, paint, largest, oldest));
  });
  return h("div", { class: "tokens", dir: "auto", tabindex: "0", "aria-label": "response" }, parts);
}
function tokenView(token, paint, largest, oldest) {
  const shown = token.text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
  if (token.version === null) return h("span", { class: "given", title: "given, not sampled" }, shown);
  const facts = [JSON.stringify(token.text), `version ${token.version}`, token.sample.split === "train" ? `lag ${lagOf(token.sample, token.version)}` : "",
    token.advantage === null ? "" : `advantage ${token.advantage}`, token.turn === null ? "" : `turn ${token.turn}`];
  return h("span", { title: facts.filter(Boolean).join(" · "), style: { background: paintOf(paint, token.sample, token.version, token.advantage, largest, oldest) } }, shown);
}
function plainResponse(sample, paint, largest, oldest) {
  const background = sample.versions[0] === sample.versions[1] || paint === "advantage" ? paintOf(paint, sample, sample.versions[0], sample.advantage, largest, oldest) : "transparent";
  return h("div", { class: "tokens", dir: "auto" }, h("span", { style: { background }, title: "This run recorded no single tokens; the colour is that of the whole response." }, sample.response || "(empty)"));
}
function paintOf(paint, sample, version, advantage, largest, oldest) {
  if (paint === "version") return lagPaint(sample.split === "train" ? lagOf(sample, version) : 0, oldest);
  return paint === "advantage" && advantage !== null ? advantagePaint(advantage, largest) : "transparent";
}
const lagPaint = (lag, oldest) => `rgba(${lag > 0 ? `var(--old), ${(0.15 + 0.4 * Math.min(1, lag / oldest)).toFixed(2)}` : "var(--pos), 0.16"})`;
const advantagePaint = (value, largest) => `rgba(var(--${value < 0 ? "neg" : "pos"}), ${(value === 0 ? 0 : 0.18 + 0.45 * Math.min(1, Math.abs(value) / largest)).toFixed(2)})`;
function paintLegend(paint, largest, oldest) {
  const key = (background, text) => h("span", { class: "key" }, h("i", { style: { background } }), text);
  if (paint === "version") return Array.from({ length: Math.min(oldest, 8) + 1 }, (_, lag) => key(lagPaint(lag, oldest), lag ? `lag ${lag}` : "lag 0: the weights being trained, or validated")).concat(h("span", { class: "key quiet" }, "grey: given, not sampled"));
  if (paint === "advantage") return [-1, -0.5, 0, 0.5, 1].map((share) => key(advantagePaint(share * largest, largest), number(Number((share * largest).toPrecision(3)))));
  return [];
}
