/* How the configurations of two runs differ. */

import { get as fetchAnswer } from "./api.js";
import { fill, h, runLink, table } from "./dom.js";
import { DASH, clip, plural, whole } from "./format.js";
import { runs } from "./store.js";

/** A section for two runs; empty without them. */
export class Difference {
  constructor() {
    this.element = h("section", { class: "difference" });
    this.asked = "";
  }

  /** Show how run `b` differs from run `a`. */
  async show(a, b) {
    const asked = a && b ? JSON.stringify([a, b]) : "";
    if (asked === this.asked) return;
    this.asked = asked;
    if (!asked) return fill(this.element);
    try {
      const answer = await fetchAnswer("/api/difference", new URLSearchParams({ a, b }));
      if (this.asked === asked) fill(this.element, heading(answer), settings(answer));
    } catch (error) {
      fill(this.element, h("p", { class: "trouble" }, error.message));
    }
  }
}

function heading({ rows, same }) {
  const differ = rows.length === 1 ? "differs" : "differ";
  const count = `${plural(rows.length, "setting")} ${differ}, ${whole(same)} are the same`;
  const title = h("div", {}, h("h2", {}, "Configuration difference"), h("p", { class: "lede" }, count));
  return h("div", { class: "heading" }, title);
}

function settings({ a, b, rows }) {
  if (!rows.length) return h("p", {}, "The two have the same configuration.");
  const name = (id) => runLink(id, runs.get(id)?.label);
  const text = (given) => (given === null || given === undefined ? DASH : clip(String(given), 400));
  const cells = rows.map((row) => [h("code", {}, row.key), text(row.a), text(row.b)]);
  return table(["Setting", name(a), name(b)], cells, { class: "settings" });
}
