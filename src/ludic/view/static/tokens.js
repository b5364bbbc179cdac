// Tokens one by one, coloured by what is known of them.

import { h, number, s, show, signed, visible } from "./dom.js";

export const WAYS = {
  weight: "weight",
  logprob: "log-prob of the sampler",
  mismatch: "mismatch of sampler and trainer",
  entropy: "entropy",
  version: "policy version",
  none: "nothing",
};
const VERSION_HUES = [228, 32, 158, 312, 92, 268, 8, 190];

// The colour of a value; hues differ in lightness, too, so that they do not rest on red and green.
function paint(way, value, scale) {
  if (value === null || value === undefined || Number.isNaN(value)) return null;
  if (way === "version") return `hsl(${VERSION_HUES[scale.versions.indexOf(value) % VERSION_HUES.length]} 60% 55% / 0.35)`;
  if (way === "weight") {
    const share = Math.min(Math.abs(value) / (scale.top || 1), 1);
    return value >= 0 ? `hsl(158 65% 42% / ${(0.08 + 0.5 * share).toFixed(3)})` : `hsl(14 85% 55% / ${(0.08 + 0.5 * share).toFixed(3)})`;
  }
  const share = Math.min(Math.abs(value) / (scale.top || 1), 1);
  const hue = { logprob: 38, mismatch: 286, entropy: 214 }[way];
  return `hsl(${hue} 80% 52% / ${(0.62 * share).toFixed(3)})`;
}

function value(way, tokens, i) {
  if (way === "weight") return tokens.weights?.[i];
  if (way === "logprob") return tokens.logprobs?.[i];
  if (way === "entropy") return tokens.entropies?.[i];
  if (way === "version") return tokens.versions?.[i];
  if (way === "mismatch") return tokens.trainer_logprobs && tokens.logprobs ? tokens.trainer_logprobs[i] - tokens.logprobs[i] : undefined;
  return undefined;
}

// Which ways have anything to show, and the largest value of each.
export function scales(calls) {
  const ranges = {};
  for (const way of Object.keys(WAYS)) {
    const values = [];
    for (const tokens of calls) {
      for (let i = 0; i < tokens.completion.length; i++) {
        const v = value(way, tokens, i);
        if (v !== undefined && v !== null) values.push(v);
      }
    }
    if (!values.length && way !== "none") continue;
    ranges[way] = { low: Math.min(...bounded(values)), high: Math.max(...bounded(values)), top: Math.max(...bounded(values).map(Math.abs)), versions: [...new Set(values)].sort((a, b) => a - b) };
  }
  return ranges;
}

function bounded(values) {
  return values.length > 50000 ? values.filter((_, i) => i % Math.ceil(values.length / 50000) === 0) : values.length ? values : [0];
}

export function colour(box, way, scale) {
  for (const node of box.querySelectorAll(".tok.sampled")) {
    const tokens = node.parentNode.tokens;
    const painted = way === "none" ? null : paint(way, value(way, tokens, Number(node.dataset.i)), scale);
    node.style.setProperty("background-color", painted ?? "transparent");
  }
}

export function legend(way, scale) {
  if (way === "none" || !scale) return null;
  if (way === "version") {
    return h("span", { class: "legend" }, scale.versions.slice(0, 8).map((v) => [h("i", { class: "patch", vars: { "background-color": paint(way, v, scale) } }), ` ${v} `]), scale.versions.length > 8 ? "…" : "");
  }
  const ends = way === "weight" ? [-scale.top, scale.top] : way === "logprob" ? [0, scale.low] : [0, scale.top];
  const steps = Array.from({ length: 13 }, (_, i) => ends[0] + ((ends[1] - ends[0]) * i) / 12);
  return h("span", { class: "legend" }, number(ends[0]), s("svg", { width: 104, height: 12, "aria-hidden": "true" }, steps.map((v, i) => s("rect", { x: i * 8, y: 0, width: 8, height: 12, fill: paint(way, v, scale) }))), number(ends[1]));
}

const FIRST = 3000;

// The sampled tokens of one call. `page` has the texts; hovering shows what is known.
export function completion(tokens, page) {
  const box = h("pre", { class: `toks ${tokens.trained ? "trained" : "untrained"}` });
  box.tokens = tokens;
  grow(box, tokens.completion, page, "sampled");
  return box;
}

