/* Alerts: the steps that broke a rule of the monitor, newest first. */

import { get as fetchAnswer } from "./api.js";
import { empty, fill, h, optimizerMark, runLink, say, stateMark } from "./dom.js";
import { ageMark, clip, number, plural, token, value, whole } from "./format.js";
import { coalesce } from "./live.js";
import { change, get } from "./state.js";
import { runs } from "./store.js";

const LIMIT = 200;

/** The view at `/alerts`. */
export class Alerts {
  constructor(root, fail) {
    this.fail = fail;
    this.kinds = new Set();
    this.kind = h("select", { id: "filter", onchange: () => change({ kind: this.kind.value || null }, true) });
    this.run = h("select", { onchange: () => change({ run: this.run.value || null }, true) });
    this.count = h("p", { class: "lede", role: "status" });
    this.list = h("ol", { class: "alerts wide" });
    this.none = h("div", {});
    fill(
      root,
      h(
        "div",
        { class: "view" },
        h(
          "div",
          { class: "heading" },
          h("div", {}, h("h1", { tabindex: -1 }, "Alerts"), this.count),
          h("div", { class: "filters" }, h("label", {}, "Kind ", this.kind), h("label", {}, "Run ", this.run)),
        ),
        this.list,
        this.none,
      ),
    );
    document.title = "Alerts · hilbert-monitor";
    this.refresh = coalesce(() => this.load());
    this.update();
  }

  update() {
    this.options();
    this.refresh.ask();
  }

  event(name) {
    if (name === "alert") this.refresh.ask();
  }

  known() {
    this.options();
  }

  options() {
    const offer = (select, all, entries, chosen) => {
      const state = JSON.stringify([entries, chosen]);
      if (select.state === state) return;
      select.state = state;
      fill(
        select,
        h("option", { value: "" }, all),
        entries.map(([key, label]) => h("option", { value: key, selected: key === chosen }, label)),
      );
    };
    const [kind, run] = [get("kind"), get("run")];
    offer(
      this.kind,
      "all kinds",
      [...new Set([...this.kinds, kind])].filter(Boolean).sort().map((one) => [one, one]),
      kind,
    );
    const listed = [...runs.values()].filter((one) => one.alerts || one.id === run).map((one) => [
      one.id,
      clip(one.label || one.id, 60),
    ]);
    offer(this.run, "all runs", run && !runs.has(run) ? [...listed, [run, run]] : listed, run);
  }

  async load() {
    const query = new URLSearchParams({ limit: LIMIT });
    for (const name of ["run", "kind"]) if (get(name)) query.set(name, get(name));
    try {
      const answer = await fetchAnswer("/api/alerts", query);
      answer.alerts.forEach((alert) => this.kinds.add(alert.kind));
      this.options();
      this.show(answer);
    } catch (error) {
      this.fail(error, () => this.refresh.ask());
    }
  }

  show({ alerts, count }) {
    const state = JSON.stringify(alerts.map((alert) => [alert.run, alert.step, alert.kind, alert.status]));
    const part = count > alerts.length ? `The newest ${whole(alerts.length)} of ` : "";
    say(this.count, part + plural(count, "alert"));
    if (state !== this.state) fill(this.list, alerts.map((alert) => h("li", {}, alertCard(alert))));
    this.state = state;
    this.list.hidden = !alerts.length;
    const filtered = get("kind") || get("run");
    fill(
      this.none,
      alerts.length ? null : filtered ? empty(
        "No alert matches",
        h(
          "p",
          {},
          h(
            "button",
            { class: "tool", type: "button", onclick: () => change({ kind: null, run: null }) },
            "Show all alerts",
          ),
        ),
      ) : empty("No step has blown up.", "A step that is far from the usual ones of its run appears here by itself."),
    );
  }

  end() {
    this.refresh.end();
  }
}

/** An alert as a card: its kind, step, value and tokens. On a run's own page, `own`, the run is left out. */
export function alertCard(alert, own = null) {
  const run = alert.run ?? own;
  const step = h(
    "a",
    { class: "step", href: `/runs/${encodeURIComponent(run)}?step=${alert.step}` },
    `step ${whole(alert.step)}`,
  );
  const who = own ? null : h(
    "span",
    { class: "who" },
    runLink(run, clip(runs.get(run)?.label || alert.name || run, 80), alert.step),
    optimizerMark(alert.optimizer),
    stateMark(alert.status),
  );
  return h(
    "article",
    { class: "alert", "data-kind": alert.kind },
    h("header", {}, h("span", { class: "kind" }, [alert.kind, alert.pattern].filter(Boolean).join(" · ")), step),
    who,
    h(
      "div",
      { class: "account" },
      alert.message ? h("p", { class: "message" }, clip(alert.message, 800)) : null,
      h("p", { class: "measured" }, measured(alert), tokens(alert)),
    ),
    ageMark(alert.time),
  );
}

/** What was measured, and how it compares with what was expected. */
function measured(alert) {
  const [measurement, expected] = [value(alert.value), value(alert.expected)];
  const factor = expected && Number.isFinite(measurement) ? measurement / expected : null;
  const limit = expected === null ? null : [" against ", number(expected), " expected"];
  return h(
    "span",
    {},
    h("b", {}, number(alert.value)),
    limit,
    factor !== null && factor > 0 ? h("em", {}, `${number(factor, 3)}×`) : null,
  );
}

function tokens(alert) {
  if (!alert.pair_text && !alert.pair) return null;
  const texts = alert.pair_text ?? alert.pair.map(String);
  return h("span", { class: "pair" }, "tokens ", token(texts[0]), " and ", token(texts[1]));
}
