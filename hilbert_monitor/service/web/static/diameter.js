/* Diameter: what a diameter buys. Final losses of runs over the diameter that steps of their head were allowed. */

import { get as fetchAnswer } from "./api.js";
import { Charts } from "./charts.js";
import { code, empty, fill, h, renew, say, table } from "./dom.js";
import { DASH, fixed, number, plural, whole } from "./format.js";
import { coalesce } from "./live.js";
import { onRemarks } from "./remarks.js";
import { WHOLE, change, get, written } from "./state.js";
import { runs } from "./store.js";

const PANELS = [
  { key: "loss", title: "Final validation loss", about: "The final validation loss over the diameter that a step of the LM head may have. Lines are means over seeds, bands one sample standard deviation. A curve that leaves at the top goes on in the table below." },
  { key: "made", title: "Diameter made", about: "The median diameter of the steps that were made. On the dashed line all that is allowed is used." },
];

let current = null;
onRemarks(() => current?.refresh.ask());

/** The view at `/diameter`. */
export class Diameter {
  constructor(root, fail) {
    this.fail = fail;
    this.answer = null;
    this.line = h("p", { class: "lede" });
    this.models = h("select", {
      "aria-label": "Model",
      onchange: () => change({ model: this.models.value, ...WHOLE }, true),
    });
    this.notes = h("ul", { class: "notes", role: "status" });
    this.charts = new Charts(PANELS, {
      name: () => `${this.answer?.model || "runs"}-diameter`,
      csv: () => `/api/diameter.csv${written(this.query())}`,
    });
    this.values = h("section", { class: "values" });
    this.body = h(
      "div",
      { class: "view diameter is-loading" },
      h("div", { class: "heading" }, h("div", {}, h("h1", { tabindex: -1 }, "What a diameter buys"), this.line), this.models),
      this.notes,
      this.charts.element,
      this.values,
    );
    this.none = h("div", { class: "view", hidden: true }, noSweep());
    fill(root, this.body, this.none);
    document.title = "Diameter · hilbert-monitor";
    this.refresh = coalesce(() => this.load());
    current = this;
    this.update();
  }

  query() {
    const query = new URLSearchParams();
    if (get("model")) query.set("model", get("model"));
    return query;
  }

  /** The address changed. */
  update() {
    this.charts.draw();
    this.refresh.ask();
  }

  /** Something happened to a run: ask again if it is a point of a sweep, or may be one. */
  event(name, data) {
    const run = runs.get(data.run ?? data.id);
    if (name === "gone" || (name === "run" && (!run || run.sweep))) this.refresh.ask();
  }

  known() {}

  async load() {
    try {
      this.answer = await fetchAnswer("/api/diameter", this.query());
      this.body.classList.remove("is-loading");
      this.render();
      await this.charts.show(this.answer.figures);
    } catch (error) {
      this.fail(error, () => this.refresh.ask());
    }
  }

  render() {
    const { curves, models, model, notes } = this.answer;
    this.body.hidden = !curves.length && !notes.length;
    this.none.hidden = !this.body.hidden;
    const counts = curves.map(({ points }) => points.reduce((sum, { runs: ids }) => sum + ids.length, 0));
    const count = counts.reduce((sum, one) => sum + one, 0);
    const about = "A diameter of 1× is the largest that a step of RowNorm can have.";
    say(this.line, `${model ? `${model}: ` : ""}${plural(count, "run")} on ${plural(curves.length, "curve")}. ${about}`);
    this.models.hidden = models.length < 2;
    const option = (name) => h("option", { value: name, selected: name === model }, name || "no model named");
    renew(this.models, [models, model], () => models.map(option));
    renew(this.notes, notes, () => notes.map((note) => h("li", {}, note)));
    this.notes.hidden = !notes.length;
    renew(this.values, curves, () => values(curves));
  }

  end() {
    current = null;
    this.refresh.end();
    this.charts.end();
  }
}

/** The numbers of the curves: a row for each diameter, a column for each curve. */
function values(curves) {
  const limited = curves.filter(({ points }) => points.some(({ allowed }) => allowed !== null));
  const places = [...new Set(limited.flatMap(({ points }) => points.map(({ allowed }) => allowed)))];
  places.sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const free = curves.filter((one) => !limited.includes(one)).flatMap(({ name, points }) => points.map((point) => [name, point]));
  const cell = (point) => (point ? both(point.loss) : DASH);
  const row = (place) => [multiple(place), ...limited.map(({ points }) => cell(points.find(({ allowed }) => allowed === place)))];
  const seeds = Math.max(...curves.flatMap(({ points }) => points.map(({ runs: ids }) => ids.length)), 0);
  return [
    h("h2", {}, "Its values"),
    h("p", { class: "about" }, `Mean ± one sample standard deviation over up to ${plural(seeds, "seed")}, by the diameter allowed`),
    table(["Allowed", ...limited.map(mark)], places.map(row)),
    ...free.map(([name, { loss, made }]) =>
      h("p", { class: "about aside" }, `${name} without a limit: ${both(loss)}, at a usual diameter of ${number(made.mean, 2)}×.`)),
  ];
}

/** A mean and its deviation, in as many decimals as the others. */
function both({ mean, deviation }) {
  if (mean === null) return DASH;
  return deviation === null ? fixed(mean, 3) : `${fixed(mean, 3)} ± ${fixed(deviation, 3)}`;
}

function mark({ name, colour }) {
  return h("span", { class: "optimizer" }, h("i", { class: "dot", style: { background: colour }, "aria-hidden": "true" }), name);
}

/** A multiple as the axis writes it. */
function multiple(allowed) {
  if (allowed === null) return "no limit";
  return allowed < 1 && Number.isInteger(1 / allowed) ? `1/${whole(1 / allowed)}×` : `${number(allowed)}×`;
}

function noSweep() {
  return empty(
    "No run was held to a diameter here",
    h("p", {}, code("hilbert-monitor bench diameter-curve --runs FOLDER"), " trains runs over a range of diameters; this page draws their losses."),
  );
}
