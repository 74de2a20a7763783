/* Compare: RowNorm against AdamW, or any others. The current ratios, the panels, and the runs that take part. */

import { get as fetchAnswer } from "./api.js";
import { METRICS } from "./catalogue.js";
import { Charts } from "./charts.js";
import { Choices, chosenPanels } from "./choices.js";
import { Controls } from "./controls.js";
import { fill, folded, foldedList, h, renew, say } from "./dom.js";
import { noRuns } from "./empties.js";
import { plural } from "./format.js";
import { coalesce } from "./live.js";
import { cards, most, values } from "./numbers.js";
import { archivedAmong, isArchived, onRemarks } from "./remarks.js";
import { Selection } from "./selection.js";
import { WHOLE, change, get, namedRuns, viewQuery, written } from "./state.js";
import { about, runs } from "./store.js";

const PANELS = [
  { key: "loss", title: "Loss", about: "Validation loss, and thinner the training loss." },
  { key: "diameter", title: "Row diameter D(S)", about: "The largest distance between two rows of a step of the LM head: how far it can move the log-odds of two tokens." },
  { key: "perturbation", title: "Hilbert RMS", about: "How far a step moved the predictions on the panel, a fixed set of validation positions." },
  {
    key: "ratio",
    title: "Ratio",
    about: "How many times smaller the second one's values are.",
    none: "No ratio yet: it needs pairs of runs with the same seed, panel and settings.",
  },
];
/** Settings of the address that are about a comparison alone. */
const ASKED = ["model", "runs", "by", "base", "over", "panels", "logx"];
/** Those that make no sense for another model. */
const OF_MODEL = { runs: null, by: null, base: null, over: null, ...WHOLE };

let current = null;
onRemarks(() => current?.remarked());

/** The view at `/`. */
export class Compare {
  constructor(root, fail) {
    this.fail = fail;
    this.answer = null;
    this.title = h("h1", { tabindex: -1 }, "Compare");
    this.line = h("p", { class: "lede" });
    this.models = h(
      "select",
      {
        "aria-label": "Model",
        onchange: () => change({ model: this.models.value, ...OF_MODEL }, true),
      },
    );
    this.hero = h("div", { class: "hero" });
    this.notes = h("ul", { class: "notes", role: "status" });
    this.controls = new Controls({ compare: true });
    this.selection = new Selection();
    this.choices = new Choices();
    this.plots = h("div", {});
    this.chart();
    this.values = h("section", { class: "values" });
    this.body = h(
      "div",
      { class: "view compare" },
      h("div", { class: "heading" }, h("div", {}, this.title, this.line), this.models),
      this.hero,
      this.notes,
      this.controls.element,
      this.selection.element,
      this.choices.element,
      this.plots,
      this.values,
    );
    this.none = h("div", { class: "view", hidden: true });
    this.body.classList.add("is-loading");
    fill(root, this.body, this.none);
    this.refresh = coalesce(() => this.load());
    current = this;
    this.update();
  }

  /** Make the panels, with those that the address asks for. */
  chart() {
    this.charts?.end();
    this.panels = chosenPanels().join();
    this.ratio = { ...PANELS.find(({ key }) => key === "ratio") };
    const always = PANELS.map((spec) => (spec.key === "ratio" ? this.ratio : spec));
    const more = chosenPanels().map((name) => METRICS.find(({ key }) => key === name)).filter(Boolean);
    this.charts = new Charts(
      [...always, ...more],
      {
        name: () => this.answer?.model || "compare",
        csv: (panel) => `/api/compare/${panel}.csv${written(this.query())}`,
      },
    );
    fill(this.plots, this.charts.element);
  }

  query() {
    const query = viewQuery();
    for (const name of ASKED) if (get(name)) query.set(name, get(name));
    return query;
  }

  /** The address changed. */
  update() {
    this.controls.show(this.answer?.axes);
    if (chosenPanels().join() !== this.panels) this.chart();
    this.charts.draw();
    const asked = written(this.query());
    if (asked !== this.asked) this.refresh.ask();
    this.asked = asked;
  }

