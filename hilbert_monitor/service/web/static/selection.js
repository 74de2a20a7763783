/* The choice of the runs that are compared: boxes by optimizer, and a search. The choice is in the address. */

import { get as fetchAnswer } from "./api.js";
import { h, optimizerMark, renew, say, stateMark, tool } from "./dom.js";
import { plural } from "./format.js";
import { coalesce } from "./live.js";
import { isArchived } from "./remarks.js";
import { change, joined, namedRuns } from "./state.js";
import { runs } from "./store.js";

const FIRST = ["AdamW", "RowNorm"];

/** A list of boxes that opens under the controls. */
export class Selection {
  constructor() {
    this.title = h("summary", {});
    this.boxes = h("div", { class: "choices" });
    this.search = h(
      "input",
      {
        type: "search",
        placeholder: "Find runs: words, lr=0.1, status:failed",
        "aria-label": "Find runs",
        oninput: () => this.finding.ask(),
      },
    );
    this.element = h("details", { class: "selection" }, this.title, this.search, this.boxes);
    this.found = null;
    this.finding = coalesce(() => this.find(), 200);
  }

  /** Show the runs of an answer's model. */
  show({ model, aside = [] }) {
    this.model = model;
    const named = namedRuns();
    const takesPart = (run) => run.model === model && (!isArchived(run.id) || named?.includes(run.id));
    this.mine = [...runs.values()].filter(takesPart).sort(inOrder);
    this.chosen = new Set(named ?? this.mine.map((run) => run.id));
    this.aside = aside;
    const [all, shown] = [this.mine.length, this.mine.filter((run) => this.chosen.has(run.id)).length];
    say(this.title, `Runs: ${shown === all ? `all ${all}` : `${shown} of ${all}`}`);
    const listed = this.mine.map((run) => [run.id, run.status, run.label]);
    const state = [listed, [...this.chosen], Boolean(named), aside, this.found && [...this.found]];
    renew(this.boxes, state, () => this.groups(!named));
  }

  /** Ask the server which runs match: it knows their settings. */
  async find() {
    const q = this.search.value.trim();
    try {
      const query = new URLSearchParams({ q, model: this.model ?? "" });
      this.found = q ? new Set((await fetchAnswer("/api/runs", query)).runs.map((run) => run.id)) : null;
    } catch {
      this.found = null; // the bar above says that the connection is lost
    }
    this.show({ model: this.model, aside: this.aside });
  }

  groups(all) {
    const listed = this.mine.filter((run) => !this.found || this.found.has(run.id));
    const groups = new Map();
    for (const run of listed) groups.set(run.optimizer, [...(groups.get(run.optimizer) ?? []), run]);
    const group = ([name, members]) => {
      const only = tool("Only these", () => this.take(members.map((run) => run.id)));
      return h("fieldset", {}, h("legend", {}, optimizerMark(name), only), members.map((run) => this.box(run)));
    };
    const matches = () => this.take(listed.map((run) => run.id));
    return [
      [...groups].map(group),
      this.found && !listed.length ? h("p", { class: "about" }, "No run matches.") : null,
      this.found && listed.length ? tool(`Only the ${plural(listed.length, "run")} found`, matches) : null,
      tool("All runs", () => change({ runs: null }), { disabled: all }),
    ];
  }

  box(run) {
    const onchange = ({ target }) => this.flip(run.id, target);
    return h(
      "label",
      { class: "check" },
      h("input", { type: "checkbox", value: run.id, checked: this.chosen.has(run.id), onchange }),
      h("span", {}, run.label || run.id),
      run.seed === null ? null : h("small", {}, `seed ${run.seed}`),
      stateMark(run.status),
      this.aside.includes(run.id) ? h("small", {}, "in no mean") : null,
    );
  }

  /** Add or remove a run; the last one cannot be removed. */
  flip(id, box) {
    const ids = this.mine.map((run) => run.id).filter((one) => (one === id ? box.checked : this.chosen.has(one)));
    if (!ids.length) box.checked = true;
    this.take(ids);
    this.boxes.querySelector(`[value="${CSS.escape(id)}"]`)?.focus();
  }

  take(ids) {
    const usual = this.mine.filter((run) => !isArchived(run.id)).map((run) => run.id);
    const same = ids.length === usual.length && usual.every((id) => ids.includes(id));
    if (ids.length) change({ runs: same ? null : joined(ids) });
  }

  end() {
    this.finding.end();
  }
}

/** AdamW and RowNorm first, then by name; within an optimizer by seed. */
function inOrder(a, b) {
  const rank = ({ optimizer }) => FIRST.indexOf(optimizer) + 1 || 3;
  const seed = (run) => run.seed ?? Number.MAX_VALUE;
  return rank(a) - rank(b) || a.optimizer.localeCompare(b.optimizer) || seed(a) - seed(b) || a.id.localeCompare(b.id);
}
