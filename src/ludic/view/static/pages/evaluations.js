// Two evaluations against each other, episode by episode, with the paired test.

import { change } from "../address.js";
import { ask } from "../api.js";
import { h, number, problems, show, signed, tone, visible } from "../dom.js";
import { figureRows } from "./run.js";

export async function open(root, params) {
  const all = await ask("evaluations");
  const choices = all.flatMap(({ run, reports }) => reports.map((name) => ({ run, name })));
  const result = h("div", {});
  const pickers = h("div", { class: "versus" });

  const chosen = (side) => choices.find((c) => c.run === params[`${side}_run`] && c.name === params[side]);
  function picker(side) {
    return h("select", { "aria-label": `Evaluation ${side.toUpperCase()}`, onchange: (event) => { const c = choices[event.target.value]; change({ [`${side}_run`]: c.run, [side]: c.name }); } },
      chosen(side) ? null : h("option", { value: "" }, "choose…"),
      choices.map((c, i) => h("option", { value: i, selected: c === chosen(side) }, `${c.run} · ${c.name.replaceAll("_", " ")}`)));
  }

  async function draw(next) {
    params = next;
    if (!params.a && choices.length > 1) {
      const run = choices.at(-1).run;
      const mine = choices.filter((c) => c.run === run);
      const [a, b] = mine.length > 1 ? mine.slice(-2) : choices.slice(-2);
      params = { a_run: a.run, a: a.name, b_run: b.run, b: b.name };
    }
    show(pickers, h("b", { class: "side-a" }, "A"), picker("a"), h("button", { class: "small", title: "Exchange", onclick: () => change({ a_run: params.b_run, a: params.b, b_run: params.a_run, b: params.a }) }, "⇄"), h("b", { class: "side-b" }, "B"), picker("b"));
    if (!chosen("a") || !chosen("b")) {
      show(result, h("p", { class: "quiet" }, choices.length ? "Choose two evaluations." : "No run here has evaluations."));
      return;
    }
    try {
      show(result, report(await ask("compare", { a_run: params.a_run, a: params.a, b_run: params.b_run, b: params.b })));
    } catch (error) {
      show(result, problems([error.message]));
    }
  }

  show(root, h("div", { class: "head" }, h("h1", {}, "Evaluations")), pickers, result);
  await draw(params);
  return { update: draw };
}

function report(data) {
  const tests = Object.entries(data.test);
  const sure = (p) => (p < 0.01 ? "strong" : p < 0.05 ? "some" : "weak");
  return [
    data.why_not ? problems([`No paired test: ${data.why_not}`]) : null,
    h("div", { class: "tiles" }, tests.map(([name, t]) => h("div", { class: `tile evidence ${sure(t.p)}` },
      h("span", { class: "quiet" }, `${name}: B − A`), h("b", { class: t.p < 0.05 ? tone(t.value) : "" }, signed(t.value)),
      h("small", { class: "quiet" }, `${signed(t.low)} to ${signed(t.high)}, n = ${t.n}`), h("small", {}, `paired test: p ${t.p < 0.00015 ? "≤ 0.0001" : `= ${t.p.toFixed(4)}`}`))),
      h("div", { class: "tile" }, h("span", { class: "quiet" }, "episodes of B"), h("b", {}, `${number(data.better)} better, ${number(data.worse)} worse`), h("small", { class: "quiet" }, `of ${number(data.total)}`))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", {}, "A ", h("small", {}, `n=${data.a.episodes}`)), h("th", {}, "B ", h("small", {}, `n=${data.b.episodes}`)))),
      h("tbody", {}, figureRows([data.a, data.b])))),
    h("h2", {}, "Episode by episode"),
    episodes(data),
  ];
}

const FIRST = 200;

function episodes(data) {
  const body = h("tbody", {});
  const more = h("button", { class: "small" });
  let at = 0;
  const part = () => {
    for (const pair of data.pairs.slice(at, at + FIRST)) {
      body.append(h("tr", {}, h("td", { class: "mono quiet" }, pair.seed ?? "–"), h("td", {}, visible(pair.agent)),
        [pair.a, pair.b].map((side) => h("td", {}, side ? [h("b", { class: tone(side.reward) }, number(side.reward)), " ", visible(side.outcome ?? ""), h("span", { class: "quiet" }, ` ${side.turns} turns`), side.error ? h("span", { class: "bad" }, " failed") : null] : "–")),
        h("td", { class: `num strong ${tone(pair.difference)}` }, pair.difference ? signed(pair.difference) : h("span", { class: "quiet" }, "="))));
    }
    at += FIRST;
    more.textContent = `${number(data.pairs.length - at)} more`;
    if (at >= data.pairs.length) more.remove();
  };
  more.addEventListener("click", part);
  part();
  return [h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Seed", "Agent", "A", "B", "B − A"].map((t) => h("th", {}, t)))), body)), at < data.pairs.length ? more : null, data.total > data.pairs.length ? h("p", { class: "quiet" }, `The ${number(data.pairs.length)} that differ most are shown.`) : null];
}
