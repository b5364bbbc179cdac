// The state of the page is its address: #/page?key=value.

export function parse(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const params = {};
  for (const [key, value] of new URLSearchParams(query)) params[key] = value;
  return { page: path || "runs", params };
}

export function address(page, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(key, value);
  }
  const text = query.toString();
  return `#/${page === "runs" ? "" : page}${text ? `?${text}` : ""}`;
}

export function go(page, params) {
  location.hash = address(page, params);
}

// Changes a few keys of the present address; `quietly` adds no step to go back to.
export function change(changes, quietly = false) {
  const { page, params } = parse();
  const next = address(page, { ...params, ...changes });
  if (!quietly) {
    location.hash = next;
    return;
  }
  history.replaceState(null, "", next);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// Keys that say which rollouts are meant, and in which order.
const NOT_FILTERS = new Set(["run", "id", "offset", "by", "as", "beside", "x0", "x1"]);

export function filtersOf(params) {
  return Object.fromEntries(Object.entries(params).filter(([key]) => !NOT_FILTERS.has(key)));
}
