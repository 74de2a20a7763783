/* Builds elements. Texts become text nodes and attributes, never markup. */

import { COLOURS } from "./catalogue.js";

/**
 * An element with attributes and children.
 * Functions named on... listen; true is an empty attribute; null, undefined and false are left out.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...unknown} children strings, numbers, nodes, lists of them, or nothing
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  fill(element, ...children);
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child || child === 0 || child === "").map(node));
  return element;
}

function node(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Replace the children of an element only if `state` changed, so that an open list or a selection stays. */
export function renew(element, state, make) {
  const text = JSON.stringify(state) ?? "";
  if (states.get(element) === text) return;
  states.set(element, text);
  fill(element, make());
}

const states = new WeakMap();

/** Set the text of an element only if it changed: a screen reader speaks every change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A notice in place of a part of the page that has nothing to show. */
export function empty(title, ...about) {
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, title),
    about.map((part) => (typeof part === "string" ? h("p", {}, part) : part)),
  );
}

/** A text that is folded if it is long: its beginning stands for it until it is opened. */
export function folded(text, limit = 240) {
  if (text.length <= limit) return text;
  return h("details", { class: "folded" }, h("summary", {}, h("span", {}, `${text.slice(0, limit - 1)}…`)), text);
}

/** A list of which the first few are shown, and the others can be opened. */
export function foldedList(items, shown = 3) {
  const rest = items.slice(shown);
  const more = h("details", {}, h("summary", {}, `${rest.length} more`), h("ul", {}, rest));
  return [...items.slice(0, shown), rest.length > 1 ? h("li", {}, more) : rest];
}

/** A command or a piece of code in a sentence. */
export const code = (text) => h("code", {}, text);

/** A small button. */
export function tool(label, onclick, attributes = {}) {
  return h("button", { class: "tool", type: "button", onclick, ...attributes }, label);
}

/** A link to a run, at a step if one is given. */
export function runLink(id, label, step = null) {
  const query = step === null ? "" : `?step=${step}`;
  return h("a", { href: `/runs/${encodeURIComponent(id)}${query}` }, label || id);
}

/** A run's state: a dot and the word. */
export function stateMark(status) {
  return h("span", { class: "state", "data-state": status }, h("i", { "aria-hidden": "true" }), status);
}

/** An optimizer's name beside its colour. */
export function optimizerMark(name) {
  const colour = COLOURS[name] ?? "var(--soft)";
  return h(
    "span",
    { class: "optimizer" },
    h("i", { class: "dot", style: { background: colour }, "aria-hidden": "true" }),
    name || "–",
  );
}

/** A table: names of columns, rows of cells; on a phone a row is a card and each cell carries its column's name. */
export function table(heads, rows, attributes = {}) {
  const labels = heads.map((head) => (head instanceof Node ? head.textContent : head));
  const rest = (cell, i) => h("td", { "data-label": labels[i + 1] }, h("div", {}, cell));
  const row = ([first, ...others]) => h("tr", {}, h("th", { scope: "row" }, first), others.map(rest));
  const head = h("tr", {}, heads.map((one) => h("th", { scope: "col" }, one)));
  const filled = h("table", attributes, h("thead", {}, head), h("tbody", {}, rows.map(row)));
  return h("div", { class: "table-scroll" }, filled);
}
