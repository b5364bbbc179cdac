// Charts drawn here, in SVG: lines with hover, zoom and export.

import { h, number, s } from "./dom.js";

export const COLOURS = ["#4a6fd4", "#d98a2b", "#2f9e74", "#b4539e", "#c8524a", "#3b93b8", "#8a6fd1", "#87893b"];
const MARGIN = { top: 10, right: 14, bottom: 24, left: 52 };

// A running mean that begins at the first value; `strength` 0 is the curve itself.
export function smoothed(points, strength) {
  if (!strength) return points.map(([x, y]) => [x, y]);
  let sum = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    sum = sum * strength + y;
    weight = weight * strength + 1;
    return [x, sum / weight];
  });
}

export function ticks(low, high, count) {
  const raw = (high - low) / count;
  // So close together that their numbers could not be told apart.
  if (!(raw > Math.max(Math.abs(low), Math.abs(high)) * 1e-9)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.75) * power;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.min(last - first + 1, 40) }, (_, i) => (first + i) * step || 0);
}

// As many digits as it takes to tell neighbours apart.
export function labels(values) {
  const step = values.length > 1 ? values[1] - values[0] : 1;
  const top = Math.max(...values.map(Math.abs));
  const digits = top > 0 ? Math.min(Math.ceil(Math.log10(top / step) + 1e-9) + 1, 12) : 3;
  return values.map((value) => [value, number(value, digits)]);
}

// series: [{name, colour, points: [[x, mean, low, high]…]}]
export function lineChart({ title, series, smooth = 0, height = 210, onzoom = null, zoomed = false }) {
  const figure = h("figure", { class: "chart" });
  const body = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", hidden: true });
  const buttons = h("span", { class: "tools" },
    zoomed && onzoom ? h("button", { class: "small", onclick: () => onzoom(null) }, "whole") : null,
    h("button", { class: "small", title: "Save as SVG", onclick: () => saveSVG(svg, title) }, "SVG"),
    h("button", { class: "small", title: "Save as PNG", onclick: () => savePNG(svg, title) }, "PNG"));
  figure.append(h("figcaption", {}, h("span", { class: "name" }, title), buttons), body, tip);
  let svg = null;
  const draw = () => {
    const width = Math.max(body.clientWidth, 240);
    const made = plot(series, smooth, width, height, title);
    svg?.remove();
    svg = made.svg;
    body.append(svg);
    hover(svg, made, tip, body, onzoom);
  };
  const watcher = new ResizeObserver(() => requestAnimationFrame(draw));
  watcher.observe(body);
  figure.close = () => watcher.disconnect();
  return figure;
}

function plot(series, smooth, width, height, title) {
  const inner = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
  const all = series.flatMap((each) => each.points);
  const lines = series.map((each) => ({ ...each, line: smoothed(each.points, smooth) }));
  let [x0, x1] = extent(all.map((p) => p[0]));
  let [y0, y1] = extent(smooth ? [...lines.flatMap((l) => l.line.map((p) => p[1])), ...quantiles(all)] : all.flatMap((p) => [p[2], p[3]]));
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const pad = (y1 - y0 || Math.abs(y0) || 1) * 0.06;
  [y0, y1] = [y0 - pad, y1 + pad];
  const X = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * inner.w;
  const Y = (y) => MARGIN.top + (1 - (y - y0) / (y1 - y0)) * inner.h;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const [y, label] of labels(ticks(y0, y1, 4))) {
    svg.append(s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: Y(y), y2: Y(y) }));
    svg.append(s("text", { class: "tick", x: MARGIN.left - 8, y: Y(y) + 4, "text-anchor": "end" }, label));
  }
  for (const [x, label] of labels(ticks(x0, x1, Math.max(2, Math.floor(inner.w / 80))))) {
    svg.append(s("text", { class: "tick", x: X(x), y: height - 6, "text-anchor": "middle" }, label));
  }
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  svg.append(s("clipPath", { id: clip }, s("rect", { x: MARGIN.left, y: MARGIN.top, width: inner.w, height: inner.h })));
  const area = s("g", { "clip-path": `url(#${clip})` });
  for (const each of lines) {
    const band = each.points.some((p) => p[2] !== p[3]);
    if (band) {
      const up = each.points.map((p) => `${X(p[0])},${Y(p[3])}`);
      const down = [...each.points].reverse().map((p) => `${X(p[0])},${Y(p[2])}`);
      area.append(s("polygon", { points: [...up, ...down].join(" "), fill: each.colour, "fill-opacity": 0.13 }));
    }
    if (smooth) area.append(path(each.points, X, Y, each.colour, 1, 0.28));
    area.append(path(each.line, X, Y, each.colour, 1.8, 1));
    if (each.points.length === 1) area.append(s("circle", { cx: X(each.points[0][0]), cy: Y(each.points[0][1]), r: 3, fill: each.colour }));
  }
  svg.append(area);
  return { svg, X, Y, lines, inner, x0, x1, height };
}

