// A rollout as it went: messages, tool calls, what the environment answered, rewards, endings.

import { chip, h, number, s, show, signed, textBlock, tone, visible } from "./dom.js";
import { completion, prompt } from "./tokens.js";

const ROLES = { system: "system", user: "environment", assistant: "model", tool: "tool" };

export function conversation(page, { asTokens }) {
  const turns = new Map();
  for (const step of page.steps) {
    if (!turns.has(step.turn)) turns.set(step.turn, []);
    turns.get(step.turn).push(step);
  }
  const parts = [];
  let answered = [];
  // What the environment says is shown where the model reads it; only what it never read, here.
  const read = page.steps.flatMap((step) => (step.new_messages ?? []).map((message) => message.content ?? ""));
  for (const [turn, steps] of turns) {
    const reward = steps.filter((step) => step.kind === "environment").reduce((sum, step) => sum + (step.reward ?? 0), 0);
    const call = steps.find((step) => step.tokens?.trained);
    const compaction = steps.find((step) => step.info?.compacted);
    const head = h("header", { class: "turn-head" }, h("h3", {}, compaction ? `Turn ${turn + 1}: the dialogue was compacted` : `Turn ${turn + 1}`),
      reward ? h("b", { class: tone(reward) }, `${signed(reward)} reward`) : null,
      call ? h("span", { class: `quiet ${tone(call.tokens.weights[0])}` }, `weight ${signed(call.tokens.weights[0])}`) : null,
      steps.some((step) => step.tokens) && !call && page.updates.length ? h("span", { class: "quiet" }, "not trained on") : null);
    const body = [];
    for (const step of steps) {
      if (step.kind === "agent") {
        if (step.fork) body.push(fork(step.fork));
        // A tool's answer is listed with its call, and again as new to the call after it.
        const repeated = answered.length && JSON.stringify(step.new_messages.slice(0, answered.length)) === JSON.stringify(answered);
        body.push(step.new_messages.slice(repeated ? answered.length : 0).map((message) => said(message)));
        body.push(model(step, page, asTokens));
        body.push(step.tool_messages.map((message) => said(message)));
        body.push(step.tool_errors.map((text) => h("p", { class: "line bad" }, visible(text))));
        answered = step.tool_messages;
      } else {
        body.push(environment(step, read));
      }
    }
    parts.push(h("section", { class: compaction ? "turn compaction" : "turn", id: `turn-${turn}` }, head, body));
    if (compaction) parts.push(seam(compaction, steps, page));
  }
  if (page.error) parts.push(h("section", { class: "turn" }, h("p", { class: "line bad" }, "The episode failed: ", visible(page.error))));
  return parts;
}

// How to read the page, and the facts that are not part of the conversation.
export function facts(page) {
  const sampling = page.steps.find((step) => step.kind === "agent" && step.tokens)?.sampling ?? {};
  const plain = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1 };
  const settings = Object.entries(sampling).filter(([key, value]) => !(key in plain && plain[key] === value) && !(Array.isArray(value) && !value.length));
  const rows = [
    ["episode", page.episode], ["group", page.group], ["task", page.task], ["environment", page.env?.kind],
    ...Object.entries(page.env?.kwargs ?? {}).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]),
    ["protocol", page.protocol], ["environment's seed", page.env_seed], ["sampling's seed", page.sampling_seed],
    ...settings.map(([key, value]) => [key.replaceAll("_", " "), JSON.stringify(value)]),
    ...Object.entries(page.meta ?? {}).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]),
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("aside", {},
    page.hasTexts ? [h("h2", {}, "How to read it"), h("ul", { class: "reading" },
      h("li", {}, h("span", { class: "as-trained" }, "token"), "sampled, and trained on"),
      h("li", {}, h("span", { class: "as-sampled" }, "token"), "sampled, and not trained on"),
      h("li", {}, h("span", { class: "as-state" }, "token"), "state: the model saw it")) ] : null,
    h("h2", {}, "Facts"), h("dl", { class: "facts" }, rows.map(([key, value]) => [h("dt", {}, visible(key)), h("dd", {}, visible(String(value)))])));
}

function fork(branching) {
  return h("p", { class: "line fork" }, branch(), ` forked here: ${branching.reason.replaceAll("_", " ")}`, branching.detail ? h("span", { class: "quiet" }, " — ", visible(branching.detail)) : null);
}

