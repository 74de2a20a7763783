/* The legend of a panel: buttons, so that a keyboard reaches them. */

import { fill, h } from "./dom.js";
import { keyOf, plain } from "./traces.js";

const DASHES = { dot: "dotted", dash: "dashed", dashdot: "dashed", longdash: "dashed" };

/** A row of buttons, one for each name of a figure. */
export class Legend {
  /**
   * @param {string} title of the panel
   * @param {(key: string, double: boolean) => void} toggle called when a name is clicked
   */
  constructor(title, toggle) {
    this.toggle = toggle;
    this.element = h("div", { class: "legend", role: "group", "aria-label": `Curves of ${title}` });
  }

  /** Show the names of some traces. Rebuilt only if they changed. */
  show(data, hidden) {
    const entries = new Map();
    const ranked = [...data].sort((a, b) => (a.legendrank ?? 1000) - (b.legendrank ?? 1000));
    for (const trace of ranked.filter(({ showlegend }) => showlegend !== false)) {
      if (!entries.has(keyOf(trace))) entries.set(keyOf(trace), trace);
    }
    const look = ([key, { name, line, marker }]) => [key, name, line, marker?.color];
    const state = JSON.stringify([...entries].map(look));
    if (this.state !== state) fill(this.element, [...entries].map(([key, trace]) => this.entry(key, trace)));
    this.state = state;
    for (const button of this.element.children) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.key)));
    }
  }

  entry(key, trace) {
    const about = { type: "button", "data-key": key, title: "Hide or show; double click to see it alone" };
    const onclick = (event) => this.toggle(key, event.detail > 1);
    return h("button", { ...about, onclick }, swatch(trace), plain(trace.name));
  }

  /** The keys of its names. */
  keys() {
    return [...this.element.children].map((button) => button.dataset.key);
  }
}

/** A piece of a trace's line, a point or an area, as it looks in the plot. */
function swatch({ line, marker, mode, fill: filling, fillcolor, opacity }) {
  const filled = filling && filling !== "none" && !line?.width;
  const point = mode === "markers";
  const colour = (point && pick(marker?.color)) || (filled && fillcolor) || pick(line?.color) || "currentColor";
  const stroke = `${Math.min(line?.width ?? 2, 2.5)}px ${DASHES[line?.dash] ?? "solid"} ${colour}`;
  const style = point || filled ? { background: colour } : { "border-top": stroke, opacity: opacity ?? 1 };
  return h("i", { class: point ? "point" : filled ? "area" : "line", style, "aria-hidden": "true" });
}

const pick = (colour) => (Array.isArray(colour) ? colour[0] : colour);