  /** Something happened to a run: redraw if it takes part. */
  event(name, data) {
    const id = data.run ?? data.id;
    const chosen = namedRuns();
    const model = runs.get(id)?.model;
    const ours = !this.answer || model === undefined || model === this.answer.model;
    const fresh = name === "run" && !this.seen?.has(model);
    if (fresh || (ours && (!chosen || chosen.includes(id)))) this.refresh.ask();
  }

  /** The list of runs changed. */
  known() {
    if (this.answer) {
      say(this.line, this.lede(this.answer));
      this.selection.show(this.answer);
      this.offer();
    }
    this.emptiness();
  }

  /** Somebody archived a run, or brought one back. */
  remarked() {
    const archived = [...runs.keys()].filter(isArchived).join();
    if (archived !== this.archived) this.refresh.ask();
    this.archived = archived;
    this.known();
  }

  async load() {
    try {
      this.answer = await fetchAnswer("/api/compare", this.query());
      this.body.classList.remove("is-loading");
      this.emptiness();
      this.render();
      await this.charts.show(this.answer.figures);
    } catch (error) {
      this.fail(error, () => this.refresh.ask());
    }
  }

  emptiness() {
    const none = about.loaded && !runs.size && about.progress >= 1 && !this.answer?.models?.length;
    this.body.hidden = none;
    this.none.hidden = !none;
    if (none) fill(this.none, noRuns());
  }

  render() {
    const { answer } = this;
    document.title = `${answer.model || "Compare"} · hilbert-monitor`;
    say(this.title, answer.model || "Compare");
    say(this.line, this.lede(answer));
    this.offer();
    renew(this.hero, [answer.contrasts, answer.pairs, answer.optimizers, answer.groups], () => cards(answer));
    renew(this.notes, answer.notes, () => foldedList((answer.notes ?? []).map((note) => h("li", {}, folded(note)))));
    this.notes.hidden = !answer.notes?.length;
    this.controls.show(answer.axes);
    this.selection.show(this.answer);
    this.choices.show(this.answer);
    const drawn = get("seeds") === "1" || get("group") === "run";
    renew(this.values, [answer.optimizers, answer.groups, answer.aside, drawn], () => values(answer, drawn));
    this.ratio.title = answer.sides.join(" / ");
    say(this.charts.element.querySelector("[data-panel=ratio] h3"), this.ratio.title);
  }

  /** Offer all models to choose from. An answer about some runs names only theirs, so the list of runs adds the others. */
  offer() {
    const models = new Map(this.answer.models.map(({ name }) => [name, 0]));
    const counted = [...runs.values()].filter(({ id, problem }) => !problem && !isArchived(id));
    for (const { model } of counted) models.set(model, (models.get(model) ?? 0) + 1);
    for (const { name, runs: count } of this.answer.models) models.set(name, Math.max(count, models.get(name)));
    const named = (name) => `${name || "no model named"} (${plural(models.get(name), "run")})`;
    const option = (name) => h("option", { value: name, selected: name === this.answer.model }, named(name));
    this.seen = models;
    this.models.hidden = models.size < 2;
    renew(this.models, [[...models], this.answer.model], () => [...models.keys()].sort().map(option));
  }

  lede(answer) {
    const whole = answer.groups.every(({ name, optimizer }) => name === optimizer);
    const counts = Object.entries(answer.optimizers).map(([name, spreads]) =>
      whole ? `${most(spreads)} ${name}` : `${name} (${plural(most(spreads), "run")})`);
    const [groups, pairs] = [counts.length, (answer.pairs ?? []).length];
    const all = groups > 6 ? `${plural(answer.counted.length, "run")} in ${groups} groups` : counts.join(whole ? ", " : "; ");
    const how = get("base") || get("over") ? "" : " by seed and panel";
    const paired = pairs ? `; ${plural(pairs, "pair")}${how}` : "";
    const none = archivedAmong([...runs.keys()]) ? "All runs are archived: tick some in Runs to compare them" : "No runs counted";
    return [`${all || none}${paired}.`, answer.about].filter(Boolean).join(" ");
  }

  end() {
    current = null;
    this.refresh.end();
    this.selection.end();
    this.charts.end();
  }
}
