/* What is compared beyond the usual: a setting to split by, the two sides of the ratio, more panels, a logarithmic x.
 * All of it is in the address. */

import { METRICS } from "./catalogue.js";
import { h, renew, say, tool } from "./dom.js";
import { plural } from "./format.js";
import { change, get } from "./state.js";
import { runs } from "./store.js";

/** The metrics that have a panel of their own, by key. */
export const chosenPanels = () => (get("panels") ?? "").split(",").filter(Boolean);

/** A disclosure under the controls. */
export class Choices {
  constructor() {
    this.title = h("summary", {});
    this.by = picker("by", "Split and colour by");
    this.base = picker("base", "Ratio of");
    this.over = picker("over", "to");
    this.metric = h(
      "select",
      { "aria-label": "Add a panel", onchange: () => this.add(this.metric.value) },
    );
    this.panels = h("span", { class: "chips" });
    this.logx = h("input", { type: "checkbox", onchange: () => change({ logx: this.logx.checked ? 1 : null }) });
    const rows = h(
      "div",
      { class: "more" },
      this.by.element,
      h("span", { class: "sides" }, this.base.element, this.over.element),
      h("span", { class: "sides" }, h("label", { class: "pick-one" }, "Panels", this.metric), this.panels),
      h("label", { class: "check" }, this.logx, "Logarithmic x"),
    );
    this.element = h("details", { class: "choose" }, this.title, rows);
  }

  /** Show what an answer offers, and what the address has chosen. */
  show({ keys = [], groups = [], measured = [], sides: usual }) {
    const optimizers = [...new Set(groups.map(({ optimizer }) => optimizer))];
    const names = groups.map(({ name }) => name).filter((name) => !optimizers.includes(name));
    const members = groups.flatMap((group) => group.runs).map((id) => [id, runs.get(id)?.label || id]);
    const sides = [["Optimizers", optimizers], ["Groups", names], ["Runs", members]];
    this.by.show([["", keys]], keys.length ? "Nothing else" : "Nothing: no setting differs");
    this.base.show(sides, get("base") ? "The usual" : usual[0]);
    this.over.show(sides, get("over") ? "The usual" : usual[1]);
    const chosen = chosenPanels();
    const offered = METRICS.filter(({ key }) => measured.includes(key) && !chosen.includes(key));
    renew(this.metric, offered, () => [
      h("option", { value: "" }, "Add one"),
      offered.map(({ key, title }) => h("option", { value: key }, title)),
    ]);
    renew(this.panels, chosen, () => chosen.map((key) => this.chip(key)));
    this.logx.checked = get("logx") === "1";
    const more = [
      get("by") && `split by ${get("by")}`,
      (get("base") || get("over")) && `ratio of ${usual.join(" to ")}`,
      chosen.length && plural(chosen.length, "more panel"),
      get("logx") === "1" && "logarithmic x",
    ];
    const said = more.filter(Boolean).join(", ");
    say(this.title, said ? `More: ${said}` : "More: split by a setting, ratios, panels");
  }

  chip(key) {
    const title = METRICS.find((metric) => metric.key === key)?.title ?? key;
    return tool(`${title} ×`, () => this.keep(chosenPanels().filter((one) => one !== key)), { title: "Remove" });
  }

  add(key) {
    this.metric.value = "";
    if (key) this.keep([...chosenPanels(), key]);
  }

  keep(panels) {
    change({ panels: panels.join(",") || null });
  }
}

/** A list to choose one of, whose choice is a setting of the address. */
function picker(name, label) {
  const list = h("select", { name, onchange: () => change({ [name]: list.value || null }) });
  return {
    element: h("label", { class: "pick-one" }, label, list),
    show(parts, none) {
      const known = parts.flatMap(([, options]) => options.map((option) => [option].flat()[0]));
      const chosen = get(name) ?? "";
      const lost = chosen && !known.includes(chosen) ? [chosen] : [];
      renew(list, [parts, none, chosen], () => {
        const option = (given) => {
          const [value, text = value] = [given].flat();
          return h("option", { value, selected: value === chosen }, text);
        };
        const part = ([title, options]) => (title && options.length
          ? h("optgroup", { label: title }, options.map(option))
          : options.map(option));
        return [option(["", none]), lost.map(option), parts.map(part)];
      });
    },
  };
}
