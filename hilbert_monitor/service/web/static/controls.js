/* The row of controls above the panels. Their settings are in the address. */

import { h, say } from "./dom.js";
import { WHOLE, change, get, zoom } from "./state.js";

const AXES = [["updates", "Updates"], ["tokens", "Tokens"], ["time", "Wall time"]];
const SCALES = [["auto", "Auto"], ["log", "Log"], ["linear", "Linear"]];
const GROUPS = [["optimizer", "Means"], ["run", "Runs"]];

/**
 * The controls of a view.
 * @param {{compare: boolean}} kind a comparison has groups, a run has not
 */
export class Controls {
  constructor({ compare }) {
    this.axis = choice("axis", "X axis", AXES, { x0: null, x1: null, step: null });
    this.scale = choice("scale", "Y axis", SCALES);
    this.group = compare ? choice("group", "Lines", GROUPS) : null;
    this.smooth = h(
      "input",
      {
        type: "range",
        id: "smooth",
        min: 0,
        max: 0.99,
        step: 0.01,
        oninput: () => change({ smooth: Number(this.smooth.value) }),
      },
    );
    this.smoothed = h("output", { for: "smooth" });
    this.seeds = h("input", { type: "checkbox", onchange: () => change({ seeds: this.seeds.checked ? 1 : 0 }) });
    this.ends = ["x0", "x1"].map((name, i) => this.end(name, i ? "to" : "from"));
    this.reset = h(
      "button",
      {
        class: "tool",
        type: "button",
        title: "Show the whole range",
        onclick: () => change(WHOLE, true),
      },
      "All",
    );
    this.element = h(
      "div",
      { class: "controls", role: "group", "aria-label": "How the curves are drawn" },
      this.axis.element,
      this.scale.element,
      this.group?.element,
      compare && h("label", { class: "check" }, this.seeds, "Each seed"),
      h("label", { class: "slider" }, h("span", {}, "Smoothing"), this.smooth, this.smoothed),
      h("div", { class: "range", role: "group", "aria-label": "Range of x" }, this.ends, this.reset),
    );
  }

  end(name, label) {
    const take = ({ target }) => {
      const ends = this.ends.map((input) => (input.value === "" ? null : Number(input.value)));
      if (ends[0] !== null && ends[1] !== null && ends[0] < ends[1]) change({ x0: ends[0], x1: ends[1] }, true);
      else if (target.value === "") change({ x0: null, x1: null }, true);
    };
    return h(
      "input",
      {
        type: "number",
        step: "any",
        min: 0,
        "aria-label": `x ${label}`,
        placeholder: `x ${label}`,
        "data-end": name,
        onchange: take,
      },
    );
  }

  /** Show the settings of the address; `axes` are those that all runs have. */
  show(axes = null) {
    this.axis.show(axes);
    this.scale.show();
    this.group?.show();
    const smooth = Number(get("smooth"));
    if (document.activeElement !== this.smooth) this.smooth.value = smooth;
    say(this.smoothed, smooth ? smooth.toFixed(2) : "off");
    this.seeds.checked = get("seeds") === "1";
    this.seeds.disabled = get("group") === "run";
    const range = zoom();
    this.ends.forEach((input, i) => document.activeElement === input || (input.value = range ? range[i] : ""));
    this.reset.hidden = !range && get("y") === null;
  }
}

/** A choice of one among a few: radio buttons that look like one piece. */
function choice(name, label, options, also = {}) {
  const inputs = options.map(([value]) =>
    h("input", { type: "radio", name, value, onchange: () => change({ [name]: value, ...also }) }),
  );
  const element = h(
    "fieldset",
    { class: "choice" },
    h("legend", {}, label),
    h("div", {}, inputs.map((input, i) => h("label", {}, input, h("span", {}, options[i][1])))),
  );
  return {
    element,
    show(possible = null) {
      for (const input of inputs) {
        input.checked = input.value === get(name);
        input.disabled = Boolean(possible?.length) && !possible.includes(input.value);
        input.parentElement.title = input.disabled ? "Not every run has it" : "";
      }
    },
  };
}
