/* Run: the geometry of one run, its tokens, the cost of the monitor, and the run's settings. */

import { get as fetchAnswer, runPath } from "./api.js";
import { alertCard } from "./alerts.js";
import { RUN_PANELS } from "./catalogue.js";
import { Charts } from "./charts.js";
import { Controls } from "./controls.js";
import { fill, h, renew, say, tool } from "./dom.js";
import { unknownRun } from "./empties.js";
import { clip, value, whole } from "./format.js";
import { layerMap } from "./layers.js";
import { coalesce } from "./live.js";
import { alertList, figures, line, troubles } from "./run_head.js";
import { attempts, configuration, cost, origin, tokenPairs } from "./run_parts.js";
import { WHOLE, change, get, viewQuery, written } from "./state.js";
import { about, runs } from "./store.js";

/** The view at `/runs/{id}`. */
export class Run {
  constructor(root, fail, id) {
    Object.assign(this, { root, fail, id, answer: null, mark: null });
    this.title = h("h1", { tabindex: -1 }, runs.get(id)?.label || id);
    this.line = h("div", { class: "lede run-line" });
    this.trouble = h("div", { class: "troubles" });
    this.stats = h("dl", { class: "stats" });
    this.marked = h("div", { class: "marked" });
    this.controls = new Controls({ compare: false });
    this.charts = new Charts(
      RUN_PANELS,
      {
        name: () => this.answer?.summary.label || id,
        csv: (panel) => `${runPath(id)}/panels/${panel}.csv${written(viewQuery())}`,
      },
    );
    this.parts = Object.fromEntries([
      "layers",
      "alerts",
      "cost",
      "tokens",
      "attempts",
      "config",
      "origin",
    ].map((name) => [name, h("section", { class: `part ${name}` })]));
    this.config = configuration();
    this.body = h(
      "div",
      { class: "view run is-loading" },
      h("p", { class: "crumb" }, h("a", { href: "/runs" }, "Runs")),
      h("div", { class: "heading" }, h("div", {}, this.title, this.line)),
      this.trouble,
      this.stats,
      this.marked,
      this.controls.element,
      this.charts.element,
      h("div", { class: "parts" }, Object.values(this.parts)),
    );
    this.missing = h("div", { class: "view", hidden: true });
    fill(root, this.body, this.missing);
    this.refresh = coalesce(() => this.load());
    this.details = coalesce(() => this.describe(), 1000);
    this.known();
  }

  /** The list of runs changed: this run may have appeared, or be gone. */
  known() {
    if (!about.loaded) return;
    const here = runs.has(this.id);
    this.body.hidden = !here;
    this.missing.hidden = here;
    if (!here) return renew(this.missing, this.id, () => unknownRun(this.id));
    if (this.begun) return;
    this.begun = true;
    this.details.ask();
    this.update();
  }

  /** The address changed. */
  update() {
    if (!this.begun) return;
    if (get("step") !== this.step) this.land();
    this.controls.show();
    const asked = written(viewQuery());
    if (asked !== this.asked) this.refresh.ask();
    else this.charts.draw();
    this.asked = asked;
    this.point();
  }

  event(name, data) {
    if ((data.run ?? data.id) !== this.id) return;
    if (name === "gone" || !this.begun) return;
    if (name === "run") this.head(data.summary);
    this.refresh.ask();
    this.details.ask();
  }

  /** Zoom to the surroundings of the step in the address, unless the address has a range. */
  land() {
    this.step = get("step");
    this.mark = null;
    const step = Number(this.step);
    if (!this.step || !Number.isFinite(step)) return this.charts.show(this.charts.figures, null);
    const last = runs.get(this.id)?.step ?? this.answer?.summary.step ?? step;
    const room = Math.max(20, Math.round(last / 40));
    if (get("axis") === "updates" && get("x0") === null) change(
      { x0: Math.max(0, step - room), x1: step + room },
      false,
      true,
    );
    if (get("axis") === "updates") this.mark = step;
  }

  async load() {
    try {
      const answer = await fetchAnswer(`${runPath(this.id)}/figures`, viewQuery());
      await this.place();
      await this.charts.show(answer.figures, this.mark);
    } catch (error) {
      this.lost(error, this.refresh);
    }
  }

  /** Find the place of the address's step on an axis that does not count steps. */
  async place() {
    const [axis, step] = [get("axis"), this.step];
    if (!step || axis === "updates" || this.mark !== null) return;
    const query = new URLSearchParams({ fields: axis, first: step, last: step });
    const { columns } = await fetchAnswer(`${runPath(this.id)}/records`, query);
    const place = value(columns[axis]?.[0]);
    const started = this.answer?.attempts?.[0]?.started;
    if (place !== null) this.mark = axis === "time" ? (started ? (place - started) / 3600 : null) : place;
  }

  async describe() {
    let layers;
    try {
      [this.answer, layers] = await Promise.all([fetchAnswer(runPath(this.id)), fetchAnswer(`${runPath(this.id)}/layers`)]);
    } catch (error) {
      return this.lost(error, this.details);
    }
    this.body.classList.remove("is-loading");
    const { summary, alerts } = this.answer;
    this.head(summary);
    const answer = this.answer;
    const part = (name, state, make) => renew(this.parts[name], state, make);
    part("layers", layers, () => layerMap(layers));
    part("alerts", alerts.length, () => alertList(this.id, alerts));
    part("cost", answer.cost, () => cost(answer.cost));
    part("tokens", [answer.tokens, answer.token_rows], () => tokenPairs(answer));
    part("attempts", [answer.attempts, summary.status], () => attempts(answer));
    part("config", answer.config, () => this.config.show(answer.config));
    part("origin", answer.info, () => origin(answer.info));
    this.point();
  }

  /** Show the parts that need the summary alone, which comes with every event. */
  head(summary) {
    document.title = `${summary.label || this.id} · hilbert-monitor`;
    say(this.title, clip(summary.label || this.id, 120));
    fill(this.line, line(summary, this.answer?.pace));
    renew(this.trouble, [summary.problem, summary.error, summary.message, summary.torn], () => troubles(summary));
    fill(this.stats, figures(summary, this.answer?.pace));
  }

  /** Show the alerts of the step in the address above the figures. */
  point() {
    if (!this.answer) return;
    const step = get("step");
    const alerts = this.answer.alerts.filter((alert) => String(alert.step) === step);
    const leave = () => tool("Whole run", () => change({ step: null, ...WHOLE }, true));
    const plain = () => h("p", {}, `Step ${whole(step)} is marked. It has no alert.`);
    const cards = () => (alerts.length ? alerts.map((alert) => alertCard(alert, this.id)) : plain());
    renew(this.marked, [alerts, step], () => (step ? [h("div", { class: "cards" }, cards()), leave()] : []));
    for (const item of this.parts.alerts.querySelectorAll("li")) {
      item.toggleAttribute("data-here", item.dataset.step === step);
    }
  }

  lost(error, again) {
    if (error.status !== 404) this.fail(error, () => again.ask());
  }

  end() {
    this.refresh.end();
    this.details.end();
    this.charts.end();
  }
}