function path(points, X, Y, colour, width, opacity) {
  const d = points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
  return s("path", { d, fill: "none", stroke: colour, "stroke-width": width, "stroke-opacity": opacity, "stroke-linejoin": "round" });
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return low > high ? [0, 1] : [low, high];
}

// With smoothing, single wild values do not decide the scale.
function quantiles(points) {
  const values = points.map((p) => p[1]).sort((a, b) => a - b);
  if (!values.length) return [];
  return [values[Math.floor(values.length * 0.02)], values[Math.ceil(values.length * 0.98) - 1]];
}

function hover(svg, { X, Y, lines, inner, x0, x1 }, tip, body, onzoom) {
  const cross = s("g", { class: "cross", visibility: "hidden" });
  svg.append(cross);
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + ((event.clientX - box.left - MARGIN.left) / inner.w) * (x1 - x0);
  };
  let from = null;
  const band = s("rect", { class: "band", y: MARGIN.top, height: inner.h, visibility: "hidden" });
  svg.append(band);
  svg.addEventListener("pointermove", (event) => {
    const x = at(event);
    if (from !== null) {
      const [a, b] = [Math.min(from, x), Math.max(from, x)];
      band.setAttribute("x", X(Math.max(a, x0)));
      band.setAttribute("width", Math.max(0, X(Math.min(b, x1)) - X(Math.max(a, x0))));
      band.setAttribute("visibility", "visible");
    }
    const near = lines.filter((l) => l.line.length).map((l) => ({ ...l, point: nearest(l.line, x) }));
    if (!near.length) return;
    const place = X(near[0].point[0]);
    cross.replaceChildren(
      s("line", { x1: place, x2: place, y1: MARGIN.top, y2: MARGIN.top + inner.h }),
      ...near.map((n) => s("circle", { cx: X(n.point[0]), cy: Y(n.point[1]), r: 3.2, fill: n.colour })));
    cross.setAttribute("visibility", "visible");
    tip.hidden = false;
    tip.replaceChildren(h("b", {}, number(near[0].point[0])),
      ...near.map((n) => h("div", {}, h("i", { class: "dot", vars: { "background-color": n.colour } }), h("span", {}, n.name), h("b", {}, number(n.point[1], 4)))));
    const left = place + 14 + tip.offsetWidth > body.clientWidth ? place - tip.offsetWidth - 14 : place + 14;
    tip.style.setProperty("left", `${Math.max(0, left)}px`);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
  if (!onzoom) return;
  svg.addEventListener("pointerdown", (event) => {
    from = at(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", (event) => {
    const [a, b] = [from, at(event)].sort((p, q) => p - q);
    from = null;
    band.setAttribute("visibility", "hidden");
    if (a !== null && X(b) - X(a) > 8) onzoom([a, b]);
  });
  svg.addEventListener("dblclick", () => onzoom(null));
}

function nearest(line, x) {
  let low = 0;
  let high = line.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  const before = line[Math.max(0, low - 1)];
  return Math.abs(before[0] - x) <= Math.abs(line[low][0] - x) ? before : line[low];
}

// A picture without a style sheet: what the sheet says is written into its attributes.
const KEPT = ["fill", "stroke", "stroke-width", "stroke-opacity", "fill-opacity", "font-size", "font-family", "opacity"];

export function standalone(svg) {
  const copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll("*")];
  const to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of KEPT) to[i].setAttribute(name, style.getPropertyValue(name));
    to[i].removeAttribute("class");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const page = getComputedStyle(document.body).backgroundColor;
  copy.prepend(s("rect", { width: "100%", height: "100%", fill: page }));
  return new XMLSerializer().serializeToString(copy);
}

export function saveSVG(svg, name) {
  save(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${fileName(name)}.svg`);
}

export async function savePNG(svg, name) {
  const scale = 2;
  const image = new Image();
  const source = URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" }));
  await new Promise((done, failed) => {
    image.onload = done;
    image.onerror = failed;
    image.src = source;
  });
  URL.revokeObjectURL(source);
  const canvas = h("canvas", { width: svg.clientWidth * scale, height: svg.clientHeight * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, `${fileName(name)}.png`));
}

function fileName(name) {
  return name.replace(/[^\w.-]+/g, "-").slice(0, 80) || "chart";
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}

export function spark(points, width = 110, height = 26) {
  const svg = s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (points.length < 2) return svg;
  const [x0, x1] = extent(points.map((p) => p[0]));
  const [y0, y1] = extent(points.map((p) => p[1]));
  const X = (x) => 1 + ((x - x0) / (x1 - x0 || 1)) * (width - 2);
  const Y = (y) => height - 3 - ((y - y0) / (y1 - y0 || 1)) * (height - 6);
  svg.append(path(points, X, Y, "currentColor", 1.4, 1));
  return svg;
}
