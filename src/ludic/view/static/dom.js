// Elements by hand. Data only ever becomes text nodes and attributes, never markup.

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function show(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

// Characters that are not seen, or turn others around: shown by name instead of acted upon.
const UNSEEN =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ue000-\uf8ff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udc7f]/g;

export function visible(text) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > at) parts.push(text.slice(at, match.index));
    const code = match[0].codePointAt(0);
    const name = code < 0xa0 ? `\\x${code.toString(16).padStart(2, "0")}` : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    parts.push(h("span", { class: "ctl", title: `U+${code.toString(16).toUpperCase().padStart(4, "0")}` }, name));
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

const LONG = 6000;

// Text as it is; the rest of a very long one is shown when asked for.
export function textBlock(text, { tag = "pre", cls = "said" } = {}) {
  if (text.length <= LONG) return h(tag, { class: cls, dir: "auto" }, visible(text));
  let end = LONG;
  const box = h(tag, { class: cls, dir: "auto" }, visible(text.slice(0, end)));
  const more = h("button", { class: "more" });
  const label = () => `${(text.length - end).toLocaleString("en")} more characters`;
  more.textContent = label();
  more.addEventListener("click", () => {
    const next = Math.min(text.length, end + 40 * LONG);
    add(box, visible(text.slice(end, next)));
    end = next;
    if (end >= text.length) more.remove();
    else more.textContent = label();
  });
  return h("div", { class: "long" }, box, more);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0+e/, "e")
    : value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, 3) });
  return text.replaceAll("-", "−");
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function tone(value) {
  return value > 0 ? "good" : value < 0 ? "bad" : "";
}

export function chip(text, cls = "", title = null) {
  return h("span", { class: `chip ${cls}`, title }, visible(String(text)));
}

export function problems(list) {
  return list?.length
    ? h("ul", { class: "problems", role: "note" }, list.map((text) => h("li", {}, visible(text))))
    : null;
}

export function empty(title, ...rest) {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, rest));
}
