/* One panel: a title, a legend, a Plotly figure, its PNG and its CSV. */

import { Cursor } from "./cursor.js";
import { h, say } from "./dom.js";
import { Legend } from "./legend.js";
import { listenToPinch } from "./pinch.js";
import { summary } from "./reading.js";
import { sketch } from "./sketch.js";
import { shownAs } from "./traces.js";

const OPTIONS = {
  responsive: true,
  displaylogo: false,
  displayModeBar: false,
  doubleClick: false,
  showTips: false,
  scrollZoom: false,
};
/**
 * Room for labels of usual length. If Plotly has to find out how much they need it draws everything twice, which took
 * 60 % of its time: it is asked to only where a label does not fit.
 */
const MARGIN = { l: 50, r: 20, t: 12, b: 38 };
const RIGHT = 46; // with an axis on the right
const TOUCH = matchMedia("(pointer: coarse)");
const KEYS = "Arrow keys read its values.";

/** A panel. Its group draws it, and handles zooms, hovers and clicks on legends. */
export class Panel {
  /**
   * @param {{key: string, title: string, about?: string}} spec
   * @param {{zoom: Function, reset: Function, hover: Function, toggle: Function}} group
   */
  constructor(spec, group) {
    this.spec = spec;
    this.group = group;
    this.drawn = null;
    this.crowded = false;
    this.pointer = null;
    const reader = { role: "application", "aria-roledescription": "plot", "aria-label": spec.title, tabindex: 0 };
    this.plot = h("div", { class: "plot", ...reader });
    this.hairline = h("div", { class: "hairline", "aria-hidden": "true" });
    this.none = h("p", { class: "none", hidden: true });
    this.spoken = h("p", { class: "unseen spoken", "aria-live": "polite" });
    this.stage = h("div", { class: "stage" }, this.plot, this.hairline, this.none, this.spoken);
    this.legend = new Legend(spec.title, (key, double) => group.toggle(key, double));
    this.cursor = new Cursor(this, (text) => say(this.spoken, text));
    const pinched = (axis, range) => this.zoom(axis === "x" ? range : null, axis === "y" ? range : null);
    listenToPinch(this.plot, pinched, () => group.reset());
    this.csv = h("a", { class: "tool", download: "", title: `Every value of ${spec.title} as CSV` }, "CSV");
    const picture = { class: "tool", type: "button", title: `${spec.title} as PNG`, onclick: () => this.save() };
    const tools = h("div", { class: "tools" }, h("button", picture, "PNG"), this.csv);
    this.element = h(
      "figure",
      { class: "panel", "data-panel": spec.key },
      h("figcaption", {}, h("h3", {}, spec.title), tools),
      spec.about && h("p", { class: "about" }, spec.about),
      this.legend.element,
      this.stage,
    );
  }

  /**
   * Take a figure of the server. All but its plot is shown at once, and a sketch of its curves in place of a first plot
   * that has to wait.
   * @param {{data: any[], layout: any}} figure
   * @param {{range: number[] | null, heights: Record<string, number[]>, hidden: Set<string>, mark: number | null}} look
   * @param {boolean} waits
   */
  take(figure, look, waits) {
    const none = !figure?.data?.length;
    this.element.classList.toggle("is-empty", none);
    this.none.hidden = !none;
    this.none.textContent = this.spec.none ?? "Not measured yet.";
    this.plot.tabIndex = none ? -1 : 0;
    this.figure = figure;
    this.look = look;
    this.legend.show(figure?.data ?? [], look.hidden);
    const text = none ? this.spec.title : `${summary(this.spec.title, figure, look.hidden)} ${KEYS}`;
    if (this.plot.getAttribute("aria-label") !== text) this.plot.setAttribute("aria-label", text);
    if (this.drawn || none || !waits) return;
    this.sketched?.remove();
    this.sketched = sketch(figure.data, this.layout(figure.layout ?? {}, look), look.hidden);
    if (this.sketched) this.stage.append(this.sketched);
  }

  /** Draw the figure that was taken, in a template of Plotly. */
  async draw(template) {
    const { figure, look } = this;
    if (!figure?.data?.length && !this.drawn) return;
    const data = (figure?.data ?? []).map((trace) => shownAs(trace, look.hidden));
    const plot = () => Plotly.react(this.plot, data, this.layout(figure?.layout ?? {}, look, template), OPTIONS);
    await plot();
    if (!this.crowded && !this.fits()) {
      this.crowded = true;
      await plot();
    }
    this.template = template;
    this.sketched?.remove();
    this.sketched = null;
    if (!this.drawn) this.listen();
    this.drawn = true;
    this.rehover();
  }

  /** Whether all labels of the axes are within the plot. */
  fits() {
    const { left, right, bottom } = this.plot.getBoundingClientRect();
    const labels = [...this.plot.querySelectorAll(".xtick, .ytick, .y3tick, .g-xtitle")];
    return labels.map((label) => label.getBoundingClientRect()).every(
      (label) => !label.width || (label.left >= left && label.right <= right && label.bottom <= bottom),
    );
  }

