/* Alerts: the steps that broke a rule of the monitor, newest first. Those that are acknowledged fold away. */

import { acknowledgeAll, nameField } from "./acknowledging.js";
import { alertCard } from "./alert_card.js";
import { get as fetchAnswer } from "./api.js";
import { empty, fill, h, say, tool } from "./dom.js";
import { clip, plural, whole } from "./format.js";
import { coalesce } from "./live.js";
import { offer, onRemarks } from "./remarks.js";
import { change, get } from "./state.js";
import { runs } from "./store.js";

export { alertCard };

const LIMIT = 200;
let current = null;
onRemarks(() => current?.refresh.ask());

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
    this.name = h("label", {}, "Acknowledge as ", nameField());
    this.all = tool("Acknowledge all", () => this.settle());
    this.trouble = h("span", { class: "refusal", role: "alert" });
    this.pastTitle = h("summary", {});
    this.pastList = h("ol", { class: "alerts wide" });
    this.past = h(
      "details",
      { class: "past", ontoggle: () => this.refresh?.ask() },
      this.pastTitle,
      this.pastList,
    );
    this.signing = h("div", { class: "filters signing" }, this.name, this.all, this.trouble);
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
        this.signing,
        this.list,
        this.none,
        this.past,
      ),
    );
    document.title = "Alerts · hilbert-monitor";
    this.refresh = coalesce(() => this.load());
    current = this;
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
    try {
      const answer = await this.ask("open");
      this.show(answer);
      if (this.past.open) this.fold(answer.acknowledged ? await this.ask("acknowledged") : { alerts: [] });
    } catch (error) {
      this.fail(error, () => this.refresh.ask());
    }
  }

  async ask(state) {
    const query = new URLSearchParams({ limit: LIMIT, state });
    for (const name of ["run", "kind"]) if (get(name)) query.set(name, get(name));
    const answer = await fetchAnswer("/api/alerts", query);
    answer.alerts.forEach((alert) => this.kinds.add(alert.kind));
    this.options();
    return answer;
  }

  show({ alerts, count, acknowledged }) {
    this.shown = alerts;
    const part = count > alerts.length ? `The newest ${whole(alerts.length)} of ` : "";
    say(this.count, part + plural(count, acknowledged ? "open alert" : "alert"));
    list(this.list, alerts);
    const left = this.signing.contains(document.activeElement);
    this.signing.hidden = !offer.offered || !alerts.length;
    if (left && this.signing.hidden) heading().focus();
    say(this.all, alerts.length > 1 ? `Acknowledge these ${alerts.length}` : "Acknowledge it");
    this.past.hidden = !acknowledged;
    say(this.pastTitle, `${plural(acknowledged, "alert")} acknowledged`);
    fill(this.none, alerts.length ? null : nothing(acknowledged));
  }

  /** The acknowledged alerts, which are listed only while they are unfolded. */
  fold({ alerts }) {
    list(this.pastList, alerts);
  }

  async settle() {
    try {
      await acknowledgeAll(this.shown);
      say(this.trouble, "");
    } catch (error) {
      say(this.trouble, error.message);
    }
  }

  end() {
    current = null;
    this.refresh.end();
  }
}

/** List alerts, if they are others than before. The focus stays with its alert, or goes to the next one. */
function list(element, alerts) {
  const keys = alerts.map((alert) => JSON.stringify([alert.run, alert.step, alert.kind, alert.time, alert.status]));
  const { keys: before = [] } = element;
  element.hidden = !alerts.length;
  if (before.length === keys.length && before.every((key, i) => key === keys[i])) return;
  const place = [...element.children].findIndex((item) => item.contains(document.activeElement));
  const control = place < 0 ? -1 : controls(element.children[place]).indexOf(document.activeElement);
  fill(element, alerts.map((alert) => h("li", {}, alertCard(alert))));
  element.keys = keys;
  if (place < 0) return;
  const same = keys.indexOf(before[place]);
  const item = element.children[same < 0 ? Math.min(place, keys.length - 1) : same];
  (item ? controls(item).at(same < 0 ? -1 : control) : heading())?.focus();
}

const controls = (item) => [...item.querySelectorAll("a, button")];
const heading = () => document.querySelector("main h1");

/** What is said where no alert is open. */
function nothing(acknowledged) {
  const all = () => change({ kind: null, run: null });
  const button = h("button", { class: "tool", type: "button", onclick: all }, "Show all alerts");
  if (acknowledged) return empty("No alert is open", "All of them are acknowledged.");
  if (get("kind") || get("run")) return empty("No alert matches", h("p", {}, button));
  return empty("No step has blown up.", "A step that is far from the usual ones of its run appears here by itself.");
}
