/* Runs: a table of all runs with a filter, and what can be done with those that are ticked. */

import { get as fetchAnswer } from "./api.js";
import { STATES } from "./catalogue.js";
import { Cells } from "./cells.js";
import { ColumnChoice } from "./column_choice.js";
import { COLUMNS, added, columnOf, shownColumns } from "./columns.js";
import { Difference } from "./difference.js";
import { fill, h, renew, say, stateMark } from "./dom.js";
import { noMatch, noRuns, onlyArchived } from "./empties.js";
import { plural, value, whole } from "./format.js";
import { coalesce } from "./live.js";
import { archivedAmong, isArchived, onRemarks } from "./remarks.js";
import { RunActions } from "./run_actions.js";
import { RunTable } from "./run_table.js";
import { change, get, getAll } from "./state.js";
import { about, learn, runs } from "./store.js";

let current = null;
onRemarks(() => current?.known());

/** The view at `/runs`. */
export class Runs {
  constructor(root, fail) {
    Object.assign(this, { fail, ids: null });
    this.filter = h("input", {
      type: "search",
      id: "filter",
      placeholder: "Filter: adamw -status:failed lr>0.01",
      "aria-label": "Filter runs",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => change({ q: this.filter.value.trim() || null }),
    });
    this.states = h("div", { class: "chips", role: "group", "aria-label": "States" });
    this.count = h("p", { class: "lede", role: "status" });
    this.sorter = h("select", { onchange: () => change({ sort: this.sorter.value || null, down: null }) });
    this.cells = new Cells(() => this.known());
    this.choice = new ColumnChoice();
    this.actions = new RunActions(() => this.take([]));
    this.table = new RunTable({ sort: flip, tick: (ids, on) => this.tick(ids, on), cells: this.cells });
    this.difference = new Difference();
    this.none = h("div", {});
    this.hint = h(
      "p",
      { class: "about hint" },
      "Tick runs to compare them; with two, their configurations are compared below.",
    );
    fill(root, this.layout());
    document.title = "Runs · hilbert-monitor";
    this.refresh = coalesce(() => this.load());
    current = this;
    this.update();
  }

  layout() {
    return h(
      "div",
      { class: "view" },
      h("div", { class: "heading" }, h("div", {}, h("h1", { tabindex: -1 }, "Runs"), this.count)),
      h(
        "div",
        { class: "filters" },
        this.filter,
        this.states,
        h("label", { class: "phone sort" }, "Sort by ", this.sorter),
      ),
      this.choice.element,
      this.actions.element,
      this.table.element,
      this.none,
      this.hint,
      this.difference.element,
    );
  }

  update() {
    if (document.activeElement !== this.filter) this.filter.value = get("q") ?? "";
    const asked = `${get("q")}|${get("status")}`;
    if (asked !== this.asked) this.refresh.ask();
    this.asked = asked;
    const sorted = get("sort");
    this.cells.want([...new Set([...added(), ...(isAdded(sorted) ? [sorted] : [])])]);
    this.choice.show();
    this.show();
    const ticked = this.ticked();
    this.difference.show(...(ticked.length === 2 ? ticked : []));
  }

  event(name, data) {
    if (name !== "run") return;
    if ((get("q") || get("status")) && this.ids) this.refresh.ask();
    this.cells.renew();
  }

