// One rollout: what was said and done, and every token with what is known of it.

import { address, change, filtersOf } from "../address.js";
import { ask } from "../api.js";
import { conversation, facts, strip } from "../conversation.js";
import { chip, h, number, show, signed, tone, visible } from "../dom.js";
import { WAYS, colour, inspect, legend, scales } from "../tokens.js";

export async function open(root, params) {
  let page = null;
  let around = {};
  let scale = {};
  const body = h("div", { class: "columns" });
  const head = h("div", {});
  const tools = h("div", { class: "bar sticky" });
  const below = h("div", {});
  const holder = h("div", { class: "rollout" }, head, tools, body, below);

  async function load(next) {
    params = next;
    page = prepare(await ask("rollout", { run: params.run, id: params.id }));
    scale = scales(page.steps.filter((step) => step.tokens).map((step) => step.tokens));
    draw();
    around = {};
    const { sort, order, ...only } = filtersOf(params);
    const asked = params.id;
    const neighbours = await ask("neighbours", { ...only, sort, order, run: params.run, id: params.id }).catch(() => ({}));
    if (asked !== params.id) return;
    around = neighbours;
    drawHead();
  }

  const way = () => (params.by in scale ? params.by : ["weight", "logprob", "none"].find((name) => name in scale));
  const tokensShown = () => params.as !== "text" && page.hasTexts;
  const to = (id) => address("rollout", { ...params, id, beside: null });

  function draw() {
    drawHead();
    drawTools();
    drawBody();
    show(below, page.children.length ? [h("h2", {}, "Sub-agents"), page.children.map((child) => subAgent(child))] : null);
    scrollTo(0, 0);
  }

  function drawHead() {
    const place = around.place ? `${number(around.place)} of ${number(around.total)}` : "";
    const step = (id, text, key) => h("a", { class: `button ${id ? "" : "off"}`, href: id ? to(id) : null, title: `${text} (${key})`, "aria-disabled": id ? null : "true" }, text);
    show(head,
      h("div", { class: "head" },
        h("h1", { class: "id" }, visible(page.id)),
        h("span", { class: "grow" }),
        h("span", { class: "quiet" }, place), step(around.previous, "← Previous", "k"), step(around.following, "Next →", "j"),
        h("a", { class: "button", href: `/export/rollout?${new URLSearchParams({ run: params.run, id: page.id })}`, download: "" }, "Save as HTML")),
      h("div", { class: "summary" },
        h("span", { class: `big ${tone(page.reward)}` }, number(page.reward)), h("span", { class: "quiet" }, "reward"),
        page.error ? chip("failed", "bad", page.error) : page.truncated ? chip(`truncated: ${page.truncation.replaceAll("_", " ")}`, "warn") : chip(page.terminated ? "terminated" : "no ending", "end"),
        page.updates.length ? chip(`trained on in update ${page.updates.join(", ")}`, "trained") : chip("not trained on", "dim"),
        h("span", { class: "quiet" }, `${number(page.tokens)} sampled tokens`, page.env ? ` · ${page.env.kind}` : "", page.agent !== "agent" ? ` · ${page.agent}` : "", page.task ? ` · ${page.task}` : ""),
        page.parent ? h("a", { href: to(page.parent) }, "↑ the agent that delegated") : null),
      siblings());
  }

  function siblings() {
    const agents = page.same_episode.filter((row) => row.id !== page.id && !row.parent);
    const group = page.same_group.filter((row) => row.agent === page.agent);
    return h("div", { class: "siblings" },
      group.length > 1 ? [h("a", { href: address("group", { run: params.run, id: page.group }) }, `Group of ${group.length}`), h("span", { class: "dots" }, group.map((row) => h("a", {
        class: `dot-link ${tone(row.weight ?? row.reward)} ${row.id === page.id ? "here" : ""}`, href: to(row.id),
        title: `reward ${number(row.reward)}${row.trained ? `, weight ${signed(row.weight)}` : ""}`,
      }, number(row.reward))))] : null,
      agents.length ? [h("span", { class: "quiet" }, "also in this episode:"), agents.map((row) => h("a", { href: to(row.id) }, visible(row.agent))),
        h("button", { class: "small", onclick: () => change({ beside: params.beside ? null : "yes" }) }, params.beside ? "alone" : "side by side")] : null);
  }

  function drawTools() {
    const select = h("select", { "aria-label": "Colour tokens by", onchange: (event) => change({ by: event.target.value }, true) },
      Object.keys(scale).map((name) => h("option", { value: name, selected: name === way() }, WAYS[name])));
    show(tools, strip(page, (turn) => document.getElementById(`turn-${turn}`)?.scrollIntoView({ behavior: "smooth", block: "start" })),
      h("span", { class: "grow" }),
      tokensShown() ? [h("label", { class: "by" }, "colour by ", select), h("span", { id: "legend" }, legend(way(), scale[way()]))] : null,
      page.hasTexts ? h("button", { class: "small", title: "t", onclick: () => change({ as: params.as === "text" ? null : "text" }, true) }, tokensShown() ? "as text" : "as tokens")
        : h("span", { class: "quiet" }, "no tokenizer was kept, so tokens have no text"));
  }

  async function drawBody() {
    const mine = h("div", { class: "column" }, conversation(page, { asTokens: tokensShown() }));
    inspect(mine, page);
    mine.classList.toggle("many", mine.children.length > 40);
    show(body, mine, facts(page));
    body.classList.toggle("several", Boolean(params.beside));
    paint();
    if (!params.beside) return;
    mine.prepend(h("h2", {}, visible(page.agent)));
    for (const row of page.same_episode.filter((other) => other.id !== page.id && !other.parent).slice(0, 3)) {
      const other = prepare(await ask("rollout", { run: params.run, id: row.id }));
      const column = h("div", { class: "column" }, h("h2", {}, h("a", { href: to(row.id) }, visible(row.agent)), h("span", { class: `quiet ${tone(other.reward)}` }, ` ${number(other.reward)}`)), conversation(other, { asTokens: tokensShown() && other.hasTexts }));
      inspect(column, other);
      body.append(column);
      paint();
    }
  }

  const paint = () => way() && colour(body, way(), scale[way()]);

  function subAgent(child) {
    const box = h("details", { class: "sub" }, h("summary", {}, h("b", {}, visible(child.agent)), h("span", { class: `strong ${tone(child.reward)}` }, ` ${number(child.reward)}`), h("span", { class: "quiet" }, ` ${child.turns} turns `), h("a", { href: to(child.id) }, "open")));
    box.addEventListener("toggle", async () => {
      if (!box.open || box.children.length > 1) return;
      const other = prepare(await ask("rollout", { run: params.run, id: child.id }));
      const column = h("div", { class: "column" }, conversation(other, { asTokens: tokensShown() && other.hasTexts }));
      inspect(column, other);
      box.append(column);
      colour(column, way(), scale[way()]);
    });
    return box;
  }

  show(root, holder);
  await load(params);
  return {
    update: async (next) => {
      if (next.id !== params.id) {
        await load(next).catch((error) => show(body, h("p", { class: "bad" }, visible(error.message))));
        return;
      }
      const again = next.as !== params.as || next.beside !== params.beside;
      params = next;
      drawTools();
      if (again) {
        drawHead();
        await drawBody();
      } else paint();
    },
    key: (event) => {
      if (event.key === "j" || event.key === "ArrowRight") around.following && (location.hash = to(around.following));
      else if (event.key === "k" || event.key === "ArrowLeft") around.previous && (location.hash = to(around.previous));
      else if (event.key === "t") change({ as: params.as === "text" ? null : "text" }, true);
      else if (event.key === "g" && page.group) location.hash = address("group", { run: params.run, id: page.group });
      else if (event.key === "c") {
        const ways = Object.keys(scale);
        change({ by: ways[(ways.indexOf(way()) + 1) % ways.length] }, true);
      } else return false;
      return true;
    },
  };
}

function prepare(page) {
  page.specials = new Set(page.special);
  page.hasTexts = Object.keys(page.texts).length > 0;
  return page;
}
