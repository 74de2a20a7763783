/* What can be done with the runs that are ticked: compare, tag, archive. */

import { h, renew, say, tool } from "./dom.js";
import { clip, plural } from "./format.js";
import { archivedAmong, change, offer } from "./remarks.js";
import { joined } from "./state.js";
import { runs } from "./store.js";

/** A bar over the table; empty while no run is ticked. */
export class RunActions {
  /** @param {() => void} clear unticks all runs */
  constructor(clear) {
    this.clear = clear;
    this.tag = h(
      "input",
      { type: "text", maxlength: 40, placeholder: "tag", "aria-label": "Tag", autocomplete: "off" },
    );
    this.trouble = h("span", { class: "refusal", role: "alert" });
    this.element = h("div", { class: "actions", role: "group", "aria-label": "Ticked runs" });
  }

  show(ids) {
    this.ids = ids;
    const state = [ids, offer.offered, archivedAmong(ids), [...this.models()]];
    renew(this.element, state, () => (ids.length ? this.parts() : []));
  }

  parts() {
    const all = archivedAmong(this.ids) === this.ids.length;
    const tagged = (event) => {
      event.preventDefault();
      if (this.tag.value.trim()) this.send({ tag: [this.tag.value.trim()] });
    };
    say(this.trouble, "");
    return [
      h("b", {}, `${plural(this.ids.length, "run")} ticked`),
      this.links(),
      offer.offered ? [
        tool(all ? "Bring back" : "Archive", () => this.send({ archived: !all })),
        h("form", { class: "tagging", onsubmit: tagged }, this.tag, h("button", { class: "tool" }, "Add tag")),
      ] : null,
      tool("Clear", this.clear),
      this.trouble,
    ];
  }

  /** Links to Compare: one for each model, as runs of one model are compared. */
  links() {
    const models = this.models();
    return [...models].map(([model, ids]) => {
      const query = new URLSearchParams({ model, runs: joined(ids) });
      const label = models.size === 1 ? "Compare these" : `Compare ${ids.length} of ${clip(model, 30)}`;
      return h("a", { class: "button", href: `/?${query}` }, label);
    });
  }

  models() {
    const models = new Map();
    for (const id of this.ids) {
      const model = runs.get(id)?.model;
      if (model !== undefined) models.set(model, [...(models.get(model) ?? []), id]);
    }
    return models;
  }

  async send(changes) {
    try {
      await change(this.ids, changes);
      this.tag.value = "";
    } catch (error) {
      say(this.trouble, error.message);
    }
  }
}
