/* Runs: a table of all runs, updated row by row, and below it how two selected ones differ. */

import { get as fetchAnswer } from "./api.js";
import { STATES } from "./catalogue.js";
import { COLUMNS } from "./columns.js";
import { Difference } from "./difference.js";
import { fill, h, renew, say, stateMark } from "./dom.js";
import { noMatch, noRuns } from "./empties.js";
import { plural, value, whole } from "./format.js";
import { coalesce } from "./live.js";
import { change, get } from "./state.js";
import { about, learn, runs } from "./store.js";

/** The view at `/runs`. */
export class Runs {
  constructor(root, fail) {
    this.fail = fail;
    this.ids = null;
    this.rows = new Map();
    this.filter = h(
      "input",
      {
        type: "search",
        id: "filter",
        placeholder: "Filter: status:failed optimizer:AdamW lr=0.1",
        "aria-label": "Filter runs",
        autocomplete: "off",
        spellcheck: "false",
        oninput: () => change({ q: this.filter.value.trim() || null }),
      },
    );
    this.states = h("div", { class: "chips", role: "group", "aria-label": "States" });
    this.count = h("p", { class: "lede", role: "status" });
    this.sorter = h(
      "select",
      { onchange: () => change({ sort: this.sorter.value || null, down: null }) },
      h("option", { value: "" }, "newest start"),
      COLUMNS.map(({ key, label }) => h("option", { value: key }, label)),
    );
    this.heads = COLUMNS.map((column) => this.head(column));
    this.body = h("tbody", {});
    this.difference = new Difference();
    this.none = h("div", {});
    this.table = h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "runs" },
        h(
          "thead",
          {},
          h("tr", {}, h("th", { scope: "col", class: "pick" }, h("span", { class: "unseen" }, "Compare")), this.heads),
        ),
        this.body,
      ),
    );
    this.hint = h("p", { class: "about hint" }, "Tick two runs to see how their configurations differ.");
    fill(
      root,
      h(
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
        this.table,
        this.none,
        this.hint,
        this.difference.element,
      ),
    );
    document.title = "Runs · hilbert-monitor";
    this.refresh = coalesce(() => this.load());
    this.update();
  }

  head({ key, label, class: kind }) {
    const flip = () => change(get("sort") === key ? { down: get("down") ? null : 1 } : { sort: key, down: null });
    return h(
      "th",
      { scope: "col", class: kind, "data-key": key },
      h("button", { type: "button", onclick: flip }, label),
    );
  }

  update() {
    if (document.activeElement !== this.filter) this.filter.value = get("q") ?? "";
    this.sorter.value = get("sort") ?? "";
    const asked = `${get("q")}|${get("status")}`;
    if (asked !== this.asked) this.refresh.ask();
    this.asked = asked;
    this.show();
    this.difference.show(...this.picked());
  }

  event(name, data) {
    if (name === "run" && (get("q") || get("status")) && this.ids) this.refresh.ask();
  }

  known() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.show());
  }

  async load() {
    const filtered = get("q") || get("status");
    if (filtered) {
      const query = new URLSearchParams();
      for (const name of ["q", "status"]) if (get(name)) query.set(name, get(name));
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

  /** The runs that are shown, in their order. */
  list() {
    const began = (run) => value(run.started) || 0; // it may be nan
    const newest = (a, b) => began(b) - began(a);
    const shown = this.ids?.map((id) => runs.get(id)).filter(Boolean) ?? [...runs.values()].sort(newest);
    const column = COLUMNS.find(({ key }) => key === get("sort"));
    if (!column) return shown;
    const way = get("down") ? -1 : 1;
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    const lacks = (x) => x === null || x === undefined || Number.isNaN(x);
    const keyed = shown.map((run) => [column.sort(run), run]);
    const compared = ([a], [b]) => Number(lacks(a)) - Number(lacks(b)) || (lacks(a) ? 0 : way * order(a, b));
    return keyed.sort(compared).map(([, run]) => run);
  }

  show() {
    if (!about.loaded) return;
    const list = this.list();
    const trs = list.map((run) => this.row(run));
    if (trs.length !== this.body.children.length || trs.some((tr, i) => this.body.children[i] !== tr)) this.place(trs);
    say(
      this.count,
      list.length === runs.size ? plural(runs.size, "run") : `${whole(list.length)} of ${plural(runs.size, "run")}`,
    );
    const way = get("down") ? "descending" : "ascending";
    for (const head of this.heads) head.ariaSort = head.dataset.key === get("sort") ? way : null;
    this.chips();
    this.table.hidden = this.hint.hidden = !list.length;
    const clear = () => change({ q: null, status: null });
    const none = () => (runs.size ? noMatch(clear) : about.progress < 1 ? null : noRuns());
    renew(this.none, [list.length, runs.size, about.progress, about.root], () => (list.length ? null : none()));
  }

  /** Put the rows into order. Only rows out of place are moved, as a moved row loses the focus. */
  place(trs) {
    const keep = new Set(trs);
    for (const tr of [...this.body.children]) if (!keep.has(tr)) tr.remove();
    trs.forEach((tr, i) => this.body.children[i] === tr || this.body.insertBefore(tr, this.body.children[i] ?? null));
  }

  /** A run's row, with the cells renewed that changed. */
  row(run) {
    const tr = this.rows.get(run.id) ?? this.newRow(run);
    if (tr.run !== run) {
      tr.run = run;
      tr.dataset.state = run.status;
      COLUMNS.forEach((column, i) => {
        const cell = tr.children[i + 1].firstChild;
        const fresh = h("div", {}, column.cell(run));
        if (!cell.isEqualNode(fresh)) cell.replaceWith(fresh);
      });
    }
    tr.firstChild.firstChild.checked = this.picked().includes(run.id);
    return tr;
  }

  newRow(run) {
    const pick = h(
      "input",
      {
        type: "checkbox",
        "aria-label": `Select ${run.label || run.id}`,
        onchange: (event) => this.pick(run.id, event.target.checked),
      },
    );
    const cells = COLUMNS.map(({ label, class: kind }, i) => h(
      i ? "td" : "th",
      { class: kind, "data-label": i ? label : null, scope: i ? null : "row" },
      h("div"),
    ));
    const tr = h("tr", { "data-run": run.id }, h("td", { class: "pick" }, pick), cells);
    this.rows.set(run.id, tr);
    return tr;
  }

  chips() {
    const counts = Object.fromEntries(STATES.map((name) => [name, 0]));
    for (const run of runs.values()) counts[run.status] += 1;
    const chip = (name) => h(
      "button",
      {
        type: "button",
        class: "chip",
        "aria-pressed": String(get("status") === name),
        onclick: () => change({ status: get("status") === name ? null : name }),
      },
      stateMark(name),
      h("b", {}, counts[name]),
    );
    const shown = STATES.filter((name) => counts[name] || get("status") === name);
    renew(this.states, [counts, get("status")], () => shown.map(chip));
  }

  picked() {
    return [get("a"), get("b")].filter(Boolean);
  }

  pick(id, on) {
    const [a = null, b = null] = on ? [...this.picked().slice(-1), id] : this.picked().filter((one) => one !== id);
    change({ a, b });
  }

  end() {
    this.refresh.end();
    cancelAnimationFrame(this.frame);
  }
}