  layout(given, { range, heights, mark }, template, automargin = this.crowded) {
    const layout = { ...given, template, autosize: true, showlegend: false, title: undefined, uirevision: undefined };
    delete layout.height;
    delete layout.width;
    layout.dragmode = TOUCH.matches ? false : "zoom";
    layout.hovermode = given.hovermode ?? "x unified";
    const sided = Object.values(given).some((axis) => axis?.side === "right" && axis.visible !== false);
    layout.margin = automargin ? { l: 8, r: 14, t: 10, b: 8 } : { ...MARGIN, ...(sided && { r: RIGHT }) };
    for (const name of Object.keys({ yaxis: 0, ...given })) if (/^yaxis\d*$/.test(name)) layout[name] = {
      ...given[name],
      automargin,
      title: undefined,
      fixedrange: TOUCH.matches || name !== "yaxis",
      tickfont: { size: given[name]?.type === "log" ? 11 : 12 },
    };
    layout.xaxis = {
      ...given.xaxis,
      automargin,
      tickfont: { size: 12 },
      fixedrange: TOUCH.matches,
      title: { ...given.xaxis?.title, font: { size: 12 } },
    };
    if (range) {
      const ends = onAxis(range, given.xaxis);
      Object.assign(layout.xaxis, { range: ends, autorange: false, ...(given.xaxis?.type === "log" && logTicks(ends)) });
    }
    const height = heights[this.spec.key]?.map(layout.yaxis.type === "log" ? Math.log10 : Number);
    if (height?.every(Number.isFinite)) Object.assign(layout.yaxis, { range: height, autorange: false });
    if (mark !== null) layout.shapes = [...(given.shapes ?? []), marker(mark)];
    return layout;
  }

  listen() {
    const { plot, group } = this;
    const ends = (changed, axis) => {
      const range = [0, 1].map((i) => Number(changed[`${axis}axis.range[${i}]`]));
      return range.every(Number.isFinite) ? range : null;
    };
    plot.on("plotly_relayout", (changed) => this.zoom(ends(changed, "x"), ends(changed, "y")));
    plot.on("plotly_doubleclick", () => TOUCH.matches || group.reset()); // to Plotly two fingers are a double click
    plot.on("plotly_hover", ({ points, xvals }) => {
      this.pointer = xvals?.[0] ?? points[0].x;
      group.hover(this, points[0].x);
    });
    plot.on("plotly_unhover", () => {
      this.pointer = null;
      group.hover(this, null);
    });
  }

  /** Zoom all panels to a range of x, and this one to a range of y; on logarithmic axes these are exponents. */
  zoom(x, y) {
    const values = (range, axis) => (range && axis?.type === "log" ? range.map((power) => 10 ** power) : range);
    const { xaxis, yaxis } = this.figure?.layout ?? {};
    this.group.zoom(this.spec.key, values(x, xaxis), values(y, yaxis));
  }

  /** Show the hover again that a redraw removed. */
  rehover() {
    this.cursor.again();
    if (this.pointer === null || !this.plot.matches(":hover")) return;
    try {
      Plotly.Fx.hover(this.plot, { xval: this.pointer }, "xy");
    } catch {
      this.pointer = null; // nothing is there to hover any more
    }
  }

  /** Draw a line at the x at which another panel is hovered. It is not part of the figure, so nothing is redrawn. */
  cross(x) {
    const axis = x === null || !this.drawn ? null : this.plot._fullLayout?.xaxis;
    const at = axis ? axis.d2p(x) : NaN;
    const inside = at >= 0 && at <= axis?._length;
    this.hairline.classList.toggle("on", inside);
    if (inside) this.hairline.style.transform = `translateX(${(axis._offset + at).toFixed(1)}px)`;
  }

  /** Save the panel as a PNG, with its legend, on the background of the page. */
  save() {
    if (!this.drawn) return;
    const ground = getComputedStyle(document.body).backgroundColor;
    const layout = this.layout(this.figure.layout ?? {}, this.look, this.template, true);
    Object.assign(
      layout,
      { showlegend: true, paper_bgcolor: ground, plot_bgcolor: ground, margin: { l: 16, r: 24, t: 96, b: 16 } },
    );
    layout.title = { text: this.group.caption(this.spec), x: 0, xref: "paper", y: 0.97, yanchor: "top" };
    layout.legend = { orientation: "h", x: 0, y: 1.01, yanchor: "bottom" };
    const data = this.figure.data.map((trace) => shownAs(trace, this.look.hidden));
    Plotly.downloadImage(
      { data, layout, config: OPTIONS },
      { format: "png", width: 1200, height: 680, scale: 2, filename: this.group.fileName(this.spec) },
    );
  }

  end() {
    if (this.drawn) Plotly.purge(this.plot);
  }
}

/** A range of x as Plotly wants it: on a logarithmic axis the logarithms, and no zero. */
function onAxis([first, last], axis) {
  return axis?.type === "log" ? [first > 0 ? first : last / 1e6, last].map(Math.log10) : [first, last];
}

/** So few labels on a logarithmic x that they do not run into each other: 1, 2, 5, 10, or powers of ten alone. */
function logTicks([first, last]) {
  const decades = last - first;
  return { nticks: decades < 1 ? 4 : decades > 2.5 ? Math.ceil(decades) : Math.ceil(2 * decades) };
}

/** A line at the step that the address names. */
const marker = (x) => ({
  type: "line",
  xref: "x",
  yref: "paper",
  x0: x,
  x1: x,
  y0: 0,
  y1: 1,
  line: { color: "#d0312d", width: 1, dash: "dot" },
});
