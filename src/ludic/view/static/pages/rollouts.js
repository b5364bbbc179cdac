// The table of rollouts: filters, sorting, search, and rewards over updates.

import { address, change, filtersOf } from "../address.js";
import { ask } from "../api.js";
import { chip, h, number, problems, show, signed, tone, visible } from "../dom.js";
import { heat } from "../heat.js";

const PAGE = 50;
const YES_NO = [["truncated", "truncated"], ["error", "failed"], ["parse_failures", "parse failure"], ["cut", "cut by length"], ["forks", "forked"], ["tools", "used tools"], ["trained", "trained on"], ["sub", "sub-agent"]];
const RANGES = [["update", "update"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["weight", "weight"]];

export async function open(root, params) {
  const run = params.run;
  let facets = await ask("facets", { run });
  const picture = h("div", {});
  const table = h("div", { class: "scroll" });
  const foot = h("div", { class: "pages" });
  const side = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() });
  const damage = h("div", {});
  const count = h("span", { class: "quiet" });
  const search = h("input", { type: "search", placeholder: "Search what was said…", "aria-label": "Search", value: params.q ?? "" });
  let typing = null;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({ q: search.value, offset: null }, true), 200);
  });
  let at = -1;
  let rows = [];
  let asked = 0;
  let drawn = null;

  function filters() {
    const select = (key, label, values) => values.length < (params[key] ? 1 : 2) && !params[key] ? null
      : h("label", {}, h("span", {}, label), h("select", { onchange: (event) => change({ [key]: event.target.value || (key === "source" ? "all" : null), offset: null }) },
        h("option", { value: "" }, "any"), values.map(([value, n]) => h("option", { value, selected: params[key] === value }, `${value}  (${number(n)})`))));
    const flag = ([key, label]) => h("label", {}, h("span", {}, label), h("select", { onchange: (event) => change({ [key]: event.target.value, offset: null }) },
      ["", "yes", "no"].map((value) => h("option", { value, selected: (params[key] ?? "") === value }, value || "any"))));
    const range = ([key, label]) => h("label", { class: "range" }, h("span", {}, label), ["min", "max"].map((end) => h("input", {
      type: "number", step: "any", placeholder: end === "min" ? "from" : "to", "aria-label": `${label} ${end}`, value: params[`${key}.${end}`] ?? "",
      onchange: (event) => change({ [`${key}.${end}`]: event.target.value, offset: null }),
    })));
    const parts = facets.components.map((name) => [`component:${name}`, `reward: ${name}`]);
    const task = h("label", {}, h("span", {}, "task"), h("input", { type: "text", value: params.task ?? "", placeholder: "any", onchange: (event) => change({ task: event.target.value, offset: null }) }));
    show(side, h("h2", {}, "Filter"),
      select("source", "from", facets.source), select("outcome", "outcome", facets.outcome), select("agent", "agent", facets.agent), select("env", "environment", facets.env), select("truncation", "truncated by", facets.truncation),
      RANGES.filter(([key]) => key !== "weight" || facets.trained).map(range), parts.map(range), task,
      YES_NO.filter(([key]) => key !== "trained" || facets.trained).map(flag),
      h("button", { class: "small", type: "button", onclick: () => { location.hash = address("rollouts", { run, source: "all" }); } }, "Clear"));
  }

  async function draw(next, quiet = false) {
    params = next;
    if (params.source === undefined && facets.source.some(([name]) => name === "train")) {
      // Those of the cold start are there too, but rarely meant.
      params = { ...params, source: "train" };
      history.replaceState(null, "", address("rollouts", params));
    }
    const number_ = ++asked;
    if (document.activeElement !== search) search.value = params.q ?? "";
    if (!side.contains(document.activeElement)) filters();
    const wanted = filtersOf(params);
    const query = { ...wanted, run, sort: params.sort, order: params.order, offset: params.offset ?? 0, limit: PAGE };
    let page;
    try {
      page = await ask("rollouts", query);
    } catch (error) {
      show(table, problems([error.message]));
      return;
    }
    if (number_ !== asked) return;
    rows = page.rows;
    if (!quiet) at = -1;
    show(count, `${number(page.total)} rollouts`);
    fill(page);
    const { sort, order, ...only } = wanted;
    const key = JSON.stringify(only) + page.total;
    if (key !== drawn) {
      drawn = key;
      paint(only, number_); // not waited for: without it, the table can be used already
    }
  }

  async function paint(only, number_) {
    let data;
    try {
      data = await ask("histogram", { ...only, run });
    } catch (error) {
      if (number_ === asked) show(picture, problems([error.message]));
      return;
    }
    if (number_ !== asked) return;
    for (const old of picture.children) old.close?.();
    show(picture, data.columns ? heat(data, { onpick: (cell) => change({ ...cell, offset: null }) }) : null);
  }

  function fill(page) {
    const parts = facets.components.length > 1 ? facets.components.slice(0, 4) : [];
    const several = { agent: facets.agent.length > 1, env: facets.env.length > 1 };
    const columns = [
      ["upd", "Update"], ["reward", "Reward"], ...parts.map((name) => [`component:${name}`, name]),
      facets.trained ? ["weight", "Weight"] : null, ["outcome", "Outcome"], [null, "Said"], ["turns", "Turns"], ["tokens", "Tokens"],
      several.agent ? ["agent", "Agent"] : null, several.env ? ["env", "Environment"] : null, [null, "Signs"], ["id", "Rollout"],
    ].filter(Boolean);
    const head = columns.map(([key, label]) => {
      const on = params.sort === key;
      const way = on && params.order !== "asc" ? "asc" : "desc";
      return h("th", { class: key?.startsWith("component:") ? "part" : null, "aria-sort": on ? (params.order === "asc" ? "ascending" : "descending") : null }, key
        ? h("button", { class: "sort", onclick: () => change({ sort: key, order: way, offset: null }) }, visible(label), on ? (params.order === "asc" ? " ↑" : " ↓") : "")
        : label);
    });
    show(table, page.rows.length
      ? h("table", { class: "rollouts" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, page.rows.map((row, i) => line(row, i, parts, several))))
      : h("p", { class: "quiet none" }, page.total || Object.keys(filtersOf(params)).length > 1 ? "No rollout fits these filters." : "No rollouts yet."));
    mark();
    const offset = Number(params.offset ?? 0);
    const last = Math.min(offset + PAGE, page.total);
    show(foot, page.total > PAGE ? [
      h("button", { class: "small", disabled: offset === 0, onclick: () => change({ offset: Math.max(0, offset - PAGE) || null }) }, "← Previous"),
      h("span", { class: "quiet" }, `${number(offset + 1)} to ${number(last)} of ${number(page.total)}`),
      h("button", { class: "small", disabled: last >= page.total, onclick: () => change({ offset: offset + PAGE }) }, "Next →"),
    ] : null);
  }

  function line(row, i, parts, several) {
    const href = address("rollout", { ...filtersOf(params), run, id: row.id });
    return h("tr", { data: { row: i }, onclick: (event) => { if (!event.target.closest("a")) location.hash = href; } },
      h("td", { class: "num" }, number(row.upd)),
      h("td", { class: `num strong ${tone(row.reward)}` }, number(row.reward)),
      parts.map((name) => h("td", { class: "num quiet part" }, number(row.components[name]))),
      facets.trained ? h("td", { class: `num ${tone(row.weight)}` }, row.trained ? signed(row.weight) : h("span", { class: "quiet" }, "–")) : null,
      h("td", {}, row.outcome ? visible(row.outcome) : ""),
      h("td", { class: "start", dir: "auto", title: "the start of what the model said" }, visible(row.said ?? "")),
      h("td", { class: "num" }, number(row.turns)),
      h("td", { class: "num" }, number(row.tokens)),
      several.agent ? h("td", {}, visible(row.agent)) : null,
      several.env ? h("td", {}, visible(row.env)) : null,
      h("td", { class: "signs" }, signs(row)),
      h("td", {}, h("a", { class: "id", href }, visible(row.id))));
  }

  function mark() {
    table.querySelectorAll("tr.at").forEach((tr) => tr.classList.remove("at"));
    const tr = table.querySelector(`tr[data-row="${at}"]`);
    tr?.classList.add("at");
    tr?.scrollIntoView({ block: "nearest" });
  }

  show(root, h("div", { class: "head" }, h("h1", {}, "Rollouts"), count, h("span", { class: "grow" }), search), damage,
    h("div", { class: "with-side" }, h("details", { class: "side", open: matchMedia("(min-width: 60rem)").matches }, h("summary", {}, "Filter"), side), h("div", { class: "body" }, picture, table, foot)));
  await draw(params);
  return {
    update: draw,
    refresh: async () => {
      facets = await ask("facets", { run });
      await draw(params, true);
    },
    onState: (state) => show(damage, problems([...(state.notes ?? []).map((n) => `${n.file}: ${n.what}`), ...(state.error ? [state.error] : [])])),
    key: (event) => {
      if (event.key === "j" || event.key === "ArrowDown") at = Math.min(at + 1, rows.length - 1);
      else if (event.key === "k" || event.key === "ArrowUp") at = Math.max(at - 1, 0);
      else if (event.key === "Enter" && rows[at]) {
        location.hash = address("rollout", { ...filtersOf(params), run, id: rows[at].id });
        return true;
      } else return false;
      mark();
      return true;
    },
    close: () => { for (const old of picture.children) old.close?.(); },
  };
}

export function signs(row) {
  return [
    row.error ? chip("failed", "bad", row.error) : null,
    row.truncated ? chip(row.truncation.replaceAll("_", " ") || "truncated", "warn", "truncated") : null,
    row.parse_failures ? chip(`${row.parse_failures} not parsed`, "warn") : null,
    row.cut ? chip("cut", "warn", "a completion was cut by length") : null,
    row.tools ? chip(`${row.tools} tool${row.tools > 1 ? "s" : ""}`) : null,
    row.forks ? chip(`${row.forks} fork${row.forks > 1 ? "s" : ""}`, "dim") : null,
    row.parent ? chip("sub-agent", "dim") : null,
  ];
}
