/* A group of panels that share their x range, their hover and their hidden curves. */

import { themes } from "./api.js";
import { h } from "./dom.js";
import { isPlotlyThere, startPlotly } from "./drawing.js";
import { Panel } from "./panel.js";
import { WHOLE, change, getAll, heights, zoom } from "./state.js";
import { isDark, onTheme } from "./theme.js";

/** A group of panels, drawn from the figures of one answer of the server. */
export class Charts {
  /**
   * @param {{key: string, title: string, about?: string}[]} specs
   * @param {{name: () => string, csv: (panel: string) => string}} owner
   */
  constructor(specs, owner) {
    Promise.all([themes(), startPlotly()]).catch(() => {}); // draw() reports what failed
    this.owner = owner;
    this.figures = null;
    this.mark = null;
    this.panels = specs.map((spec) => new Panel(spec, this));
    this.element = h("div", { class: "panels" }, this.panels.map((panel) => panel.element));
    this.dragging = false;
    this.waiting = false;
    this.element.addEventListener(
      "pointerdown",
      (event) => (this.dragging = event.button === 0 && Boolean(event.target.closest(".plot"))),
    );
    this.released = () => {
      this.dragging = false;
      if (this.waiting) setTimeout(() => this.draw());
    };
    addEventListener("pointerup", this.released);
    addEventListener("pointercancel", this.released);
    this.unfollow = onTheme(() => this.draw());
  }

  /** Show figures. Nothing is drawn if they are the same as before. */
  async show(figures, mark = null) {
    const state = JSON.stringify([figures, mark, location.search]);
    this.figures = figures;
    this.mark = mark;
    if (state === this.state) return;
    await this.draw();
    this.state = state;
  }

  /** Draw the figures with the settings of the address; not while the pointer drags out a range. */
  async draw() {
    this.waiting = this.dragging;
    if (!this.figures || this.dragging) return;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const look = {
      range: zoom() ?? extent(this.figures),
      heights: heights(),
      hidden: new Set(getAll("hidden")),
      mark: this.mark,
    };
    for (const panel of this.panels) {
      panel.csv.href = this.owner.csv(panel.spec.key);
      panel.take(this.figures[panel.spec.key], look, !isPlotlyThere());
    }
    const [templates] = await Promise.all([themes(), startPlotly()]);
    for (const panel of this.panels) {
      if (!panel.drawn) await painted(); // what is there already is seen first
      if (this.ended || turn !== this.turn) return; // a later call draws what is newer
      await panel.draw(templates[isDark() ? "dark" : "light"]);
    }
  }

  /** Zoom all panels to a range of x, and one of them to a range of y; finer data follow. Either may be null. */
  zoom(key, x, y) {
    const across = x && x[0] !== x[1] ? rounded(x) : null;
    const others = getAll("y").filter((one) => !one.startsWith(`${key}:`));
    const along = y && y[0] !== y[1] ? y.map((end) => Number(end.toPrecision(5))).sort((a, b) => a - b) : null;
    change(
      {
        ...(across && { x0: Math.max(0, across[0]), x1: across[1] }),
        ...(along && { y: [...others, [key, ...along].join(":")] }),
      },
      true,
    );
  }

  reset() {
    change(WHOLE, true);
  }

  hover(from, x) {
    for (const panel of this.panels) if (panel !== from) panel.cross(x);
  }

  /** Hide or show curves. A double click shows them alone, or shows all again. */
  toggle(key, double) {
    const hidden = new Set(getAll("hidden"));
    if (!double) return change({ hidden: hidden.delete(key) ? [...hidden] : [...hidden, key] });
    const mates = this.panels.map((panel) => panel.legend.keys()).filter((keys) => keys.includes(key)).flat();
    const others = mates.filter((mate) => mate !== key);
    return change({ hidden: others.every((mate) => hidden.has(mate)) ? [] : [...new Set(others)] });
  }

  caption(spec) {
    return `${escaped(this.owner.name())}: ${spec.title}`;
  }

  fileName(spec) {
    return `${this.owner.name()}-${spec.key}`.replace(/[^\w.=+-]+/g, "-");
  }

  end() {
    this.ended = true;
    removeEventListener("pointerup", this.released);
    removeEventListener("pointercancel", this.released);
    this.unfollow();
    this.panels.forEach((panel) => panel.end());
  }
}

/** The range that holds all curves of all panels, so that one x stands at one place in each; null if x is no number. */
function extent(figures) {
  let [first, last] = [Infinity, -Infinity];
  const drawn = Object.values(figures).filter(Boolean);
  const log = drawn.some(({ layout }) => layout?.xaxis?.type === "log");
  for (const { data = [] } of drawn) {
    for (const { x } of data) {
      if (!Array.isArray(x) || !x.length) continue;
      const start = log ? x.find((place) => place > 0) ?? null : x[0];
      const ends = [start, x[x.length - 1]].filter((end) => end !== null);
      if (ends.some((end) => typeof end !== "number")) return null;
      first = Math.min(first, ...ends);
      last = Math.max(last, ...ends);
    }
  }
  if (log) return last > first ? [first / (last / first) ** (1 / 60), last * (last / first) ** (1 / 60)] : null;
  const room = (last - first) / 60;
  return last > first ? [first - room, last + room] : null;
}

/** A range in order, with as many digits as its width needs, and its smaller end: a logarithmic axis has no zero. */
function rounded([first, last]) {
  const sizes = [Math.abs(last - first), first, last].filter((size) => size > 0);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(Math.min(...sizes))));
  return [Math.min(first, last), Math.max(first, last)].map((x) => Number(x.toFixed(Math.min(digits, 9))));
}

/** Lets the browser paint what is drawn so far. */
const painted = () => new Promise((resolve) => setTimeout(resolve));

/** Plotly reads a subset of HTML. */
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
