// One run: figures, curves, evaluations, settings and origin.

import { address } from "../address.js";
import { ask } from "../api.js";
import { curveWall } from "../curves.js";
import { chip, h, number, percent, problems, show, visible } from "../dom.js";

export async function open(root, params) {
  let data = await ask("run", { run: params.run });
  const head = h("div", {});
  const figures = h("div", { class: "tiles" });
  const evals = h("section", {});
  const running = h("section", {});
  const about = h("section", { class: "about" });
  const damage = h("div", {});
  const wall = curveWall([data.name], data.keys, params);

  function fill() {
    show(head, h("div", { class: "head" },
      h("h1", {}, visible(data.name)), chip(data.state, data.state),
      h("span", { class: "quiet" }, [data.model, data.env, data.algorithm].filter(Boolean).join(" · ")),
      h("span", { class: "grow" }),
      h("a", { class: "button primary", href: address("rollouts", { run: data.name }) }, "Rollouts →")), problems(data.problems));
    const tiles = [
      ["update", number(data.step), data.steps ? `of ${number(data.steps)}` : ""],
      ["mean reward", number(data.figures["train/reward_mean"]), ""],
      ["entropy", number(data.figures["train/entropy"]), "per token"],
      ["tokens per second", number(data.figures["perf/tokens_per_s"]), "in training"],
    ];
    const held = data.headline && Object.entries(data.headline.stages).at(-1);
    const shown = data.headline?.rate ? percent : number;
    if (held) tiles.unshift([`${data.headline.name}, ${held[0].replaceAll("_", " ")}`, shown(held[1].value), `${shown(held[1].low)} – ${shown(held[1].high)}`]);
    show(figures, tiles.map(([name, value, note]) => h("div", { class: "tile" }, h("span", { class: "quiet" }, name), h("b", {}, value), h("small", { class: "quiet" }, note))));
    show(evals, evaluations(data));
    show(running, processes(data.processes));
    show(about, settings(data));
  }
  fill();
  show(root, head, damage, figures, running, wall.node, evals, about);
  await wall.draw(params);
  return {
    update: (next) => wall.draw((params = next)),
    refresh: async () => {
      data = await ask("run", { run: params.run });
      fill();
      await wall.draw(params);
    },
    onState: (state) => show(damage, problems([...(state.notes ?? []).map((n) => `${n.file}: ${n.what}`), ...(state.error ? [state.error] : [])])),
    close: wall.close,
  };
}

export function estimate(rate, format = percent) {
  return rate ? h("span", { class: "est" }, h("b", {}, format(rate.value)), h("small", { class: "quiet" }, ` ${format(rate.low)} – ${format(rate.high)}`)) : "–";
}

// A row for each figure of the reports, the one that leads first.
export function figureRows(reports) {
  const lead = reports.map((r) => r.headline).find((key) => key && key !== "reward") ?? "reward";
  const names = [...new Set([lead, "reward", ...reports.flatMap((r) => Object.keys(r.rates ?? {}))])];
  return names.map((name) => h("tr", {}, h("td", {}, name === "reward" ? "mean reward" : visible(name.replace("outcome/", "").replaceAll("_", " "))),
    reports.map((r) => h("td", {}, name === "reward" ? estimate(r.reward, number) : estimate(r.rates?.[name])))));
}

function evaluations(data) {
  const reports = Object.entries(data.figures_of_reports);
  if (!reports.length) return null;
  const envs = [...new Set(reports.flatMap(([, r]) => Object.keys(r.envs ?? {})))];
  const compare = reports.length > 1
    ? h("a", { class: "button", href: address("evaluations", { a_run: data.name, a: reports.at(-2)[0], b_run: data.name, b: reports.at(-1)[0] }) }, "Compare the last two")
    : null;
  return [
    h("div", { class: "bar" }, h("h2", {}, "Held-out episodes"), h("span", { class: "grow" }), compare),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, ""), reports.map(([name, r]) => h("th", {}, name.replaceAll("_", " "), h("small", { class: "quiet" }, r.episodes ? ` n=${r.episodes}` : ""))))),
      h("tbody", {},
        reports.some(([, r]) => r.problem) ? h("tr", {}, h("td", {}, ""), reports.map(([, r]) => h("td", {}, r.problem ? h("span", { class: "bad" }, visible(r.problem)) : ""))) : null,
        figureRows(reports.map(([, r]) => r)),
        envs.map((env) => h("tr", {}, h("td", {}, visible(env)), reports.map(([, r]) => h("td", {}, estimate(r.envs?.[env], r.envs?.[env]?.rate ? percent : number)))))))),
  ];
}

// The processes of a run over Redis, as `ludic pipeline status` shows them.
function processes(status) {
  if (!status) return null;
  if (status.problem) return [h("h2", {}, "Processes"), problems([status.problem])];
  return [
    h("h2", {}, "Processes"),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, status.columns.map((name) => h("th", {}, name)))),
      h("tbody", {}, status.rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, visible(cell)))))))),
    h("dl", { class: "facts" }, Object.entries(status.queue).map(([k, v]) => [h("dt", {}, k), h("dd", {}, visible(v))])),
  ];
}

function settings(data) {
  const origin = data.origin ?? {};
  const facts = [
    ["started", origin.started],
    ["command", origin.command?.join(" ")],
    ["commit", origin.git ? `${origin.git.commit?.slice(0, 12)}${origin.git.dirty ? ", with changes" : ""}` : null],
    ["machine", origin.machine ? `${origin.machine.system}, ${origin.machine.cpus} CPUs` : null],
    ["versions", origin.versions ? Object.entries(origin.versions).map(([k, v]) => `${k} ${v}`).join(", ") : null],
  ].filter(([, value]) => value);
  const warnings = data.summary?.warnings ?? [];
  return [
    warnings.length ? [h("h2", {}, "Signs to look at"), problems(warnings)] : null,
    h("h2", {}, "Origin"),
    h("dl", { class: "facts" }, facts.map(([k, v]) => [h("dt", {}, k), h("dd", {}, visible(v))])),
    h("details", {}, h("summary", {}, h("h2", {}, "Settings")), h("dl", { class: "facts mono" }, Object.entries(data.settings).map(([k, v]) => [h("dt", {}, k), h("dd", {}, visible(typeof v === "string" ? v : JSON.stringify(v)))]))),
  ];
}