  known() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.show());
  }

  async load() {
    const query = new URLSearchParams();
    for (const name of ["q", "status"]) if (get(name)) query.set(name, get(name));
    if (query.size) {
      try {
        const answer = await fetchAnswer("/api/runs", query);
        learn(answer.runs);
        this.ids = answer.runs.map((run) => run.id);
      } catch (error) {
        return this.fail(error, () => this.refresh.ask());
      }
    } else this.ids = null;
    this.show();
  }

  /** The runs that match, in their order; archived ones only if they are asked for. */
  list() {
    const began = (run) => value(run.started) || 0; // it may be nan
    const newest = (a, b) => began(b) - began(a);
    const asked = get("archived") || /(^|[\s-])archived[:=]/.test(get("q") ?? "");
    const found = this.ids?.map((id) => runs.get(id)).filter(Boolean) ?? [...runs.values()].sort(newest);
    this.archived = archivedAmong(found.map((run) => run.id));
    const shown = asked ? found : found.filter((run) => !isArchived(run.id));
    const column = columnOf(get("sort"), this.cells);
    return column ? sorted(shown, column, get("down") ? -1 : 1) : shown;
  }

  show() {
    const unanswered = !this.ids && (get("q") || get("status"));
    if (!about.loaded || unanswered) return;
    const list = this.list();
    const [columns, order] = [shownColumns(this.cells), `${get("q")}|${get("status")}|${get("sort")}|${get("down")}`];
    const how = { columns, sorted: get("sort"), down: Boolean(get("down")), ticked: this.ticked() };
    this.table.show(list, { ...how, fresh: order !== this.order });
    this.order = order;
    this.actions.show(how.ticked.filter((id) => runs.has(id)));
    this.sorting(columns);
    const part = list.length === runs.size ? "" : `${whole(list.length)} of `;
    say(this.count, part + plural(runs.size, "run"));
    this.chips();
    this.table.element.hidden = this.hint.hidden = !list.length;
    const clear = () => change({ q: null, status: null });
    const some = () => (this.archived ? onlyArchived(this.archived, () => change({ archived: 1 })) : noMatch(clear));
    const none = () => (runs.size ? some() : about.progress < 1 ? null : noRuns());
    const state = [list.length, runs.size, this.archived, about.progress, about.root];
    renew(this.none, state, () => (list.length ? null : none()));
  }

  /** The columns to sort by, for a phone, on which the table has no head. */
  sorting(columns) {
    const options = columns.map(({ key, label }) => [key, label]);
    renew(this.sorter, options, () => [
      h("option", { value: "" }, "newest start"),
      options.map(([key, label]) => h("option", { value: key }, label)),
    ]);
    this.sorter.value = get("sort") ?? "";
  }

  chips() {
    const counts = Object.fromEntries(STATES.map((name) => [name, 0]));
    for (const run of runs.values()) if (get("archived") || !isArchived(run.id)) counts[run.status] += 1;
    const chip = (name, pressed, onclick, ...parts) => h(
      "button",
      { type: "button", class: "chip", "data-chip": name, "aria-pressed": String(pressed), onclick },
      parts,
    );
    const state = (name) => {
      const pressed = get("status") === name;
      const toggle = () => change({ status: pressed ? null : name });
      return chip(name, pressed, toggle, stateMark(name), h("b", {}, counts[name]));
    };
    const archive = () => {
      const toggle = () => change({ archived: get("archived") ? null : 1 });
      return chip("archived", Boolean(get("archived")), toggle, "archived", h("b", {}, this.archived));
    };
    const shown = STATES.filter((name) => counts[name] || get("status") === name);
    renew(this.states, [counts, get("status"), this.archived, get("archived")], () => [
      shown.map(state),
      this.archived || get("archived") ? archive() : null,
    ]);
  }

  /** The ids of ticked runs, in the order in which they were ticked; `a` and `b` are those of older links. */
  ticked() {
    return [...new Set([get("a"), get("b"), ...getAll("tick")].filter(Boolean))];
  }

  tick(ids, on) {
    const others = this.ticked().filter((id) => !ids.includes(id));
    this.take(on ? [...others, ...ids] : others);
  }

  take(ids) {
    change({ tick: ids, a: null, b: null });
  }

  end() {
    current = null;
    this.refresh.end();
    this.cells.end();
    this.table.end();
    cancelAnimationFrame(this.frame);
  }
}

/** Sort by a column, or the other way round. */
const flip = (key) => change(
  get("sort") === key ? { down: get("down") ? null : 1 } : { sort: key, down: null },
);

const isAdded = (key) => key && !COLUMNS.some((one) => one.key === key);

/** Runs sorted by a column; those without a value come last. Numbers come before texts. */
function sorted(list, column, way) {
  const lacks = (x) => x === null || x === undefined || Number.isNaN(x);
  const order = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  };
  const keyed = list.map((run) => [column.sort(run), run]);
  const compared = ([a], [b]) => Number(lacks(a)) - Number(lacks(b)) || (lacks(a) ? 0 : way * order(a, b));
  return keyed.sort(compared).map(([, run]) => run);
}
