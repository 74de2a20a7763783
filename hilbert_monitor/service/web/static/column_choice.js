/* The choice of the columns of the table of runs. The choice is in the address. */

import { get as fetchAnswer } from "./api.js";
import { COLUMNS, LAST, added, labelOf } from "./columns.js";
import { fill, h, say } from "./dom.js";
import { plural } from "./format.js";
import { change, getAll } from "./state.js";

/** A list of boxes that opens under the filter. Settings that differ between runs come first. */
export class ColumnChoice {
  constructor() {
    this.title = h("summary", {}, "Columns");
    this.search = h("input", {
      type: "search",
      placeholder: "Find a setting or a value",
      "aria-label": "Find a column",
      oninput: () => this.narrow(),
    });
    this.boxes = h("div", { class: "choices" });
    this.element = h(
      "details",
      { class: "selection columns", ontoggle: () => this.element.open && this.load() },
      this.title,
      this.search,
      this.boxes,
    );
  }

  show() {
    const more = added().length;
    say(this.title, more ? `Columns: ${more} added` : "Columns");
    for (const box of this.boxes.querySelectorAll("input")) box.checked = this.isShown(box.value);
  }

  async load() {
    try {
      const { settings, fields } = await fetchAnswer("/api/columns");
      const differ = settings.filter(({ values }) => values > 1);
      const rest = settings.filter(({ values }) => values <= 1);
      const own = COLUMNS.filter(({ key }) => key !== "name").map(({ key, label }) => this.box(key, label));
      const setting = ({ name, values }) => this.box(name, name, values > 1 ? plural(values, "value") : null);
      const field = ({ name, label, about }) => this.box(name, labelOf(name), null, `${label}: ${about}`);
      fill(
        this.boxes,
        group("Usual columns", own),
        group("Settings that differ", differ.map(setting)),
        group("Other settings", rest.map(setting)),
        group("Last values", fields.filter(({ name }) => !isOwn(name)).map(field)),
      );
      this.narrow();
    } catch (error) {
      fill(this.boxes, h("p", { class: "trouble" }, error.message));
    }
  }

  box(name, label, hint = null, title = null) {
    const box = h("input", {
      type: "checkbox",
      value: name,
      checked: this.isShown(name),
      onchange: (event) => this.flip(name, event.target.checked),
    });
    return h("label", { class: "check", title }, box, h("span", {}, label), hint ? h("small", {}, hint) : null);
  }

  isShown(name) {
    return COLUMNS.some(({ key }) => key === name) ? !getAll("hide").includes(name) : added().includes(name);
  }

  flip(name, on) {
    const own = COLUMNS.some(({ key }) => key === name);
    const list = (own ? getAll("hide") : added()).filter((one) => one !== name);
    change({ [own ? "hide" : "show"]: own === on ? list : [...list, name] });
  }

  /** Leave the boxes whose names have what is searched for. */
  narrow() {
    const text = this.search.value.trim().toLowerCase();
    for (const label of this.boxes.querySelectorAll("label")) {
      label.hidden = !label.textContent.toLowerCase().includes(text);
    }
    for (const part of this.boxes.querySelectorAll("fieldset")) {
      part.hidden = !part.querySelector("label:not([hidden])");
    }
  }
}

const isOwn = (name) => COLUMNS.some(({ key }) => LAST + key === name);

const group = (title, boxes) => (boxes.length ? h("fieldset", {}, h("legend", {}, title), boxes) : null);