// Both sides of a compaction: how long the dialogue was, and what the model sees of it from here on.
function seam(compaction, steps, page) {
  const calls = page.steps.filter((step) => step.kind === "agent" && step.tokens);
  const last = steps.filter((step) => step.tokens).at(-1);
  const next = last ? calls[calls.indexOf(last) + 1] : null;
  const before = last ? `${number(last.tokens.prompt.length)} tokens before` : "before";
  const after = next ? `${number(next.tokens.prompt.length)} after` : "after";
  const { dropped_turns: dropped, kept_turns: kept } = compaction.info;
  const how = kept === undefined ? "it was broken off" : dropped === undefined ? `a summary replaced the dialogue, the last ${kept} turns stay` : `no summary came: ${dropped} turns were dropped, the last ${kept} stay`;
  const text = next && page.hasTexts ? next.tokens.prompt.map((id) => page.texts[id] ?? "").join("") : "";
  return h("div", { class: "seam" }, h("p", { class: "line" }, `${before} · ${how} · ${after}`),
    text ? h("details", {}, h("summary", {}, "What the model sees from here on"), textBlock(text)) : null);
}

function branch() {
  return s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: "M4 2v12M4 9c5 0 8-1 8-6M9.5 5.5L12 3l2.5 2.5" }));
}

function said(message) {
  const role = ROLES[message.role] ?? message.role;
  return h("article", { class: `message ${message.role}` }, h("header", {}, visible(message.name ? `${role}: ${message.name}` : role)), textBlock(message.content ?? ""));
}

function model(step, page, asTokens) {
  const { tokens, message } = step;
  const shown = asTokens && tokens && page.hasTexts ? completion(tokens, page) : textBlock(message.content ?? "");
  const calls = (message.tool_calls ?? []).map((call) => h("div", { class: "call" }, h("b", {}, visible(call.function.name)), textBlock(JSON.stringify(call.function.arguments, null, 1), { cls: "said arguments" })));
  return h("article", { class: `message assistant ${tokens?.trained ? "trained" : ""}` },
    h("header", {}, "model", tokens ? h("span", { class: "quiet" }, ` ${number(tokens.completion.length)} tokens`) : null,
      step.finish_reason === "length" ? chip("cut by length", "warn") : step.finish_reason === "abort" ? chip("aborted", "bad") : null),
    tokens && asTokens ? prompt(tokens, page) : null, shown, calls);
}

function environment(step, read) {
  const failed = step.info?.parse_error;
  const parts = Object.entries(step.components);
  const facts = [
    failed ? chip("not parsed", "warn", "the environment was not stepped") : null,
    step.info?.compacted ? chip("compacted", "end", "a summary, and no move") : null,
    !failed && !step.stepped && !step.info?.compacted ? chip("not stepped", "warn") : null,
    step.action !== null && !failed ? h("span", {}, "action ", h("code", {}, visible(step.action.length > 200 ? `${step.action.slice(0, 200)}…` : step.action))) : null,
    !step.acted ? h("span", { class: "quiet" }, "heard without having acted") : null,
    h("span", {}, "reward ", h("b", { class: tone(step.reward) }, number(step.reward)), parts.length > 1 ? h("span", { class: "quiet" }, ` = ${parts.map(([k, v]) => `${k} ${number(v)}`).join(" + ")}`) : null),
    step.terminated ? chip("terminated", "end") : null,
    step.truncated ? chip(`truncated: ${(step.truncation ?? "").replaceAll("_", " ")}`, "warn") : null,
    step.info?.result !== undefined ? chip(String(step.info.result), "end") : null,
  ];
  const ended = step.terminated || step.truncated || failed;
  const others = Object.fromEntries(Object.entries(step.info ?? {}).filter(([key]) => !["parse_error", "result", "compacted"].includes(key)));
  return h("div", { class: "outcome" }, h("div", { class: "line facts-line" }, facts),
    ended && step.next_obs && !read.some((text) => text.includes(step.next_obs)) ? h("article", { class: "message user" }, h("header", {}, failed ? "feedback" : "last observation"), textBlock(step.next_obs)) : null,
    Object.keys(others).length ? h("details", { class: "info" }, h("summary", {}, "info"), textBlock(JSON.stringify(others, null, 1))) : null);
}

// A bar for each turn: how much weight it got, and its reward.
export function strip(page, onpick) {
  const turns = new Map();
  for (const step of page.steps) {
    const totals = turns.get(step.turn) ?? { reward: 0, weight: null };
    if (step.kind === "environment") totals.reward += step.reward ?? 0;
    else if (step.tokens?.trained) totals.weight = step.tokens.weights[0];
    turns.set(step.turn, totals);
  }
  const box = h("div", { class: "strip", role: "list", "aria-label": "Turns" });
  show(box, [...turns].slice(0, 200).map(([turn, { reward, weight }]) => h("button", {
    class: `step ${tone(weight ?? reward)}`, role: "listitem",
    title: `turn ${turn + 1}: reward ${number(reward)}${weight === null ? "" : `, weight ${signed(weight)}`}`,
    onclick: () => onpick(turn),
  }, String(turn + 1))));
  return box;
}