// The prompt: state, never trained on. Repeated tokens are those of the call before.
export function prompt(tokens, page) {
  const count = tokens.prompt.length;
  const fresh = count - tokens.repeated;
  const label = `prompt: ${number(count)} tokens${tokens.repeated ? `, ${number(tokens.repeated)} of them as before, ${number(fresh)} new` : ""}`;
  const box = h("details", { class: "prompt" }, h("summary", {}, label));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    const pre = h("pre", { class: "toks state" });
    pre.tokens = tokens;
    grow(pre, tokens.prompt, page, "state", tokens.repeated);
    box.append(pre);
  });
  return box;
}

function grow(box, ids, page, kind, repeated = 0) {
  let at = 0;
  const more = h("button", { class: "more" });
  const part = () => {
    const end = Math.min(ids.length, at + FIRST);
    const made = document.createDocumentFragment();
    for (let i = at; i < end; i++) {
      const text = page.texts[ids[i]] ?? `⟨${ids[i]}⟩`;
      const special = page.specials.has(ids[i]);
      const cls = `tok ${kind}${special ? " special" : ""}${i < repeated ? " repeated" : ""}`;
      made.append(h("span", { class: cls, data: { i } }, shownText(text)));
    }
    at = end;
    more.remove();
    box.append(made);
    if (at < ids.length) {
      more.textContent = `${number(ids.length - at)} more tokens`;
      box.append(more);
    }
  };
  more.addEventListener("click", part);
  part();
}

function shownText(text) {
  if (!text.includes("\n")) return visible(text);
  return text.split(/(\n)/).map((part) => (part === "\n" ? [h("span", { class: "nl" }, "↵"), "\n"] : visible(part)));
}

// One tooltip for all tokens below `root`.
export function inspect(root, page) {
  const tip = h("div", { class: "inspector", role: "status", hidden: true });
  root.append(tip);
  const over = (event) => {
    const node = event.target.closest?.(".tok");
    if (!node) {
      tip.hidden = true;
      return;
    }
    const i = Number(node.dataset.i);
    const tokens = node.parentNode.tokens;
    const sampled = node.classList.contains("sampled");
    const id = (sampled ? tokens.completion : tokens.prompt)[i];
    const rows = [["id", String(id)], ["place", number((sampled ? tokens.prompt.length : 0) + i)]];
    if (sampled) {
      const lp = tokens.logprobs?.[i];
      if (lp !== undefined && lp !== null) rows.push(["log-prob", `${number(lp, 4)}  (${(100 * Math.exp(lp)).toFixed(1)} %)`]);
      if (tokens.trained) {
        rows.push(["trainer's log-prob", number(tokens.trainer_logprobs[i], 4)]);
        if (lp !== undefined && lp !== null) rows.push(["mismatch", signed(tokens.trainer_logprobs[i] - lp)]);
        rows.push(["entropy", number(tokens.entropies[i], 3)], ["weight", signed(tokens.weights[i], 4)], ["update", number(tokens.update)]);
      }
      if (tokens.versions) rows.push(["policy version", number(tokens.versions[i])]);
    }
    const kind = sampled ? (tokens.trained ? "sampled, trained on" : "sampled, not trained on") : i < tokens.repeated ? "state, as before" : "state";
    show(tip, h("code", {}, visible(JSON.stringify(page.texts[id] ?? ""))), h("div", { class: "quiet" }, kind), h("dl", {}, rows.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])));
    tip.hidden = false;
    const box = node.getBoundingClientRect();
    const wide = tip.offsetWidth;
    const tall = tip.offsetHeight;
    tip.style.setProperty("left", `${Math.max(8, Math.min(box.left, innerWidth - wide - 8))}px`);
    tip.style.setProperty("top", `${box.bottom + tall + 8 > innerHeight ? Math.max(8, box.top - tall - 6) : box.bottom + 6}px`);
  };
  root.addEventListener("pointerover", over);
  root.addEventListener("click", over);
  root.addEventListener("pointerleave", () => { tip.hidden = true; });
}
