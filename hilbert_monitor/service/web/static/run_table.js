/* The table of runs, which is updated row by row. Of a long list the first rows are there, and more when they are
 * scrolled to. */

import { fill, h } from "./dom.js";
import { whole } from "./format.js";
import { offer, remarksOf } from "./remarks.js";
import { editRemarks } from "./remark_dialog.js";

const PART = 200;
const MOST_TICKED = 500;

/** The table. `sort(key)` and `tick(ids, on)` are called when the reader asks for it; `cells` has added columns. */
export class RunTable {
  constructor({ sort, tick, cells }) {
    Object.assign(this, { sort, tick, cells, rows: new Map(), columns: [], most: PART, list: [] });
    this.all = h("input", {
      type: "checkbox",
      "aria-label": "Tick all runs that are listed",
      onchange: (event) => this.tick(this.list.map((run) => run.id), event.target.checked),
    });
    this.head = h("tr", {});
    this.body = h("tbody", {});
    this.more = h("button", { class: "tool more", type: "button", onclick: () => this.extend() });
    this.watcher = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && this.extend());
    this.watcher.observe(this.more);
    this.element = h(
      "div",
      {},
      h("div", { class: "table-scroll" }, h("table", { class: "runs" }, h("thead", {}, this.head), this.body)),
      this.more,
    );
  }

  /**
   * Show runs.
   * @param {any[]} list the runs, in their order
   * @param {{columns: any[], sorted: string | null, down: boolean, ticked: string[], fresh: boolean}} how
   */
  show(list, { columns, sorted, down, ticked, fresh }) {
    if (fresh) this.most = PART;
    const state = JSON.stringify(columns.map(({ key }) => key));
    if (state !== this.state) this.renew(columns);
    this.state = state;
    this.columns = columns;
    this.list = list;
    this.ticked = new Set(ticked);
    for (const head of this.head.querySelectorAll("[data-key]")) {
      head.ariaSort = head.dataset.key === sorted ? (down ? "descending" : "ascending") : null;
    }
    const trs = list.slice(0, this.most).map((run) => this.row(run));
    if (trs.length !== this.body.children.length || trs.some((tr, i) => this.body.children[i] !== tr)) this.place(trs);
    const left = list.length - trs.length;
    this.more.hidden = !left;
    if (left) fill(this.more, `Show more: ${whole(left)} are left`);
    this.all.checked = list.length > 0 && list.every((run) => this.ticked.has(run.id));
    this.all.disabled = list.length > MOST_TICKED;
    this.all.title = this.all.disabled ? `Filter to at most ${MOST_TICKED} runs to tick all` : "";
    this.how = { columns, sorted, down, ticked, fresh: false };
  }

  /** Begin anew with other columns. */
  renew(columns) {
    this.rows.clear();
    fill(this.body);
    const head = ({ key, label, class: kind }) => h(
      "th",
      { scope: "col", class: kind, "data-key": key },
      h("button", { type: "button", onclick: () => this.sort(key) }, label),
    );
    fill(this.head, h("th", { scope: "col", class: "pick" }, this.all), columns.map(head));
  }

  /** Show a further part of the list. */
  extend() {
    if (this.most >= this.list.length) return;
    this.most += PART;
    this.show(this.list, this.how);
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
    const state = [run, remarksOf(run.id), offer.offered, this.cells.columns];
    if (state.some((part, i) => part !== tr.state?.[i])) this.fill(tr, run);
    tr.state = state;
    tr.firstChild.firstChild.checked = this.ticked.has(run.id);
    return tr;
  }

  fill(tr, run) {
    tr.dataset.state = run.status;
    tr.classList.toggle("is-archived", remarksOf(run.id).archived);
    this.columns.forEach((column, i) => {
      const cell = tr.children[i + 1].firstChild;
      const fresh = h("div", {}, column.cell(run), i || !offer.offered ? null : this.pencil(run));
      if (!cell.isEqualNode(fresh)) cell.replaceWith(fresh);
    });
  }

  /** The button that opens the note of a run. */
  pencil(run) {
    const label = `Note and tags of ${run.label || run.id}`;
    return h(
      "button",
      { class: "pencil", type: "button", "aria-label": label, title: "Note and tags", onclick: () => editRemarks(run) },
      "✎",
    );
  }

  newRow(run) {
    const pick = h("input", {
      type: "checkbox",
      "aria-label": `Select ${run.label || run.id}`,
      onchange: (event) => this.tick([run.id], event.target.checked),
    });
    const cells = this.columns.map(({ label, class: kind }, i) => h(
      i ? "td" : "th",
      { class: kind, "data-label": i ? label : null, scope: i ? null : "row" },
      h("div"),
    ));
    const tr = h("tr", { "data-run": run.id }, h("td", { class: "pick" }, pick), cells);
    this.rows.set(run.id, tr);
    return tr;
  }

  end() {
    this.watcher.disconnect();
  }
}
