/* The address holds all settings of the page, so that a link shows a colleague the same picture. */

/** Defaults of the settings that the address may hold. */
export const DEFAULTS = { axis: "updates", smooth: "0", scale: "auto", group: "optimizer", seeds: "0" };
const VIEW = [...Object.keys(DEFAULTS), "x0", "x1"];

/** @type {Set<(moved: boolean) => void>} */
const listeners = new Set();
const visited = {};

/** Where the page is: {view, id, query}. */
export function route() {
  const parts = location.pathname.split("/").filter(Boolean);
  const query = new URLSearchParams(location.search);
  if (!parts.length) return { view: "compare", id: null, query };
  if (parts[0] === "runs" && parts.length === 2) return { view: "run", id: decode(parts[1]), query };
  if (parts.length === 1 && ["runs", "diameter", "alerts"].includes(parts[0])) return { view: parts[0], id: null, query };
  return { view: "unknown", id: null, query };
}

/** A setting of the address, or its default. */
export function get(name) {
  return new URLSearchParams(location.search).get(name) ?? DEFAULTS[name] ?? null;
}

/** All of a repeated setting. */
export const getAll = (name) => new URLSearchParams(location.search).getAll(name);

/** The runs that the address names; undefined if it names none. */
export const namedRuns = () => get("runs")?.split(",").map((id) => id.replaceAll("%2C", ",").replaceAll("%25", "%"));

/** Ids of runs as one setting: commas are between them, and escaped within. */
export const joined = (ids) => ids.map((id) => id.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");

/**
 * Change settings of the address; null takes one away, a list is repeated.
 * @param {Record<string, unknown>} changes
 * @param {boolean} [push] whether the back button undoes it
 * @param {boolean} [quiet] whether listeners are not called
 */
export function change(changes, push = false, quiet = false) {
  const query = new URLSearchParams(location.search);
  for (const [name, given] of Object.entries(changes)) {
    query.delete(name);
    const values = Array.isArray(given) ? given : [given];
    const texts = values.filter((one) => one !== null && one !== undefined).map(String);
    for (const one of texts) if (one !== DEFAULTS[name]) query.append(name, one);
  }
  const target = location.pathname + written(query);
  if (target === location.pathname + location.search) return;
  history[push ? "pushState" : "replaceState"](null, "", target);
  if (quiet) visited[route().view] = location.search;
  else tell(false);
}

/** Go to a view. */
export function go(href) {
  if (href !== location.pathname + location.search) history.pushState(null, "", href);
  tell(true);
}

/** Call back after every change of the address; the argument says whether the page went elsewhere. */
export function onChange(listener) {
  listeners.add(listener);
}

/** All settings of the curves, as a query for the API; also those that are the page's defaults. */
export function viewQuery() {
  const query = new URLSearchParams();
  for (const name of VIEW) if (get(name) !== null) query.set(name, get(name));
  return query;
}

/** The x range that is zoomed to, or null. */
export function zoom() {
  const [first, last] = [get("x0"), get("x1")].map((text) => (text === null || text === "" ? NaN : Number(text)));
  return Number.isFinite(first) && Number.isFinite(last) && last > first ? [first, last] : null;
}

/** The settings that show the whole range of x and of y again. */
export const WHOLE = { x0: null, x1: null, y: null };

/** The y ranges that panels are zoomed to, by the keys of the panels: `y=loss:3:4` in the address. */
export function heights() {
  const ranges = getAll("y").map((text) => text.split(":")).map(([key, ...ends]) => [key, ends.map(Number)]);
  return Object.fromEntries(ranges.filter(([, [low, high]]) => Number.isFinite(low) && high > low));
}

/** The query that a view had when it was last seen. */
export const lastQuery = (view) => visited[view] ?? "";

/** A query as text, with commas and colons left readable. */
export function written(query) {
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return text && `?${text}`;
}

function tell(moved) {
  const { view } = route();
  visited[view] = location.search;
  for (const listener of listeners) listener(moved);
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

visited[route().view] = location.search;
addEventListener("popstate", () => tell(true));
