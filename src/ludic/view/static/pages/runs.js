// Every run: state, figures, the settings in which they differ, and curves together.

import { address, change } from "../address.js";
import { ask } from "../api.js";
import { COLOURS, spark } from "../chart.js";
import { curveWall } from "../curves.js";
import { chip, empty, h, number, percent, problems, show, visible } from "../dom.js";

const MOST_TOGETHER = 8;

export async function open(root, params) {
  let data = await ask("runs");
  let wall = null;
  const table = h("div", { class: "scroll" });
  const curves = h("div", {});
  const notes = h("div", {});

  const chosen = (p) => (p.sel === undefined ? data.runs.slice(-MOST_TOGETHER).map((r) => r.name) : p.sel.split("|").filter((n) => data.runs.some((r) => r.name === n)));

  function fill() {
    show(notes, problems(data.problems));
    const picked = chosen(params);
    const settings = data.differing.slice(0, 8);
    const rows = [...data.runs].reverse().map((run) => row(run, picked, settings));
    const heads = ["", "Run", "State", "Update", "Reward", "", "Held out", ...settings];
    show(table, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { class: i > 6 ? "setting" : "", title: i > 6 ? text : null }, i > 6 ? shortened(text, settings) : text)))), h("tbody", {}, rows)));
  }

  function row(run, picked, settings) {
    const on = picked.includes(run.name);
    const box = h("input", { type: "checkbox", checked: on, "aria-label": `Curves of ${run.name}`, onchange: () => {
      const next = box.checked ? [...picked, run.name] : picked.filter((name) => name !== run.name);
      change({ sel: next.join("|") || "none" });
    } });
    const colour = on ? COLOURS[picked.indexOf(run.name) % COLOURS.length] : "transparent";
    const href = address("run", { run: run.name });
    return h("tr", { class: run.state ?? "" },
      h("td", { class: "pick" }, h("label", { vars: { "--colour": colour } }, box)),
      h("td", {}, h("a", { class: "title", href }, visible(run.name)), h("div", { class: "quiet" }, [run.model, run.env, run.algorithm].filter(Boolean).join(" · ")), problems(run.problems)),
      h("td", {}, chip(run.state ?? "unknown", run.state)),
      h("td", { class: "num" }, number(run.step), run.steps ? h("span", { class: "quiet" }, ` / ${number(run.steps)}`) : null),
      h("td", { class: "num strong" }, number(run.figures?.["train/reward_mean"])),
      h("td", {}, run.spark ? spark(run.spark) : null),
      h("td", {}, headline(run.headline)),
      settings.map((key) => h("td", { class: "setting" }, visible(shown(run.settings[key])))));
  }

  async function draw(next) {
    params = next;
    fill();
    const picked = chosen(params).slice(0, MOST_TOGETHER);
    const keys = await ask("run", { run: picked[0] ?? data.runs[0]?.name }).then((r) => r.keys).catch(() => []);
    const same = wall && wall.names.join("|") === picked.join("|");
    if (!same) {
      wall?.made.close();
      wall = { names: picked, made: curveWall(picked, keys, params) };
      show(curves, wall.made.node);
    }
    await wall.made.draw(params);
  }

  if (!data.runs.length) {
    show(root, empty("No runs here", "Looked in ", data.roots.join(", "), ". A run's folder has a run.json; ", h("code", {}, "ludic train tic-tac-toe"), " makes one."), problems(data.problems));
    return { refresh: () => location.reload() };
  }
  const evaluations = h("a", { class: "button", href: "#/evaluations" }, "Compare evaluations");
  show(root, h("div", { class: "head" }, h("h1", {}, "Runs"), h("span", { class: "quiet" }, `${data.runs.length} in ${data.roots.join(", ")}`), h("span", { class: "grow" }), evaluations), notes, table, curves);
  await draw(params);
  return {
    update: draw,
    refresh: async () => {
      data = await ask("runs");
      await draw(params);
    },
    close: () => wall?.made.close(),
  };
}

function headline(figure) {
  if (!figure) return "";
  const stages = Object.entries(figure.stages);
  if (!stages.length) return "";
  const [, last] = stages.at(-1);
  const shown = figure.rate ? percent : number;
  const title = stages.map(([stage, f]) => `${stage.replaceAll("_", " ")}: ${shown(f.value)} [${shown(f.low)}, ${shown(f.high)}]`).join("\n");
  return h("span", { title }, `${figure.name} `, h("b", {}, shown(last.value)));
}

function shortened(key, keys) {
  const last = (text) => text.split(".").at(-1);
  const alone = keys.filter((other) => last(other) === last(key)).length === 1;
  return (alone ? last(key) : key.split(".").slice(-2).join(".")).replaceAll("_", " ");
}

function shown(value) {
  return value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}
