/* One panel: a title, a legend of buttons, a Plotly figure, its PNG and its CSV. */

import { fill, h } from "./dom.js";

const OPTIONS = {
  responsive: true,
  displaylogo: false,
  displayModeBar: false,
  doubleClick: false,
  showTips: false,
  scrollZoom: false,
};
const TOUCH = matchMedia("(pointer: coarse)");
const PLAIN = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'", "&#39;": "'", "&amp;": "&" };

/** Undo the escapes that Plotly needs. */
const plain = (text) => String(text ?? "").replace(/&(?:lt|gt|quot|#x27|#39|amp);/g, (escape) => PLAIN[escape]);

/** The key by which a curve is hidden. All curves of a group share it, in every panel. */
export const keyOf = (trace) => plain(trace.legendgroup || trace.name);

/** A panel. Its group draws it, and handles zooms, hovers and clicks on legends. */
export class Panel {
  /**
   * @param {{key: string, title: string, about?: string}} spec
   * @param {{zoom: Function, reset: Function, hover: Function, toggle: Function, alone: Function}} group
   */
  constructor(spec, group) {
    this.spec = spec;
    this.group = group;
    this.drawn = null;
    this.pointer = null;
    this.plot = h("div", { class: "plot", role: "img", "aria-label": spec.title });
    this.hairline = h("div", { class: "hairline", "aria-hidden": "true" });
    this.none = h("p", { class: "none", hidden: true });
    this.legend = h("div", { class: "legend", role: "group", "aria-label": `Curves of ${spec.title}` });
    this.csv = h("a", { class: "tool", download: "", title: `Every value of ${spec.title} as CSV` }, "CSV");
    const png = h(
      "button",
      { class: "tool", type: "button", title: `${spec.title} as PNG`, onclick: () => this.save() },
      "PNG",
    );
    this.element = h(
      "figure",
      { class: "panel", "data-panel": spec.key },
      h("figcaption", {}, h("h3", {}, spec.title), h("div", { class: "tools" }, png, this.csv)),
      spec.about && h("p", { class: "about" }, spec.about),
      this.legend,
      h("div", { class: "stage" }, this.plot, this.hairline, this.none),
    );
  }

  /**
   * Draw a figure of the server.
   * @param {{data: any[], layout: any}} figure
   * @param {{template: any, range: number[] | null, hidden: Set<string>, mark: number | null}} look
   */
  async draw(figure, look) {
    const none = !figure?.data?.length;
    this.element.classList.toggle("is-empty", none);
    this.none.hidden = !none;
    this.none.textContent = this.spec.none ?? "Not measured yet.";
    this.figure = figure;
    this.look = look;
    this.entries(figure?.data ?? [], look.hidden);
    if (none && !this.drawn) return;
    const data = (figure?.data ?? []).map((trace) => shownAs(trace, look.hidden));
    await Plotly.react(this.plot, data, this.layout(figure?.layout ?? {}, look), OPTIONS);
    if (!this.drawn) this.listen();
    this.drawn = true;
    this.rehover();
  }

  layout(given, { template, range, mark }) {
    const layout = { ...given, template, autosize: true, showlegend: false, title: undefined, uirevision: undefined };
    delete layout.height;
    delete layout.width;
    layout.dragmode = TOUCH.matches ? false : "zoom";
    layout.hovermode = given.hovermode ?? "x unified";
    layout.margin = { l: 8, r: 14, t: 10, b: 8 };
    for (const name of Object.keys(given)) if (/^yaxis\d*$/.test(name)) layout[name] = {
      ...given[name],
      title: undefined,
      fixedrange: true,
      tickfont: { size: given[name].type === "log" ? 11 : 12 },
    };
    layout.yaxis ??= { fixedrange: true };
    layout.xaxis = {
      ...given.xaxis,
      tickfont: { size: 12 },
      fixedrange: TOUCH.matches,
      title: { ...given.xaxis?.title, font: { size: 12 } },
    };
    if (range) Object.assign(layout.xaxis, { range: onAxis(range, given.xaxis), autorange: false });
    if (mark !== null) layout.shapes = [...(given.shapes ?? []), marker(mark)];
    return layout;
  }

  listen() {
    const { plot, group } = this;
    plot.on("plotly_relayout", (changed) => {
      const [first, last] = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
      const place = (end) => (plot._fullLayout.xaxis.type === "log" ? 10 ** Number(end) : Number(end));
      if (first !== undefined && last !== undefined) group.zoom(place(first), place(last));
    });
    plot.on("plotly_doubleclick", () => group.reset());
    plot.on("plotly_hover", ({ points, xvals }) => {
      this.pointer = xvals?.[0] ?? points[0].x;
      group.hover(this, points[0].x);
    });
    plot.on("plotly_unhover", () => {
      this.pointer = null;
      group.hover(this, null);
    });
  }

  /** Show the hover again that a redraw removed. */
  rehover() {
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

  /** The legend: buttons, so that a keyboard reaches them. Rebuilt only if its entries changed. */
  entries(data, hidden) {
    const entries = new Map();
    const ranked = [...data].sort((a, b) => (a.legendrank ?? 1000) - (b.legendrank ?? 1000));
    for (const trace of ranked.filter(({ showlegend }) => showlegend !== false)) {
      if (!entries.has(keyOf(trace))) entries.set(keyOf(trace), trace);
    }
    const state = JSON.stringify([...entries].map(([
      key,
      { name, line, marker: dot },
    ]) => [key, name, line, dot?.color]));
    if (this.state !== state) {
      this.state = state;
      fill(this.legend, [...entries].map(([key, trace]) => this.entry(key, trace)));
    }
    for (const button of this.legend.children) button.setAttribute(
      "aria-pressed",
      String(!hidden.has(button.dataset.key)),
    );
  }

  entry(key, trace) {
    const dash = { dot: "dotted", dash: "dashed", dashdot: "dashed", longdash: "dashed" }[trace.line?.dash] ?? "solid";
    const filled = trace.fill && trace.fill !== "none" && !trace.line?.width;
    const point = trace.mode === "markers";
    const own = (point && pick(trace.marker?.color)) || (filled && trace.fillcolor);
    const colour = own || pick(trace.line?.color) || "currentColor";
    const width = `${Math.min(trace.line?.width ?? 2, 2.5)}px`;
    const style = point || filled ? { background: colour } : {
      "border-top": `${width} ${dash} ${colour}`,
      opacity: trace.opacity ?? 1,
    };
    const swatch = h("i", { class: point ? "point" : filled ? "area" : "line", style, "aria-hidden": "true" });
    return h(
      "button",
      {
        type: "button",
        "data-key": key,
        title: "Hide or show; double click to see it alone",
        onclick: (event) => this.group.toggle(key, event.detail > 1),
      },
      swatch,
      plain(trace.name),
    );
  }

  /** The keys of its legend. */
  keys() {
    return [...this.legend.children].map((button) => button.dataset.key);
  }

  /** Save the panel as a PNG, with its legend, on the background of the page. */
  save() {
    if (!this.drawn) return;
    const ground = getComputedStyle(document.body).backgroundColor;
    const layout = this.layout(this.figure.layout ?? {}, this.look);
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

/** A trace, invisible if it is hidden. Plotly makes a CSS selector of its uid, so that must be plain. */
function shownAs(trace, hidden) {
  const uid = trace.uid?.replace(/[^A-Za-z0-9-]/g, (sign) => `_${sign.codePointAt(0).toString(16)}`);
  return { ...trace, ...(uid && { uid }), ...(hidden.has(keyOf(trace)) && { visible: false }) };
}

/** A range of x as Plotly wants it: on a logarithmic axis the logarithms, and no zero. */
function onAxis([first, last], axis) {
  return axis?.type === "log" ? [first > 0 ? first : last / 1e6, last].map(Math.log10) : [first, last];
}

const pick = (colour) => (Array.isArray(colour) ? colour[0] : colour);

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
