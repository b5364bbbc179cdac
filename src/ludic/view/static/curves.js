// A wall of curves: any metrics of any runs, smoothed, zoomed, refreshed in place.

import { ask } from "./api.js";
import { change } from "./address.js";
import { COLOURS, lineChart } from "./chart.js";
import { h, show } from "./dom.js";

const REWARD = "train/reward_mean";
const COMPONENT = /^train\/reward_.+_mean$/;
const MOST_PARTS = 4;
const REST = ["train/loss", "train/entropy", "train/grad_norm", "train/mismatch_kl", "train/completion_tokens_mean"];

// The reward comes first, then what it is made of where that is more than one part.
export function firstKeys(keys) {
  const parts = keys.filter((key) => COMPONENT.test(key));
  const chosen = [REWARD, ...(parts.length > 1 ? parts.slice(0, MOST_PARTS) : []), ...REST].filter((key) => keys.includes(key));
  return chosen.length ? chosen : keys.slice(0, 4);
}

// names: the runs; keys: all metrics that there are. The choice is in the address.
export function curveWall(names, keys, params) {
  const box = h("section", { class: "curves" });
  const wall = h("div", { class: "wall" });
  const list = h("datalist", { id: "metric-names" }, keys.map((key) => h("option", { value: key })));
  const colour = (run) => COLOURS[names.indexOf(run) % COLOURS.length];
  let asked = 0;

  const chosen = (p) => (p.keys ? p.keys.split(",").filter((key) => keys.includes(key)) : firstKeys(keys));
  const pick = h("input", { type: "text", list: "metric-names", placeholder: "add a metric…", "aria-label": "Add a metric" });
  pick.addEventListener("change", () => {
    if (keys.includes(pick.value)) change({ keys: [...new Set([pick.value, ...chosen(params)])].join(",") });
    pick.value = "";
  });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: params.smooth ?? 0.6, "aria-label": "Smoothing" });
  slider.addEventListener("input", () => change({ smooth: slider.value }, true));
  const shownKeys = h("span", { class: "picked" });
  box.append(h("div", { class: "bar" }, h("h2", {}, "Curves"), pick, list, shownKeys, h("label", { class: "slide" }, "smooth", slider)), wall);

  async function draw(next) {
    params = next;
    const number = ++asked;
    const wanted = chosen(params);
    show(shownKeys, wanted.map((key) => h("button", {
      class: "chip removable", title: "Leave it out",
      onclick: () => change({ keys: wanted.filter((other) => other !== key).join(",") || "none" }),
    }, key)));
    if (!wanted.length || !names.length) {
      show(wall, h("p", { class: "quiet" }, names.length ? "No metric is chosen." : "No run is chosen."));
      return;
    }
    const zoom = params.x0 !== undefined ? { low: params.x0, high: params.x1 } : {};
    const curves = await ask("curve", { run: names, key: wanted, ...zoom });
    if (number !== asked) return;
    for (const old of wall.children) old.close?.();
    show(wall, wanted.map((key) => lineChart({
      title: key,
      smooth: Number(params.smooth ?? 0.6),
      zoomed: params.x0 !== undefined,
      onzoom: (range) => change(range ? { x0: range[0].toFixed(2), x1: range[1].toFixed(2) } : { x0: null, x1: null }),
      series: curves.filter((c) => c.key === key && c.points.length).map((c) => ({ name: c.run, colour: colour(c.run), points: c.points })),
    })));
  }

  return { node: box, draw, colour, close: () => { for (const old of wall.children) old.close?.(); } };
}
