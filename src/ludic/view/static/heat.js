// How many rollouts had which reward, update by update; a cell chooses its rollouts.

import { saveSVG, savePNG, ticks } from "./chart.js";
import { h, number, s } from "./dom.js";

const M = { top: 8, right: 14, bottom: 24, left: 52 };

export function heat(data, { height = 170, onpick }) {
  const title = "Rewards over updates";
  const body = h("div", { class: "plot" });
  let svg = null;
  const figure = h("figure", { class: "chart heat" },
    h("figcaption", {}, h("span", { class: "name" }, title), h("span", { class: "quiet" }, "click a cell to see its rollouts"),
      h("span", { class: "tools" }, h("button", { class: "small", onclick: () => saveSVG(svg, title) }, "SVG"), h("button", { class: "small", onclick: () => savePNG(svg, title) }, "PNG"))), body);
  const draw = () => {
    svg?.remove();
    svg = plot(data, Math.max(body.clientWidth, 240), height, onpick, title);
    body.append(svg);
  };
  const watcher = new ResizeObserver(() => requestAnimationFrame(draw));
  watcher.observe(body);
  figure.close = () => watcher.disconnect();
  return figure;
}

function plot(data, width, height, onpick, title) {
  const inner = { w: width - M.left - M.right, h: height - M.top - M.bottom };
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  if (!data.columns) return svg;
  const step = (data.high - data.low) / data.bins || 1;
  const cw = inner.w / data.columns;
  const ch = inner.h / data.bins;
  const totals = new Map();
  for (const [c, , n] of data.cells) totals.set(c, (totals.get(c) ?? 0) + n);
  for (const [c, b, n] of data.cells) {
    const from = data.first + c * data.per;
    const low = data.low + b * step;
    const cell = s("rect", {
      class: "cell", x: M.left + c * cw, y: M.top + (data.bins - 1 - b) * ch,
      width: Math.max(cw - 1, 0.6), height: Math.max(ch - 1, 0.6), rx: 1.5,
      "fill-opacity": (0.1 + 0.9 * (n / totals.get(c))).toFixed(3),
      onclick: () => onpick({ "update.min": from, "update.max": from + data.per - 1, "reward.min": Number(low.toPrecision(6)), "reward.max": Number((low + step).toPrecision(6)) }),
    }, s("title", {}, `update ${from}${data.per > 1 ? `–${from + data.per - 1}` : ""}: ${n} rollouts with a reward of ${number(low)}${data.bins > 1 ? ` to ${number(low + step)}` : ""}`));
    svg.append(cell);
  }
  const span = data.high - data.low || 1;
  const Y = (r) => M.top + (1 - (r - data.low) / span) * inner.h;
  const X = (c) => M.left + (c + 0.5) * cw;
  const line = data.means.map(([c, m], i) => `${i ? "L" : "M"}${X(c).toFixed(1)} ${Y(m).toFixed(1)}`).join("");
  svg.append(s("path", { class: "mean", d: line, fill: "none" }));
  for (const r of data.bins === 1 ? [data.low] : ticks(data.low, data.high, 4)) {
    svg.append(s("text", { class: "tick", x: M.left - 8, y: Y(r) + 4, "text-anchor": "end" }, number(r)));
  }
  const last = data.first + (data.columns - 1) * data.per;
  for (const u of ticks(data.first, last, Math.max(2, Math.floor(inner.w / 90)))) {
    if (Number.isInteger(u)) svg.append(s("text", { class: "tick", x: X((u - data.first) / data.per), y: height - 6, "text-anchor": "middle" }, number(u)));
  }
  return svg;
}
