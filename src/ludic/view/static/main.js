// Which page is shown, the keyboard, and the theme.

import { parse } from "./address.js";
import { ask, watch } from "./api.js";
import { add, h, show, visible } from "./dom.js";
import * as comparison from "./pages/evaluations.js";
import * as group from "./pages/group.js";
import * as rollout from "./pages/rollout.js";
import * as rollouts from "./pages/rollouts.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";

const PAGES = { runs, run, rollouts, rollout, group, evaluations: comparison };
const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const live = document.getElementById("live");

let shown = null;

async function route() {
  const { page, params } = parse();
  const module = PAGES[page];
  if (!module) {
    show(main, h("div", { class: "empty" }, h("h2", {}, "There is no such page"), h("a", { href: "#/" }, "All runs")));
    return;
  }
  trail(page, params);
  if (shown?.module === module && shown.page?.update && shown.run === params.run) {
    shown.page.update(params);
    return;
  }
  leave();
  const mine = (shown = { module, run: params.run, page: null, stop: null });
  show(main, h("p", { class: "waiting" }, "…"));
  // From before the page asks: what changes while it does is seen by the first look.
  const { version = null } = await ask("state", params.run ? { run: params.run } : {}).catch(() => ({ version: "" }));
  if (shown !== mine) return;
  try {
    const made = await module.open(main, params);
    if (shown !== mine) {
      made?.close?.();
      return;
    }
    mine.page = made;
    const now = parse();
    if (JSON.stringify(now.params) !== JSON.stringify(params)) made?.update?.(now.params);
  } catch (error) {
    if (shown === mine) {
      mine.page = { refresh: again }; // it may be there once more is indexed
      show(main, h("div", { class: "empty" }, h("h2", {}, "This cannot be shown"), h("p", {}, visible(error.message)), h("a", { href: "#/" }, "All runs")));
    }
  }
  if (shown === mine) mine.stop = watch(params.run, (state) => mine.page?.refresh?.(state), onState, version);
}

function again() {
  leave();
  route();
}

function leave() {
  shown?.stop?.();
  shown?.page?.close?.();
  shown = null;
  show(live);
  live.className = "live";
}

function onState(state) {
  const text = state.lost ? "no answer from the server"
    : state.progress ? `indexing ${(100 * state.progress).toFixed(0)} %`
    : state.state === "running" ? "live" : "";
  if (live.textContent !== text) show(live, text);
  live.className = `live ${state.lost ? "lost" : state.state ?? ""}`;
  shown?.page?.onState?.(state);
}

function trail(page, params) {
  const parts = [];
  if (params.run) parts.push([params.run, `#/run?run=${encodeURIComponent(params.run)}`]);
  if (["rollouts", "rollout", "group"].includes(page)) {
    parts.push(["Rollouts", `#/rollouts?run=${encodeURIComponent(params.run)}`]);
  }
  if (page === "rollout" || page === "group") parts.push([page === "group" ? "Group" : "Rollout", null]);
  if (page === "evaluations") parts.push(["Evaluations", null]);
  show(crumbs, parts.map(([text, href]) => [h("span", { class: "slash" }, "/"), href ? h("a", { href }, visible(text)) : h("span", {}, text)]));
  document.title = [...parts.map(([text]) => text).reverse(), "Ludic"].join(" · ");
}

// Theme: as the system says, until a person says otherwise.
const stored = localStorage.getItem("ludic-theme");
if (stored) document.documentElement.dataset.theme = stored;
document.getElementById("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("ludic-theme", next);
});

const HELP = [
  ["j, k", "next and previous rollout, or row"],
  ["Enter", "open the row"],
  ["c", "colour tokens by something else"],
  ["t", "text or tokens"],
  ["g", "the rollout's group"],
  ["/", "search"],
  ["u", "up"],
  ["?", "this"],
];

function help() {
  const open = document.querySelector("dialog.help");
  if (open) {
    open.remove();
    return;
  }
  const rows = HELP.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]);
  const box = h("dialog", { class: "help", onclick: () => box.remove() }, h("h2", {}, "Keyboard"), h("dl", {}, rows));
  add(document.body, [box]);
  box.showModal();
  box.addEventListener("close", () => box.remove());
}

document.getElementById("keys").addEventListener("click", help);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "?") help();
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (event.key === "u") [...crumbs.querySelectorAll("a"), document.querySelector(".brand")].at(crumbs.querySelectorAll("a").length > 1 || parse().page === "rollouts" ? -2 : -1)?.click();
  else if (!shown?.page?.key?.(event)) return;
  event.preventDefault();
});

window.addEventListener("hashchange", route);
route();
