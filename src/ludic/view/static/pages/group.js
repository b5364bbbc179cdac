// The attempts of a group beside each other: rewards, weights, and where they part.

import { address } from "../address.js";
import { ask } from "../api.js";
import { chip, h, number, show, signed, textBlock, tone, visible } from "../dom.js";
import { signs } from "./rollouts.js";

export async function open(root, params) {
  const draw = async () => {
    const data = await ask("group", { run: params.run, id: params.id });
    const roles = Object.keys(data.parting);
    show(root,
      h("div", { class: "head" }, h("h1", { class: "id" }, visible(data.group)), h("span", { class: "quiet" }, `${data.attempts.length} attempts`)),
      roles.map((role) => role_(data, role, params.run, roles.length > 1)));
  };
  await draw();
  return {
    update: async (next) => {
      params = next;
      await draw();
    },
  };
}

function role_(data, role, run, several) {
  const attempts = data.attempts.filter((attempt) => attempt.agent === role);
  const parting = data.parting[role];
  const rewards = attempts.map((a) => a.reward).filter((r) => r !== null);
  const mean = rewards.reduce((sum, r) => sum + r, 0) / (rewards.length || 1);
  const most = Math.max(...rewards.map((r) => Math.abs(r - mean)), 1e-9);
  return h("section", {},
    several ? h("h2", {}, visible(role)) : null,
    h("div", { class: "tiles" },
      h("div", { class: "tile" }, h("span", { class: "quiet" }, "mean reward"), h("b", {}, number(mean))),
      h("div", { class: "tile" }, h("span", { class: "quiet" }, "they part in"), h("b", {}, parting === null ? "no turn" : `turn ${parting + 1}`)),
      h("div", { class: "tile wide" }, h("span", { class: "quiet" }, "reward of each attempt, against the mean"),
        h("div", { class: "bars" }, attempts.map((a) => h("a", { class: `bar-of ${tone(a.reward - mean)}`, href: `#attempt`, title: `${a.id}: ${number(a.reward)}`, onclick: (event) => { event.preventDefault(); document.getElementById(`attempt-${a.n}`)?.scrollIntoView({ behavior: "smooth", inline: "center", block: "nearest" }); }, vars: { "--size": `${((Math.abs(a.reward - mean) / most) * 100).toFixed(0)}%` } }))))),
    attempts[0]?.first ? h("details", { class: "task" }, h("summary", {}, "What every attempt was shown first"), textBlock(attempts[0].first)) : null,
    h("div", { class: "attempts" }, attempts.map((a) => attempt(a, run, parting))));
}

function attempt(row, run, parting) {
  const href = address("rollout", { run, id: row.id });
  return h("article", { class: "attempt", id: `attempt-${row.n}` },
    h("header", {}, h("a", { href }, h("b", { class: `big ${tone(row.reward)}` }, number(row.reward))),
      h("span", { class: "quiet" }, row.trained ? `weight ${signed(row.weight)}` : "not trained on"), row.outcome ? chip(row.outcome, "end") : null, signs(row)),
    h("ol", {}, row.turns_shown.map((turn, i) => h("li", { class: i === parting ? "parts" : i < (parting ?? Infinity) ? "same" : "" },
      i === parting ? h("div", { class: "parting" }, "they part here") : null,
      h("pre", { class: "said", dir: "auto" }, h("span", { class: "common" }, visible(turn.text.slice(0, turn.common))), visible(turn.text.slice(turn.common)), turn.cut ? "…" : ""),
      h("div", { class: "line quiet" }, turn.parse_error ? chip("not parsed", "warn") : null, turn.compacted ? chip("compacted", "end") : null, turn.calls.map((name) => chip(name)), turn.action && turn.action !== turn.text ? h("code", {}, visible(turn.action.slice(0, 120))) : null, turn.reward ? h("b", { class: tone(turn.reward) }, signed(turn.reward)) : null)))),
    h("a", { class: "quiet", href }, "token by token →"));
}
