/* The cells of columns that the reader has added to the table of runs. */

import { get } from "./api.js";
import { coalesce } from "./live.js";

const GAP = 2000;

/** Fetches the cells of some columns, again when runs have changed. */
export class Cells {
  /** @param {() => void} changed called with new cells */
  constructor(changed) {
    Object.assign(this, { names: [], columns: {}, changed });
    this.refresh = coalesce(() => this.load(), GAP);
  }

  /** Have the cells of these columns. */
  want(names) {
    if (JSON.stringify(names) === JSON.stringify(this.names)) return;
    this.names = names;
    this.renew();
  }

  /** Fetch the cells again: a run has changed. */
  renew() {
    if (this.names.length) this.refresh.ask();
  }

  /** A cell, or null. */
  of(name, id) {
    return this.columns[name]?.[id] ?? null;
  }

  async load() {
    const query = new URLSearchParams(this.names.map((name) => ["name", name]));
    try {
      const { columns } = await get("/api/columns/cells", query);
      this.columns = columns;
      this.changed();
    } catch (error) {
      if (error.status === 0 || error.status >= 500) setTimeout(() => this.renew(), GAP);
    }
  }

  end() {
    this.refresh.end();
  }
}
