/* Shortcuts, and the dialog that lists them. */

import { WHOLE, change, go, lastQuery } from "./state.js";

const VIEWS = { c: ["compare", "/"], r: ["runs", "/runs"], a: ["alerts", "/alerts"] };
const help = document.getElementById("help");
let going = 0;

/** Listen to the keyboard. */
export function listen() {
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  help.addEventListener("click", (event) => event.target === help && help.close());
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const field = event.target.closest?.("input:not([type=radio], [type=checkbox], [type=range]), select, textarea");
    if (event.key === "Escape") return field?.blur();
    if (field) return;
    if (press(event.key)) event.preventDefault();
  });
}

function press(key) {
  const view = Date.now() - going < 1200 && VIEWS[key];
  going = key === "g" ? Date.now() : 0;
  if (view) return go(view[1] + lastQuery(view[0])), true;
  if (key === "?") return help.showModal(), true;
  if (key === "0") return change(WHOLE, true), true;
  const filter = key === "/" && document.getElementById("filter");
  if (filter) return filter.focus(), filter.select?.(), true;
  return false;
}
